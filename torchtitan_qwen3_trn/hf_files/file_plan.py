"""Where each tensor of an export lies: files of a chosen size, their headers, the index."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_qwen3_trn.hf_files.headers import DTYPE_BYTES

__all__ = ["DTYPE_NAMES", "FilePlan", "Place", "index_of", "natural_order", "parse_size", "plan_files"]

# safetensors' names of the types an export can have.
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*(\d+)\s*([KMG]I?B)\s*", re.IGNORECASE)
# safetensors pads its header with spaces so that tensors start at a multiple of this.
_ALIGNMENT = 8


@dataclass(frozen=True)
class Place:
    """Where one whole tensor goes.

    Attributes:
        file: the file's name.
        offset: of the tensor's first byte in the file.
        shape: of the whole tensor.
        dtype: type in the file.
    """

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """All files of an export.

    Attributes:
        places: by tensor name, in the order of the files.
        headers: the first bytes of every file: header length and header.
        sizes: of every file, in bytes.
    """

    places: dict[str, Place]
    headers: dict[str, bytes]
    sizes: dict[str, int]


def plan_files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> FilePlan:
    """Put tensors into files of at most ``limit`` bytes of tensors each; a larger tensor gets a file of its own.

    Names are those of published checkpoints: ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name in natural_order(shapes):
        nbytes = math.prod(shapes[name]) * dtype.itemsize
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    places: dict[str, Place] = {}
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for number, group in enumerate(groups, start=1):
        single = len(groups) == 1
        file = "model.safetensors" if single else f"model-{number:05}-of-{len(groups):05}.safetensors"
        headers[file], offsets, sizes[file] = _header({name: shapes[name] for name in group}, dtype)
        places.update((name, Place(file, offsets[name], tuple(shapes[name]), dtype)) for name in group)
    return FilePlan(places, headers, sizes)


def index_of(plan: FilePlan) -> dict[str, Any]:
    """The content of ``model.safetensors.index.json``; ``total_size`` counts the tensors' bytes."""
    total = sum(place.nbytes for place in plan.places.values())
    weight_map = {name: place.file for name, place in sorted(plan.places.items())}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def natural_order(names: Mapping[str, Any]) -> list[str]:
    """Names sorted with numbers as numbers, so that layer 2 comes before layer 10."""
    return sorted(
        names, key=lambda name: [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in _parts(name)]
    )


def parse_size(text: str) -> int:
    """Bytes of ``5GB``, ``500 MiB``.

    Raises:
        ValueError: not a positive whole number with a unit.
    """
    found = _SIZE.fullmatch(text)
    if not found or int(found[1]) == 0:
        raise ValueError(f'"{text}" is not a size; write a whole number and a unit, such as "5GB" or "500MB"')
    return int(found[1]) * _UNITS[found[2].upper()]


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, dict[str, int], int]:
    kind = DTYPE_NAMES[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name, shape in shapes.items():
        begins[name] = end
        end += math.prod(shape) * DTYPE_BYTES[kind]
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + at for name, at in begins.items()}, start + end
