"""Files of a checkpoint folder from an untrusted source: nothing outside the folder is opened, nothing is executed."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from torchtitan_qwen3_trn.errors import JobError, Problem

# The largest published config.json and index files have a few megabytes.
_JSON_LIMIT = 64 * 2**20


def file_problem(path: Path) -> Problem | None:
    """Why ``path`` must not be opened as a file of its folder; ``None`` when it may be, or does not exist.

    A symbolic link may lead to a file of the same folder, and from the Hugging Face cache's
    ``snapshots/<revision>/`` to its ``blobs/``.
    """
    try:
        target = path.resolve(strict=True)
        kind = target.stat().st_mode
    except FileNotFoundError:
        return Problem(str(path), "is a symbolic link to nothing", "download it again") if path.is_symlink() else None
    except (OSError, RuntimeError, ValueError) as error:
        return Problem(str(path), f"cannot be opened ({error})", "download it again")
    if target.parent not in _roots(path.parent):
        return _leads_out(path, target)
    return None if stat.S_ISREG(kind) else Problem(str(path), "is not a regular file", "replace it by one")


def links_out(folder: Path) -> list[Problem]:
    """The symbolic links in subfolders of ``folder`` that lead out of it; the cache's ``blobs/`` are allowed."""
    roots = _roots(folder)
    links = sorted(path for path in folder.rglob("*") if path.is_symlink() and path.parent != folder)
    targets = {path: path.resolve() for path in links}
    return [_leads_out(path, to) for path, to in targets.items() if not any(to.is_relative_to(root) for root in roots)]


def _roots(folder: Path) -> list[Path]:
    """The folders that links of ``folder`` may lead to."""
    root = folder.resolve()
    return [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]


def _leads_out(path: Path, target: Path) -> Problem:
    what = f"is a symbolic link out of the folder, to {target}, and is not followed"
    return Problem(str(path), what, "replace it by the file itself")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        JobError: it must not or cannot be opened, is not JSON, or is not an object.
    """
    if problem := file_problem(path):
        raise JobError([problem])
    fix = "download it again"
    try:
        size = path.stat().st_size
        if size <= _JSON_LIMIT:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
            what = f"must hold a JSON object, got a {type(found).__name__}"
        else:
            what = f"has {size} bytes, but at most {_JSON_LIMIT} are read"
    except OSError as error:
        what, fix = f"cannot be read ({error.strerror or error})", "point to the folder of a Hugging Face checkpoint"
    except (ValueError, RecursionError) as error:
        what = f"is not JSON ({error})"
    raise JobError([Problem(str(path), what, fix)])


def weight_files(folder: Path) -> tuple[list[Path], list[Problem]]:
    """The ``.safetensors`` files of ``folder`` that may be opened, sorted, and what is wrong with the others."""
    try:
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    except OSError as error:
        return [], [Problem(str(folder), f"cannot be listed ({error.strerror or error})")]
    faults = {file: file_problem(file) for file in files}
    return [file for file in files if faults[file] is None], [fault for fault in faults.values() if fault]


def require_folder(folder: Path) -> None:
    """Raise `JobError` unless ``folder`` is a folder, and not a training checkpoint."""
    fix = "name the folder of a Hugging Face checkpoint"
    if not folder.is_dir():
        raise JobError([Problem(str(folder), "is not a folder" if folder.exists() else "does not exist", fix)])
    if (folder / ".metadata").is_file():
        what = "is a training checkpoint, which torchtitan-trn export converts"
        raise JobError([Problem(str(folder), what, fix)])
