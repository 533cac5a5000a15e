"""The loss a freshly initialised Qwen3 starts from, at full size, against theory.

    python -m benchmarks.first_loss [--flavor 4B-Instruct-2507] [--backend huggingface_v5] [--seq_len 256] [--quick]

Builds the model with its own initialisation in bfloat16 and runs one forward pass over two rows, uniformly random
tokens and the bundled text. Exits with status 1 when a row is further than 0.05 nats from `expected_first_loss`.

What is compared is the loss against targets independent of the input, averaged over all of them:
logsumexp(logits) - mean(logits). That is what theory is about, and hundreds of positions settle it. The loss against
the one next token of each position, which a training run logs, has the same expectation but a spread of about 1 nat
per token, and positions with the same target share most of it: hidden vectors of random weights resemble each other,
so a frequent target is off by the same amount each time. The printed standard error counts distinct targets.

Also printed: the mean logit of the input token itself. With tied weights the residual stream still holds a trace of
its embedding.

Weights stay in bfloat16; a layer computes in float32, several times faster on a CPU without bfloat16 arithmetic.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedConfig

from benchmarks.rounds import command_line, say
from torchtitan_qwen3_trn.assets import text_path, tokenizer_path
from torchtitan_qwen3_trn.models.first_loss import expected_first_loss
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.qwen3.flavors import flavor
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.overrides.document_sdpa import sdpa

TOLERANCE = 0.05
CHUNK = 16384  # rows of the output projection in float32 at a time: 168 MB at 2560 columns


def main() -> int:
    """Measure, print, and return the exit status."""
    args = _arguments()
    hf_config = flavor(args.flavor, max_position_embeddings=args.seq_len)
    vocab_size, width, std = hf_config.vocab_size, hf_config.hidden_size, hf_config.initializer_range
    expected = expected_first_loss(vocab_size, width, std)
    torch.manual_seed(args.seed)
    began = time.perf_counter()
    model = _in_bfloat16(*BUILDERS[args.backend](hf_config))
    say(f"{args.flavor}, {args.backend}: initialised in {time.perf_counter() - began:.0f} s")
    say(f"expected first loss {expected:.4f} = ln({vocab_size}) + {std}^2 x {width} / 2")

    rows = {
        "random tokens": _random_tokens(hf_config, args.seq_len),
        "bundled text": _text_tokens(hf_config, args.seq_len),
    }
    began = time.perf_counter()
    with torch.no_grad():
        hidden_BLD = model(torch.stack(list(rows.values()))[:, :-1])
    say(f"forward over {hidden_BLD.shape[0]} x {hidden_BLD.shape[1]} tokens in {time.perf_counter() - began:.0f} s")
    differences = [
        _report(name, _measured(model, hidden_LD, tokens), tokens[1:], expected)
        for (name, tokens), hidden_LD in zip(rows.items(), hidden_BLD, strict=True)
    ]
    say(f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
    return int(max(abs(difference) for difference in differences) > TOLERANCE)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, rounds=None, quick="the flavor 0.6B unless another one is given")
    parser.add_argument("--flavor", help="(default 4B-Instruct-2507)")
    parser.add_argument("--backend", choices=BUILDERS, default="native", help="(default native)")
    parser.add_argument("--seq_len", type=int, default=256, help="tokens per row (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    arguments = parser.parse_args()
    arguments.flavor = arguments.flavor or ("0.6B" if arguments.quick else "4B-Instruct-2507")
    return arguments


def _native(hf_config: PreTrainedConfig) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """torchtitan's model on meta; its embedding; its layers and final norm."""
    config = model_config(hf_config)
    for layer in config.layers:
        layer.attention.inner_attention = sdpa(layer.attention.inner_attention)
    with torch.device("meta"):
        model = config.build()
    return model, model.tok_embeddings, [*model.layers.values(), model.norm]


