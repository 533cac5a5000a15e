"""YaRN as Transformers computes it: torchtitan's frequencies times the attention factor it leaves out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.models.common.rope import CosSinRoPE


class YarnCosSinRoPE(CosSinRoPE):
    """`CosSinRoPE` whose cos and sin are multiplied by ``attention_factor``.

    torchtitan leaves the factor to the model's softmax scale; Transformers' Qwen3 multiplies cos and sin, so
    every attention logit grows by the factor squared.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Adds to `CosSinRoPE.Config` the one number it has no field for."""

        attention_factor: float = 1.0

    def _precompute_cache(self) -> torch.Tensor:
        """Float32 cache of shape ``(max_seq_len, 2 * dim)``: cos, then sin."""
        return super()._precompute_cache() * self.config.attention_factor
