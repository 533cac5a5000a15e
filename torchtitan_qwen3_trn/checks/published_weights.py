"""Checks of the published weights a job is to start from, before memory is allocated; the same on every route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchtitan_qwen3_trn.checks.checkpoints import newest_checkpoint
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem


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
    if will_load_files(config) and config.model_spec is not None:
        # Imported now: it takes Transformers' model code, a quarter of a second at the start of every other job.
        from torchtitan_qwen3_trn.checks.published_files import check_files

        yield from check_files(Path(checkpoint.initial_load_path or config.hf_assets_path), config.model_spec)
