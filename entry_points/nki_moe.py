"""Plugin ``nki-moe``: experts in NKI kernels, and routing that Neuron can run without a host round trip."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from torchtitan_qwen3_trn.checks import kernels as kernel_checks
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, NodeOverride, hookimpl
from torchtitan_qwen3_trn.job.configuration import is_rank_zero
from torchtitan_qwen3_trn.job.override_plan import matching_nodes
from torchtitan_qwen3_trn.kernels.experts import experts as experts_operator
from torchtitan_qwen3_trn.overrides import static_moe as experts
from torchtitan_qwen3_trn.trainer import PluginTrainer

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
def adjust_config(config: PluginTrainer.Config, machine: Machine) -> None:
    """Let selective checkpointing keep the chosen experts."""
    config.activation_checkpoint = experts.route_keeping(config.activation_checkpoint)


@hookimpl
def node_overrides(config: PluginTrainer.Config) -> list[NodeOverride]:
    """Replace router, token dispatcher and experts; nothing in a dense model, so that a job file serves both."""
    options = config.plugins.options(Options)
    every_expert = NodeOverride(target=GroupedExperts.Config, factory=experts.kernel_experts)
    if options.fqns is None and next(matching_nodes(every_expert, config), None) is None:
        if is_rank_zero():
            logger.info("nki-moe replaces nothing: the model has no experts")
        return []
    return [
        NodeOverride(target=TokenChoiceTopKRouter.Config, factory=experts.static_router, fqns=options.fqns),
        NodeOverride(target=LocalTokenDispatcher.Config, factory=experts.static_dispatcher, fqns=options.fqns),
        NodeOverride(
            target=GroupedExperts.Config,
            factory=experts.kernel_experts,
            fqns=options.fqns,
            kwargs={"block_rows": options.block_rows},
        ),
    ]


@hookimpl
def check_job(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Dimensions of model, experts and blocks against the kernels, and whether the kernels can be imported."""
    options = config.plugins.options(Options)
    problems = []
    if options.block_rows < 1:
        problems.append(Problem("plugins.nki-moe.block_rows", f"{options.block_rows} is no number of rows"))
    if config.debug.spmd_typechecking:
        what = "torchtitan's type checker does not know the operators of the plugin nki-moe"
        problems.append(Problem("debug.spmd_typechecking", what, "set it to false"))
    sizes = kernel_checks.expert_sizes(config, block_rows=options.block_rows)
    return problems + kernel_checks.check_kernel(
        experts_operator, sizes, machine, plugin="nki-moe", provider=options.provider
    )
