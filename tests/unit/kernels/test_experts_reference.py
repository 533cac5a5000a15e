"""The reference of `experts` against float64 and against stock's `GroupedExperts`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torchtitan.models.common.moe import GroupedExperts

from torchtitan_qwen3_trn.kernels.experts import block_count, block_plan, experts
from torchtitan_qwen3_trn.overrides.static_moe import kernel_experts

NAMES = ("y", "dx", "dw1", "dw2", "dw3")


def counts_for(routing: str, num_experts: int, rows: int) -> torch.Tensor:
    if routing == "balanced":
        counts = torch.full((num_experts,), rows // num_experts)
        counts[: rows % num_experts] += 1
    elif routing == "one expert":
        counts = torch.zeros(num_experts, dtype=torch.int64)
        counts[num_experts // 2] = rows
    elif routing == "skewed":
        weights = 1 / torch.arange(1, num_experts + 1) ** 1.2
        counts = (weights / weights.sum() * rows).long()
        counts[0] += rows - counts.sum()
    else:
        raise ValueError(routing)
    return counts


CASES = {
    "balanced": {"dim": 64, "hidden": 48, "num_experts": 8, "rows": 64},
    "empty experts": {"dim": 64, "hidden": 48, "num_experts": 16, "rows": 9},
    "all on one expert": {"dim": 64, "hidden": 48, "num_experts": 8, "rows": 64, "routing": "one expert"},
    "one token": {"dim": 64, "hidden": 48, "num_experts": 8, "rows": 1},
    "one expert": {"dim": 64, "hidden": 48, "num_experts": 1, "rows": 33},
    "128 experts, top-8": {"dim": 64, "hidden": 48, "num_experts": 128, "rows": 8 * 60, "routing": "skewed"},
    "skewed": {"dim": 72, "hidden": 40, "num_experts": 7, "rows": 101, "routing": "skewed"},
    "rows without expert": {"dim": 64, "hidden": 48, "num_experts": 8, "rows": 64, "unowned": 19},
}


def draw_case(
    *, dim: int, hidden: int, num_experts: int, rows: int, routing: str = "balanced", unowned: int = 0, dtype
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((rows + unowned, dim), (num_experts, hidden, dim), (num_experts, dim, hidden), (num_experts, hidden, dim))
    tensors = [
        (torch.randn(shape) * (1.0 if i == 0 else shape[-1] ** -0.5)).to(dtype) for i, shape in enumerate(shapes)
    ]
    dy = torch.randn(shapes[0]).to(dtype)
    tensors[0][rows:] = float("nan")
    dy[rows:] = float("nan")
    return tensors, counts_for(routing, num_experts, rows), dy


def ours(tensors, counts, dy, block_rows: int = 16) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = experts(*leaves, *block_plan(counts, len(dy), block_rows))[0]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def stock(tensors, counts, dy) -> list[torch.Tensor]:
    x, w1, w2, w3 = tensors
    module = GroupedExperts.Config(dim=x.shape[1], hidden_dim=w1.shape[1], num_experts=len(w1)).build().to(x.dtype)
    leaves = [x.detach()[: int(counts.sum())].requires_grad_()]
    with torch.no_grad():
        for parameter, value in zip((module.w1_EFD, module.w2_EDF, module.w3_EFD), (w1, w2, w3), strict=True):
            parameter.copy_(value)
    y = module(leaves[0], counts)
    return [y.detach(), *torch.autograd.grad(y, [leaves[0], module.w1_EFD, module.w2_EDF, module.w3_EFD], dy[: len(y)])]


def exact(tensors, counts, dy, every: int) -> Iterator[tuple[int, slice, list[torch.Tensor]]]:
    """Expert by expert in float64, so that real sizes fit in memory: rows, and y, dx, dw1, dw2, dw3."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        rows = slice(start, start + count)
        start += count
        if expert % every:
            continue
        leaves = [tensors[0][rows], *(w[expert] for w in tensors[1:])]
        x, w1, w2, w3 = leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        y = (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
        yield expert, rows, [y.detach(), *torch.autograd.grad(y, leaves, dy[rows].double())]


def relative_errors(results, tensors, counts, dy, *, every: int = 1) -> dict[str, float]:
    """Frobenius norm of the error over that of the exact result, for each of `NAMES`; ``every`` n-th expert counts."""
    error, size = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
    for expert, rows, truth in exact(tensors, counts, dy, every):
        parts = [results[0][rows], results[1][rows], *(w[expert] for w in results[2:])]
        for name, part, value in zip(NAMES, parts, truth, strict=True):
            error[name] += float((part - value).square().sum())
            size[name] += float(value.square().sum())
    return {name: (error[name] / size[name]) ** 0.5 if size[name] else error[name] for name in NAMES}


@pytest.mark.parametrize("case", CASES)
def test_float32_is_exact_to_1e_5(case):
    tensors, counts, dy = draw_case(**CASES[case], dtype=torch.float32)
    errors = relative_errors(ours(tensors, counts, dy), tensors, counts, dy)
    assert max(errors.values()) < 1e-5, errors


def test_sizes_that_stock_cannot_align_work():
    sizes = {"dim": 65, "hidden": 47, "num_experts": 7, "rows": 101, "routing": "skewed"}
    tensors, counts, dy = draw_case(**sizes, dtype=torch.float32)
    assert max(relative_errors(ours(tensors, counts, dy), tensors, counts, dy).values()) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_about_as_accurate_as_stock(case):
    tensors, counts, dy = draw_case(**CASES[case], dtype=torch.bfloat16)
    mine = relative_errors(ours(tensors, counts, dy), tensors, counts, dy)
    theirs = relative_errors(stock(tensors, counts, dy), tensors, counts, dy)
    assert all(mine[name] <= 1.2 * theirs[name] for name in NAMES), (mine, theirs)


def test_real_sizes_in_bfloat16_are_about_as_accurate_as_stock():
    sizes = {"dim": 2048, "hidden": 768, "num_experts": 64, "rows": 4 * 64, "routing": "skewed", "unowned": 5}
    tensors, counts, dy = draw_case(**sizes, dtype=torch.bfloat16)
    mine = relative_errors(ours(tensors, counts, dy, 256), tensors, counts, dy, every=9)
    theirs = relative_errors(stock(tensors, counts, dy), tensors, counts, dy, every=9)
    assert all(mine[name] <= 1.2 * theirs[name] for name in NAMES), (mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_expert_give_zeros_and_leak_nowhere(dtype):
    tensors, counts, dy = draw_case(**CASES["rows without expert"], dtype=dtype)
    y, dx, *weights = ours(tensors, counts, dy)
    assert not y[64:].any()
    assert not dx[64:].any()
    assert all(tensor.isfinite().all() for tensor in (y, dx, *weights))


def test_gradient_is_the_derivative():
    tensors, counts, _ = draw_case(dim=4, hidden=3, num_experts=4, rows=7, routing="skewed", dtype=torch.float64)
    counts[-1] = 0
    plan = block_plan(counts, 7, 2)
    leaves = [x.requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *args: experts(*args, *plan)[0], leaves)


@pytest.mark.parametrize("block_rows", [1, 16, 128])
@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_every_row_once_and_never_mix_experts(case, block_rows):
    sizes = CASES[case]
    counts = counts_for(sizes.get("routing", "balanced"), sizes["num_experts"], sizes["rows"])
    rows = sizes["rows"] + sizes.get("unowned", 0)
    plan = block_plan(counts, rows, block_rows)
    assert all(part.dtype == torch.int32 for part in plan)
    assert plan.row_NS.shape == (block_count(rows, len(counts), block_rows), block_rows)
    assert plan.row_NS[plan.row_NS >= 0].tolist() == list(range(rows))
    owner = torch.arange(len(counts) + 1).repeat_interleave(
        torch.cat((counts, torch.tensor([rows - int(counts.sum())])))
    )
    bounds = plan.first_block_E2.tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        held = plan.row_NS[first:last]
        assert (owner[held[held >= 0]] == expert).all()
        assert last > first or expert == len(counts)
    assert (plan.row_NS[bounds[-1] :] == -1).all()


def test_worst_routing_needs_no_more_blocks_than_counted():
    for rows in range(1, 14):
        for ones in range(5):
            counts = torch.tensor([min(1, rows - e) if e < ones else 0 for e in range(4)]).clamp(min=0)
            counts = torch.cat((counts, torch.tensor([max(rows - int(counts.sum()), 0)])))
            plan = block_plan(counts, rows, 4)
            assert int(plan.first_block_E2[-1]) <= len(plan.row_NS)
            assert (plan.row_NS >= 0).sum() == rows


def test_module_keeps_stock_parameter_names_and_layout():
    config = GroupedExperts.Config(dim=8, hidden_dim=6, num_experts=3)
    one, other = config.build(), kernel_experts(config).build()
    assert {n: p.shape for n, p in one.named_parameters()} == {n: p.shape for n, p in other.named_parameters()}


def test_autocast_decides_the_dtype_of_the_module():
    module = kernel_experts(GroupedExperts.Config(dim=8, hidden_dim=6, num_experts=3)).build()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x, counts = torch.randn(9, 8), torch.tensor([4, 3, 2])
    wide = module(x, counts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = module(x, counts)
    assert wide.dtype == narrow.dtype == torch.float32
    assert torch.equal(narrow, narrow.bfloat16().float())
    assert not torch.equal(wide, narrow)


def test_module_without_blocks_computes_what_the_operator_computes_with_them():
    tensors, counts, _ = draw_case(**CASES["skewed"], dtype=torch.float32)
    module = kernel_experts(GroupedExperts.Config(dim=72, hidden_dim=40, num_experts=7)).build()
    module.load_state_dict(dict(zip(("w1_EFD", "w2_EDF", "w3_EFD"), tensors[1:], strict=True)))
    assert torch.equal(module(tensors[0], counts), experts(*tensors, *block_plan(counts, 101, 16))[0])
