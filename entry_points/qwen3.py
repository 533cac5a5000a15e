"""Plugin ``qwen3``: torchtitan's own Qwen3, from the checkpoint's config.json or from a flavor."""

from __future__ import annotations

import torch
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn.checks import native_model, published_weights
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, StepLog, hookimpl
from torchtitan_qwen3_trn.models import balancing, first_loss
from torchtitan_qwen3_trn.models.qwen3 import native_spec


@hookimpl
def adjust_config(config: JobConfig, machine: Machine) -> None:
    """Choose the SPMD backend that gloo can run with expert parallelism."""
    native_spec.use_supported_spmd_backend(config, machine)


@hookimpl
def model_spec(config: JobConfig) -> ModelSpec:
    """Torchtitan's Qwen3."""
    return native_spec.model_spec_for(config)


@hookimpl
def check_job(config: JobConfig, machine: Machine) -> list[Problem]:
    """Sizes against parallel degrees, positions and vocabulary, and the headers of the weights to be loaded."""
    if not _is_ours(config):
        return []
    return [*native_model.check(config, machine), *published_weights.check(config)]


@hookimpl
def after_step(config: JobConfig, trainer: Trainer, step: int, local_loss: torch.Tensor, log: StepLog) -> None:
    """Log the loss that balances experts; after the first step, warn if loaded weights look random."""
    if not _is_ours(config):
        return
    balancing.log_router_loss(trainer.model_parts, trainer.parallel_dims, trainer.device, log)
    if step == 1 and first_loss.asks_for_published_weights(config):
        expected = first_loss.expected_random_loss(config.model_spec)
        first_loss.report_random_first_loss(config, local_loss, trainer.parallel_dims, expected)


def _is_ours(config: JobConfig) -> bool:
    """Whether no other plugin has given the model."""
    return config.model_spec is not None and isinstance(config.model_spec.model, Qwen3Model.Config)
