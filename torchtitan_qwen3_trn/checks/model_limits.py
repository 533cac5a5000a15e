"""Questions about a model that are the same on every route: positions, vocabulary, memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.device.cpu import cpu_device_module
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.launch import Machine


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
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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


def divisors(count: int) -> str:
    """The remedy for a degree that does not divide ``count``."""
    return f"choose one of {[degree for degree in range(1, count + 1) if count % degree == 0]}"


def tokenizer_entries(folder: Path) -> int:
    """Highest token id plus one, from tokenizer.json; 0 when there is none to read."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = list(tokenizer["model"]["vocab"].values())
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return max(ids, default=-1) + 1
