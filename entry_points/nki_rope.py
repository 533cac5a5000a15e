"""Plugin ``nki-rope``: rotary embedding of query and key in one NKI kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.models.common.rope import CosSinRoPE

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine, NodeOverride, hookimpl
from torchtitan_qwen3_trn.overrides import kernel_checks, kernel_rope
from torchtitan_qwen3_trn.trainer import PluginTrainer


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.nki-rope]``."""

    provider: kernel_rope.Provider = "ours"
    """Whose kernel: this package's, "nkilib" for AWS's rope_hf with a change of layout around it, or "auto" for this
    package's if it can be imported and PyTorch operators if not."""

    fqns: list[str] | None = None
    """Modules to replace, such as ``["layers.0", "layers.1"]``; absent: all of them."""


@hookimpl
def node_overrides(config: PluginTrainer.Config) -> list[NodeOverride]:
    """Replace the rotary embedding."""
    options = config.plugins.options(Options)
    kwargs = {"provider": options.provider}
    return [NodeOverride(target=CosSinRoPE.Config, factory=kernel_rope.kernel_rope, fqns=options.fqns, kwargs=kwargs)]


@hookimpl
def check_job(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Sequence length and head dimension against the kernel, and whether the kernel can be imported."""
    provider = config.plugins.options(Options).provider
    operator, sizes = kernel_rope.OPERATORS[provider], kernel_checks.attention_sizes(config)
    return kernel_checks.check_kernel(operator, sizes, machine, plugin="nki-rope", provider=provider)
