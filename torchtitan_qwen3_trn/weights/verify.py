"""Whether a Hugging Face folder holds the model it claims to: files, tensors, logits, generated text.

Shape suffixes: B batch, L sequence, V vocabulary, N tokens of one expert, R tokens of all experts, D model width,
E experts, F inner width of an expert.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE as INDEX
from safetensors import safe_open
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import file_problem, links_out, require_folder, weight_files
from torchtitan_qwen3_trn.hf_files.headers import DTYPES, check_tensors, read_headers
from torchtitan_qwen3_trn.hf_files.index import total_size_problems
from torchtitan_qwen3_trn.hf_files.tensor_names import listed
from torchtitan_qwen3_trn.hf_files.tying import tying_problems
from torchtitan_qwen3_trn.models.hf_config import first_lines, from_folder
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan_qwen3_trn.overrides.document_sdpa import document_mask, sdpa
from torchtitan_qwen3_trn.weights.folder_assets import has_tokenizer
from torchtitan_qwen3_trn.weights.folder_check import layout_of_folder
from torchtitan_qwen3_trn.weights.manifest import MANIFEST, manifest_problems
from torchtitan_qwen3_trn.weights.offline import read_tensor
from torchtitan_qwen3_trn.weights.training_checkpoint import TrainingCheckpoint

Outcome = Literal["ok", "failed", "skipped"]
# Takes the folder; returns the figures, or raises `_Skip` or `JobError`.
Check = Callable[[Path], str]

# Two implementations of one model in float32: the same products, at most summed in another order. Seen between
# Transformers and torchtitan: equal bit for bit without experts, 4e-7 of the largest logit with them.
_TOLERANCE = 1e-4
_ROWS, _LENGTH, _GENERATED = 2, 32, 16
_PROMPT = "The"
# Elements checked for NaN at a time.
_WINDOW = 16 * 2**20


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        outcome: whether it holds.
        detail: the figures, or what is wrong.
    """

    check: str
    outcome: Outcome
    detail: str


def verify(folder: Path, *, checkpoint: Path | None = None, cheap: bool = False) -> list[Finding]:
    """Check ``folder`` from its files to the text it generates.

    Once files or tensors fail, the other checks are skipped. Nothing outside the folder is read, and no code that
    comes with it is run.

    Args:
        folder: config.json, safetensors, and other files of a checkpoint.
        checkpoint: the training checkpoint it was exported from, to be compared tensor by tensor.
        cheap: read headers and small files only.
    """
    cheap_checks: dict[str, Check] = {
        "files": _files,
        "tensors": _tensors,
        "tying": _tying,
        "index": _index,
        "manifest": partial(_manifest, checksums=not cheap),
    }
    compared = {"checkpoint": partial(_checkpoint, checkpoint=checkpoint)} if checkpoint else {}
    others: dict[str, Check] = {"values": _values, **compared, "logits": _logits, "generation": _generation}
    findings: list[Finding] = []
    for name, check in (cheap_checks if cheap else cheap_checks | others).items():
        unusable = any(finding.outcome == "failed" for finding in findings[:2])
        skipped = Finding(name, "skipped", "needs the checks above")
        findings.append(skipped if unusable else _finding(name, check, folder))
    return findings


class _Skip(Exception):  # noqa: N818 - not an error
    """A check that has nothing to check."""


def _finding(name: str, check: Check, folder: Path) -> Finding:
    try:
        return Finding(name, "ok", check(folder))
    except _Skip as reason:
        return Finding(name, "skipped", str(reason))
    except JobError as error:
        return Finding(name, "failed", "; ".join(map(str, error.problems)))
    except Exception as error:
        logging.getLogger(__name__).debug("check %s failed", name, exc_info=True)
        return Finding(name, "failed", f"{type(error).__name__}: {first_lines(error)}")


def _stop_on(problems: list[Problem]) -> None:
    if problems:
        raise JobError(problems)


def _files(folder: Path) -> str:
    require_folder(folder)
    found, problems = read_headers(folder)
    # Transformers looks for more files than are read here, and follows links.
    others = [path for path in folder.iterdir() if path.suffix != ".safetensors"]
    unsafe = [file_problem(path) for path in others if path.is_symlink() or not path.is_dir()]
    _stop_on([*problems, *filter(None, unsafe), *links_out(folder)])
    files = {header.file for header in found.values()}
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {len(found)} tensors"


def _tensors(folder: Path) -> str:
    """Names and shapes against Transformers' own model on the meta device; one type for all."""
    layout = layout_of_folder(folder)
    _stop_on(check_tensors(folder, layout.shapes, ignores=layout.ignores))
    config, kinds = from_folder(folder), {header.dtype for header in read_headers(folder)[0].values()}
    stated, found = getattr(config, "dtype", None), ", ".join(sorted(kinds))
    if stated is not None and {DTYPES.get(kind) for kind in kinds} != {stated}:
        what = f"says {stated}, but the files hold {found}"
        raise JobError([Problem(f"{folder / 'config.json'}: dtype", what, "correct it")])
    parameters = sum(map(math.prod, layout.shapes.values()))
    return f"{type(config).__name__}, {parameters:,} parameters, {found}"


def _tying(folder: Path) -> str:
    """A tied output layer is absent or equal to the embedding; one that is not tied is present."""
    tied, found = layout_of_folder(folder).tied, read_headers(folder)[0]
    _stop_on(tying_problems(folder, tied, found))
    states = (
        f"{name} repeats {source}" if name in found else f"{name} is {source}, and left out"
        for name, source in tied.items()
    )
    return "; ".join(states) or "not tied: lm_head is a tensor of its own"


