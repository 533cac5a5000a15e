"""Rotary position embedding computed from the positions, in place of a table that is gathered from.

Shape suffixes: B batch, L sequence, N heads, H head dimension, E = H / 2 frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config.override import derive

# The two private helpers are stock's single source of the YaRN frequencies and of the placement of positions.
# Their only public users bury them in a table or in a gather; a copy here would drift unnoticed, whereas a
# renamed helper fails at import and changed numbers fail the comparison with stock's table in the tests.
from torchtitan.models.common.rope import CosSinRoPE, _maybe_wrap_positions, _yarn_inv_freq

from torchtitan_qwen3_trn.kernels.rope import rotate


class GatherFreeRoPE(CosSinRoPE):
    """`CosSinRoPE` without a table: the same numbers, no gather or index operator in forward or backward.

    The buffer keeps the name ``cache`` that torchtitan's sharding and initialisation know, but holds only the
    inverse frequencies, ``(E,)`` float32. Angles are the same float32 products that stock's table is made of, so
    outputs and gradients equal stock's bit for bit on CPU; positions are exact up to 2**24.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Options of `GatherFreeRoPE`."""

        attention_factor: float = 1.0
        """Multiplies cos and sin: the attention factor of YaRN in Transformers' models."""

    def _precompute_cache(self) -> Tensor:
        """Inverse frequencies ``(E,)``, float32 whatever the default dtype, on the default device.

        Always computed on the host: an accelerator's ``pow`` may be off in the last bits, and position 262,143
        multiplies that error.
        """
        with torch.device("cpu"):
            inv_freq_E = _inverse_frequencies(self.config)
        return inv_freq_E.to(torch.get_default_device())

    def _reshape_cache(self, query: Tensor, positions: Tensor | None = None) -> Tensor:
        """Cos and sin for ``positions``, side by side.

        Args:
            query: ``(B, L, N, H)``.
            positions: ``(B, L)`` or ``(1, L)``, any integer dtype; ``None`` counts from 0.

        Returns:
            Float32 ``(B or 1, L, 1, H)``: E cosines, then E sines.
        """
        positions_BL = _maybe_wrap_positions(positions, query)
        if positions_BL is None:
            positions_BL = torch.arange(query.shape[1], device=query.device)[None]
            if isinstance(query, DTensor):
                replicate = [Replicate()] * query.device_mesh.ndim
                positions_BL = DTensor.from_local(positions_BL, query.device_mesh, replicate, run_check=False)
        return _cos_sin(positions_BL, self.cache, self.config.attention_factor)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate ``query`` and ``key`` ``(B, L, N, H)`` by ``rope_cache`` ``(B or 1, L, 1, H)``.

        Computed in float32, returned in the inputs' dtypes.
        """
        cos_BL1E, sin_BL1E = rope_cache.chunk(2, dim=-1)
        return rotate(query, cos_BL1E, sin_BL1E), rotate(key, cos_BL1E, sin_BL1E)


def _inverse_frequencies(config: CosSinRoPE.Config) -> Tensor:
    """``theta ** (-2i / dim)`` for i < dim / 2 (RoFormer, arXiv:2104.09864), YaRN-scaled if so configured."""
    if config.scaling == "llama":
        raise NotImplementedError("CosSinRoPE, and so GatherFreeRoPE, does not support scaling = 'llama'")
    if config.scaling == "yarn" and config.rope_factor > 1.0:
        return _yarn_inv_freq(
            config.dim,
            config.theta,
            config.rope_factor,
            config.beta_fast,
            config.beta_slow,
            config.original_seq_len,
            config.truncate,
        )
    return 1.0 / config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)


def _cos_sin(positions_BL: Tensor, inv_freq_E: Tensor, factor: float) -> Tensor:
    """``(B, L, 1, H)``: cosines and sines of position times frequency, times ``factor``."""
    angles_BL1E = (positions_BL.float()[:, :, None] * inv_freq_E)[:, :, None]
    cos_sin_BL1H = torch.cat((angles_BL1E.cos(), angles_BL1E.sin()), dim=-1)
    return cos_sin_BL1H if factor == 1.0 else cos_sin_BL1H * factor


def gather_free_rope(config: CosSinRoPE.Config) -> GatherFreeRoPE.Config:
    """Override factory: the `GatherFreeRoPE` that takes the place of ``config``, sharding and YaRN factor included."""
    return derive(config, GatherFreeRoPE.Config)
