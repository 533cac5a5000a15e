"""Rotary embedding of query and key in one operator: an NKI kernel on Neuron, PyTorch elsewhere.

Shape suffixes: B batch, b = B or 1, L sequence, N query heads, M key heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import spmd_types as spmd
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config.override import derive
from torchtitan.models.common.rope import CosSinRoPE

from torchtitan_qwen3_trn.kernels.nkilib_rope import nkilib_rope
from torchtitan_qwen3_trn.kernels.operator import Operator
from torchtitan_qwen3_trn.kernels.rope import rope
from torchtitan_qwen3_trn.overrides.position_rope import GatherFreeRoPE

Provider = Literal["ours", "nkilib", "auto"]

OPERATORS: dict[str, Operator] = {"ours": rope, "nkilib": nkilib_rope, "auto": rope}


class KernelRoPE(GatherFreeRoPE):
    """`CosSinRoPE` as one operator over query and key, with cosines and sines computed from the positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatherFreeRoPE.Config):
        """Options of `KernelRoPE`."""

        provider: str = "ours"
        """Whose kernel runs on Neuron; a key of `OPERATORS`."""

        kernel: bool = True
        """Whether the NKI kernel runs on Neuron; false computes with PyTorch operators everywhere."""

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate ``query`` ``(B, L, N, H)`` and ``key`` ``(B, L, M, H)`` for ``positions`` ``(b, L)``."""
        cos_sin_bLH = self._reshape_cache(query, positions).squeeze(2)
        operator = OPERATORS[self.config.provider]
        return on_shards(operator if self.config.kernel else operator.portable, query, key, cos_sin_bLH)


def on_shards(
    operator: Callable[..., tuple[Tensor, ...]], q_BLNH: Tensor, k_BLMH: Tensor, cos_sin_bLH: Tensor
) -> tuple[Tensor, Tensor]:
    """Call ``operator`` on each rank's own part of query and key, whichever way torchtitan represents it."""
    if not isinstance(q_BLNH, DTensor) or not isinstance(k_BLMH, DTensor):
        with spmd.no_typecheck():
            q_out_BLNH, k_out_BLMH = operator(q_BLNH, k_BLMH, cos_sin_bLH)[:2]
        if spmd.is_type_checking():
            for out, given in ((q_out_BLNH, q_BLNH), (k_out_BLMH, k_BLMH)):
                spmd.assert_type(out, spmd.get_local_type(given), get_partition_spec(given))
        return q_out_BLNH, k_out_BLMH
    if isinstance(cos_sin_bLH, DTensor):
        rows = [place if isinstance(place, Shard) and place.dim < 2 else Replicate() for place in q_BLNH.placements]
        cos_sin_bLH = cos_sin_bLH.redistribute(placements=rows).to_local()
    outputs = operator(q_BLNH.to_local(), k_BLMH.to_local(), cos_sin_bLH)[:2]
    q_out_BLNH, k_out_BLMH = (
        DTensor.from_local(
            out, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
        )
        for out, given in zip(outputs, (q_BLNH, k_BLMH), strict=True)
    )
    return q_out_BLNH, k_out_BLMH


def kernel_rope(config: CosSinRoPE.Config, *, provider: str = "ours", kernel: bool = True) -> KernelRoPE.Config:
    """Override factory: the `KernelRoPE` that takes the place of ``config``, sharding and YaRN factor included."""
    return derive(config, KernelRoPE.Config, provider=provider, kernel=kernel)
