"""Plugin ``sdpa``: scaled-dot-product attention in place of FlexAttention, aware of packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import FlexAttention

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, NodeOverride, hookimpl
from torchtitan_qwen3_trn.overrides import document_sdpa as attention
from torchtitan_qwen3_trn.trainer import PluginTrainer


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.sdpa]``."""

    document_mask: bool = True
    """Keep attention inside each packed document. False attends causally across documents, which is what the
    mask-free flash kernel of torch-neuronx needs."""

    fqns: list[str] | None = None
    """Modules to replace, such as ``["layers.0", "layers.1"]``; absent: all of them."""


@hookimpl
def node_overrides(config: PluginTrainer.Config) -> list[NodeOverride]:
    """Replace the inner attention."""
    options = config.plugins.options(Options)
    kwargs = {"document_mask": options.document_mask}
    return [NodeOverride(target=FlexAttention.Config, factory=attention.sdpa, fqns=options.fqns, kwargs=kwargs)]


@hookimpl
def check_job(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Context parallelism, and layers left on FlexAttention."""
    options = config.plugins.options(Options)
    return attention.check(config, machine, document_mask=options.document_mask, fqns=options.fqns)


@hookimpl
def model_inputs(config: PluginTrainer.Config, inputs: torch.Tensor, extra_kwargs: dict[str, Any]) -> None:
    """Build the document mask once per microbatch."""
    positions_BL = extra_kwargs.get("positions")
    if positions_BL is not None and config.plugins.options(Options).document_mask:
        extra_kwargs["attention_masks"] = attention.document_mask(positions_BL)
