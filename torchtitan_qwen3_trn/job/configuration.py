"""From a job file and the command line to the job's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import default_adamw
from torchtitan.config.configs import TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.tools import utils

from torchtitan_qwen3_trn.config import JobConfig, ModelOptions
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.job.command_line import Flags
from torchtitan_qwen3_trn.job.job_file import JobFile, lay_over, read_job_file
from torchtitan_qwen3_trn.job.legacy import Table, lookup
from torchtitan_qwen3_trn.job.sections import apply_sections
from torchtitan_qwen3_trn.job.values import Problems
from torchtitan_qwen3_trn.launch import is_rank_zero, without_warnings
from torchtitan_qwen3_trn.plugins import Plugins, choose, installed_plugins, load, plugins_config_type

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConfiguredJob:
    """A configuration built from a job file.

    Attributes:
        config: the configuration; where the file is wrong it holds defaults.
        plugins: the plugins that the job enables, loaded.
        problems: everything wrong with the file so far.
        notes: lines for the log: the file, the profile and the keys it changed.
        warnings: translated and ignored keys.
    """

    config: JobConfig
    plugins: Plugins
    problems: list[Problem]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def log(self) -> None:
        """Write notes and warnings, on rank 0."""
        if is_rank_zero():
            for text in self.notes:
                logger.info(text)
            for text in self.warnings:
                logger.warning(text)


def configure(flags: Flags) -> ConfiguredJob:
    """Read the job file that ``flags`` name, load its plugins and lay file, profile and flags over the defaults.

    Raises:
        JobError: when the file cannot be read at all.
    """
    job = read_job_file(Path(str(flags.job_file)))
    profile = _profile(job, flags)
    table, changes = lay_over(job.table, job.profiles.get(profile, {}))
    table, _ = lay_over(table, flags.table)
    plugins, problems = _load_plugins(table)
    with without_warnings():
        config, found = _judge(default_config(plugins), job, profile, table, flags)
    config = replace(config, job=replace(config.job, config_file=flags.job_file))
    notes = [f"Job file {job.path}"]
    if profile in job.profiles:
        notes.append(f"Profile {profile} changes {len(changes)} keys")
        notes += [f"Profile {profile}: {change}" for change in changes]
    return ConfiguredJob(
        config=config,
        plugins=plugins,
        problems=[*job.problems, *problems, *found],
        notes=notes + _idle_options(table, plugins),
        warnings=job.warnings,
    )


def default_config(plugins: Plugins) -> JobConfig:
    """The configuration of an empty job file, with the options of ``plugins``."""
    return JobConfig(
        plugins=plugins_config_type(plugins.loaded)(),
        loss=ChunkedLossWrapper.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        optimizer=default_adamw(),
        # Graph capture exists for NVIDIA only, and refuses expert and pipeline parallelism.
        training=TrainingConfig(disable_cuda_graphs=True),
    )


def _profile(job: JobFile, flags: Flags) -> str:
    choice = lookup(flags.table, "job.profile")[1] or lookup(job.table, "job.profile")[1] or "auto"
    return utils.device_type if choice == "auto" else str(choice)


def _judge(
    defaults: JobConfig, job: JobFile, profile: str, table: Table, flags: Flags
) -> tuple[JobConfig, list[Problem]]:
    """The configuration of ``table``, and what is wrong with it, with the file alone and with its other profiles.

    The file alone must be right in each value; whether values fit together is a question about file and profile. What
    goes wrong only with a profile is reported as ``profile.<device>.<key>``.
    """
    active = profile if profile in job.profiles else None
    alone = Problems()
    config = apply_sections(defaults, table if active is None else job.table, alone)
    problems = [*alone, *(alone.combinations if active is None else [])]
    for device, overlay in job.profiles.items():
        found = Problems()
        laid = table if device == active else lay_over(job.table, overlay)[0]
        made = apply_sections(defaults, laid, found)
        config = made if device == active else config
        problems += _due_to(device, found, alone, flags.table if device == active else {})
    return config, list(dict.fromkeys(problems))


def _due_to(device: str, found: Problems, alone: Problems, flags: Table) -> list[Problem]:
    """``found`` under the name of the profile, but for what the file alone or a flag has wrong."""
    known = {*alone, *alone.combinations}
    return [
        problem
        if problem in known or lookup(flags, problem.where)[0]
        else replace(problem, where=f"profile.{device}.{problem.where}")
        for problem in (*found, *found.combinations)
    ]


def _load_plugins(table: Table) -> tuple[Plugins, list[Problem]]:
    _, backend = lookup(table, "model.backend")
    chosen, problems = choose(
        backend if isinstance(backend, str) else ModelOptions().backend,
        _strings(lookup(table, "plugins.enable")[1]),
        _strings(lookup(table, "plugins.disable")[1]),
    )
    plugins, load_problems = load(chosen)
    return plugins, problems + load_problems


def _idle_options(table: Table, plugins: Plugins) -> list[str]:
    """Notes on options of installed plugins that this job does not enable."""
    return [
        f"[plugins.{name}] has no effect: this job does not enable the plugin"
        for name in installed_plugins()
        if name not in plugins.names and lookup(table, f"plugins.{name.replace('-', '_')}")[0]
    ]


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
