"""RMSNorm of each query and key head, then rotary embedding, in one pass over memory.

Shape suffixes: B batch, b = B or 1, L sequence, N query heads, M key heads, H head dimension, E = H / 2 frequencies,
P = ceil(B L / 128) groups of 128 of the B L positions.

With g the norm's weight and R the rotation of `rope`, per head (RMSNorm: arXiv 1910.07467)::

    r = (mean(x^2) + eps) ^ -0.5        xhat = x r        y = R(xhat g)
    u = R^T(dy)      dg = sum(u xhat)      v = u g      dx = r (v - xhat mean(v xhat))

Everything between input and output is float32; the output is rounded once, where separate norm and RoPE round twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_qwen3_trn.kernels.operator import Operator
from torchtitan_qwen3_trn.kernels.rope import LIMITS, rotate

TILE_ROWS = 128
"""Positions whose weight gradients are summed in one row of the result. The reference sums consecutive ones. Which ones
a kernel sums depends on the shapes, not on the number of cores."""


def _qk_norm_rope(
    q_BLNH: Tensor, k_BLMH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, cos_sin_bLH: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise and rotate query and key.

    Args:
        q_BLNH, k_BLMH: queries and keys, both float32 or both bfloat16.
        q_weight_H, k_weight_H: weights of their norms, in that dtype or float32.
        cos_sin_bLH: float32; E cosines, then E sines, for each position. Gets no gradient.
        eps: added to the mean square.

    Returns:
        Queries and keys, shaped and typed like the inputs, then the reciprocal root mean squares ``(B, L, N)`` and
        ``(B, L, M)`` in float32, which backward needs.
    """
    cos_bL1E, sin_bL1E = cos_sin_bLH[:, :, None].chunk(2, dim=-1)
    results = []
    for x_BLNH, weight_H in ((q_BLNH, q_weight_H), (k_BLMH, k_weight_H)):
        wide_BLNH = x_BLNH.to(cos_sin_bLH.dtype)
        rms_BLN = (wide_BLNH.square().mean(-1) + eps).rsqrt()
        normed_BLNH = wide_BLNH * rms_BLN[..., None] * weight_H
        results.append((rotate(normed_BLNH, cos_bL1E, sin_bL1E).to(x_BLNH.dtype), rms_BLN))
    (q_out_BLNH, q_rms_BLN), (k_out_BLMH, k_rms_BLM) = results
    return q_out_BLNH, k_out_BLMH, q_rms_BLN, k_rms_BLM


def _qk_norm_rope_backward(
    dq_BLNH: Tensor,
    dk_BLMH: Tensor,
    q_BLNH: Tensor,
    k_BLMH: Tensor,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    cos_sin_bLH: Tensor,
    q_rms_BLN: Tensor,
    k_rms_BLM: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `qk_norm_rope`.

    Args:
        dq_BLNH, dk_BLMH: gradients of the first two outputs, dtype of the queries.
        q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH: as given to `qk_norm_rope`.
        q_rms_BLN, k_rms_BLM: its last two outputs, float32.

    Returns:
        Gradients of queries and keys, shaped and typed like them, and the weights' gradients ``(P, H)`` in float32, one
        row per group of `TILE_ROWS` positions (all heads summed); the caller sums the rows, so that the order of
        summation does not depend on the number of cores.
    """
    cos_bL1E, sin_bL1E = cos_sin_bLH[:, :, None].chunk(2, dim=-1)
    back_bL1E = -sin_bL1E
    inputs, weights = [], []
    for dy_BLNH, x_BLNH, weight_H, rms_BLN in (
        (dq_BLNH, q_BLNH, q_weight_H, q_rms_BLN),
        (dk_BLMH, k_BLMH, k_weight_H, k_rms_BLM),
    ):
        normed_BLNH = x_BLNH.to(cos_sin_bLH.dtype) * rms_BLN[..., None]
        unrotated_BLNH = rotate(dy_BLNH.to(cos_sin_bLH.dtype), cos_bL1E, back_bL1E)
        weights.append(_sum_in_tiles(unrotated_BLNH * normed_BLNH))
        scaled_BLNH = unrotated_BLNH * weight_H
        mean_BLN1 = (scaled_BLNH * normed_BLNH).mean(-1, keepdim=True)
        inputs.append((rms_BLN[..., None] * (scaled_BLNH - normed_BLNH * mean_BLN1)).to(x_BLNH.dtype))
    return inputs[0], inputs[1], weights[0], weights[1]


def _sum_in_tiles(x_BLNH: Tensor) -> Tensor:
    rows = x_BLNH.sum(2).flatten(0, 1)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS))
    return padded.unflatten(0, (-1, TILE_ROWS)).sum(1)


def _fake(
    q_BLNH: Tensor, k_BLMH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, cos_sin_bLH: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        q_BLNH.new_empty(q_BLNH.shape),
        k_BLMH.new_empty(k_BLMH.shape),
        cos_sin_bLH.new_empty(q_BLNH.shape[:-1]),
        cos_sin_bLH.new_empty(k_BLMH.shape[:-1]),
    )


def _fake_backward(
    dq_BLNH: Tensor,
    dk_BLMH: Tensor,
    q_BLNH: Tensor,
    k_BLMH: Tensor,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    cos_sin_bLH: Tensor,
    q_rms_BLN: Tensor,
    k_rms_BLM: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles = -(-q_BLNH.shape[0] * q_BLNH.shape[1] // TILE_ROWS)
    weight = cos_sin_bLH.new_empty((tiles, q_BLNH.shape[-1]))
    return q_BLNH.new_empty(q_BLNH.shape), k_BLMH.new_empty(k_BLMH.shape), weight, torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:5], *output[2:])


def _gradient(
    ctx: Any, dq_BLNH: Tensor, dk_BLMH: Tensor, *unused: Tensor, backward: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH, q_rms_BLN, k_rms_BLM = ctx.saved_tensors
    dq_in_BLNH, dk_in_BLMH, dq_weight_PH, dk_weight_PH = backward[0](
        dq_BLNH, dk_BLMH, q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH, q_rms_BLN, k_rms_BLM
    )
    dq_weight_H = dq_weight_PH.sum(0).to(q_weight_H.dtype)
    dk_weight_H = dk_weight_PH.sum(0).to(k_weight_H.dtype)
    return dq_in_BLNH, dk_in_BLMH, dq_weight_H, dk_weight_H, None, None


qk_norm_rope_backward = Operator(
    name="torchtitan_qwen3_trn::qk_norm_rope_backward",
    reference=_qk_norm_rope_backward,
    fake=_fake_backward,
    kernel="torchtitan_qwen3_trn.kernels.qk_norm_rope_backward_nki:qk_norm_rope_backward_kernel",
    limits=LIMITS,
)

qk_norm_rope = Operator(
    name="torchtitan_qwen3_trn::qk_norm_rope",
    reference=_qk_norm_rope,
    fake=_fake,
    kernel="torchtitan_qwen3_trn.kernels.qk_norm_rope_nki:qk_norm_rope_kernel",
    save=_save,
    gradient=_gradient,
    backward=(qk_norm_rope_backward,),
    limits=LIMITS,
)
