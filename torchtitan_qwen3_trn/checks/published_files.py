"""Files of published weights against the model that is to be loaded from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.headers import check_tensors, read_headers
from torchtitan_qwen3_trn.hf_files.tying import tying_problems
from torchtitan_qwen3_trn.models.described_spec import hf_config_of
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf_config import config_differences, from_folder
from torchtitan_qwen3_trn.weights.folder_check import count_problems


def check_files(folder: Path, model_spec: ModelSpec) -> Iterator[Problem]:
    """What keeps the safetensors files of ``folder`` from being the weights of ``model_spec``.

    Reads headers, and of tensors only a tied output layer that the files repeat.
    """
    try:
        found, _ = read_headers(folder)
        if found and (folder / "config.json").exists() and (problems := count_problems(folder, len(found))):
            yield from problems
            return
        wanted = hf_config_of(model_spec)
        if (folder / "config.json").exists():
            where, fix = str(folder / "config.json"), "change [model], or load the weights of the model it describes"
            for difference in config_differences(from_folder(folder), wanted):
                yield Problem(where, f"disagrees with the job: {difference}", fix)
        layout = layout_of(build_on_meta(wanted, document_mask=True, experts="eager"))
    except JobError as error:
        yield from error.problems
        return
    problems = check_tensors(folder, layout.shapes, ignores=layout.ignores)
    yield from problems or tying_problems(folder, layout.tied, found)