def _huggingface(hf_config: PreTrainedConfig) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """Transformers' model on meta; its embedding; its layers and final norm."""
    skeleton = build_on_meta(hf_config, document_mask=False, experts="eager")
    config = HFModel.Config(
        architecture=hf_config,
        layout=layout_of(skeleton),
        tensor_parallel_plan={},
        vocab_size=hf_config.vocab_size,
        document_mask=False,
    )
    with torch.device("meta"):
        model = config.build()
    return model, model.model.embed_tokens, [*model.layers, model.model.norm]


BUILDERS = {"native": _native, "huggingface_v5": _huggingface}


def _in_bfloat16(model: nn.Module, embedding: nn.Module, modules: list[nn.Module]) -> nn.Module:
    """``model`` with its own random weights in bfloat16 (rotary cache float32), without its output projection."""
    _cast(model, torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    model._skip_lm_head = True
    embedding.register_forward_hook(lambda _module, _args, out: out.float())
    for module in modules:
        module.register_forward_pre_hook(lambda module, _args: _cast(module, torch.float32))
        module.register_forward_hook(lambda module, _args, _out: _cast(module, torch.bfloat16))
    return model.eval()


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: the rotary cache has to stay float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _random_tokens(hf_config: PreTrainedConfig, seq_len: int) -> torch.Tensor:
    return torch.randint(hf_config.vocab_size, (seq_len + 1,))


def _text_tokens(hf_config: PreTrainedConfig, seq_len: int) -> torch.Tensor:
    """The first ``seq_len + 1`` tokens of the bundled text; a smaller vocabulary folds them."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path() / "tokenizer.json"))
    ids: list[int] = []
    with sorted(text_path().glob("*.json"))[0].open(encoding="utf-8") as lines:
        while len(ids) <= seq_len:
            ids += tokenizer.encode(json.loads(next(lines))["text"]).ids
    return torch.tensor(ids[: seq_len + 1]) % hf_config.vocab_size


def _measured(model: nn.Module, hidden_LD: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Per position: loss over independent targets, loss of the next token, logit of the input token; ``(3, L)``.

    Goes through the vocabulary in parts, so that no more than L x `CHUNK` logits exist at a time.
    """
    total_L = torch.full((len(hidden_LD),), -math.inf)
    sum_L, target_L, own_L = torch.zeros(3, len(hidden_LD))
    for start, weight_VD in enumerate(model.lm_head.weight.detach().split(CHUNK)):
        logits_LV = hidden_LD @ weight_VD.float().T
        total_L = torch.logaddexp(total_L, logits_LV.logsumexp(-1))
        sum_L += logits_LV.sum(-1)
        target_L += _picked(logits_LV, tokens[1:] - start * CHUNK)
        own_L += _picked(logits_LV, tokens[:-1] - start * CHUNK)
    return torch.stack([total_L - sum_L / model.lm_head.weight.shape[0], total_L - target_L, own_L])


def _picked(logits_LV: torch.Tensor, index_L: torch.Tensor) -> torch.Tensor:
    """Logit at each index, 0 where the index lies outside this part of the vocabulary."""
    width = logits_LV.shape[1]
    picked_L = logits_LV.gather(1, index_L.clamp(0, width - 1)[:, None])[:, 0]
    return picked_L * ((index_L >= 0) & (index_L < width))


def _report(name: str, measured: torch.Tensor, targets: torch.Tensor, expected: float) -> float:
    independent, following, own = measured.mean(1).tolist()
    per_target = torch.zeros(int(targets.max()) + 1).index_add(0, targets, measured[1] - following)
    error = per_target.norm().item() / len(targets)
    difference = independent - expected
    verdict = "ok" if abs(difference) <= TOLERANCE else f"more than {TOLERANCE} off"
    say(
        f"{name:13}  loss {independent:.4f} ({difference:+.4f}, {verdict})  next token {following:.3f} +- {error:.3f}  "
        f"logit of the input token {own:+.3f}"
    )
    return difference


if __name__ == "__main__":
    raise SystemExit(main())
