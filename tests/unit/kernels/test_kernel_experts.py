"""The grouped experts' kernels against float64, and against the error of stock's bfloat16 grouped matmul."""

import pytest
import torch
from torchtitan.models.common.moe import GroupedExperts

import nki_emulator
from nki_emulator.testing import emulator_only, nki
from torchtitan_qwen3_trn.kernels.experts import block_plan
from torchtitan_qwen3_trn.kernels.experts_nki import (
    experts_input_gradient_kernel,
    experts_kernel,
    experts_weight_gradients_kernel,
)

NAMES = ("y", "dx", "dw1", "dw2", "dw3")
DIM, HIDDEN = 2048, 768  # Qwen3-30B-A3B


def draw(counts, dim, hidden, dtype, unowned=0):
    torch.manual_seed(0)
    num_experts, rows = len(counts), sum(counts) + unowned
    x, dy = (torch.randn(rows, dim).to(dtype) for _ in range(2))
    w1, w3 = ((torch.randn(num_experts, hidden, dim) * dim**-0.5).to(dtype) for _ in range(2))
    w2 = (torch.randn(num_experts, dim, hidden) * hidden**-0.5).to(dtype)
    x[sum(counts) :] = float("nan")
    dy[sum(counts) :] = float("nan")
    return x, w1, w2, w3, dy, torch.tensor(counts, dtype=torch.int32)


def run(case, *, lnc=1, block_rows=256, **options):
    """y, dx, dw1, dw2, dw3 from the three kernels."""
    x, w1, w2, w3, dy, counts = case
    plan = block_plan(counts, len(x), block_rows)
    y, g, u = nki.simulate(experts_kernel[lnc], **options)(x, w1, w2, w3, *plan)
    dx, dg, du, h = nki.simulate(experts_input_gradient_kernel[lnc], **options)(dy, g, u, w1, w2, w3, *plan)
    return [y, dx, *nki.simulate(experts_weight_gradients_kernel[lnc], **options)(dy, x, h, dg, du, *plan)]


def in_float64(case):
    x, w1, w2, w3, dy, counts = (t.double() for t in case)
    results = [torch.zeros_like(t) for t in (x, x, w1, w2, w3)]
    end = 0
    for expert, count in enumerate(counts.int().tolist()):
        rows = slice(end, end + count)
        end += count
        leaves = [t.detach().requires_grad_() for t in (x[rows], w1[expert], w2[expert], w3[expert])]
        y = (torch.nn.functional.silu(leaves[0] @ leaves[1].T) * (leaves[0] @ leaves[3].T)) @ leaves[2].T
        results[0][rows] = y.detach()
        gradients = torch.autograd.grad(y, leaves, dy[rows])
        for result, place, gradient in zip(results[1:], (rows, expert, expert, expert), gradients, strict=True):
            result[place] = gradient
    return results


def by_stock(case):
    x, w1, w2, w3, dy, counts = case
    module = GroupedExperts(GroupedExperts.Config(dim=x.shape[1], hidden_dim=w1.shape[1], num_experts=len(w1)))
    module.w1_EFD, module.w2_EDF, module.w3_EFD = (torch.nn.Parameter(w) for w in (w1, w2, w3))
    x = x.clone().requires_grad_()
    y = module(x, counts)
    return [y.detach(), *torch.autograd.grad(y, (x, module.w1_EFD, module.w2_EDF, module.w3_EFD), dy)]


def error(result, exact):
    return ((result.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(
    ("counts", "dim", "hidden", "unowned"),
    [
        pytest.param([130, 0, 1, 257], 256, 128, 60, id="empty expert, second block, rows without expert"),
        pytest.param([0, 300, 0], 128, 384, 0, id="all rows on one expert"),
        pytest.param([0, 1], 384, 128, 0, id="one row"),
        pytest.param([0, 0], 128, 128, 3, id="no row"),
        pytest.param([4] * 128, 128, 128, 0, id="128 experts"),
        pytest.param([640], 128, 256, 0, id="one expert, three blocks"),
    ],
)
def test_float32_matches_float64_whatever_the_routing(counts, dim, hidden, unowned):
    case = draw(counts, dim, hidden, torch.float32, unowned)
    for name, ours, exact in zip(NAMES, run(case), in_float64(case), strict=True):
        if name in ("y", "dx"):
            assert not ours[sum(counts) :].any(), f"{name}: rows without expert are not zero"
            exact[sum(counts) :] = 0
        assert error(ours, exact) < 1e-5, name


@pytest.mark.parametrize(
    ("counts", "dim", "hidden", "lnc"),
    [
        pytest.param([150, 0, 106], DIM, HIDDEN, 2, id="Qwen3-30B-A3B"),
        # One core cannot hold these weights or their gradients at once: they are worked on in parts.
        pytest.param([40], 4096, 1536, 1, id="Qwen3-235B-A22B on one core"),
    ],
)
def test_bfloat16_at_real_sizes_errs_less_than_1_2_times_stock(counts, dim, hidden, lnc):
    case = draw(counts, dim, hidden, torch.bfloat16)
    exact = in_float64(case)
    for name, ours, stock, right in zip(NAMES, run(case, lnc=lnc), by_stock(case), exact, strict=True):
        assert error(ours, right) <= 1.2 * error(stock, right), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_cores_give_the_bits_of_one_whichever_comes_first(dtype):
    case = draw([100, 0, 300], 256, 384, dtype, unowned=30)
    one, two = run(case), run(case, lnc=2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    if getattr(nki, "__emulated__", False):
        other_order = run(case, lnc=2, first_core=1)
        assert all(torch.equal(a, b) for a, b in zip(one, other_order, strict=True))


def test_rows_of_other_experts_do_not_matter():
    counts = [90, 200, 40]
    case = draw(counts, 128, 128, torch.float32)
    poisoned = [t.clone() for t in case]
    poisoned[0][90:290] = float("nan")
    poisoned[4][90:290] = float("nan")
    for name, clean, other in zip(NAMES, run(case), run(poisoned), strict=True):
        kept = [slice(0, 90), slice(290, None)] if name in ("y", "dx") else [0, 2]
        assert all(torch.equal(clean[part], other[part]) for part in kept), name


@emulator_only
def test_weights_are_read_once_and_only_tiles_with_rows_are_worked_on():
    def counted(counts):
        case = draw(counts, 256, 256, torch.bfloat16)
        with nki_emulator.counting() as report:
            nki.simulate(experts_kernel[2])(*case[:4], *block_plan(case[5], sum(counts), 256))
        return report

    # The same rows in as many tiles: all on one expert, or on two with one expert idle.
    together, apart = counted([512, 0, 0]), counted([256, 0, 256])
    assert together.total("tensor") == apart.total("tensor")
    assert together.hbm_bytes == apart.hbm_bytes
    # One tile instead of two, though a block holds 256 rows: half the work, and less to move by what a tile moves.
    half = counted([128, 0, 0])
    assert 4 * half.total("tensor") == together.total("tensor")
