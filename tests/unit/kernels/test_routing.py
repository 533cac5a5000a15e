"""Routing by comparisons, sums and row gathers: the results of sorting, without any operator that Neuron lacks."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from torchtitan_qwen3_trn.kernels.routing import (
    combine_rows,
    exchange_rows,
    regroup_routes,
    routes,
    take_rows,
    top_k,
)
from torchtitan_qwen3_trn.overrides.static_moe import StaticDispatcher, route_keeping, static_router

MISSING = {
    "sort", "argsort", "topk", "bincount", "histc", "unique", "searchsorted", "scatter_add", "index_add", "index_put",
    "_index_put_impl", "index", "gather", "nonzero", "repeat_interleave", "one_hot", "cumsum", "_local_scalar_dense",
}  # fmt: skip
"""What public sources of torch-neuronx lack or run slowly, and what needs the host (see the plugin's documentation)."""


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__.rstrip("_"))  # in-place forms too
        return func(*args, **(kwargs or {}))


def draw_ids(tokens: int, k: int, num_experts: int, *, skewed: bool = False) -> torch.Tensor:
    scores = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(tokens))
    if skewed:
        scores = scores + 1 / torch.arange(1, num_experts + 1)
    return scores.topk(k, dim=-1).indices


SHAPES = [(1, 1, 1), (1, 8, 8), (5, 2, 3), (200, 4, 64), (33, 8, 128), (257, 1, 7)]


@pytest.mark.parametrize(("tokens", "k", "num_experts"), SHAPES)
def test_top_k_chooses_what_topk_chooses(tokens, k, num_experts):
    scores = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(0))
    assert torch.equal(top_k(scores, k), scores.topk(k, dim=-1).indices)


def test_top_k_is_an_operator():
    torch.library.opcheck(torch.ops.torchtitan_qwen3_trn.top_k.default, (torch.rand(2, 5, 8), 3))


@pytest.mark.parametrize(("adjust", "again"), [(route_keeping, [0, 1]), (lambda config: config, [2, 1])])
def test_selective_checkpointing_keeps_the_chosen_experts(adjust, again):
    """Scores that differ when they are computed again stand for arithmetic that is not reproducible."""
    scores, chosen = iter(torch.tensor([[[3.0, 2.0, 1.0]], [[1.0, 2.0, 3.0]]])), []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen.append(top_k(next(scores), 2))
            return x * chosen[-1]

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": Layer()})
    adjust(SelectiveAC.Config()).build().apply(model)
    model.layers["0"](torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert [ids[0].tolist() for ids in chosen] == [[0, 1], again]


def test_equal_scores_go_to_the_lower_expert():
    assert top_k(torch.tensor([[0.5, 0.5, 0.1, 0.5], [0.0, 0.0, 0.0, 0.0]]), 3).tolist() == [[0, 1, 3], [0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_differ_where_scores_are_not_numbers(dtype):
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 8, [-inf] * 8, [-inf] * 3 + [1.0] + [-inf] * 4, [nan, 2.0, nan, 3.0, -inf, nan, nan, nan]]
    ids = top_k(torch.tensor([*rows, [inf, 0.0, inf, nan, 1.0, -inf, nan, nan]], dtype=dtype), 4)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 1, 2], [3, 1, 0, 2], [0, 2, 4, 1]]


def test_scores_of_nan_fit_the_exchange_between_ranks():
    """Its rows suffice for tokens that choose different experts only."""
    ids = top_k(torch.full((5, 8), float("nan")), 4)
    plan = routes(ids, 8, ranks=4)
    assert plan.counts_E.tolist() == [5, 5, 5, 5, 0, 0, 0, 0]
    assert torch.equal(plan.source_R[plan.row_TK.flatten()], torch.arange(5 * 4))


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("tokens", "k", "num_experts"), SHAPES)
def test_rows_are_those_of_a_stable_sort_by_expert(tokens, k, num_experts, skewed):
    ids = draw_ids(tokens, k, num_experts, skewed=skewed)
    plan = routes(ids, num_experts)
    assert torch.equal(plan.source_R, torch.argsort(ids.flatten(), stable=True))
    assert torch.equal(plan.source_R[plan.row_TK.flatten()], torch.arange(tokens * k))
    assert torch.equal(plan.counts_E, torch.bincount(ids.flatten(), minlength=num_experts).int())


def test_autocast_does_not_change_routes():
    ids = draw_ids(2048, 4, 16, skewed=True)
    expected = routes(ids, 16, ranks=2)
    with torch.autocast("cpu", torch.bfloat16):
        actual = routes(ids, 16, ranks=2)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("tokens", "k", "num_experts"), [(6, 2, 4), (40, 4, 64), (5, 8, 8)])
def test_padded_exchange_brings_every_row_to_its_expert_and_back(tokens, k, num_experts, ranks):
    per_rank, x = num_experts // ranks, torch.randn(ranks, tokens, 3)
    ids = [draw_ids(tokens + rank, k, num_experts, skewed=True)[:tokens] for rank in range(ranks)]
    capacity = exchange_rows(tokens, k, per_rank)
    sent = [routes(ids[rank], num_experts, ranks=ranks) for rank in range(ranks)]
    buffers = [take_rows(x[rank], plan).view(ranks, capacity, 3) for rank, plan in enumerate(sent)]
    returned = [torch.empty(ranks, capacity, 3) for _ in range(ranks)]
    for rank in range(ranks):
        counts_GE = torch.stack([plan.counts_E.view(ranks, per_rank)[rank] for plan in sent])
        regrouped = regroup_routes(counts_GE, capacity)
        rows = take_rows(torch.cat([buffer[rank] for buffer in buffers]), regrouped)
        wanted = [
            x[source][(ids[source] == expert).any(-1)]
            for expert in range(rank * per_rank, (rank + 1) * per_rank)
            for source in range(ranks)
        ]
        owned = int(regrouped.counts_E.sum())
        assert torch.equal(rows[:owned], torch.cat(wanted))
        scale = torch.arange(1, per_rank + 1).repeat_interleave(regrouped.counts_E) + rank * per_rank
        rows[:owned] *= scale[:, None]
        rows[owned:] = float("nan")
        back = torch.empty_like(rows)
        back[regrouped.source_R] = rows
        for source, part in enumerate(back.split(capacity)):
            returned[source][rank] = part
    for rank in range(ranks):
        scores = torch.rand(tokens, k)
        combined = combine_rows(returned[rank].flatten(0, 1), scores, sent[rank])
        expected = x[rank] * (scores * (ids[rank] + 1)).sum(-1, keepdim=True)
        torch.testing.assert_close(combined, expected)


