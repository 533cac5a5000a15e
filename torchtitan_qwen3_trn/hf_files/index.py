"""The index of a checkpoint in several files, ``model.safetensors.index.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from pathlib import Path

from huggingface_hub.constants import SAFETENSORS_INDEX_FILE as INDEX

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.hf_files.tensor_names import listed, shortened

logger = logging.getLogger(__name__)

_SAME_REVISION = "download index and files from the same revision"


def index_problems(folder: Path, files: Set[str], stored_in: Mapping[str, str]) -> list[Problem]:
    """Statements of the index of ``folder`` that are not true of its files; none if there is no index.

    Args:
        folder: the checkpoint's folder.
        files: names of the weight files in it.
        stored_in: for each tensor the name of the file that holds it.
    """
    path = folder / INDEX
    if not path.exists() and not path.is_symlink():
        return []
    try:
        weight_map = _weight_map(path)
    except JobError as error:
        return error.problems
    outside = sorted({file for file in weight_map.values() if file != Path(file).name or file in ("", ".", "..")})
    if outside:
        what = f"names files outside the folder ({shortened(outside)}), which are not opened"
        return [Problem(str(path), what, "use a checkpoint from a source you trust")]
    absent = sorted(set(weight_map.values()) - files)
    if absent:
        what = f"names {len(absent)} files that are not there ({shortened(absent)})"
        return [Problem(str(path), what, "finish the download")]
    misplaced = [
        f"{name} listed in {file}, {'stored in ' + stored_in[name] if name in stored_in else 'absent'}"
        for name, file in weight_map.items()
        if stored_in.get(name) != file
    ]
    unlisted = [f"{name} in {file}" for name, file in stored_in.items() if name not in weight_map]
    rows = [(misplaced, "not in the file that the index names"), (unlisted, "stored but not listed")]
    return [Problem(str(path), f"{listed(names)} {what}", _SAME_REVISION) for names, what in rows if names]


def total_size_problems(folder: Path, stored: int) -> list[Problem]:
    """Whether the index, where it states a total size, states the number of bytes of all tensors, ``stored``."""
    path = folder / INDEX
    metadata = read_json(path).get("metadata") if path.is_file() else None
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated is None or stated == stored:
        return []
    what = f"says total_size {ascii(stated)[:40]}, but the files hold {stored} bytes of tensors"
    return [Problem(str(path), what, _SAME_REVISION)]


def file_numbers(folder: str | None, names: Set[str]) -> dict[str, int] | None:
    """Number, from 1, of the safetensors file that stock's export writes each tensor to, as in the index of ``folder``.

    Stock's writer needs exactly the tensors of the model, and numbers without gaps. So names that the model lacks are
    left out and files renumbered; names that the index lacks (an untied ``lm_head``) go to the last file.

    Args:
        folder: the folder of a checkpoint, if there is one.
        names: the model's tensors, by their names in files.

    Returns:
        ``None``, which means one file, without a usable index.
    """
    if not folder:
        return None
    path = Path(folder, INDEX)
    if not path.is_file():
        logger.info("no %s in %s: a Hugging Face export will be one file", INDEX, folder)
        return None
    try:
        weight_map = _weight_map(path)
    except JobError as error:
        logger.warning("%s; a Hugging Face export will be one file", error.problems[0])
        return None
    files = {name: file for name, file in weight_map.items() if name in names}
    numbers = {file: number for number, file in enumerate(sorted(set(files.values())), start=1)}
    return {name: numbers[files[name]] if name in files else len(numbers) for name in sorted(names)} if files else None


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        what = "has no weight_map from tensor names to file names"
        raise JobError([Problem(str(path), what, "download it again")])
    return weight_map