def _index(folder: Path) -> str:
    found, _ = read_headers(folder)
    _stop_on(total_size_problems(folder, sum(header.nbytes for header in found.values())))
    if (folder / INDEX).is_file():
        return "every tensor is in the file that the index names"
    if len({header.file for header in found.values()}) > 1:
        what = f"there are several files but no {INDEX}"
        raise JobError([Problem(str(folder), what, "download it, or export again")])
    raise _Skip("a single file needs no index")


def _manifest(folder: Path, *, checksums: bool) -> str:
    if not (folder / MANIFEST).exists():
        raise _Skip("the folder has no manifest")
    _stop_on(manifest_problems(folder, checksums=checksums))
    return "all SHA-256 agree" if checksums else "all sizes agree"


def _values(folder: Path) -> str:
    """No NaN and no infinity; tensors that hold only zeros are reported."""
    nonfinite, zero = [], []
    for file in weight_files(folder)[0]:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                parts = opened.get_tensor(name).flatten().split(_WINDOW)
                nonfinite += [name] if not all(bool(part.isfinite().all()) for part in parts) else []
                zero += [name] if not any(bool(part.any()) for part in parts) else []
    if nonfinite:
        raise JobError([Problem(str(folder), f"NaN or infinity in {listed(nonfinite)}")])
    return f"all finite; only zeros in {listed(zero)}" if zero else "all finite"


def _checkpoint(folder: Path, checkpoint: Path) -> str:
    """The tensors of the training checkpoint in the files' type, bit for bit."""
    found, _ = read_headers(folder)
    count = 0
    for name, value in TrainingCheckpoint(checkpoint, folder).tensors():
        written = read_tensor(folder, found, name)
        if not torch.equal(written, value.to(written.dtype)):
            what = f"{name} differs from the one in {checkpoint}"
            raise JobError([Problem(str(folder / found[name].file), what, "export again")])
        count += 1
    return f"{count} tensors equal bit for bit"


def _logits(folder: Path) -> str:
    """Transformers' logits against torchtitan's, both in float32 with the tensors of the folder."""
    config = from_folder(folder)
    if config.model_type not in ("qwen3", "qwen3_moe"):
        raise _Skip("torchtitan's own model exists for Qwen3 only")
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(config.vocab_size, (_ROWS, _LENGTH), generator=generator)
    with torch.no_grad():
        theirs_BLV = _load(folder)(input_ids=tokens_BL, use_cache=False).logits
        ours_BLV = _native_logits(folder, config, tokens_BL)
    difference = float((theirs_BLV - ours_BLV).abs().max() / theirs_BLV.abs().max())
    differ = f"differ by {difference:.1e} of the largest"
    if not difference <= _TOLERANCE:
        what = f"logits of Transformers and torchtitan {differ}, more than {_TOLERANCE:g}"
        raise JobError([Problem(str(folder), what)])
    return f"{differ} (at most {_TOLERANCE:g})" if difference else "equal bit for bit"


def _generation(folder: Path) -> str:
    if not has_tokenizer(folder):
        raise _Skip("the folder has no tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    inputs = tokenizer(_PROMPT, return_tensors="pt")
    ids, length = inputs["input_ids"], {"max_new_tokens": _GENERATED, "min_new_tokens": _GENERATED}
    with torch.no_grad():
        output = _load(folder).generate(
            input_ids=ids, attention_mask=inputs["attention_mask"], do_sample=False, **length
        )
    new = output[0, ids.shape[1] :]
    if len(new) != _GENERATED:
        raise JobError([Problem(str(folder), f"generated {len(new)} tokens instead of {_GENERATED}")])
    return f"{len(new)} tokens: " + json.dumps(_PROMPT + tokenizer.decode(new), ensure_ascii=False)


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    ).eval()


class _Float32Experts(GroupedExperts):
    """torchtitan's experts without their rounding to bfloat16, so that a small tolerance suffices."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Stock's options."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Expert after expert; as `GroupedExperts.forward`."""
        parts_ND = x_RD.split(num_tokens_per_expert_E.tolist())
        experts = zip(parts_ND, self.w1_EFD, self.w2_EDF, self.w3_EFD, strict=True)
        silu = torch.nn.functional.silu
        return torch.cat([(silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in experts])


def _native_logits(folder: Path, hf_config: PreTrainedConfig, tokens_BL: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, L, V]`` of torchtitan's Qwen3 in float32."""
    config = model_config(hf_config, load_balance_coeff=None)
    for layer in config.layers:
        if isinstance(layer.attention.inner_attention, FlexAttention.Config):
            layer.attention.inner_attention = sdpa(layer.attention.inner_attention)
        if layer.moe is not None:
            routed = layer.moe.routed_experts
            routed.inner_experts = derive(routed.inner_experts, _Float32Experts.Config)
    model, adapter, found = config.build(), Qwen3StateDictAdapter(config, None), read_headers(folder)[0]
    names = chain.from_iterable(adapter.file_names.values())
    published = {name: read_tensor(folder, found, name).float() for name in names}
    model.load_state_dict(adapter.from_hf(published), strict=False)
    positions_BL = torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL)
    return model.eval()(tokens_BL, positions_BL, document_mask(positions_BL))
