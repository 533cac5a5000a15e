"""Checks of the published weights a job is to start from, before memory is allocated; the same on every route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan_qwen3_trn.checks.checkpoints import newest_checkpoint
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.headers import check_tensors, read_headers
from torchtitan_qwen3_trn.hf_files.tying import tying_problems
from torchtitan_qwen3_trn.models.described_spec import hf_config_of
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf_config import config_differences, from_folder
from torchtitan_qwen3_trn.weights.folder_check import count_problems


def check(config: JobConfig) -> list[Problem]:
    """What keeps the files from being loaded as the weights of the job's model: all of it.

    Reads headers, and of tensors only a tied output layer that the files repeat.
    """
    return list(_problems(config))


def will_load_files(config: JobConfig) -> bool:
    """Whether the run starts from Hugging Face files: it asks for it, and has no checkpoint of its own to resume."""
    checkpoint = config.checkpoint
    return bool(checkpoint.enable and checkpoint.initial_load_in_hf and newest_checkpoint(config) is None)


def _problems(config: JobConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.initial_load_in_hf and not checkpoint.enable:
        what = "has no effect while checkpoint.enable is false: the run would start from random weights"
        yield Problem("checkpoint.initial_load_in_hf", what, "set checkpoint.enable = true")
    if checkpoint.initial_load_in_hf_quantized:
        yield Problem("checkpoint.initial_load_in_hf_quantized", "quantized weights cannot be trained here")
    if not will_load_files(config) or config.model_spec is None:
        return
    folder = Path(checkpoint.initial_load_path or config.hf_assets_path)
    try:
        found, _ = read_headers(folder)
        if found and (folder / "config.json").exists() and (problems := count_problems(folder, len(found))):
            yield from problems
            return
        wanted = hf_config_of(config.model_spec)
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
