"""Questions about the export of a job: what would make it fail, or change the model, when training has ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchtitan_qwen3_trn.checks.checkpoints import newest_checkpoint
from torchtitan_qwen3_trn.checks.model_limits import expert_bias_problems
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hf_files.file_plan import parse_size
from torchtitan_qwen3_trn.weights.folder_assets import assets_problems
from torchtitan_qwen3_trn.weights.job_export import destination, facts_of, is_export
from torchtitan_qwen3_trn.weights.publish import destination_problem

_WHERE = "plugins.safetensors-export"


def check_export(
    config: JobConfig, *, folder: str, steps: list[int], at_end: bool, max_shard_size: str, drop_expert_bias: bool
) -> list[Problem]:
    """Report at the start what would make an export fail at the end; arguments are the plugin's options."""
    problems = assets_problems(Path(config.hf_assets_path))
    try:
        parse_size(max_shard_size)
    except ValueError as error:
        problems.append(Problem(f"{_WHERE}.max_shard_size", str(error)))
    if beyond := [step for step in steps if not 1 <= step <= config.training.steps]:
        what = f"steps {beyond} do not exist in a run of {config.training.steps}"
        problems.append(Problem(f"{_WHERE}.steps", what, "name steps that the run takes"))
    if "://" in config.dump_folder + folder:
        what = "exports go to a file system only"
        return [*problems, Problem(f"{_WHERE}.folder", what, "name a folder on a disk that all hosts see")]
    last = [config.training.steps] if at_end else []
    problems += _taken(config, folder, {*steps, *last})
    if not drop_expert_bias:
        problems += expert_bias_problems(config, f"{_WHERE}.drop_expert_bias = true")
    return problems


def _taken(config: JobConfig, folder: str, steps: Iterable[int]) -> list[Problem]:
    """Destinations that exist and are not what this job wrote before a restart."""
    newest = newest_checkpoint(config)
    resumed = int(newest.name.removeprefix("step-")) if newest is not None else 0
    found = (
        destination_problem(target)
        for step in sorted(steps)
        if step > resumed and not is_export(target := destination(config, folder, step), facts_of(config, step))
    )
    return [problem for problem in found if problem is not None]
