"""Grouped SwiGLU experts: every routed token is computed by its expert, none is dropped, all shapes are static.

Shape suffixes: R rows (routed tokens, sorted by expert, then rows that belong to no expert), D model dimension, F
hidden dimension of an expert, E experts, N blocks, S rows of a block.

With W1, W3 ``(F, D)`` and W2 ``(D, F)`` of a row's expert, as in torchtitan's `GroupedExperts` (arXiv 2002.05202)::

    g = x W1^T      u = x W3^T      h = silu(g) u                 y = h W2^T
    dh = dy W2      du = dh silu(g) dg = dh u silu'(g)            dx = dg W1 + du W3
    dW1 = dg^T x    dW3 = du^T x    dW2 = dy^T h                  silu'(g) = s (1 + g (1 - s)),  s = sigmoid(g)

Products are accumulated in float32. Kernels compute silu and its neighbours in float32 from the stored g and u, and
round what they store once to the dtype of ``x``; the references round after each elementwise step and, in ``dx``, after
each of the two products. Rows after those of the last expert belong to no expert. They are zero in ``y`` and ``dx`` and
contribute to no gradient, whatever they contain, NaN included.

Kernels work in blocks of S rows, each of one expert. How many blocks a routing needs is known only on the device, but
it is at most N = `block_count`. `block_plan` computes the blocks on the device from the counts, without synchronizing
with the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_qwen3_trn.kernels.limits import Limit
from torchtitan_qwen3_trn.kernels.operator import Operator

LIMITS = (
    Limit(size="D", multiple_of=128, reason="the contraction runs over whole tiles of 128"),
    Limit(size="F", multiple_of=128, reason="the contraction runs over whole tiles of 128"),
    Limit(size="S", multiple_of=128, at_most=512, reason="a block is up to four tiles of 128 rows"),
)


_SMALL_WORK = 2**20
"""Multiplications below which the call of a bfloat16 product costs more than its work, measured on one CPU core."""


class BlockPlan(NamedTuple):
    """Which rows each block holds, all int32 on the device. The references use only the counts.

    Attributes:
        counts_E: rows of each expert; the rows of expert e start at ``sum(counts_E[:e])``.
        first_block_E2: ``(E + 2,)``; expert e owns the blocks ``first_block_E2[e]`` to ``first_block_E2[e + 1]``, at
            least one, so that its weights' gradients are written even if it has no row. The blocks between the last
            two entries hold the rows without expert; blocks from the last entry on are unused.
        row_NS: row in each slot of each block, ascending; -1 in unused slots.
    """

    counts_E: Tensor
    first_block_E2: Tensor
    row_NS: Tensor


def block_count(rows: int, num_experts: int, block_rows: int) -> int:
    """Largest number of blocks a routing of ``rows`` rows can need: one per expert and one per full block of rows."""
    return -(-rows // block_rows) + num_experts


def block_plan(counts_E: Tensor, rows: int, block_rows: int) -> BlockPlan:
    """Assign rows to blocks for the given counts, on their device, with comparisons and sums only.

    Args:
        counts_E: rows per expert, any integer dtype; the sum is at most ``rows``.
        rows: R.
        block_rows: S.
    """
    counts_E = counts_E.to(torch.int32)
    num_experts, device = len(counts_E), counts_E.device
    unowned_1 = rows - counts_E.sum(0, keepdim=True, dtype=torch.int32)
    counts_e = torch.cat((counts_E, unowned_1))  # e = E + 1: rows without expert, treated as one more expert
    owner_e = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    block_N = torch.arange(block_count(rows, num_experts, block_rows), dtype=torch.int32, device=device)
    slot_S = torch.arange(block_rows, dtype=torch.int32, device=device)

    earlier_ee = (owner_e < owner_e[:, None]).to(torch.int32)
    blocks_e = ((counts_e + (block_rows - 1)) // block_rows).maximum((owner_e < num_experts).to(torch.int32))
    first_row_e = (earlier_ee * counts_e).sum(1, dtype=torch.int32)
    first_block_e = (earlier_ee * blocks_e).sum(1, dtype=torch.int32)
    past_last_e = first_block_e + blocks_e

    owned_Ne = ((block_N[:, None] >= first_block_e) & (block_N[:, None] < past_last_e)).to(torch.int32)
    done_Ne = (block_N[:, None] - first_block_e) * block_rows
    left_N = (owned_Ne * (counts_e - done_Ne)).sum(1, dtype=torch.int32)
    row_N = (owned_Ne * (first_row_e + done_Ne)).sum(1, dtype=torch.int32)
    row_NS = torch.where(slot_S < left_N[:, None], row_N[:, None] + slot_S, -1)
    return BlockPlan(counts_E, torch.cat((first_block_e, past_last_e[-1:])), row_NS)


def no_block_plan(counts_E: Tensor) -> BlockPlan:
    """The counts alone, which is all that the references need."""
    return BlockPlan(counts_E.to(torch.int32), *counts_E.new_empty((2, 0), dtype=torch.int32).unbind())


def _experts(
    x_RD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    w3_EFD: Tensor,
    counts_E: Tensor,
    first_block_E2: Tensor,
    row_NS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts' outputs.

    Args:
        x_RD: rows sorted by expert, float32 or bfloat16.
        w1_EFD, w2_EDF, w3_EFD: gate, down and up projections, dtype of ``x_RD``.
        counts_E, first_block_E2, row_NS: see `BlockPlan`; the reference uses only the first.

    Returns:
        ``y_RD``, and ``g_RF`` and ``u_RF`` for the backward operators, all in the dtype of ``x_RD``. In rows
        without expert, a kernel may leave ``g`` and ``u`` unwritten; the reference writes zeros.
    """
    counts, dtype = counts_E.tolist(), x_RD.dtype
    x_RD, w1_EFD, w2_EDF, w3_EFD = _to_multiply(x_RD, w1_EFD, w2_EDF, w3_EFD, work=_work(x_RD, w1_EFD.shape))
    y_RD = torch.empty_like(x_RD)
    g_RF, u_RF = (x_RD.new_empty((len(x_RD), w1_EFD.shape[1])) for _ in range(2))
    rows = _rows(counts, x_RD, g_RF, u_RF)
    for x_rD, g_rF, u_rF, w1_DF, w3_DF in zip(*rows, w1_EFD.mT.unbind(), w3_EFD.mT.unbind(), strict=True):
        torch.mm(x_rD, w1_DF, out=g_rF)
        torch.mm(x_rD, w3_DF, out=u_rF)
    g_RF, u_RF = g_RF.to(dtype), u_RF.to(dtype)
    _clear_unowned(counts, g_RF, u_RF)
    h_RF = torch.nn.functional.silu(g_RF).mul_(u_RF).to(x_RD.dtype)
    for h_rF, y_rD, w2_FD in zip(*_rows(counts, h_RF, y_RD), w2_EDF.mT.unbind(), strict=True):
        torch.mm(h_rF, w2_FD, out=y_rD)
    _clear_unowned(counts, y_RD)
    return y_RD.to(dtype), g_RF, u_RF


