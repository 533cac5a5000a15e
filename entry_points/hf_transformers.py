"""Plugin ``hf-transformers``: the Transformers v5 model of the job, trained by torchtitan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn.checks import published_weights, transformers_model
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, StepLog, hookimpl
from torchtitan_qwen3_trn.models import balancing, first_loss
from torchtitan_qwen3_trn.models.hf import transformers_spec
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.overrides.document_sdpa import document_mask


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.hf-transformers]``."""

    document_mask: bool = True
    """Keep attention inside each packed document. False attends causally across documents, without any mask."""

    experts: transformers_spec.Experts = "auto"
    """How Transformers computes experts; "auto" is grouped_mm, and eager on Neuron."""


@hookimpl
def model_spec(config: JobConfig, options: Options) -> ModelSpec:
    """The Transformers model, from config.json or from a Qwen3 flavor."""
    return transformers_spec.model_spec_for(config, document_mask=options.document_mask, experts=options.experts)


@hookimpl
def check_job(config: JobConfig, machine: Machine) -> list[Problem]:
    """Degrees, sequence length, vocabulary, memory, and the headers of the weights to be loaded."""
    if not _is_ours(config):
        return []
    return [*transformers_model.check(config, machine), *published_weights.check(config)]


@hookimpl
def model_inputs(config: JobConfig, options: Options, extra_kwargs: dict[str, Any]) -> None:
    """Build the document mask once per microbatch."""
    positions_BL = extra_kwargs.get("positions")
    if _is_ours(config) and positions_BL is not None and options.document_mask:
        extra_kwargs["attention_masks"] = document_mask(positions_BL)


@hookimpl
def after_step(config: JobConfig, trainer: Trainer, step: int, local_loss: torch.Tensor, log: StepLog) -> None:
    """Log the router's loss; after the first step, warn if loaded weights look random."""
    if not _is_ours(config):
        return
    balancing.log_router_loss(trainer.model_parts, trainer.parallel_dims, trainer.device, log)
    if step == 1 and first_loss.asks_for_published_weights(config):
        expected = first_loss.expected_random_loss(config.model_spec)
        first_loss.report_random_first_loss(config, local_loss, trainer.parallel_dims, expected)


def _is_ours(config: JobConfig) -> bool:
    """Whether no other plugin has given the model."""
    return config.model_spec is not None and isinstance(config.model_spec.model, HFModel.Config)
