"""Rotary position embedding of query and key in one launch, in torchtitan's layout, without a transpose.

Shape suffixes: B batch, b = B or 1, L sequence, N query heads, M key heads, H head dimension, E = H / 2 frequencies.

The rotation is that of stock's `CosSinRoPE` (pairs ``(i, i + E)``), for i < E with c, s the position's cosine, sine::

    y[i]     = x[i] c - x[i + E] s          dx[i]     = dy[i] c + dy[i + E] s
    y[i + E] = x[i + E] c + x[i] s          dx[i + E] = dy[i + E] c - dy[i] s

Both directions are computed in float32 with one rounding per product and per sum, so that they equal stock bit for bit,
and are rounded once to the dtype of the input.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_qwen3_trn.kernels.limits import Limit
from torchtitan_qwen3_trn.kernels.operator import Operator

LIMITS = (
    Limit(size="L", multiple_of=128, per_core=True, reason="each core takes whole tiles of 128 positions"),
    Limit(size="H", multiple_of=2, at_most=256, reason="a head is rotated as two halves"),
)


def _rope(q_BLNH: torch.Tensor, k_BLMH: torch.Tensor, cos_sin_bLH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key.

    Args:
        q_BLNH: queries, float32 or bfloat16.
        k_BLMH: keys, same dtype.
        cos_sin_bLH: float32; E cosines, then E sines, for each position. Gets no gradient.

    Returns:
        Rotated queries and keys, shaped and typed like the inputs.
    """
    cos_bL1E, sin_bL1E = cos_sin_bLH[:, :, None].chunk(2, dim=-1)
    return _rotate(q_BLNH, cos_bL1E, sin_bL1E), _rotate(k_BLMH, cos_bL1E, sin_bL1E)


def _rope_backward(
    dq_BLNH: torch.Tensor, dk_BLMH: torch.Tensor, cos_sin_bLH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rope`'s inputs from those of its outputs: the rotation by the opposite angle.

    Args:
        dq_BLNH: gradient of the rotated queries, float32 or bfloat16.
        dk_BLMH: gradient of the rotated keys.
        cos_sin_bLH: as given to `rope`.

    Returns:
        Gradients of queries and keys, shaped and typed like the arguments.
    """
    cos_bL1E, sin_bL1E = cos_sin_bLH[:, :, None].chunk(2, dim=-1)
    return _rotate_back(dq_BLNH, cos_bL1E, sin_bL1E), _rotate_back(dk_BLMH, cos_bL1E, sin_bL1E)


def _rotate(x_BLNH: torch.Tensor, cos_bL1E: torch.Tensor, sin_bL1E: torch.Tensor) -> torch.Tensor:
    # addcmul would save a pass over memory but may fuse multiply and add, which rounds once less than stock does.
    low_BLNE, high_BLNE = x_BLNH.to(cos_bL1E.dtype).chunk(2, dim=-1)
    new_low_BLNE = (low_BLNE * cos_bL1E).sub_(high_BLNE * sin_bL1E)
    new_high_BLNE = (high_BLNE * cos_bL1E).add_(low_BLNE * sin_bL1E)
    return torch.cat((new_low_BLNE.to(x_BLNH.dtype), new_high_BLNE.to(x_BLNH.dtype)), dim=-1)


def _rotate_back(dy_BLNH: torch.Tensor, cos_bL1E: torch.Tensor, sin_bL1E: torch.Tensor) -> torch.Tensor:
    low_BLNE, high_BLNE = dy_BLNH.to(cos_bL1E.dtype).chunk(2, dim=-1)
    new_low_BLNE = (low_BLNE * cos_bL1E).add_(high_BLNE * sin_bL1E)
    new_high_BLNE = (high_BLNE * cos_bL1E).sub_(low_BLNE * sin_bL1E)
    return torch.cat((new_low_BLNE.to(dy_BLNH.dtype), new_high_BLNE.to(dy_BLNH.dtype)), dim=-1)


def rope_fake(
    q_BLNH: torch.Tensor, k_BLMH: torch.Tensor, cos_sin_bLH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty tensors like the results of both operators."""
    return q_BLNH.new_empty(q_BLNH.shape), k_BLMH.new_empty(k_BLMH.shape)


def save_table(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Keep the table, which is all that backward needs."""
    ctx.save_for_backward(inputs[2])


def rope_gradient(
    ctx: Any, dq_BLNH: torch.Tensor, dk_BLMH: torch.Tensor, *, backward: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Gradients of query and key from those of the outputs, by the one operator of ``backward``."""
    (cos_sin_bLH,) = ctx.saved_tensors
    dq_BLNH, dk_BLMH = backward[0](dq_BLNH, dk_BLMH, cos_sin_bLH)
    return dq_BLNH, dk_BLMH, None


rope_backward = Operator(
    name="torchtitan_qwen3_trn::rope_backward",
    reference=_rope_backward,
    fake=rope_fake,
    kernel="torchtitan_qwen3_trn.kernels.rope_nki:rope_backward_kernel",
    limits=LIMITS,
)

rope = Operator(
    name="torchtitan_qwen3_trn::rope",
    reference=_rope,
    fake=rope_fake,
    kernel="torchtitan_qwen3_trn.kernels.rope_nki:rope_kernel",
    save=save_table,
    gradient=rope_gradient,
    backward=(rope_backward,),
    limits=LIMITS,
)