def _experts_input_gradient(
    dy_RD: Tensor,
    g_RF: Tensor,
    u_RF: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    w3_EFD: Tensor,
    counts_E: Tensor,
    first_block_E2: Tensor,
    row_NS: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the rows, and the operands of the weights' gradients.

    Args:
        dy_RD: gradient of the outputs, dtype of ``x_RD``.
        g_RF, u_RF: second and third output of `experts`.
        w1_EFD, w2_EDF, w3_EFD, counts_E, first_block_E2, row_NS: as given to `experts`.

    Returns:
        ``dx_RD``, and ``dg_RF``, ``du_RF`` and ``h_RF`` for `experts_weight_gradients`, in the dtype of ``dy_RD``. In
        rows without expert, a kernel may leave all but ``dx`` unwritten; the reference writes zeros.
    """
    counts, dtype = counts_E.tolist(), dy_RD.dtype
    dy_RD, w1_EFD, w2_EDF, w3_EFD = _to_multiply(dy_RD, w1_EFD, w2_EDF, w3_EFD, work=_work(dy_RD, w1_EFD.shape))
    dh_RF, dx_RD = dy_RD.new_empty(g_RF.shape), torch.empty_like(dy_RD)
    for dy_rD, dh_rF, w2_DF in zip(*_rows(counts, dy_RD, dh_RF), w2_EDF.unbind(), strict=True):
        torch.mm(dy_rD, w2_DF, out=dh_rF)
    dh_RF = dh_RF.to(dtype)
    silu_RF = torch.nn.functional.silu(g_RF)
    du_RF = dh_RF * silu_RF
    h_RF = silu_RF.mul_(u_RF)
    dg_RF = torch.ops.aten.silu_backward(dh_RF.mul_(u_RF), g_RF)
    _clear_unowned(counts, dg_RF, du_RF, h_RF)
    rows = _rows(counts, dg_RF.to(dy_RD.dtype), du_RF.to(dy_RD.dtype), dx_RD)
    for dg_rF, du_rF, dx_rD, w1_FD, w3_FD in zip(*rows, w1_EFD.unbind(), w3_EFD.unbind(), strict=True):
        torch.mm(dg_rF, w1_FD, out=dx_rD)
        dx_rD.addmm_(du_rF, w3_FD)
    _clear_unowned(counts, dx_RD)
    return dx_RD.to(dtype), dg_RF, du_RF, h_RF


def _experts_weight_gradients(
    dy_RD: Tensor,
    x_RD: Tensor,
    h_RF: Tensor,
    dg_RF: Tensor,
    du_RF: Tensor,
    counts_E: Tensor,
    first_block_E2: Tensor,
    row_NS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the weights, accumulated in float32 over all rows of an expert and rounded once.

    Args:
        dy_RD: gradient of the outputs.
        x_RD: as given to `experts`.
        h_RF, dg_RF, du_RF: fourth, second and third output of `experts_input_gradient`.
        counts_E, first_block_E2, row_NS: as given to `experts`.

    Returns:
        ``dw1_EFD``, ``dw2_EDF`` and ``dw3_EFD`` in the dtype of ``x_RD``; zeros for an expert without rows.
    """
    counts, dtype = counts_E.tolist(), x_RD.dtype
    work = _work(x_RD, (len(counts), h_RF.shape[1], x_RD.shape[1]))
    x_RD, dy_RD, h_RF, dg_RF, du_RF = _to_multiply(x_RD, dy_RD, h_RF, dg_RF, du_RF, work=work)
    dw1_EFD, dw3_EFD = (x_RD.new_empty((len(counts), h_RF.shape[1], x_RD.shape[1])) for _ in range(2))
    dw2_EDF = x_RD.new_empty(dw1_EFD.mT.shape)
    rows = _rows(counts, dg_RF, du_RF, dy_RD, x_RD, h_RF)
    matrices = (dw1_EFD.unbind(), dw3_EFD.unbind(), dw2_EDF.unbind())
    for dg_rF, du_rF, dy_rD, x_rD, h_rF, dw1_FD, dw3_FD, dw2_DF in zip(*rows, *matrices, strict=True):
        torch.mm(dg_rF.mT, x_rD, out=dw1_FD)
        torch.mm(du_rF.mT, x_rD, out=dw3_FD)
        torch.mm(dy_rD.mT, h_rF, out=dw2_DF)
    return dw1_EFD.to(dtype), dw2_EDF.to(dtype), dw3_EFD.to(dtype)


def _work(x_RD: Tensor, shape_EFD: tuple[int, ...]) -> int:
    """Multiplications in the average expert's product."""
    num_experts, hidden_dim, dim = shape_EFD
    return len(x_RD) * hidden_dim * dim // num_experts


def _to_multiply(*tensors: Tensor, work: int) -> list[Tensor]:
    """Operands in the dtype to multiply in: small bfloat16 products take a third of the time in float32 on a CPU."""
    small = tensors[0].dtype == torch.bfloat16 and work <= _SMALL_WORK
    return [tensor.float() if small else tensor for tensor in tensors]


def _rows(counts: list[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each expert, as views, for each tensor."""
    return [x_RD[: sum(counts)].split_with_sizes(counts) for x_RD in tensors]


def _clear_unowned(counts: list[int], *row_tensors: Tensor) -> None:
    owned = sum(counts)
    for tensor in row_tensors:
        if owned < len(tensor):
            tensor[owned:] = 0


def _fake(x_RD: Tensor, w1_EFD: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g_RF = x_RD.new_empty((x_RD.shape[0], w1_EFD.shape[1]))
    return x_RD.new_empty(x_RD.shape), g_RF, torch.empty_like(g_RF)


def _fake_input_gradient(dy_RD: Tensor, g_RF: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return dy_RD.new_empty(dy_RD.shape), torch.empty_like(g_RF), torch.empty_like(g_RF), torch.empty_like(g_RF)


def _fake_weight_gradients(
    dy_RD: Tensor, x_RD: Tensor, h_RF: Tensor, dg_RF: Tensor, du_RF: Tensor, counts_E: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    num_experts, dim, hidden_dim = counts_E.shape[0], x_RD.shape[1], h_RF.shape[1]
    w1_EFD = x_RD.new_empty((num_experts, hidden_dim, dim))
    return w1_EFD, x_RD.new_empty((num_experts, dim, hidden_dim)), torch.empty_like(w1_EFD)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # g and u have none
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs, *output[1:])


def _gradient(ctx: Any, dy_RD: Tensor | None, *unused: None, backward: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    if dy_RD is None:
        return (None,) * len(ctx.needs_input_grad)
    x_RD, w1_EFD, w2_EDF, w3_EFD, *plan, g_RF, u_RF = ctx.saved_tensors
    input_gradient, weight_gradients = backward
    dx_RD, dg_RF, du_RF, h_RF = input_gradient(dy_RD, g_RF, u_RF, w1_EFD, w2_EDF, w3_EFD, *plan)
    weights = weight_gradients(dy_RD, x_RD, h_RF, dg_RF, du_RF, *plan)
    return (dx_RD, *weights, None, None, None)


experts_weight_gradients = Operator(
    name="torchtitan_qwen3_trn::experts_weight_gradients",
    reference=_experts_weight_gradients,
    fake=_fake_weight_gradients,
    kernel="torchtitan_qwen3_trn.kernels.experts_nki:experts_weight_gradients_kernel",
    limits=LIMITS,
)

experts_input_gradient = Operator(
    name="torchtitan_qwen3_trn::experts_input_gradient",
    reference=_experts_input_gradient,
    fake=_fake_input_gradient,
    kernel="torchtitan_qwen3_trn.kernels.experts_nki:experts_input_gradient_kernel",
    limits=LIMITS,
)

experts = Operator(
    name="torchtitan_qwen3_trn::experts",
    reference=_experts,
    fake=_fake,
    kernel="torchtitan_qwen3_trn.kernels.experts_nki:experts_kernel",
    save=_save,
    gradient=_gradient,
    backward=(experts_input_gradient, experts_weight_gradients),
    limits=LIMITS,
)
