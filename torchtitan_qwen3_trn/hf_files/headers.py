"""What the headers of a checkpoint's safetensors files say; no tensor is read and nothing is allocated.

The safetensors library checks the format. Two things it does not do are done here: it keeps the last of two equal
names, and its messages do not always name the tensor at fault.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import weight_files
from torchtitan_qwen3_trn.hf_files.index import index_problems
from torchtitan_qwen3_trn.hf_files.tensor_names import clipped, listed, shape_differences

# Types of weights that can be trained, by safetensors' names.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# safetensors' own limit for a header, in bytes.
_HEADER_LIMIT = 100_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class TensorHeader:
    """One tensor in a file.

    Attributes:
        shape: its dimensions.
        dtype: safetensors' name of its type, such as ``BF16``.
        file: the file's name.
        nbytes: its size in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes: int


def check_tensors(
    folder: Path, expected: Mapping[str, Sequence[int]], *, ignores: Callable[[str], bool] = lambda name: False
) -> list[Problem]:
    """Why the weights in ``folder`` are not those of a model with the tensors ``expected``; headers are read only.

    Args:
        folder: the checkpoint's folder.
        expected: shape of every tensor the model needs, by its name in files.
        ignores: whether a tensor that the model does not need is known to be redundant.

    Returns:
        At most one problem for each kind: missing, unexpected, another shape, another dtype; and unreadable files.
    """
    found, problems = read_headers(folder)
    if problems:
        return problems
    shapes = {name: header.shape for name, header in found.items() if name in expected or not ignores(name)}
    where, fix = f"weights in {folder}", "use the config.json that belongs to these files, or download them again"
    problems = [Problem(where, difference, fix) for difference in shape_differences(shapes, expected)]
    other = [f"{name} {found[name].dtype}" for name in expected if name in found and found[name].dtype not in DTYPES]
    if other:
        what = f"{listed(other)} not of floating-point numbers of 16 bits or more"
        problems.append(Problem(where, what, "use the unquantized checkpoint"))
    return problems


def read_headers(folder: Path) -> tuple[dict[str, TensorHeader], list[Problem]]:
    """All tensors in the ``.safetensors`` files of ``folder`` by name, and what is wrong with the files."""
    files, problems = weight_files(folder)
    if not files and not problems:
        return {}, [_no_weights(folder)]
    found: dict[str, TensorHeader] = {}
    repeated = []
    for file in files:
        try:
            tensors = parse_header(file)
        except JobError as error:
            problems += error.problems
            continue
        repeated += [f"{name} in {found[name].file} and {file.name}" for name in tensors if name in found]
        found.update(tensors)
    if repeated:
        what = f"{listed(repeated)} in two files"
        problems.append(Problem(f"weights in {folder}", what, "remove one set of files"))
    stored_in = {name: header.file for name, header in found.items()}
    return found, problems or index_problems(folder, {file.name for file in files}, stored_in)


def parse_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file by name.

    Raises:
        JobError: the file cannot be read or breaks a rule of the format; the message says which.
    """
    try:
        with safe_open(file, framework="np"):
            entries = _entries(file)
    except (SafetensorError, OSError, ValueError) as error:
        reason = clipped(str(error).removeprefix("Error while deserializing header: "))
        what = f"is not a valid safetensors file: {reason}{_detail(file)}"
        raise JobError([Problem(str(file), what, "download it again")]) from error
    return {
        name: TensorHeader(tuple(entry["shape"]), entry["dtype"], file.name, end - begin)
        for name, entry in entries.items()
        for begin, end in [entry["data_offsets"]]
    }


def _entries(file: Path) -> dict[str, Any]:
    """The header's entries by tensor name, unchecked but for repeated names."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, _HEADER_LIMIT)).decode(), object_pairs_hook=_without_repetition)
    header.pop("__metadata__", None)
    return header


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    (name, count), *_ = Counter(name for name, _ in pairs).most_common(1) or [("", 0)]
    if count > 1:
        raise ValueError(f"its header has the key {clipped(name)} twice")
    return dict(pairs)


def _detail(file: Path) -> str:
    """What safetensors' message about an invalid file leaves out: the tensor at fault, or by how much sizes differ."""
    try:
        entries, size = _entries(file), file.stat().st_size
        wrong = next((name for name, entry in entries.items() if not _is_consistent(entry)), None)
        if wrong is not None:
            return f"; {clipped(wrong)} has the entry {clipped(str(entries[wrong]))}"
        end = max(entry["data_offsets"][1] for entry in entries.values())
        with file.open("rb") as opened:
            needed = 8 + int.from_bytes(opened.read(8), "little") + end
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return ""
    return "" if needed == size else f"; its header describes {needed} bytes, but it has {size}: truncated or damaged"


def _is_consistent(entry: Any) -> bool:
    """Whether dtype, shape and offsets of one entry fit together."""
    try:
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        # The first number in a type's name is its width in bits; BOOL takes a byte.
        bits = int((re.findall(r"\d+", entry["dtype"]) or ["8"])[0])
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        return False
    # Bounded, so that the product is computed at once whatever the file says.
    bounded = len(numbers) <= 10 and all(type(each) is int and 0 <= each < 2**63 for each in numbers)
    return bounded and math.prod(shape) * bits == 8 * (end - begin)


def _no_weights(folder: Path) -> Problem:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)) if folder.is_dir() else []
    if not pickles:
        fix = "name a folder with weights; a job without them leaves checkpoint.initial_load_in_hf out"
        return Problem(f"weights in {folder}", "there is no .safetensors file", fix)
    what = f"only Python pickles ({', '.join(pickles[:3])}), which can run code when they are opened and are not read"
    convert = (
        'convert them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
    return Problem(f"weights in {folder}", what, convert)
