"""The files of an export, planned from shapes alone: names, headers, and where each tensor goes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.constants import SAFETENSORS_WEIGHTS_FILE_PATTERN
from pydantic import ByteSize, TypeAdapter

from torchtitan_qwen3_trn.hf_files.headers import DTYPES

_SIZE = re.compile(r"[0-9]{1,12}\s*[KMG]I?B", re.IGNORECASE)
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


@dataclass(frozen=True)
class FilePlan:
    """All files of an export.

    Attributes:
        places: by tensor name, in the order of the files.
        headers: the first bytes of every file: header length and header.
        sizes: of every file, in bytes.
        index: the content of ``model.safetensors.index.json``; its ``total_size`` counts the tensors' bytes.
    """

    places: dict[str, Place]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    index: dict[str, Any]


def plan_files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> FilePlan:
    """Put tensors into files of at most ``limit`` bytes of tensors each; a larger tensor gets a file of its own.

    Names are those of published checkpoints: ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on.
    """
    split = split_state_dict_into_shards_factory(
        {name: math.prod(shapes[name]) * dtype.itemsize for name in natural_order(shapes)},
        get_storage_size=lambda nbytes: nbytes,
        filename_pattern=SAFETENSORS_WEIGHTS_FILE_PATTERN,
        max_shard_size=limit,
    )
    index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
    plan = FilePlan({}, {}, {}, index)
    for file, names in split.filename_to_tensors.items():
        header, offsets, plan.sizes[file] = _header({name: shapes[name] for name in names}, dtype)
        plan.headers[file] = header
        plan.places.update((name, Place(file, offsets[name], tuple(shapes[name]), dtype)) for name in names)
    return plan


def natural_order(names: Iterable[str]) -> list[str]:
    """Names sorted with numbers as numbers, so that layer 2 comes before layer 10."""
    # Splitting at a group alternates text and digits, so that only equal kinds are compared.
    return sorted(names, key=lambda name: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)])


def parse_size(text: str) -> int:
    """Bytes of ``5GB`` (10^9 each) or ``500 MiB`` (2^20 each).

    Raises:
        ValueError: not a positive whole number with one of the units KB, MB, GB, KiB, MiB, GiB.
    """
    # ByteSize alone would also take a number without a unit, and ignore what follows after a unit.
    nbytes = TypeAdapter(ByteSize).validate_python(text) if _SIZE.fullmatch(text.strip()) else 0
    if nbytes == 0:
        raise ValueError(f'"{text}" is not a size; write a whole number and a unit, such as "5GB" or "500MB"')
    return int(nbytes)


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, dict[str, int], int]:
    """First bytes of a file of these tensors, offset of each tensor in the file, size of the file."""
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name, shape in shapes.items():
        begins[name] = end
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + at for name, at in begins.items()}, start + end
