"""Plugin ``float32-norm``: the attention and feed-forward norms compute in float32, whatever the training dtype.

A whole override plugin in one file: the replacement, its factory, the options, the hook.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.config.override import derive
from torchtitan.models.common.nn_modules import RMSNorm

from torchtitan_qwen3_trn.hooks import NodeOverride, hookimpl


class Float32RMSNorm(RMSNorm):
    """Stock's norm; parameters, their names and so checkpoints stay the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """Stock's options."""

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Normalise in float32 and return the input's dtype."""
        with torch.autocast(x_BLD.device.type, enabled=False):
            y_BLD = torch.nn.functional.rms_norm(x_BLD.float(), self.normalized_shape, self.weight.float(), self.eps)
        return y_BLD.type_as(x_BLD)


def float32_norm(config: RMSNorm.Config) -> Float32RMSNorm.Config:
    """``derive`` keeps sizes, sharding and initialisation of the node that is replaced."""
    return derive(config, Float32RMSNorm.Config)


@dataclass(kw_only=True, slots=True)
class Options:
    """Section ``[plugins.float32-norm]``."""

    fqns: list[str] | None = None
    """Modules to replace, such as ``["layers.0.ffn_norm"]``; absent: both norms of every layer."""


@hookimpl
def node_overrides(options: Options) -> list[NodeOverride]:
    """Which nodes to replace, and with what."""
    fqns = options.fqns or ["layers.*.attention_norm", "layers.*.ffn_norm"]
    return [NodeOverride(target=RMSNorm.Config, factory=float32_norm, fqns=fqns)]
