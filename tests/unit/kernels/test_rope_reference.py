"""The reference of `rope` against stock's `CosSinRoPE`; that of `qk_norm_rope` against stock's norm and RoPE."""

from __future__ import annotations

import pytest
import torch
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

from torchtitan_qwen3_trn.kernels.qk_norm_rope import TILE_ROWS, qk_norm_rope, qk_norm_rope_backward
from torchtitan_qwen3_trn.kernels.rope import rope
from torchtitan_qwen3_trn.overrides.kernel_rope import kernel_rope

SIZES = {"Qwen3 heads": (1, 256, 32, 4, 128), "odd": (3, 77, 5, 1, 16), "one position": (1, 1, 2, 2, 64)}
EPS = 1e-6


@pytest.fixture(params=SIZES)
def sizes(request):
    return SIZES[request.param]


def draw(*shape: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stock_and_table(head_dim: int, length: int) -> tuple[CosSinRoPE, torch.Tensor]:
    stock = CosSinRoPE.Config(dim=head_dim, max_seq_len=length, theta=1e6).build()
    cos, sin = stock.cache.chunk(2, dim=-1)
    return stock, torch.cat((cos[:, : head_dim // 2], sin[:, : head_dim // 2]), dim=-1)[None]


def inputs(sizes, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    batch, length, queries, keys, dim = sizes
    return tuple(
        draw(batch, length, heads, dim, seed=seed, dtype=dtype) for seed, heads in enumerate((queries, keys) * 2)
    )


def both_ways(function, *leaves: torch.Tensor, grads) -> list[torch.Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = function(*leaves)[:2]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def test_float32_has_the_bits_of_stock_forward_and_backward(sizes):
    q, k, dq, dk = inputs(sizes)
    stock, table = stock_and_table(sizes[-1], sizes[1])
    expected = both_ways(lambda q, k: stock(q, k), q, k, grads=(dq, dk))
    actual = both_ways(lambda q, k: rope(q, k, table), q, k, grads=(dq, dk))
    assert max(float((one - other).detach().abs().max()) for one, other in zip(expected, actual, strict=True)) == 0.0


def test_bfloat16_is_the_float32_result_rounded_once(sizes):
    q, k, dq, dk = inputs(sizes, torch.bfloat16)
    _, table = stock_and_table(sizes[-1], sizes[1])
    exact = both_ways(lambda q, k: rope(q, k, table), q.float(), k.float(), grads=(dq.float(), dk.float()))
    actual = both_ways(lambda q, k: rope(q, k, table), q, k, grads=(dq, dk))
    for one, other in zip(exact, actual, strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_gradient_of_rope_is_the_derivative():
    q, k, *_ = (x.double().requires_grad_() for x in inputs((2, 3, 2, 1, 8)))
    table = torch.randn(1, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, table), (q, k))


def test_table_gets_no_gradient():
    q, k, *_ = inputs((1, 3, 2, 1, 8))
    table = torch.randn(1, 3, 8, requires_grad=True)
    rope(q.requires_grad_(), k, table)[0].sum().backward()
    assert table.grad is None


@pytest.mark.parametrize("per_row", [False, True], ids=["shared positions", "positions per row"])
def test_module_has_the_bits_of_stock(per_row):
    q, k, dq, dk = inputs((3, 33, 4, 2, 16))
    config = CosSinRoPE.Config(dim=16, max_seq_len=100, theta=1e6)
    positions = torch.randint(0, 100, (3 if per_row else 1, 33), generator=torch.Generator().manual_seed(0))
    stock, ours = config.build(), kernel_rope(config).build()
    expected = both_ways(lambda q, k: stock(q, k, positions), q, k, grads=(dq, dk))
    actual = both_ways(lambda q, k: ours(q, k, positions), q, k, grads=(dq, dk))
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


def apart(stock: CosSinRoPE, weights: tuple[torch.Tensor, torch.Tensor]):
    def function(q, k, q_weight, k_weight):
        normed = [torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS) for x, w in ((q, q_weight), (k, k_weight))]
        return stock(*normed)

    return function


def fused(table: torch.Tensor):
    return lambda q, k, q_weight, k_weight: qk_norm_rope(q, k, q_weight, k_weight, table, EPS)


def weights_for(dim: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(1 + 0.1 * draw(dim, seed=seed).to(dtype) for seed in (8, 9))


def test_fused_norm_equals_norm_and_rope_apart_in_float32(sizes):
    """Tolerance: sums over a head and, for the weights, over all rows, in another order; 1e-5 of the largest entry."""
    q, k, dq, dk = inputs(sizes)
    stock, table = stock_and_table(sizes[-1], sizes[1])
    weights = weights_for(sizes[-1])
    expected = both_ways(apart(stock, weights), q, k, *weights, grads=(dq, dk))
    actual = both_ways(fused(table), q, k, *weights, grads=(dq, dk))
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5 * float(one.detach().abs().max()))


def test_fused_norm_in_bfloat16_is_no_less_accurate_than_apart(sizes):
    q, k, dq, dk = inputs(sizes, torch.bfloat16)
    stock, table = stock_and_table(sizes[-1], sizes[1])
    weights = weights_for(sizes[-1], torch.bfloat16)
    wide = [x.double() for x in (q, k, *weights)]
    exact = both_ways(fused(table.double()), *wide, grads=(dq.double(), dk.double()))
    errors = []
    for function in (apart(stock, weights), fused(table)):
        results = both_ways(function, q, k, *weights, grads=(dq, dk))
        errors.append([float((one - other).norm()) for one, other in zip(exact, results, strict=True)])
    for separate, together in zip(*errors, strict=True):
        assert together <= separate


def test_gradient_of_the_fused_norm_is_the_derivative():
    q, k, *_ = (x.double().requires_grad_() for x in inputs((2, 3, 2, 1, 8)))
    weights = [torch.rand(8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    function = fused(torch.randn(1, 3, 8, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda *args: function(*args)[:2], (q, k, *weights))


@pytest.mark.parametrize("length", [TILE_ROWS, TILE_ROWS + 1, 3])
def test_weight_gradients_come_in_tiles_of_rows(length):
    q, k, dq, dk = inputs((1, length, 2, 1, 8))
    table = torch.randn(1, length, 8)
    *_, q_rms, k_rms = qk_norm_rope(q, k, *weights_for(8), table, EPS)
    partial = qk_norm_rope_backward(dq, dk, q, k, *weights_for(8), table, q_rms, k_rms)[2]
    assert partial.shape == (-(-length // TILE_ROWS), 8)


def test_stock_norm_is_the_one_the_fused_operator_is_compared_with():
    q, *_ = inputs((1, 3, 2, 1, 8))
    norm = RMSNorm.Config(normalized_shape=8, eps=EPS).build()
    torch.nn.init.ones_(norm.weight)
    assert torch.equal(norm(q), torch.nn.functional.rms_norm(q, (8,), norm.weight, EPS))
