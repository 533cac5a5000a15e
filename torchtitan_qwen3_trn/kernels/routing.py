"""Token routing with operators that Neuron supports: no sort, histogram, accumulating scatter or host synchronization.

Everything is comparisons, sums, small matrix products and row gathers; the one scatter writes each element once. All
shapes depend on the numbers of tokens, experts and ranks, never on the routing, and every sum has a fixed order, so
results are reproducible bit for bit.

Shape suffixes: T tokens, K experts chosen per token, E experts, D model dimension, A = T K assignments, R rows of a
buffer that tokens are copied to, G ranks, C rows per rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_TILE = 128  # rows ranked by one triangular product; the width of the Tensor Engine


class Routes(NamedTuple):
    """The row of each assignment, and the assignment of each row.

    Attributes:
        counts_E: int32, assignments per expert.
        row_TK: int64, row of the buffer that token t's k-th assignment is copied to.
        source_R: int64, index ``t K + k`` of the assignment in a row; -1 in unused rows.
    """

    counts_E: Tensor
    row_TK: Tensor
    source_R: Tensor


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores, largest first, the lower index first among equals.

    K rounds of maximum and comparison, because top-k operators do not define the order of equal scores. The k indices
    are always distinct; NaN and -inf count as the smallest scores.

    Args:
        scores_TE: any leading dimensions.
        k: at most E.

    Returns:
        int64, last dimension k; from one custom operator, ``torchtitan_qwen3_trn::top_k``, so that activation
        checkpointing can save its output.
    """
    return _top_k(scores_TE.detach(), k)


@torch.library.custom_op("torchtitan_qwen3_trn::top_k", mutates_args=())
def _top_k(scores_TE: Tensor, k: int) -> Tensor:
    num_experts = scores_TE.shape[-1]
    expert_E = torch.arange(num_experts, dtype=torch.int32, device=scores_TE.device)
    lowest = torch.finfo(scores_TE.dtype).min  # above the -inf that marks experts already chosen
    remaining_TE = torch.where(scores_TE >= lowest, scores_TE, lowest)
    ids = []
    for _ in range(k):
        best_T1 = remaining_TE.amax(-1, keepdim=True)
        candidate_TE = torch.where(remaining_TE == best_T1, expert_E, num_experts - 1)
        id_T1 = candidate_TE.amin(-1, keepdim=True)
        remaining_TE = remaining_TE.masked_fill(expert_E == id_T1, float("-inf"))
        ids.append(id_T1)
    return torch.cat(ids, dim=-1).long()


@_top_k.register_fake
def _fake_top_k(scores_TE: Tensor, k: int) -> Tensor:
    return scores_TE.new_empty((*scores_TE.shape[:-1], k), dtype=torch.int64)


