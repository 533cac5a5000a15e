"""Makes a small trained checkpoint: ``python tools/make_checkpoint.py [OUTDIR]``.

Use it in place of published weights where those are too large. It is a Qwen3 with 0.7 million parameters, trained for
half a minute on the bundled text by a plain PyTorch loop and saved as several safetensors files with index, config.json
and tokenizer. Without OUTDIR it goes to ``./outputs/small_checkpoint``, which is where
``examples/qwen3_4b_finetune.toml`` reads it on a CPU.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from torchtitan_qwen3_trn.assets import text_path, tokenizer_path

DEFAULT_FOLDER = Path("outputs/small_checkpoint")
STEPS = 120
SEED = 1

_BATCH, _SEQ_LEN = 8, 128
_PEAK_RATE = 4e-3
_FILE_SIZE = "1MB"

_Batches = Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]


def make(folder: Path, *, steps: int = STEPS) -> float:
    """Train the model, write it to ``folder`` with its tokenizer, and return its loss on the last ten batches."""
    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=str(tokenizer_path()))
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(_config(tokenizer.get_vocab_size()), dtype=torch.float32)
    loss = _train(model, _batches(tokenizer), steps)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=_FILE_SIZE)
    for path in tokenizer_path().iterdir():
        shutil.copyfile(path, folder / path.name)
    return loss


def _config(vocab_size: int) -> Qwen3Config:
    """A small Qwen3 with the 4B's features: grouped query heads, a tied head, its RoPE base."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    )


def _train(model: PreTrainedModel, batches: _Batches, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step, (inputs, labels) in zip(range(steps), batches, strict=False):
        optimizer.param_groups[0]["lr"] = _PEAK_RATE * min((step + 1) / 10, math.cos(math.pi / 2 * step / steps))
        optimizer.zero_grad()
        logits = model(input_ids=inputs["input"], position_ids=inputs["positions"], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def _batches(tokenizer: HuggingFaceTokenizer) -> _Batches:
    loader: Any = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(text_path()))
    return iter(
        loader.build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=_SEQ_LEN, local_batch_size=_BATCH)
    )


def main(arguments: Sequence[str]) -> None:
    """The command: at most one argument, the folder to write to."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise SystemExit("usage: python tools/make_checkpoint.py [OUTDIR]")
    folder = Path(arguments[0]) if arguments else DEFAULT_FOLDER
    loss = make(folder)
    sys.stdout.write(f"{folder}: loss {loss:.2f} after {STEPS} steps\n")


if __name__ == "__main__":
    main(sys.argv[1:])
