"""What the headers of a checkpoint's safetensors files say; no tensor is read and nothing is allocated.

The format, from safetensors' documentation: 8 bytes of header length (little-endian), a JSON object, the tensors' bytes
without holes. Headers are parsed here and not by the library, because the library keeps the last of two equal names
and its messages do not say which tensor is at fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import read_json, weight_files

__all__ = ["DTYPE_BYTES", "INDEX", "TensorHeader", "check_tensors", "listed", "parse_header", "read_headers"]

INDEX = "model.safetensors.index.json"

# Bytes of an element, by safetensors' name of its type.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
# safetensors' own limit.
_HEADER_LIMIT = 100_000_000
_SHOWN = 5
_LOADABLE = {"F64", "F32", "F16", "BF16"}
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class TensorHeader:
    """One tensor in a file.

    Attributes:
        shape: its dimensions.
        dtype: as safetensors spells it, such as ``BF16``.
        file: the file's name.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str


class _HeaderError(ValueError):
    """What is wrong with a header."""


def check_tensors(
    folder: Path, expected: Mapping[str, Sequence[int]], *, ignores: Callable[[str], bool] = lambda name: False
) -> list[Problem]:
    """Everything that keeps the weights in ``folder`` from being those of a model with the tensors ``expected``.

    Args:
        folder: the checkpoint's folder.
        expected: shape of every tensor the model needs, by its name in files.
        ignores: whether a tensor that the model does not need is known to be redundant.

    Returns:
        At most one problem for each kind: missing, unexpected, misshapen, of another dtype; and unreadable files.
    """
    found, problems = read_headers(folder)
    if problems:
        return problems
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and not ignores(name)]
    misshapen = [
        f"{name} {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != tuple(shape)
    ]
    foreign = [
        f"{name} {found[name].dtype}" for name in expected if name in found and found[name].dtype not in _LOADABLE
    ]
    other_config = "use the config.json that belongs to these files"
    rows = [
        (missing, f"of the model's {len(expected)} missing", "download the checkpoint again, or change the model"),
        (unexpected, "without a place in the model", other_config),
        (misshapen, "of another shape", other_config),
        (foreign, "not of floating-point numbers of 16 bits or more", "use the unquantized checkpoint"),
    ]
    return [Problem(f"weights in {folder}", f"{listed(names)} {what}", fix) for names, what, fix in rows if names]


def read_headers(folder: Path) -> tuple[dict[str, TensorHeader], list[Problem]]:
    """All tensors in the ``.safetensors`` files of ``folder`` by name, and what is wrong with the files."""
    files, problems = weight_files(folder)
    if not files and not problems:
        return {}, [_no_weights(folder)]
    found: dict[str, TensorHeader] = {}
    doubles = []
    for file in files:
        try:
            tensors = parse_header(file)
        except (_HeaderError, OSError) as error:
            problems.append(Problem(str(file), f"cannot be read: {error}", "download it again"))
            continue
        doubles += [f"{name} in {found[name].file} and {file.name}" for name in tensors if name in found]
        found.update(tensors)
    if doubles:
        problems.append(Problem(f"weights in {folder}", f"twice there: {listed(doubles)}", "remove one set of files"))
    return found, problems or _index_problems(folder, {file.name for file in files}, found)


def parse_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file by name.

    Raises:
        ValueError: the file breaks a rule of the format; the message says which, and for which tensor.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        if len(prefix) < 8:
            raise _HeaderError(f"{size} bytes are too few for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, _HEADER_LIMIT):
            raise _HeaderError(f"a header of {length} bytes is announced, in a file of {size} bytes")
        raw = opened.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_doubles)
    except _HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise _HeaderError(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _HeaderError(f"its header is a {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _HeaderError("__metadata__ is not a table of strings")
    tensors = {name: _tensor(name, entry, file.name) for name, entry in header.items()}
    _check_places({name: entry["data_offsets"] for name, entry in header.items()}, size - 8 - length)
    return tensors


def listed(names: Iterable[str]) -> str:
    """Count and first names: ``7 tensors (a, b, c, d, e, ...)``."""
    names = list(names)
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''} ({_names(names)})"


def _clipped(text: str, limit: int = 200) -> str:
    """Names come from files that may be broken: printable, and of bearable length."""
    printable = text if text.isprintable() else ascii(text)
    return printable if len(printable) <= limit else printable[:limit] + "..."


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _HeaderError(f"its header has the key {_clipped(key)} twice")
        found[key] = value
    return found


def _tensor(name: str, entry: Any, file: str) -> TensorHeader:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _HeaderError(f"{_clipped(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _HeaderError(f"{_clipped(name)} has the unknown dtype {_clipped(str(dtype), 40)}")
    if not _are_sizes(shape) or len(shape) > 8:
        raise _HeaderError(f"{_clipped(name)} has the impossible shape {_clipped(str(shape), 80)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _HeaderError(f"{_clipped(name)} has the impossible offsets {_clipped(str(offsets), 80)}")
    needed, given = math.prod(shape) * DTYPE_BYTES[dtype], offsets[1] - offsets[0]
    if needed != given:
        raise _HeaderError(f"{_clipped(name)} needs {needed} bytes and its offsets give it {given}")
    return TensorHeader(tuple(shape), dtype, file)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**63 for each in values
    )


def _check_places(places: Mapping[str, list[int]], length: int) -> None:
    """Tensors must lie one after the other and end where the file ends."""
    for name, (_, stop) in places.items():
        if stop > length:
            raise _HeaderError(f"{_clipped(name)} ends at byte {stop} of {length}: the file is truncated or wrong")
    end = 0
    for name, (begin, stop) in sorted(places.items(), key=lambda item: item[1]):
        if begin < end:
            raise _HeaderError(f"{_clipped(name)} begins at byte {begin}, inside the tensor that ends at {end}")
        if begin > end:
            raise _HeaderError(f"{begin - end} bytes before {_clipped(name)} belong to no tensor")
        end = stop
    if end != length:
        raise _HeaderError(f"{length - end} bytes at its end belong to no tensor")


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


def _index_problems(folder: Path, files: set[str], found: Mapping[str, TensorHeader]) -> list[Problem]:
    path = folder / INDEX
    if not path.exists() and not path.is_symlink():
        return []
    try:
        index = read_json(path)
    except JobError as error:
        return error.problems
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return [
            Problem(str(path), "is not an index of tensors: weight_map is no table of file names", "download it again")
        ]
    outside = sorted({file for file in weight_map.values() if file != Path(file).name or file in ("", ".", "..")})
    if outside:
        what = f"names files outside the folder ({_names(outside)}), which are not opened"
        return [Problem(str(path), what, "use a checkpoint from a source you trust")]
    absent = sorted(set(weight_map.values()) - files)
    if absent:
        what = f"names {len(absent)} files that are not there ({_names(absent)})"
        return [Problem(str(path), what, "finish the download")]
    elsewhere = [
        f"{name} listed in {file}, stored in {found[name].file}"
        if name in found
        else f"{name} listed in {file}, absent"
        for name, file in weight_map.items()
        if name not in found or found[name].file != file
    ]
    unlisted = [f"{name} in {header.file}" for name, header in found.items() if name not in weight_map]
    rows = [(elsewhere, "not where it says"), (unlisted, "stored but not listed")]
    fix = "download index and files from the same revision"
    return [Problem(str(path), f"{listed(names)} {what}", fix) for names, what in rows if names]


def _names(names: Sequence[str]) -> str:
    return ", ".join(_clipped(name) for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
