"""Plugin ``hf-transformers``: the Transformers v5 model of the job, trained by torchtitan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.checks import published_weights as import_check
from torchtitan_qwen3_trn.checks import transformers_model as checks
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, hookimpl
from torchtitan_qwen3_trn.models import balancing, first_loss
from torchtitan_qwen3_trn.models.hf import transformers_spec as job
from torchtitan_qwen3_trn.overrides.document_sdpa import document_mask
from torchtitan_qwen3_trn.trainer import PluginTrainer

BACKEND = "huggingface_v5"


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.hf-transformers]``."""

    document_mask: bool = True
    """Keep attention inside each packed document. False attends causally across documents, without any mask."""

    experts: job.Experts = "auto"
    """How Transformers computes experts; "auto" is grouped_mm, and eager on Neuron."""


@hookimpl
def model_spec(config: PluginTrainer.Config) -> ModelSpec | None:
    """The Transformers model, from config.json or from a Qwen3 flavor."""
    if config.model.backend != BACKEND:
        return None
    options = config.plugins.options(Options)
    return job.model_spec_for(config, document_mask=options.document_mask, experts=options.experts)


@hookimpl
def check_job(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Degrees, sequence length, vocabulary, memory, and the headers of the weights to be loaded."""
    return [*checks.check(config, machine), *import_check.check(config)] if config.model.backend == BACKEND else []


@hookimpl
def model_inputs(config: PluginTrainer.Config, inputs: torch.Tensor, extra_kwargs: dict[str, Any]) -> None:
    """Build the document mask once per microbatch."""
    positions_BL = extra_kwargs.get("positions")
    if config.model.backend == BACKEND and positions_BL is not None and config.plugins.options(Options).document_mask:
        extra_kwargs["attention_masks"] = document_mask(positions_BL)


@hookimpl
def after_step(trainer: PluginTrainer, step: int) -> None:
    """Log the router's loss; after the first step, warn if loaded weights look random."""
    if trainer.config.model.backend != BACKEND:
        return
    balancing.log(trainer, step)
    if first_loss.asks_for_published_weights(trainer.config):
        first_loss.report_random_first_loss(trainer, step, first_loss.expected_random_loss(trainer.config.model_spec))