def routes(ids_TK: Tensor, num_experts: int, *, ranks: int = 1) -> Routes:
    """Sort assignments by expert, tokens in order within an expert.

    Args:
        ids_TK: experts chosen by each token, any integer dtype.
        num_experts: E.
        ranks: G; with more than one, rows are laid out for an all-to-all of equal sizes: `exchange_rows` per rank,
            first the assignments to the rank's E / G experts, then unused rows.
    """
    num_tokens, k = ids_TK.shape
    device = ids_TK.device
    expert_E = torch.arange(num_experts, dtype=torch.int32, device=device)
    chosen_AE = ids_TK.reshape(-1, 1).int() == expert_E
    counts_E, rank_AE = _rank_within(chosen_AE)

    first_E = _exclusive_sum(counts_E)
    rows_per_rank = num_tokens * k
    if ranks > 1:
        rows_per_rank = exchange_rows(num_tokens, k, num_experts // ranks)
        owner_E = expert_E // (num_experts // ranks)
        earlier_EE = (expert_E < expert_E[:, None]) & (owner_E == owner_E[:, None])
        first_E = (earlier_EE.int() * counts_E).sum(1, dtype=torch.int32) + owner_E * rows_per_rank
    row_A = torch.where(chosen_AE, rank_AE + first_E, 0).sum(1, dtype=torch.int64)
    return Routes(counts_E, row_A.view(num_tokens, k), _inverse(row_A, rows_per_rank * ranks))


def exchange_rows(num_tokens: int, k: int, experts_per_rank: int) -> int:
    """Largest number of rows a rank can send to another: every token, to as many experts as the other rank holds."""
    return num_tokens * min(k, experts_per_rank)


def regroup_routes(counts_GE: Tensor, rows_per_rank: int) -> Routes:
    """Routes that regroup rows sorted by sending rank, then by expert, into rows sorted by expert.

    Args:
        counts_GE: rows that each rank sent for each of this rank's E experts, any integer dtype.
        rows_per_rank: C; within the rows of a rank, those without expert come last.

    Returns:
        Routes with one assignment per received row: ``counts_E`` over all ranks, ``row_TK`` of shape ``(G C, 1)`` and
        its inverse. Rows without expert are moved behind those of the last expert.
    """
    counts_GE = counts_GE.to(torch.int32)
    padding_G1 = rows_per_rank - counts_GE.sum(1, keepdim=True, dtype=torch.int32)
    counts_Ge = torch.cat((counts_GE, padding_G1), dim=1)  # e = E + 1: rows without expert, treated as one more expert
    totals_e = counts_Ge.sum(0, dtype=torch.int32)

    position_C = torch.arange(rows_per_rank, dtype=torch.int32, device=counts_GE.device)
    group_G = torch.arange(len(counts_Ge), dtype=torch.int32, device=counts_GE.device)
    first_Ge = _exclusive_sum(counts_Ge)
    offset_GCe = position_C[:, None] - first_Ge[:, None]
    owner_GCe = (offset_GCe >= 0) & (offset_GCe < counts_Ge[:, None])
    earlier_GG = (group_G < group_G[:, None]).int()
    from_earlier_ranks_Ge = (earlier_GG[:, :, None] * counts_Ge).sum(1, dtype=torch.int32)
    row_GCe = offset_GCe + (from_earlier_ranks_Ge + _exclusive_sum(totals_e))[:, None]
    row_R = torch.where(owner_GCe, row_GCe, 0).sum(-1, dtype=torch.int64).flatten()
    return Routes(totals_e[:-1], row_R[:, None], _inverse(row_R, len(row_R)))


def take_rows(x_TD: Tensor, plan: Routes) -> Tensor:
    """Copy the token of each assignment into the assignment's row.

    Args:
        x_TD: tokens.
        plan: see `routes`.

    Returns:
        ``(R, D)``; unused rows hold a copy of some token and contribute no gradient.
    """
    return _TakeRows.apply(x_TD, plan.row_TK, plan.source_R)


def combine_rows(y_RD: Tensor, scores_TK: Tensor, plan: Routes) -> Tensor:
    """Sum of each token's expert outputs, weighted by its scores.

    Args:
        y_RD: outputs, in the rows that `take_rows` filled.
        scores_TK: weights, floating.
        plan: see `routes`.

    Returns:
        ``(T, D)`` in the dtype of ``y_RD``, summed in float32 (float64 for float64) in the order of K.
    """
    return _CombineRows.apply(y_RD, scores_TK, plan.row_TK, plan.source_R)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return x_TD.index_select(0, _tokens(source_R, row_TK))

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        if row_TK.shape[1] == 1:
            return dy_RD.index_select(0, row_TK[:, 0]), None, None
        dx_TD = dy_RD.index_select(0, row_TK[:, 0]).to(_wide(dy_RD))
        for row_T in row_TK[:, 1:].unbind(1):
            dx_TD += dy_RD.index_select(0, row_T)
        return dx_TD.to(dy_RD.dtype), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, scores_TK: Tensor, row_TK: Tensor, source_R: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, scores_TK, row_TK, source_R)
        wide = _wide(y_RD)
        out_TD = torch.zeros((len(row_TK), y_RD.shape[1]), dtype=wide, device=y_RD.device)
        for row_T, score_T in zip(row_TK.unbind(1), scores_TK.unbind(1), strict=True):
            out_TD += y_RD.index_select(0, row_T).to(wide) * score_T[:, None]
        return out_TD.to(y_RD.dtype)

    @staticmethod
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RD, scores_TK, row_TK, source_R = ctx.saved_tensors
        wide = _wide(y_RD)
        dout_TD = dout_TD.to(wide)
        score_R = scores_TK.reshape(-1).index_select(0, source_R.clamp(min=0)).to(wide)
        score_R = torch.where(source_R >= 0, score_R, 0)
        dy_RD = dout_TD.index_select(0, _tokens(source_R, row_TK)) * score_R[:, None]
        dscores_TK = torch.stack(
            [(dout_TD * y_RD.index_select(0, row_T)).sum(-1) for row_T in row_TK.unbind(1)], dim=-1
        )
        return dy_RD.to(y_RD.dtype), dscores_TK.to(scores_TK.dtype), None, None


def _tokens(source_R: Tensor, row_TK: Tensor) -> Tensor:
    return source_R.clamp(min=0) // row_TK.shape[1]


def _rank_within(chosen_AE: Tensor) -> tuple[Tensor, Tensor]:
    """Number of true entries of each column, and, for each entry, of true entries above it; int32.

    Tiles of 128 rows are ranked by a product with a triangular matrix of ones, then offset by the tiles before.
    Products of zeros and ones summed in float32 are exact up to 2**24; autocast would round counts above 256 to
    bfloat16.
    """
    rows, num_experts = chosen_AE.shape
    padded = torch.nn.functional.pad(chosen_AE.float(), (0, 0, 0, -rows % _TILE))
    tiles = padded.view(-1, _TILE, num_experts)
    totals = tiles.sum(1)
    with torch.autocast(tiles.device.type, enabled=False):
        within = torch.ones(_TILE, _TILE, device=tiles.device).tril(-1) @ tiles
        before = torch.ones(len(tiles), len(tiles), device=tiles.device).tril(-1) @ totals
    return totals.sum(0).int(), (within + before[:, None]).view(-1, num_experts)[:rows].int()


def _exclusive_sum(x: Tensor) -> Tensor:
    """Sum of the entries before each one along the last dimension, int32."""
    index = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    return (x[..., None, :] * (index < index[:, None]).int()).sum(-1, dtype=torch.int32)


def _inverse(row_A: Tensor, rows: int) -> Tensor:
    unused_R = torch.full((rows,), -1, dtype=torch.int64, device=row_A.device)
    return unused_R.scatter(0, row_A, torch.arange(len(row_A), device=row_A.device))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
