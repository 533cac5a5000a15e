"""Plugin ``nki-rope``: rotary embedding of query and key in one NKI kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

from torchtitan_qwen3_trn.checks.kernel_sizes import attention_sizes, fusion_problems, kernel_problems, uses_kernel
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import MODEL_PREFIX, Machine, NodeOverride, hookimpl
from torchtitan_qwen3_trn.kernels.operator import Operator
from torchtitan_qwen3_trn.kernels.qk_norm_rope import qk_norm_rope
from torchtitan_qwen3_trn.overrides import fused_qk_norm, kernel_rope

NAME = "nki-rope"


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.nki-rope]``."""

    provider: kernel_rope.Provider = "ours"
    """Whose kernel: this package's, "nkilib" for AWS's rope_hf with a change of layout around it, or "auto" for this
    package's, and PyTorch operators where it cannot be imported or a size does not fit it."""

    fused_qk_norm: bool = False
    """Normalise query and key in the same kernel, which saves a pass over both and rounds once less. Needs
    provider "ours" or "auto", no tensor parallelism, and a spmd_backend other than "full_dtensor"."""

    fqns: list[str] | None = None
    """Modules to replace, such as ``["layers.0", "layers.1"]``; absent: all of them."""


@hookimpl
def node_overrides(config: JobConfig, options: Options, machine: Machine) -> list[NodeOverride]:
    """Replace the rotary embedding, and with ``fused_qk_norm`` the norms before it."""
    sizes = attention_sizes(config)
    kernel = uses_kernel(_operator(options), sizes, machine, plugin=NAME, provider=options.provider)
    target, fqns = CosSinRoPE.Config, options.fqns
    if not options.fused_qk_norm:
        kwargs = {"provider": options.provider, "kernel": kernel}
        return [NodeOverride(target=target, factory=kernel_rope.kernel_rope, fqns=fqns, kwargs=kwargs)]
    rope = NodeOverride(target=target, factory=fused_qk_norm.fused_rope, fqns=fqns, kwargs={"kernel": kernel})
    norms = fused_qk_norm.norms_beside(fqn.removeprefix(MODEL_PREFIX) for fqn in rope.nodes(config))
    return [rope, NodeOverride(target=RMSNorm.Config, factory=fused_qk_norm.deferred_norm, fqns=norms)]


@hookimpl
def check_job(config: JobConfig, options: Options, machine: Machine) -> list[Problem]:
    """Options that exclude each other, sequence length and head dimension, and whether the kernel can be imported."""
    if options.fused_qk_norm and (problems := list(fusion_problems(config, provider=options.provider))):
        return problems
    if options.provider == "auto":
        return []
    sizes = attention_sizes(config)
    return kernel_problems(_operator(options), sizes, machine, plugin=NAME, provider=options.provider)


def _operator(options: Options) -> Operator:
    return qk_norm_rope if options.fused_qk_norm else kernel_rope.OPERATORS[options.provider]
