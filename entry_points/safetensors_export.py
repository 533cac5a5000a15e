"""Plugin ``safetensors-export``: the trained model as a Hugging Face folder that is complete or absent."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn.checks.export_settings import check_export
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import hookimpl
from torchtitan_qwen3_trn.weights import job_export


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.safetensors-export]``. ``checkpoint.export_dtype`` says the type of the tensors."""

    folder: str = "export"
    """Where exports go, relative to ``job.dump_folder``: one folder ``step-N`` each. One that is there already must be
    this job's export from before a restart, and is kept."""

    at_end: bool = True
    """Export when training has ended."""

    steps: list[int] = field(default_factory=list)
    """Export after these steps, too."""

    max_shard_size: str = "5GB"
    """Bytes of tensors in one file at most, such as ``5GB`` or ``500MB``."""

    drop_expert_bias: bool = False
    """Export although torchtitan's expert bias has no place in the files; tokens then go to other experts."""


@hookimpl
def check_job(config: JobConfig, options: Options) -> list[Problem]:
    """Sizes, steps, places that are taken, and balancing that cannot be exported."""
    return check_export(config, **asdict(options))


@hookimpl
def after_step(config: JobConfig, options: Options, trainer: Trainer, step: int) -> None:
    """Export after the chosen steps."""
    last = options.at_end and step == config.training.steps
    if step in options.steps and not last:
        _export(config, options, trainer, step)


@hookimpl
def checkpoint_saved(config: JobConfig, step: int) -> None:
    """Keep what ``torchtitan-trn export`` needs beside the weights."""
    job_export.keep_assets(config, step)


@hookimpl
def training_ended(config: JobConfig, options: Options, trainer: Trainer) -> None:
    """Export the trained model."""
    if options.at_end:
        _export(config, options, trainer, trainer.step)


def _export(config: JobConfig, options: Options, trainer: Trainer, step: int) -> None:
    job_export.export_model(
        trainer,
        config,
        step,
        folder=options.folder,
        max_shard_size=options.max_shard_size,
        drop_expert_bias=options.drop_expert_bias,
    )
