"""Plugin ``nki-rope``: rotary embedding of query and key in one NKI kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

from torchtitan_qwen3_trn.checks import kernels as kernel_checks
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, NodeOverride, hookimpl
from torchtitan_qwen3_trn.job.override_plan import MODEL_PREFIX, matching_nodes
from torchtitan_qwen3_trn.kernels.qk_norm_rope import qk_norm_rope as qk_norm_rope_operator
from torchtitan_qwen3_trn.overrides import fused_qk_norm as qk_norm_rope
from torchtitan_qwen3_trn.overrides import kernel_rope
from torchtitan_qwen3_trn.trainer import PluginTrainer


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
def node_overrides(config: PluginTrainer.Config) -> list[NodeOverride]:
    """Replace the rotary embedding, and with ``fused_qk_norm`` the norms before it."""
    options = config.plugins.options(Options)
    if not options.fused_qk_norm:
        kwargs = {"provider": options.provider}
        return [
            NodeOverride(target=CosSinRoPE.Config, factory=kernel_rope.kernel_rope, fqns=options.fqns, kwargs=kwargs)
        ]
    rope = NodeOverride(target=CosSinRoPE.Config, factory=qk_norm_rope.fused_rope, fqns=options.fqns)
    norms = qk_norm_rope.norms_beside(fqn.removeprefix(MODEL_PREFIX) for fqn in matching_nodes(rope, config))
    return [rope, NodeOverride(target=RMSNorm.Config, factory=qk_norm_rope.deferred_norm, fqns=norms)]


@hookimpl
def check_job(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Options that exclude each other, sequence length and head dimension, and whether the kernel can be imported."""
    options = config.plugins.options(Options)
    operator = qk_norm_rope_operator if options.fused_qk_norm else kernel_rope.OPERATORS[options.provider]
    problems = _fusion_problems(config, options) if options.fused_qk_norm else []
    sizes = kernel_checks.attention_sizes(config)
    return problems or kernel_checks.check_kernel(
        operator, sizes, machine, plugin="nki-rope", provider=options.provider
    )


def _fusion_problems(config: PluginTrainer.Config, options: Options) -> list[Problem]:
    problems, degree = [], config.parallelism.tensor_parallel_degree
    if options.provider == "nkilib":
        what = '"nkilib" has no kernel that normalises too'
        problems.append(Problem("plugins.nki-rope.provider", what, 'choose "ours", or fused_qk_norm = false'))
    if degree > 1:
        what = f"{degree}, but the gradients of the norms' weights would not be summed over the ranks that share heads"
        fix = "set it to 1, or plugins.nki-rope.fused_qk_norm = false"
        problems.append(Problem("parallelism.tensor_parallel_degree", what, fix))
    if config.parallelism.spmd_backend == "full_dtensor":
        what = '"full_dtensor" passes the norms\' weights as DTensors, which their operator does not take'
        fix = 'set it to "spmd_types" or "partial_dtensor", or plugins.nki-rope.fused_qk_norm = false'
        problems.append(Problem("parallelism.spmd_backend", what, fix))
    return problems
