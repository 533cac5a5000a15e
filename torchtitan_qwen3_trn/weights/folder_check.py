"""The part of verifying a Hugging Face folder that reads headers and small files only."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.hf_files.headers import check_tensors, read_headers
from torchtitan_qwen3_trn.hf_files.index import total_size_problems
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import Layout, layout_of
from torchtitan_qwen3_trn.models.hf_config import config_differences, from_folder
from torchtitan_qwen3_trn.models.value_rules import LAYERS_AND_EXPERTS, counts
from torchtitan_qwen3_trn.weights.manifest import manifest_problems


def check_export(folder: Path, config: PreTrainedConfig) -> list[Problem]:
    """Where the export ``folder`` differs from the model ``config`` describes; the cheap checks only."""
    try:
        layout = layout_of_folder(folder)
        written = from_folder(folder)
    except JobError as error:
        return error.problems
    differences = config_differences(written, config)
    problems = [Problem(str(folder / "config.json"), each) for each in differences]
    problems += check_tensors(folder, layout.shapes)
    problems += total_size_problems(folder, sum(header.nbytes for header in read_headers(folder)[0].values()))
    return problems + manifest_problems(folder, checksums=False)


def layout_of_folder(folder: Path) -> Layout:
    """The tensors that the model of ``folder/config.json`` has in files.

    Raises:
        JobError: config.json cannot be used, or has more layers or experts than there are tensors.
    """
    found, problems = read_headers(folder)
    if problems := problems or count_problems(folder, len(found)):
        raise JobError(problems)
    return layout_of(build_on_meta(from_folder(folder)))


def count_problems(folder: Path, tensors: int) -> list[Problem]:
    """Numbers of layers or experts in ``folder/config.json`` that are too large for a model of so many tensors.

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
