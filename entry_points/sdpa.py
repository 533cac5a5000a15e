"""Plugin ``sdpa``: scaled-dot-product attention in place of FlexAttention, aware of packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.models.common.attention import FlexAttention

from torchtitan_qwen3_trn.checks.attention import check_attention
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, NodeOverride, hookimpl
from torchtitan_qwen3_trn.overrides import document_sdpa


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.sdpa]``."""

    document_mask: bool = True
    """Keep attention inside each packed document. False attends causally across documents, which is what the
    mask-free flash kernel of torch-neuronx needs."""

    fqns: list[str] | None = None
    """Modules to replace, such as ``["layers.0", "layers.1"]``; absent: all of them."""


@hookimpl
def node_overrides(options: Options) -> list[NodeOverride]:
    """Replace the inner attention."""
    kwargs = {"document_mask": options.document_mask}
    return [NodeOverride(target=FlexAttention.Config, factory=document_sdpa.sdpa, fqns=options.fqns, kwargs=kwargs)]


@hookimpl
def check_job(config: JobConfig, options: Options, machine: Machine) -> list[Problem]:
    """Context parallelism, and layers left on FlexAttention."""
    return check_attention(config, machine, document_mask=options.document_mask, fqns=options.fqns)


@hookimpl
def model_inputs(options: Options, extra_kwargs: dict[str, Any]) -> None:
    """Build the document mask once per microbatch."""
    positions_BL = extra_kwargs.get("positions")
    if positions_BL is not None and options.document_mask:
        extra_kwargs["attention_masks"] = document_sdpa.document_mask(positions_BL)
