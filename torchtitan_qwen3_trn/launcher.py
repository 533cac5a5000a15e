"""From the command line of ``python -m torchtitan.train`` to a configuration whose ``build()`` trains the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.config.override import derive

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.job.command_line import Flags, parse_flags
from torchtitan_qwen3_trn.job.configuration import configure
from torchtitan_qwen3_trn.job.prepare import PreparedJob, prepare
from torchtitan_qwen3_trn.launch import collection_paused, end_with, launcher_problems, output_of_rank_zero_only
from torchtitan_qwen3_trn.plugins import load_plugins_of
from torchtitan_qwen3_trn.trainer import PluginTrainer


def parse(args: list[str], parse_like_stock: Callable[..., Any]) -> Any:
    """The configuration that ``args`` describe; a job that cannot run ends the process with a message.

    Args:
        args: the command line.
        parse_like_stock: called as ``parse_like_stock(args)`` or ``parse_like_stock(args, defaults)``.
    """
    try:
        flags = parse_flags(args)
        if flags.job_file is not None:
            return _job(flags, parse_like_stock)
        config = parse_like_stock(args)
        return _checked(config) if isinstance(config, JobConfig) else config
    except JobError as error:
        end_with(error)


@collection_paused()
def _job(flags: Flags, parse_like_stock: Callable[..., Any]) -> JobConfig:
    configured = configure(flags)
    try:
        with output_of_rank_zero_only():
            config = parse_like_stock(flags.rest, configured.config)
    except AssertionError as error:
        # Some of stock's configurations assert where others raise the ValueError that tyro reports.
        raise JobError([Problem("command line", str(error) or "a value is not possible")]) from error
    configured.log()
    earlier = [*configured.problems, *launcher_problems()]
    return _buildable(prepare(config, configured.plugins, earlier=earlier, source=str(flags.job_file)))


def _checked(config: JobConfig) -> JobConfig:
    """A configuration of ours that came through ``--module``."""
    plugins, problems = load_plugins_of(config)
    return _buildable(prepare(config, plugins, earlier=problems))


def _buildable(job: PreparedJob) -> JobConfig:
    """The job's configuration, whose ``build()``, which stock calls without arguments, passes the job on."""

    class Buildable(type(job.config)):  # type: ignore[misc]
        def build(self, **kwargs: Any) -> PluginTrainer:
            return PluginTrainer(job.config, job=job)

    return derive(job.config, Buildable)
