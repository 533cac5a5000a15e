"""Plugin ``safetensors-export``: the trained model as a Hugging Face folder that is complete or absent."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import hookimpl
from torchtitan_qwen3_trn.trainer import PluginTrainer
from torchtitan_qwen3_trn.weights import job_export as export_job


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
def check_job(config: PluginTrainer.Config) -> list[Problem]:
    """Sizes, steps, places that are taken, and balancing that cannot be exported."""
    return export_job.check(config, config.plugins.options(Options))


@hookimpl
def after_step(trainer: PluginTrainer, step: int) -> None:
    """Export after the chosen steps."""
    options = trainer.config.plugins.options(Options)
    last = options.at_end and step == trainer.config.training.steps
    if step in options.steps and not last:
        export_job.export_model(trainer, options, step)


@hookimpl
def checkpoint_saved(trainer: PluginTrainer, step: int) -> None:
    """Keep what ``torchtitan-trn export`` needs beside the weights."""
    export_job.keep_assets(trainer, step)


@hookimpl
def training_ended(trainer: PluginTrainer) -> None:
    """Export the trained model."""
    options = trainer.config.plugins.options(Options)
    if options.at_end:
        export_job.export_model(trainer, options, trainer.step)
