"""Whether a tied tensor that files contain equals its source; if not, training would silently ignore it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hf_files.headers import TensorHeader

# Rows compared at a time; a row has the model's width.
_ROWS = 4096


def tying_problems(folder: Path, tied: Mapping[str, str], found: Mapping[str, TensorHeader]) -> list[Problem]:
    """Tensors of ``folder`` that config.json ties to another one but that differ from it.

    Args:
        folder: config.json and safetensors, whose headers are valid.
        tied: for each tied tensor the one it is tied to.
        found: the headers by tensor name.
    """
    return [
        Problem(
            str(folder / found[name].file),
            f"{name} is tied to {source} by config.json but differs from it in the files",
            "remove it, or set tie_word_embeddings to false",
        )
        for name, source in tied.items()
        if name in found and source in found and not _equal(folder, found, name, source)
    ]


def _equal(folder: Path, found: Mapping[str, TensorHeader], name: str, source: str) -> bool:
    one, other = found[name], found[source]
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with (
        safe_open(folder / one.file, framework="pt") as first_file,
        safe_open(folder / other.file, framework="pt") as second_file,
    ):
        first, second = first_file.get_slice(name), second_file.get_slice(source)
        starts = range(0, one.shape[0], _ROWS)
        return all(torch.equal(first[at : at + _ROWS], second[at : at + _ROWS]) for at in starts)
