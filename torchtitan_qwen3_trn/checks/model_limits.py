"""Questions about a model that are the same on every route: positions, vocabulary, memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.device.cpu import cpu_device_module
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.launch import Machine, ranks_in


def check_positions(config: JobConfig, positions: int) -> list[Problem]:
    """Sequence length against the ``positions`` that the model is made for."""
    seq_len = config.training.seq_len
    if seq_len <= positions:
        return []
    what = f"{seq_len} is beyond the {positions} positions of this model"
    return [Problem("training.seq_len", what, f"at most {positions}; a longer one needs YaRN or model.max_seq_len")]


def check_vocabulary(config: JobConfig, vocab_size: int) -> list[Problem]:
    """Entries of the tokenizer against the model's ``vocab_size``."""
    entries = tokenizer_entries(Path(config.hf_assets_path))
    if entries <= vocab_size:
        return []
    what = f"{vocab_size} is less than the {entries} entries of the tokenizer in {config.hf_assets_path}"
    return [Problem("model.vocab_size", what, "raise it, or use the tokenizer of this model")]


def check_memory(parameters: int, config: JobConfig, machine: Machine) -> list[Problem]:
    """Report a model whose weights alone are larger than the memory of this host.

    That is the least a job needs; gradients and AdamW's states take three times as much again. Looked at on the CPU
    only, and where this host's share is known: all ranks are here, or shards are equal.
    """
    here = ranks_in("LOCAL_WORLD_SIZE")
    known = here >= machine.world_size or config.parallelism.pipeline_parallel_degree == 1
    if machine.device_type != "cpu" or not known:
        return []
    itemsize = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    needed = parameters * itemsize * min(here / machine.world_size, 1)
    total = cpu_device_module.get_device_properties().total_memory
    if needed <= total:
        return []
    what = (
        f"{parameters:,} parameters in {config.training.dtype} are {needed / 1e9:,.1f} GB on this host, which has "
        f"{total / 1e9:,.1f} GB of memory"
    )
    return [Problem("model", what, "choose a smaller one, for instance in [profile.cpu], or more hosts")]


def indivisible(where: str, degree: int, counts: Mapping[str, int]) -> list[Problem]:
    """The ``counts``, by name, that the ``degree`` set at ``where`` does not divide, each with its divisors."""
    return [
        Problem(
            where,
            f"{degree} does not divide the {count} {name}",
            f"choose one of {[divisor for divisor in range(1, count + 1) if count % divisor == 0]}",
        )
        for name, count in counts.items()
        if degree > 0 and count % degree
    ]


def expert_bias_problems(config: JobConfig, remedy: str) -> list[Problem]:
    """Report a trained expert bias, which a Hugging Face export loses; ``remedy`` is what accepts or avoids that."""
    layers = getattr(getattr(config.model_spec, "model", None), "layers", None) or []
    if not any(getattr(getattr(layer, "moe", None), "load_balance_coeff", None) for layer in layers):
        return []
    what = 'Hugging Face files have no place for the expert bias that "bias" trains, so routing would change'
    return [Problem("model.load_balance", what, f'set it to "aux_loss" or "none", or {remedy}')]


def tokenizer_entries(folder: Path) -> int:
    """Highest token id plus one, from tokenizer.json; 0 when there is none to read."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = list(tokenizer["model"]["vocab"].values())
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return max(ids, default=-1) + 1
