"""Plugin ``nki-moe``: experts in NKI kernels, and routing that Neuron can run without a host round trip."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from torchtitan_qwen3_trn.checks.kernel_sizes import check_experts, expert_sizes, uses_kernel
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, NodeOverride, hookimpl
from torchtitan_qwen3_trn.kernels.experts import experts
from torchtitan_qwen3_trn.launch import is_rank_zero
from torchtitan_qwen3_trn.overrides import static_moe

NAME = "nki-moe"

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.nki-moe]``."""

    provider: Literal["ours", "auto"] = "ours"
    """"ours" refuses to run without the kernels. "auto" runs the experts as PyTorch operators where the kernels cannot
    be imported or a size does not fit them; these wait for the row counts on the host, three times a layer."""

    block_rows: int = 256
    """Rows of the blocks that the kernels work in: larger ones load weights less often, smaller ones waste less when
    many experts have few tokens."""

    fqns: list[str] | None = None
    """Modules to replace, such as ``["layers.0", "layers.1"]``; absent: all of them."""


@hookimpl
def adjust_config(config: JobConfig) -> None:
    """Let selective activation checkpointing keep the chosen experts."""
    adjusted = static_moe.route_keeping(config.activation_checkpoint)
    if adjusted is not config.activation_checkpoint and is_rank_zero():
        logger.info("%s: selective activation checkpointing also keeps the experts that the router chose", NAME)
    config.activation_checkpoint = adjusted


@hookimpl
def node_overrides(config: JobConfig, options: Options, machine: Machine) -> list[NodeOverride]:
    """Replace router, token dispatcher and experts; nothing in a dense model, so that a job file serves both."""
    sizes = expert_sizes(config, block_rows=options.block_rows)
    if options.fqns is None and not sizes:
        if is_rank_zero():
            logger.info("%s replaces nothing: the model has no experts", NAME)
        return []
    kernel = uses_kernel(experts, sizes, machine, plugin=NAME, provider=options.provider)
    kwargs = {"block_rows": options.block_rows, "kernel": kernel}
    replacements = (
        (TokenChoiceTopKRouter.Config, static_moe.static_router, {}),
        (LocalTokenDispatcher.Config, static_moe.static_dispatcher, {}),
        (GroupedExperts.Config, static_moe.kernel_experts, kwargs),
    )
    return [
        NodeOverride(target=target, factory=factory, fqns=options.fqns, kwargs=kwargs)
        for target, factory, kwargs in replacements
    ]


@hookimpl
def check_job(config: JobConfig, options: Options, machine: Machine) -> list[Problem]:
    """Dimensions of model, experts and blocks against the kernels, and whether the kernels can be imported."""
    return list(check_experts(config, machine, plugin=NAME, provider=options.provider, block_rows=options.block_rows))
