"""The part of verifying a Hugging Face folder that reads headers and small files only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.hf_files.headers import DTYPE_BYTES, INDEX, TensorHeader, check_tensors, read_headers
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import Layout, layout_of
from torchtitan_qwen3_trn.models.hf_config import config_differences, from_folder
from torchtitan_qwen3_trn.models.value_rules import LAYERS_AND_EXPERTS, counts
from torchtitan_qwen3_trn.weights.manifest import manifest_problems

__all__ = ["check_export", "count_problems", "layout_of_folder", "total_size_problems"]


def check_export(folder: Path, config: PreTrainedConfig) -> list[Problem]:
    """What keeps ``folder`` from being a faithful export of the model ``config`` describes; the cheap checks only."""
    try:
        layout = layout_of_folder(folder)
        written = from_folder(folder)
    except JobError as error:
        return error.problems
    differences = config_differences(written, config)
    problems = [Problem(str(folder / "config.json"), each) for each in differences]
    problems += check_tensors(folder, layout.shapes)
    problems += total_size_problems(folder, read_headers(folder)[0])
    return problems + manifest_problems(folder, checksums=False)


def layout_of_folder(folder: Path) -> Layout:
    """The tensors that the model of ``folder/config.json`` has in files.

    Raises:
        JobError: config.json cannot be used, or speaks of more layers or experts than there are tensors.
    """
    found, problems = read_headers(folder)
    if problems:
        raise JobError(problems)
    if problems := count_problems(folder, len(found)):
        raise JobError(problems)
    return layout_of(build_on_meta(from_folder(folder), document_mask=True, experts="eager"))


def count_problems(folder: Path, tensors: int) -> list[Problem]:
    """Numbers of layers or experts in ``folder/config.json`` that a model of so many tensors cannot have.

    Raises:
        JobError: config.json cannot be read.
    """
    return [
        Problem(
            f"{folder / 'config.json'}: {where}",
            f"{ascii(count)[:40]} cannot be right for files with {tensors} tensors",
            "use the config.json of these weights",
        )
        for where, key, count in counts(read_json(folder / "config.json"))
        if key in LAYERS_AND_EXPERTS and not 0 <= count <= tensors
    ]


def total_size_problems(folder: Path, found: Mapping[str, TensorHeader]) -> list[Problem]:
    """Whether the index states the size of the tensors in the files, where it states one."""
    path = folder / INDEX
    if not path.is_file():
        return []
    metadata: Any = read_json(path).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = sum(math.prod(header.shape) * DTYPE_BYTES[header.dtype] for header in found.values())
    if stated is None or stated == stored:
        return []
    what = f"says total_size {ascii(stated)[:40]}, and the files hold {stored} bytes of tensors"
    return [Problem(str(path), what, "download index and files from the same revision")]
