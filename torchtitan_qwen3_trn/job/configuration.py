"""A job file and a few early command-line flags to a trainer configuration."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torchtitan_qwen3_trn.config import Backend, JobOptions, ModelOptions
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.job.job_file import JobFile, lay_over, read_job_file
from torchtitan_qwen3_trn.job.legacy import Table
from torchtitan_qwen3_trn.job.trial import silenced
from torchtitan_qwen3_trn.job.values import ValueProblems
from torchtitan_qwen3_trn.plugins import ActivePlugins, choose, installed_plugins, load, plugins_config_type

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

logger = logging.getLogger(__name__)


@dataclass
class LoadedJob:
    """A configuration built from a job file.

    Attributes:
        config: the configuration; where the file is wrong it holds defaults.
        problems: everything wrong with the file so far.
        notes: lines for the log: the file, the profile and the keys it changed.
        warnings: translated and ignored keys.
    """

    config: PluginTrainer.Config
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


def load_job(path: str | Path, args: list[str] | None = None) -> LoadedJob:
    """Build a configuration from the job file at ``path``.

    ``args`` are command-line arguments; only those that decide how the file is read are looked at here
    (``--job.profile``, ``--model.backend``, ``--plugins.enable``, ``--plugins.disable``).

    Raises:
        JobError: when the file cannot be read at all.
    """
    args = args or []
    job = read_job_file(Path(path))
    table, notes = _with_profile(job, flag_value(args, "job.profile"))
    problems = list(job.problems)
    plugins = _load_plugins(table, args, problems)
    with silenced():
        base = default_config(plugins)
        problems += _file_problems(base, job)
    notes += _idle_options(table, plugins)
    config = _apply(base, table, [] if problems else problems)
    config = replace(config, job=replace(config.job, config_file=str(path)))
    return LoadedJob(config=config, problems=problems, notes=notes, warnings=job.warnings)


def default_config(plugins: ActivePlugins) -> PluginTrainer.Config:
    """The configuration of a job file that says nothing, with the options of ``plugins``."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config.configs import TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    from torchtitan_qwen3_trn.trainer import PluginTrainer

    return PluginTrainer.Config(
        job=JobOptions(),
        model=ModelOptions(),
        plugins=plugins_config_type(plugins.loaded)(),
        loss=ChunkedLossWrapper.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        optimizer=default_adamw(),
        # Graph capture exists for NVIDIA only, and refuses expert and pipeline parallelism.
        training=TrainingConfig(disable_cuda_graphs=True),
    )


def flag_value(args: list[str], name: str) -> str | None:
    """Value of ``--name value`` or ``--name=value`` in ``args``, hyphens and underscores alike; the last one wins."""
    value = None
    for index, arg in enumerate(args):
        flag, equals, inline = arg.partition("=")
        if flag.replace("-", "_") == "__" + name.replace("-", "_"):
            value = inline if equals else next(iter(args[index + 1 :]), None)
    return value


def flag_count(args: list[str], name: str) -> int:
    """How often ``args`` gives the flag ``name``."""
    return sum(arg.partition("=")[0].replace("-", "_") == "__" + name.replace("-", "_") for arg in args)


def is_rank_zero() -> bool:
    """Whether this process speaks for the job: rank 0, or not started by a launcher that counts."""
    rank = os.environ.get("RANK", "0")
    return rank == "0" or not rank.isdecimal()


def _with_profile(job: JobFile, requested: str | None) -> tuple[Table, list[str]]:
    from torchtitan.tools import utils

    choice = requested or _nested(job.table, "job", "profile") or "auto"
    device = utils.device_type if choice == "auto" else choice
    notes = [f"Job file {job.path}"]
    overlay = job.profiles.get(str(device))
    if overlay is None:
        return job.table, notes
    table, changes = lay_over(job.table, overlay)
    notes.append(f"Profile {device} changes {len(changes)} keys")
    notes += [f"Profile {device}: {change}" for change in changes]
    return table, notes


def _load_plugins(table: Table, args: list[str], problems: list[Problem]) -> ActivePlugins:
    backend = flag_value(args, "model.backend") or _nested(table, "model", "backend")
    if backend not in get_args(Backend):
        backend = ModelOptions().backend
    chosen, choice_problems = choose(backend, _names(table, args, "enable"), _names(table, args, "disable"))
    plugins, load_problems = load(chosen)
    problems += choice_problems + load_problems
    return plugins


def _idle_options(table: Table, plugins: ActivePlugins) -> list[str]:
    """Notes on options of installed plugins that this job does not enable."""
    enabled = {plugin.installed.field_name for plugin in plugins.loaded}
    idle = [name for name in installed_plugins() if name.replace("-", "_") not in enabled]
    options = table.get("plugins")
    given = [name for name in idle if isinstance(options, dict) and name.replace("-", "_") in options]
    return [f"[plugins.{name}] has no effect: this job does not enable the plugin" for name in given]


def _names(table: Table, args: list[str], key: str) -> list[str]:
    flag = flag_value(args, f"plugins.{key}")
    if flag is not None:
        return [name for name in flag.split(",") if name]
    names = _nested(table, "plugins", key)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _nested(table: Table, section: str, key: str) -> Any:
    below = table.get(section)
    return below.get(key) if isinstance(below, dict) else None


def _file_problems(base: PluginTrainer.Config, job: JobFile) -> list[Problem]:
    """Mistakes in the file itself, including profiles that are not used this time.

    Values are checked where they stand. Whether they fit together is a question about file and profile combined.
    """
    problems = ValueProblems()
    _apply(base, job.table, problems)
    for device, overlay in job.profiles.items():
        _apply(base, overlay, problems, f"profile.{device}")
    if problems:
        return problems
    combined: list[Problem] = []
    for device, overlay in job.profiles.items():
        _apply(base, lay_over(job.table, overlay)[0], combined, f"profile.{device}")
    return combined


def _apply(base: PluginTrainer.Config, table: Table, problems: list[Problem], where: str = "") -> PluginTrainer.Config:
    from torchtitan_qwen3_trn.job.sections import apply_sections

    return apply_sections(base, table, problems, where)
