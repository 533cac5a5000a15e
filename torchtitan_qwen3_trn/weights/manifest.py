"""The manifest of an export: which files belong to it, their checksums, and where they come from."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import file_problem, read_json
from torchtitan_qwen3_trn.weights.writer import sha256_of

MANIFEST = "export_manifest.json"
_PACKAGES = ("torchtitan-qwen3-trn", "torchtitan", "torch", "transformers", "safetensors")


def write_manifest(folder: Path, checksums: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Write the manifest of the files of ``folder``.

    Args:
        folder: the export.
        checksums: SHA-256 of every file, in hexadecimal, by name.
        facts: further entries, such as step and job.
    """
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    content = {
        "manifest_version": 1,
        **facts,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions | {"python": platform.python_version()},
        "files": {
            name: {"sha256": checksums[name], "bytes": (folder / name).stat().st_size} for name in sorted(checksums)
        },
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def manifest_problems(folder: Path, *, checksums: bool) -> list[Problem]:
    """What in ``folder`` differs from its manifest; no problem if it has none.

    Args:
        folder: the export.
        checksums: also read every file, not only its size.
    """
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        return []
    try:
        files = read_json(path).get("files")
    except JobError as error:
        return error.problems
    if not isinstance(files, dict):
        return [Problem(str(path), 'has no object "files"', "export again")]
    problems = []
    for name, entry in files.items():
        if name != Path(name).name or not isinstance(entry, dict):
            problems.append(Problem(str(path), f"has an invalid entry {ascii(name)[:80]}", "export again"))
            continue
        file = folder / name
        problem = file_problem(file)
        if problem or not file.is_file():
            problems.append(problem or Problem(str(file), "is in the manifest but missing", "copy it again"))
        elif file.stat().st_size != entry.get("bytes"):
            what = f"has {file.stat().st_size} bytes where the manifest says {ascii(entry.get('bytes'))[:40]}"
            problems.append(Problem(str(file), what, "copy it again"))
        elif checksums and sha256_of(file) != entry.get("sha256"):
            problems.append(Problem(str(file), "has another SHA-256 than the manifest says", "copy it again"))
    weights = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in files)
    problems += [Problem(str(folder / name), "is not in the manifest", "remove it") for name in weights]
    return problems
