"""Vector, Scalar and Tensor Engine instructions, with values worked out by hand from the documentation."""

import math

import ml_dtypes
import numpy as np
import pytest

from nki_emulator.testing import apply, load, nisa, nl, rows, run, store, to_psum

X = rows([1, -2, 3], [4, 5, -6])
Y = rows([10, 20, 30], [40, 50, 60])


def test_tensor_copy_rounds_to_the_type_of_dst():
    # 1.00390625 = 1 + 2^-8 lies between the bfloat16 numbers 1 and 1 + 2^-7: a tie, to the even mantissa, 1.
    out = apply(nisa.tensor_copy, (1, 2), nl.bfloat16, rows([1.00390625, 1.01171875]))
    np.testing.assert_array_equal(out.astype(np.float32), [[1.0, 1.015625]])


def test_float_to_integer_rounds_to_even_and_saturates():
    out = apply(nisa.tensor_copy, (1, 6), nl.int8, rows([0.5, 1.5, 2.5, -1.5, 300.0, -300.0]))
    np.testing.assert_array_equal(out, [[0, 2, 2, -2, 127, -128]])


def test_tensor_copy_of_one_type_keeps_all_bits():
    value = 2**24 + 1  # not a float32
    out = apply(nisa.tensor_copy, (1, 1), nl.int32, rows([value], dtype=np.int32))
    assert out.item() == value


