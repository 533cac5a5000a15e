"""Plugin ``gather-free-rope``: rotary embedding computed from positions, without any table look-up."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.models.common.rope import CosSinRoPE

from torchtitan_qwen3_trn.hooks import NodeOverride, hookimpl
from torchtitan_qwen3_trn.overrides import position_rope


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.gather-free-rope]``."""

    fqns: list[str] | None = None
    """Modules to replace, such as ``["layers.0", "layers.1"]``; absent: all of them."""


@hookimpl
def node_overrides(options: Options) -> list[NodeOverride]:
    """Replace the rotary embedding of every layer."""
    return [NodeOverride(target=CosSinRoPE.Config, factory=position_rope.gather_free_rope, fqns=options.fqns)]
