"""Buffers, views and access patterns. Expected values follow from the documentation of NkiTensor by hand."""

import ml_dtypes
import numpy as np
import pytest
import torch

from nki_emulator.testing import emulator_only, load, nisa, nl, rows, run, store


def view_of(make, array):
    """The elements of `make(tile)` for an SBUF tile holding `array`."""

    def kernel(x):
        view = make(load(x))
        out = nl.ndarray(view.shape, dtype=view.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=view)
        return out

    return run(kernel, array)


GRID = np.arange(24, dtype=np.float32).reshape(2, 12)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda t: t[:, 2:8:3], [[2, 5], [14, 17]]),
        (lambda t: t[:, nl.ds(3, 2)], [[3, 4], [15, 16]]),
        (lambda t: t[1], [[12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]]),  # partition stays, with size 1
        (lambda t: t[:, -1], [[11], [23]]),
        (lambda t: t.reshape((2, 3, 4))[:, 1, :], [[4, 5, 6, 7], [16, 17, 18, 19]]),
        (lambda t: t.reshape((2, 3, 4)).permute((0, 2, 1))[:, 0], [[0, 4, 8], [12, 16, 20]]),
        (lambda t: t.reshape_dim(1, (3, -1)).select(1, 2), [[8, 9, 10, 11], [20, 21, 22, 23]]),
        (lambda t: t[:, 0:1].broadcast(1, 3), [[0, 0, 0], [12, 12, 12]]),
        (lambda t: t.rearrange(("p", ("a", "b")), ("p", "b", "a"), {"a": 6})[:, 1],
         [[1, 3, 5, 7, 9, 11], [13, 15, 17, 19, 21, 23]]),
        (lambda t: t.ap([[12, 2], [5, 2], [1, 2]]).flatten_dims(1, 1), [[[0, 1], [5, 6]], [[12, 13], [17, 18]]]),
        (lambda t: t.ap([[12, 2], [0, 2], [4, 2]], offset=1), [[[1, 5], [1, 5]], [[13, 17], [13, 17]]]),
        (lambda t: t.expand_dim(1).squeeze_dim(1).slice(1, 4, 8, 2), [[4, 6], [16, 18]]),
    ],
)  # fmt: skip
def test_a_view_holds_the_documented_elements(make, expected):
    np.testing.assert_array_equal(view_of(make, GRID), np.array(expected, np.float32))


def test_view_reinterprets_bits():
    ones = view_of(lambda t: t.view(nl.int32), np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(ones, [[0x3F800000, 0x3F800000]])
    halves = view_of(lambda t: t.view(nl.uint16), np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(halves, [[0x0000, 0x3F80]])


def test_hbm_integer_index_drops_the_dimension():
    def kernel(x):
        out = nl.ndarray((4,), dtype=x.dtype, buffer=nl.shared_hbm)
        assert x[1].shape == (3, 4)
        nisa.dma_copy(dst=out, src=x[1, 2])
        return out

    np.testing.assert_array_equal(run(kernel, np.arange(24, dtype=np.float32).reshape(2, 3, 4)), [20, 21, 22, 23])


def test_uninitialised_memory_holds_nan_or_4():
    def kernel():
        floats = nl.ndarray((2, 2), dtype=nl.bfloat16, buffer=nl.sbuf)
        integers = nl.ndarray((2, 2), dtype=nl.int32, buffer=nl.sbuf)
        return store(floats), store(integers)

    floats, integers = run(kernel)
    assert np.isnan(floats.astype(np.float32)).all()
    assert (integers == 4).all()


def test_arguments_written_by_the_kernel_change_in_place():
    def kernel(x):
        nisa.dma_copy(dst=x[0], src=x[1])
        return x

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    result = run(kernel, x)
    assert isinstance(result, torch.Tensor)
    assert result.dtype is torch.bfloat16
    assert x.tolist() == [[3.0, 4.0], [3.0, 4.0]]


def test_a_strided_argument_is_written_back():
    def kernel(x):
        nisa.dma_copy(dst=x[0], src=x[1])
        return x

    base = np.arange(8, dtype=np.float32).reshape(2, 4)
    run(kernel, base[:, ::2])
    np.testing.assert_array_equal(base, [[4, 1, 6, 3], [4, 5, 6, 7]])


@emulator_only
def test_tensors_at_one_address_share_memory():
    def kernel(x):
        a = nl.ndarray((2, 2), dtype=nl.float32, buffer=nl.sbuf, address=(0, 64))
        b = nl.ndarray((2, 2), dtype=nl.float32, buffer=nl.sbuf, address=(0, 68))
        nisa.dma_copy(dst=a, src=x)
        return store(b)

    out = run(kernel, rows([1, 2], [3, 4]))
    np.testing.assert_array_equal(out[:, 0], [2, 4])
    assert np.isnan(out[:, 1]).all()


def test_constants():
    def kernel():
        constant = nl.shared_constant(np.array([[1.5, 2.5]], np.float32))
        identity = nl.shared_identity_matrix(3, dtype=nl.float32)
        return store(load(constant)), store(identity), store(nl.full((1, 2), 7.0, dtype=nl.bfloat16))

    constant, identity, full = run(kernel)
    np.testing.assert_array_equal(constant, [[1.5, 2.5]])
    np.testing.assert_array_equal(identity, np.eye(3))
    assert full.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(full.astype(np.float32), [[7, 7]])


def test_operators_on_tiles():
    def kernel(x, y):
        a, b = nl.load(x), nl.load(y)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, value=nl.add(nl.multiply(a, b), nl.sum(a, axis=1)))
        return out

    np.testing.assert_array_equal(run(kernel, rows([1, 2]), rows([3, 4])), [[6, 11]])


def test_static_loops_are_plain_ranges():
    assert list(nl.affine_range(3)) == [0, 1, 2]
    assert list(nl.sequential_range(1, 7, 3)) == [1, 4]


def test_fori_loop_reads_its_bound_from_memory():
    def kernel(x, count):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=nl.zeros((1, 4), dtype=x.dtype, buffer=nl.sbuf))
        bound = nisa.register_alloc()
        nisa.register_load(bound, load(count))

        def body(i):
            cell = nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=cell, src=x.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
            nisa.dma_copy(dst=out.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1), src=cell)

        nl.fori_loop(0, bound, body)
        return out

    np.testing.assert_array_equal(run(kernel, rows([5, 6, 7, 8]), rows([3], dtype=np.int32)), [[5, 6, 7, 0]])


@pytest.mark.parametrize(("start", "passes"), [(3, 3), (0, 0)])
def test_while_loop_tests_before_the_first_pass(start, passes):
    def kernel(count):
        left, one, total = load(count), nl.ndarray((1, 1), nl.int32), nl.ndarray((1, 1), nl.int32)
        nisa.memset(one, 1)
        nisa.memset(total, 0)
        register = nisa.register_alloc()
        nisa.register_load(register, left)

        def body(r):
            nisa.tensor_tensor(total, total, one, nl.add)
            nisa.tensor_tensor(left, left, one, nl.subtract)
            nisa.register_load(r, left)
            return r

        nl.while_loop(register, body)
        return store(total)

    assert run(kernel, rows([start], dtype=np.int32)).item() == passes


def test_registers_move_and_store():
    def kernel():
        first, second = nisa.register_alloc(41), nisa.register_alloc()
        nisa.register_move(second, first)
        out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.register_store(out, second)
        return store(out)

    assert run(kernel).item() == 41