def test_memset():
    out = apply(lambda dst: nisa.memset(dst, -3), (2, 2), nl.int16)
    np.testing.assert_array_equal(out, np.full((2, 2), -3))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (nl.add, [[11, 18, 33], [44, 55, 54]]),
        (nl.subtract, [[-9, -22, -27], [-36, -45, -66]]),
        (nl.multiply, [[10, -40, 90], [160, 250, -360]]),
        (nl.maximum, [[10, 20, 30], [40, 50, 60]]),
        (nl.minimum, [[1, -2, 3], [4, 5, -6]]),
        (nl.less, [[1, 1, 1], [1, 1, 1]]),
        (nl.equal, [[0, 0, 0], [0, 0, 0]]),
        (nl.logical_and, [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_tensor_tensor(op, expected):
    np.testing.assert_array_equal(
        apply(lambda d, a, b: nisa.tensor_tensor(d, a, b, op), (2, 3), nl.float32, X, Y), expected
    )


def test_every_instruction_rounds_to_bfloat16():
    # (256 + 1) rounds to 256 in bfloat16 (8 bits), so adding 1 twice changes nothing.
    def twice(dst, a, b):
        nisa.tensor_tensor(dst, a, b, nl.add)
        nisa.tensor_tensor(dst, dst, b, nl.add)

    a, b = rows([256], dtype=ml_dtypes.bfloat16), rows([1], dtype=ml_dtypes.bfloat16)
    assert apply(twice, (1, 1), nl.bfloat16, a, b).astype(np.float32).item() == 256


def test_int32_tensor_tensor_is_exact_on_gpsimd_and_float32_on_vector():
    a, b = rows([2**24], dtype=np.int32), rows([1], dtype=np.int32)
    exact = apply(lambda d, x, y: nisa.tensor_tensor(d, x, y, nl.add), (1, 1), nl.int32, a, b)
    rounded = apply(
        lambda d, x, y: nisa.tensor_tensor(d, x, y, nl.add, engine=nisa.engine.vector), (1, 1), nl.int32, a, b
    )
    assert (exact.item(), rounded.item()) == (2**24 + 1, 2**24)


@pytest.mark.parametrize(
    ("op", "b", "expected"),
    [(nl.bitwise_and, 0b0110, 0b0100), (nl.bitwise_or, 0b0110, 0b1110), (nl.bitwise_xor, 0b0110, 0b1010),
     (nl.left_shift, 2, 0b110000), (nl.right_shift, 2, 0b11)],
)  # fmt: skip
def test_bit_operators_leave_the_type_alone(op, b, expected):
    a = rows([0b1100], dtype=np.uint8)
    out = apply(lambda d, x, y: nisa.tensor_tensor(d, x, y, op), (1, 1), nl.uint8, a, rows([b], dtype=np.uint8))
    assert out.item() == expected
    scalar = apply(lambda d, x: nisa.tensor_scalar(d, x, op, b), (1, 1), nl.uint8, a)
    assert scalar.item() == expected


def test_right_shift_is_logical():
    out = apply(lambda d, x: nisa.tensor_scalar(d, x, nl.right_shift, 28), (1, 1), nl.int32, rows([-1], dtype=np.int32))
    assert out.item() == 15


def test_tensor_scalar_applies_two_operators_and_reverses():
    # (x - 1) * 10, then 1 - x, then 100 - (x * p) with p per partition
    two = apply(
        lambda d, x: nisa.tensor_scalar(d, x, nl.subtract, 1.0, op1=nl.multiply, operand1=10.0), (2, 3), nl.float32, X
    )
    np.testing.assert_array_equal(two, [[0, -30, 20], [30, 40, -70]])
    back = apply(lambda d, x: nisa.tensor_scalar(d, x, nl.subtract, 1.0, reverse0=True), (2, 3), nl.float32, X)
    np.testing.assert_array_equal(back, [[0, 3, -2], [-3, -4, 7]])
    rowwise = apply(
        lambda d, x, p: nisa.tensor_scalar(d, x, nl.multiply, p, op1=nl.subtract, operand1=100.0, reverse1=True),
        (2, 3), nl.float32, X, rows([2], [3]),
    )  # fmt: skip
    np.testing.assert_array_equal(rowwise, [[98, 104, 94], [88, 85, 118]])


def test_tensor_scalar_unary_rsqrt():
    out = apply(lambda d, x: nisa.tensor_scalar(d, x, nl.rsqrt, 0), (1, 2), nl.float32, rows([4, 16]))
    np.testing.assert_array_equal(out, [[0.5, 0.25]])


def test_scalar_tensor_tensor():
    out = apply(lambda d, x, y: nisa.scalar_tensor_tensor(d, x, nl.multiply, 2.0, nl.add, y), (2, 3), nl.float32, X, Y)
    np.testing.assert_array_equal(out, [[12, 16, 36], [48, 60, 48]])


def test_tensor_reduce_over_trailing_dimensions():
    cube = np.arange(12, dtype=np.float32).reshape(1, 2, 6)
    last = apply(lambda d, x: nisa.tensor_reduce(d, nl.add, x, axis=2), (1, 2), nl.float32, cube)
    np.testing.assert_array_equal(last, [[15, 51]])
    both = apply(lambda d, x: nisa.tensor_reduce(d, nl.maximum, x, axis=(1, 2), negate=True), (1, 1), nl.float32, cube)
    np.testing.assert_array_equal(both, [[-11]])


def test_tensor_scalar_reduce_and_its_accumulator():
    def kernel(x):
        tile = load(x)
        out = nl.ndarray((2, 3), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((2, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(out, tile, nl.multiply, 2.0, nl.add)
        nisa.tensor_scalar_reduce(
            out, tile, nl.multiply, 1.0, nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce
        )
        return store(out), store(total)

    out, total = run(kernel, X)
    np.testing.assert_array_equal(out, X)
    np.testing.assert_array_equal(total, [[6], [9]])  # 2 * (2, 3) + (2, 3)


def test_tensor_partition_reduce():
    out = apply(lambda d, x: nisa.tensor_partition_reduce(d, nl.add, x), (1, 3), nl.float32, X)
    np.testing.assert_array_equal(out, [[5, 3, -3]])


def test_reciprocal():
    np.testing.assert_array_equal(apply(nisa.reciprocal, (1, 2), nl.float32, rows([4, -0.5])), [[0.25, -2]])


def test_tensor_tensor_scan():
    # r0 = 2 * 1 + 1 = 3, r1 = 3 * 3 + 1 = 10, r2 = 0 * 10 + 5 = 5
    out = apply(
        lambda d, a, b: nisa.tensor_tensor_scan(d, a, b, 1.0, nl.multiply, nl.add),
        (1, 3), nl.float32, rows([2, 3, 0]), rows([1, 1, 5]),
    )  # fmt: skip
    np.testing.assert_array_equal(out, [[3, 10, 5]])


def test_tensor_scalar_cumulative():
    out = apply(
        lambda d, x: nisa.tensor_scalar_cumulative(d, x, nl.multiply, nl.add, 2.0), (1, 3), nl.float32, rows([1, 2, 3])
    )
    np.testing.assert_array_equal(out, [[2, 6, 12]])


def test_bn_stats_and_bn_aggr():
    def kernel(x):
        statistics, moments = nl.ndarray((1, 6), nl.float32), nl.ndarray((1, 2), nl.float32)
        nisa.bn_stats(statistics, load(x))
        nisa.bn_aggr(moments, statistics)
        return store(statistics), store(moments)

    statistics, moments = run(kernel, rows([1, 10, 3, 20]))
    np.testing.assert_array_equal(statistics, [[2, 2, 2, 2, 15, 50]])  # even: 1, 3; odd: 10, 20
    np.testing.assert_allclose(moments, [[8.5, (7.5**2 + 1.5**2 + 5.5**2 + 11.5**2) / 4]], rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "x", "expected"),
    [
        (nl.copy, -1.5, -1.5),
        (nl.square, -3.0, 9.0),
        (nl.relu, -3.0, 0.0),
        (nl.exp, 1.0, math.e),
        (nl.log, math.e, 1.0),
        (nl.sqrt, 9.0, 3.0),
        (nl.rsqrt, 4.0, 0.5),
        (nl.reciprocal, 4.0, 0.25),
        (nl.tanh, 0.5, math.tanh(0.5)),
        (nl.sigmoid, 2.0, 1 / (1 + math.exp(-2))),
        (nl.silu, 2.0, 2 / (1 + math.exp(-2))),
        (nl.silu_dx, 0.0, 0.5),
        (nl.gelu, 1.0, 0.5 * (1 + math.erf(2**-0.5))),
        (nl.gelu_apprx_tanh, 0.0, 0.0),
        (nl.gelu_apprx_sigmoid, 1.0, 1 / (1 + math.exp(-1.702))),
        (nl.softplus, 0.0, math.log(2)),
        (nl.mish, 0.0, 0.0),
        (nl.erf, 0.5, math.erf(0.5)),
        (nl.erf_dx, 0.0, 2 / math.sqrt(math.pi)),
        (nl.sin, 1.0, math.sin(1.0)),
        (nl.arctan, 1.0, math.atan(1.0)),
        (nl.sign, -2.0, -1.0),
        (nl.abs, -2.0, 2.0),
    ],
)
def test_activation_functions(op, x, expected):
    out = apply(lambda d, t: nisa.activation(d, op, t), (1, 1), nl.float32, rows([x]))
    # AWS's simulator may evaluate the functions in another order: a few units in the last place.
    np.testing.assert_allclose(out, [[expected]], rtol=1e-5, atol=1e-6)


def test_silu_dx_is_the_slope_of_silu():
    x = np.linspace(-6, 6, 97, dtype=np.float32).reshape(1, -1)
    slope = apply(lambda d, t: nisa.activation(d, nl.silu_dx, t), x.shape, nl.float32, x)
    wide = x.astype(np.float64)
    silu = lambda v: v / (1 + np.exp(-v))  # noqa: E731
    np.testing.assert_allclose(slope, (silu(wide + 1e-5) - silu(wide - 1e-5)) / 2e-5, atol=1e-6)


def test_activation_scales_adds_bias_and_keeps_row_sums():
    def kernel(x, scale, bias):
        tile, factor, shift = load(x), load(scale), load(bias)
        out = nl.ndarray((2, 3), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((2, 1), dtype=nl.float32, buffer=nl.sbuf)
        cmd = nisa.reduce_cmd
        nisa.activation(out, nl.copy, tile, bias=shift, scale=factor, reduce_op=nl.add, reduce_cmd=cmd.reset_reduce)
        nisa.activation(out, nl.copy, tile, reduce_op=nl.add, reduce_cmd=cmd.reduce, reduce_res=total)
        nisa.activation(out, nl.copy, tile, bias=shift, scale=factor)
        return store(out), store(total)

    out, total = run(kernel, X, rows([2], [3]), rows([1], [-1]))
    np.testing.assert_array_equal(out, [[3, -3, 7], [11, 14, -19]])
    np.testing.assert_array_equal(total, [[3 - 3 + 7 + 2], [11 + 14 - 19 + 3]])


def test_activation_reduce():
    def kernel(x):
        out, total = nl.ndarray((2, 3), nl.float32), nl.ndarray((2, 1), nl.float32)
        nisa.activation_reduce(out, nl.square, load(x), nl.add, total)
        return store(total)

    np.testing.assert_array_equal(run(kernel, X), [[14], [77]])


def matmul(left, right, **options):
    def kernel(a, b):
        out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(out, load(a), load(b), **options)
        return store(out)

    return run(kernel, left, right)


def test_nc_matmul_contracts_partitions():
    np.testing.assert_array_equal(matmul(rows([1, 2], [3, 4]), rows([5, 6], [7, 8])), [[26, 30], [38, 44]])


def test_nc_matmul_keeps_bfloat16_products_in_float32():
    big, small = rows([256.0], [1.0], dtype=ml_dtypes.bfloat16), rows([1.0], [1.0], dtype=ml_dtypes.bfloat16)
    assert matmul(big, small).item() == 257


@pytest.mark.parametrize("accumulate", [(None, None), (False, True)])
def test_psum_accumulates_after_the_first_matmul(accumulate):
    def kernel(a, b):
        left, right = load(a), load(b)
        out = nl.ndarray((2, 2), dtype=nl.float32, buffer=nl.psum)
        for flag in accumulate:
            nisa.nc_matmul(out, left, right, accumulate=flag)
        return store(out)

    np.testing.assert_array_equal(run(kernel, rows([1, 2], [3, 4]), rows([5, 6], [7, 8])), [[52, 60], [76, 88]])


def test_overwriting_starts_a_new_sum():
    def kernel(a, b):
        left, right = load(a), load(b)
        out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.psum)
        for flag in (False, True, False):
            nisa.nc_matmul(out, left, right, accumulate=flag)
        return store(out)

    assert run(kernel, rows([2]), rows([5])).item() == 10


def test_double_row_contracts_the_pair_too():
    def kernel(a, b):
        out = nl.ndarray((1, 2), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(out, load(a), load(b), perf_mode=nisa.matmul_perf_mode.double_row)
        return store(out)

    fp8 = ml_dtypes.float8_e5m2
    a = np.array([[[1], [2]], [[3], [4]]], fp8)  # [K=2, 2, M=1]
    b = np.array([[[1, 0], [0, 1]], [[1, 1], [2, 0]]], fp8)  # [K=2, 2, N=2]
    np.testing.assert_array_equal(run(kernel, a, b), [[1 + 3 + 8, 2 + 3]])


def test_transposes():
    def kernel(x):
        tile = load(x)
        through_psum = nl.ndarray((3, 2), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(through_psum, tile)
        on_vector = nl.ndarray((3, 2), dtype=nl.float32, buffer=nl.sbuf)
        nisa.nc_transpose(on_vector, tile, engine=nisa.engine.vector)
        as_matmul = nl.ndarray((3, 2), dtype=nl.float32, buffer=nl.psum)
        identity = nl.shared_identity_matrix(2, dtype=nl.float32)
        nisa.nc_matmul(as_matmul, tile, identity, is_transpose=True)
        return store(through_psum), store(on_vector), store(as_matmul)

    x = X.copy()
    x[0, 0] = np.nan  # exact also for what is not a number
    for out in run(kernel, x):
        np.testing.assert_array_equal(out, x.T)


def test_engines_read_psum():
    def kernel(x, y):
        out = nl.ndarray((2, 3), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(out, to_psum(load(x)), load(y), nl.add)
        return store(out)

    np.testing.assert_array_equal(run(kernel, X, Y), X + Y)