def test_gradients_of_moving_rows_are_the_derivatives():
    plan = routes(draw_ids(5, 2, 4), 4, ranks=2)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: take_rows(x, plan)[plan.source_R >= 0], (x,))
    y = torch.randn(len(plan.source_R), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, scores: combine_rows(y, scores, plan), (y, scores))


def test_unused_rows_get_no_gradient_and_give_none():
    plan = routes(draw_ids(5, 2, 4), 4, ranks=2)
    y = torch.randn(len(plan.source_R), 3)
    y[plan.source_R < 0] = float("nan")
    y.requires_grad_()
    combine_rows(y, torch.rand(5, 2), plan).sum().backward()
    assert not y.grad[plan.source_R < 0].any()
    assert y.grad.isfinite().all()


def both_dispatchers(num_experts: int, k: int) -> list[LocalTokenDispatcher]:
    return [kind.Config(num_experts=num_experts, top_k=k).build() for kind in (LocalTokenDispatcher, StaticDispatcher)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dispatcher_gives_stock_rows_and_stock_sums(dtype):
    """Sums: stock rounds each product to the dtype and adds in the order of experts, ours once in the order of K. In
    float32 only the order differs, worth a few units in the last place."""
    ids, scores = draw_ids(50, 4, 16), torch.rand(50, 4)
    x = torch.randn(50, 8, dtype=dtype)
    counts = torch.bincount(ids.flatten(), minlength=16)
    results = []
    for dispatcher in both_dispatchers(16, 4):
        rows, per_expert, metadata = dispatcher.dispatch(x, scores, ids, counts)
        results.append((rows, per_expert, dispatcher.combine(rows * 2, metadata, x)))
    (rows, per_expert, combined), (our_rows, our_per_expert, our_combined) = results
    assert torch.equal(rows, our_rows)
    assert torch.equal(per_expert, our_per_expert)
    exact = x.double() * 2 * scores.double().sum(-1, keepdim=True)
    if dtype == torch.float32:
        torch.testing.assert_close(our_combined, combined, rtol=1e-6, atol=1e-6)
    else:
        assert (our_combined - exact).norm() <= (combined - exact).norm()


def test_router_equals_stock_forward_and_backward():
    config = TokenChoiceTopKRouter.Config(
        num_experts=16,
        gate=Linear.Config(in_features=8, out_features=16),
        top_k=4,
        score_func="softmax",
        route_norm=True,
    )
    stock, ours = config.build(), static_router(config).build()
    torch.nn.init.normal_(stock.gate.weight)
    ours.load_state_dict(stock.state_dict())
    x, bias = torch.randn(2, 5, 8), torch.randn(16)
    for expert_bias in (None, bias):
        results = [router(x, expert_bias) for router in (stock, ours)]
        (scores, ids, every), (our_scores, our_ids, our_every) = results
        order, our_order = ids.argsort(-1), our_ids.argsort(-1)
        assert torch.equal(ids.gather(-1, order), our_ids.gather(-1, our_order))
        assert torch.equal(every, our_every)
        torch.testing.assert_close(scores.gather(-1, order), our_scores.gather(-1, our_order), rtol=1e-6, atol=0)
        weight_E = torch.rand(16)
        weights = [weight_E[i] for i in (ids, our_ids)]
        grads = [
            torch.autograd.grad((score * weight).sum(), router.gate.weight)[0]
            for router, score, weight in zip((stock, ours), (scores, our_scores), weights, strict=True)
        ]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_nothing_that_neuron_lacks_is_called_forward_or_backward():
    config = TokenChoiceTopKRouter.Config(
        num_experts=16,
        gate=Linear.Config(in_features=8, out_features=16),
        top_k=4,
        score_func="softmax",
        route_norm=True,
    )
    router, dispatcher = static_router(config).build(), both_dispatchers(16, 4)[1]
    choose = torch._library.custom_ops.OPDEFS["torchtitan_qwen3_trn::top_k"]._init_fn  # what the operator hides
    x = torch.randn(2, 5, 8, requires_grad=True)
    with Seen() as seen:
        scores, ids, _ = router(x, None)
        choose(scores, 2)
        flat = x.view(10, 8)
        rows, _, metadata = dispatcher.dispatch(flat, scores.view(10, 4), ids.view(10, 4), torch.empty(0))
        dispatcher.combine(rows, metadata, flat).sum().backward()
        regroup_routes(torch.tensor([[1, 2], [0, 3]]), 4)
    assert len(seen.names) > 20
    assert not seen.names & MISSING


def test_repeats_bit_for_bit():
    ids, x = draw_ids(300, 4, 16), torch.randn(300, 8, dtype=torch.bfloat16)
    plan, scores = routes(ids, 16), torch.rand(300, 4)
    first, second = (combine_rows(take_rows(x, plan), scores, plan) for _ in range(2))
    assert torch.equal(first, second)
