"""What the headers of a checkpoint's safetensors files say; no tensor is read and nothing is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from torchtitan_qwen3_trn.errors import Problem

__all__ = ["TensorHeader", "check_tensors", "listed", "read_headers"]

_INDEX = "model.safetensors.index.json"
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
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return {}, [_no_weights(folder)]
    found: dict[str, TensorHeader] = {}
    problems, doubles = [], []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    doubles += [f"{name} in {found[name].file} and {file.name}"] if name in found else []
                    piece = opened.get_slice(name)
                    found[name] = TensorHeader(tuple(piece.get_shape()), piece.get_dtype(), file.name)
        except (SafetensorError, OSError) as error:
            problems.append(Problem(str(file), f"cannot be read: {error}", "download it again"))
    if doubles:
        problems.append(Problem(f"weights in {folder}", f"twice there: {listed(doubles)}", "remove one set of files"))
    return found, problems + _index_problems(folder, {file.name for file in files})


def listed(names: Iterable[str]) -> str:
    """Count and first names: ``7 tensors (a, b, c, d, e, ...)``."""
    names = list(names)
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''} ({shown})"


def _no_weights(folder: Path) -> Problem:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)) if folder.is_dir() else []
    if not pickles:
        fix = "download the weights there, or do not set checkpoint.initial_load_in_hf"
        return Problem(f"weights in {folder}", "there is no .safetensors file", fix)
    what = f"only Python pickles ({', '.join(pickles[:3])}), which can run code when they are opened and are not read"
    convert = (
        'convert them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
    return Problem(f"weights in {folder}", what, convert)


def _index_problems(folder: Path, files: set[str]) -> list[Problem]:
    path = folder / _INDEX
    if not path.is_file():
        return []
    try:
        named = {str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"is not an index of tensors ({type(error).__name__}: {error})"
        return [Problem(str(path), what, "download it again")]
    absent = sorted(named - files)
    if not absent:
        return []
    shown = ", ".join(absent[:_SHOWN]) + (", ..." if len(absent) > _SHOWN else "")
    return [Problem(str(path), f"names {len(absent)} files that are not there ({shown})", "finish the download")]
