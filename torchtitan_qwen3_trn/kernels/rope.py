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
from torch import Tensor

from torchtitan_qwen3_trn.kernels.limits import Limit
from torchtitan_qwen3_trn.kernels.operator import Operator

LIMITS = (
    Limit(size="L", multiple_of=128, per_core=True, reason="each core takes whole tiles of 128 positions"),
    Limit(size="H", multiple_of=2, at_most=256, reason="a head is rotated as two halves"),
)


def _rope(q_BLNH: Tensor, k_BLMH: Tensor, cos_sin_bLH: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key.

    Args:
        q_BLNH, k_BLMH: queries and keys, both float32 or both bfloat16.
        cos_sin_bLH: float32; E cosines, then E sines, for each position. Gets no gradient.

    Returns:
        Rotated queries and keys, shaped and typed like the inputs.
    """
    cos_bL1E, sin_bL1E = cos_sin_bLH[:, :, None].chunk(2, dim=-1)
    return rotate(q_BLNH, cos_bL1E, sin_bL1E), rotate(k_BLMH, cos_bL1E, sin_bL1E)


def _rope_backward(dq_BLNH: Tensor, dk_BLMH: Tensor, cos_sin_bLH: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `rope`'s inputs from those of its outputs: the rotation by the opposite angle.

    Args:
        dq_BLNH, dk_BLMH: gradients of the rotated queries and keys, both float32 or both bfloat16.
        cos_sin_bLH: as given to `rope`.

    Returns:
        Gradients of queries and keys, shaped and typed like the arguments.
    """
    cos_bL1E, sin_bL1E = cos_sin_bLH[:, :, None].chunk(2, dim=-1)
    back_bL1E = -sin_bL1E
    return rotate(dq_BLNH, cos_bL1E, back_bL1E), rotate(dk_BLMH, cos_bL1E, back_bL1E)


def rotate(x_BLNH: Tensor, cos_bL1E: Tensor, sin_bL1E: Tensor) -> Tensor:
    """The pairs ``(i, i + E)`` of each head rotated by an angle, given as its cosine and sine.

    Computed in the dtype of ``cos_bL1E``, returned in that of ``x_BLNH``. Negative sines rotate back.
    """
    # Half by half and in place on fresh tensors: at these sizes the time goes into writing memory. addcmul would save
    # another pass but may fuse multiply and add, which rounds once less than stock does.
    low_BLNE, high_BLNE = x_BLNH.to(cos_bL1E.dtype).chunk(2, dim=-1)
    new_low_BLNE = (low_BLNE * cos_bL1E).sub_(high_BLNE * sin_bL1E)
    new_high_BLNE = (high_BLNE * cos_bL1E).add_(low_BLNE * sin_bL1E)
    return torch.cat((new_low_BLNE.to(x_BLNH.dtype), new_high_BLNE.to(x_BLNH.dtype)), dim=-1)


def rope_fake(q_BLNH: Tensor, k_BLMH: Tensor, cos_sin_bLH: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors like the results of both operators."""
    return q_BLNH.new_empty(q_BLNH.shape), k_BLMH.new_empty(k_BLMH.shape)


def save_table(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the table, which is all that backward needs."""
    ctx.save_for_backward(inputs[2])


def rope_gradient(
    ctx: Any, dq_BLNH: Tensor, dk_BLMH: Tensor, *, backward: tuple[Any, ...]
) -> tuple[Tensor, Tensor, None]:
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
