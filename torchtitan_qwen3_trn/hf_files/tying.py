"""Whether files repeat a tied tensor as it is: of two different ones, training would keep only the first."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hf_files.headers import TensorHeader
from torchtitan_qwen3_trn.models.hf.layout import Layout

__all__ = ["tying_problems"]

# Rows compared at a time; a row has the model's width.
_ROWS = 4096


def tying_problems(folder: Path, layout: Layout, found: Mapping[str, TensorHeader]) -> list[Problem]:
    """Tensors of ``folder`` that config.json ties to another one and that differ from it.

    Args:
        folder: config.json and safetensors, whose headers are in order.
        layout: of the folder's model.
        found: the headers by tensor name.
    """
    return [
        Problem(
            str(folder / found[name].file),
            f"{name} is tied to {source} by config.json and differs from it in the files",
            "remove it, or set tie_word_embeddings to false",
        )
        for name, source in layout.tied.items()
        if name in found and source in found and not _equal(folder, found[name], name, found[source], source)
    ]


def _equal(folder: Path, one: TensorHeader, name: str, other: TensorHeader, source: str) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with ExitStack() as files:
        first = files.enter_context(safe_open(folder / one.file, framework="pt")).get_slice(name)
        second = files.enter_context(safe_open(folder / other.file, framework="pt")).get_slice(source)
        starts = range(0, one.shape[0], _ROWS)
        return all(torch.equal(first[at : at + _ROWS], second[at : at + _ROWS]) for at in starts)
