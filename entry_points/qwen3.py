"""Plugin ``qwen3``: torchtitan's own Qwen3, from the checkpoint's config.json or from a flavor."""

from __future__ import annotations

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.checks import native_model
from torchtitan_qwen3_trn.checks import published_weights as import_check
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, hookimpl
from torchtitan_qwen3_trn.models import balancing, first_loss
from torchtitan_qwen3_trn.models.qwen3 import native_spec as job
from torchtitan_qwen3_trn.trainer import PluginTrainer

BACKENDS = ("native", "nki_moe")


@hookimpl
def model_spec(config: PluginTrainer.Config) -> ModelSpec | None:
    """Torchtitan's Qwen3 for the backends that run it."""
    if config.model.backend not in BACKENDS:
        return None
    return job.model_spec_for(config)


@hookimpl
def check_job(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Sizes against parallel degrees, positions and vocabulary, and the headers of the weights to be loaded."""
    return (
        [*native_model.check(config, machine), *import_check.check(config)] if config.model.backend in BACKENDS else []
    )


@hookimpl
def after_step(trainer: PluginTrainer, step: int) -> None:
    """Log the loss that balances experts; after the first step, warn if loaded weights look random."""
    if trainer.config.model.backend not in BACKENDS:
        return
    balancing.log(trainer, step)
    if first_loss.asks_for_published_weights(trainer.config):
        first_loss.report_random_first_loss(trainer, step, first_loss.expected_random_loss(trainer.config.model_spec))


@hookimpl
def adjust_config(config: PluginTrainer.Config, machine: Machine) -> None:
    """Choose the SPMD backend that gloo can run with expert parallelism."""
    if config.model.backend in BACKENDS:
        job.use_supported_spmd_backend(config, machine)
