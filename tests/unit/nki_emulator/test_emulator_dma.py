"""DMA: copies, gathers, scatters, transposes and sums, with values worked out by hand."""

import numpy as np
import pytest

from nki_emulator.testing import load, nisa, nl, rows, run, store

TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)


def gather(table, index, **options):
    def kernel(x, i):
        dst = nl.ndarray((len(index), 4), dtype=x.dtype, buffer=nl.sbuf)
        nisa.memset(dst, -1.0)
        nisa.dma_copy(dst, x.ap([[4, len(index)], [1, 4]], vector_offset=load(i), indirect_dim=0), **options)
        return store(dst)

    return run(kernel, table, np.array(index, np.int32).reshape(-1, 1))


def test_gather_reads_one_row_per_index():
    np.testing.assert_array_equal(gather(TABLE, [3, 0, 3]), TABLE[[3, 0, 3]])


def test_skip_leaves_rows_of_missing_indices():
    out = gather(TABLE, [-1, 4, 5], oob_mode=nisa.oob_mode.skip)
    np.testing.assert_array_equal(out, [[-1] * 4, TABLE[4], [-1] * 4])


def test_scatter_writes_one_row_per_index():
    def kernel(x, values, i):
        nisa.dma_copy(x.ap([[4, 2], [1, 4]], vector_offset=load(i), indirect_dim=0), load(values))
        return x

    out = run(kernel, TABLE.copy(), rows([1, 1, 1, 1], [2, 2, 2, 2]), rows([4], [1], dtype=np.int32))
    np.testing.assert_array_equal(out, [TABLE[0], [2] * 4, TABLE[2], TABLE[3], [1] * 4])


def test_scatter_skips_missing_rows():
    def kernel(x, values, i):
        view = x.ap([[4, 2], [1, 4]], vector_offset=load(i), indirect_dim=0)
        nisa.dma_copy(view, load(values), oob_mode=nisa.oob_mode.skip)
        return x

    out = run(kernel, TABLE.copy(), rows([1, 1, 1, 1], [2, 2, 2, 2]), rows([-1], [1], dtype=np.int32))
    np.testing.assert_array_equal(out, [TABLE[0], [2] * 4, *TABLE[2:]])


def test_a_vector_offset_steps_by_the_tensors_row_not_by_the_pattern():
    # [T, 2, H] with H = 2: a row has 4 elements although the pattern takes the second half only.
    def kernel(x, i):
        dst = nl.ndarray((2, 2), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst, x.ap([[4, 2], [1, 2]], offset=2, vector_offset=load(i), indirect_dim=0))
        return store(dst)

    out = run(kernel, TABLE.reshape(5, 2, 2), rows([3], [1], dtype=np.int32))
    np.testing.assert_array_equal(out, [[14, 15], [6, 7]])


@pytest.mark.parametrize("through", ["tile", "register", "select"])
def test_a_scalar_offset_moves_the_whole_view(through):
    def kernel(x, i):
        index = load(i)
        if through == "register":
            register = nisa.register_alloc()
            nisa.register_load(register, index)
            index = register
        view = x.select(0, index) if through == "select" else x.ap([[1, 4]], scalar_offset=index, indirect_dim=0)
        out = nl.ndarray((1, 4), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(out, view)
        return store(out)

    np.testing.assert_array_equal(run(kernel, TABLE, rows([3], dtype=np.int32)), TABLE[3:4])


def test_vector_select():
    def kernel(x, i):
        out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(out, x.vector_select(0, load(i)))
        return store(out)

    np.testing.assert_array_equal(run(kernel, TABLE, rows([4], [2], dtype=np.int32)), TABLE[[4, 2]])


def test_dma_converts_through_float32():
    def kernel(x):
        out = nl.ndarray((1, 3), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(out, x)
        return store(out)

    np.testing.assert_array_equal(run(kernel, rows([1.5, -2.5, 7])), [[2, -2, 7]])


def test_dma_reshapes_between_hbm_and_sbuf():
    def kernel(x):
        tile = nl.ndarray((4, 5), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile, x.permute((1, 0)))
        return store(tile)

    np.testing.assert_array_equal(run(kernel, TABLE), TABLE.T)


@pytest.mark.parametrize(("shape", "axes"), [((16, 4), (1, 0)), ((2, 3, 4), (2, 1, 0)), ((2, 3, 5, 4), (3, 1, 2, 0))])
def test_dma_transpose(shape, axes):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def kernel(t):
        dst = nl.ndarray(tuple(shape[a] for a in axes), dtype=t.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(dst, t)
        return store(dst)

    np.testing.assert_array_equal(run(kernel, x), x.transpose(axes))


def test_gather_transpose_reads_indices_column_by_column():
    table = np.arange(40 * 8, dtype=np.float16).reshape(40, 8)
    index = np.arange(16, dtype=np.uint32)[::-1].reshape(16, 1).copy()

    def kernel(x, i):
        dst = nl.ndarray((8, 16), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(dst, x.ap([[8, 16], [1, 8]], vector_offset=load(i), indirect_dim=0))
        return store(dst)

    np.testing.assert_array_equal(run(kernel, table, index), table[15::-1][:16].T)


def test_dma_compute_adds_in_float32():
    def kernel(a, b, c):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_compute(out, [a, b, load(c)], nl.add)
        return out

    x = rows([1, 2], [3, 4])
    np.testing.assert_array_equal(run(kernel, x, 10 * x, 100 * x), 111 * x)


def test_dma_compute_scatter_and_gather_add():
    def kernel(x, values, i):
        index, tile = load(i), load(values)
        view = x.ap([[4, 2], [1, 4]], vector_offset=index, indirect_dim=0)
        nisa.dma_compute(view, [view, tile], nl.add)
        nisa.dma_compute(tile, [tile, x.ap([[4, 2], [1, 4]], vector_offset=index, indirect_dim=0)], nl.add)
        return x, store(tile)

    x, tile = run(kernel, TABLE.copy(), np.ones((2, 4), np.float32), rows([4], [1], dtype=np.int32))
    np.testing.assert_array_equal(x, [TABLE[0], TABLE[1] + 1, TABLE[2], TABLE[3], TABLE[4] + 1])
    np.testing.assert_array_equal(tile, [TABLE[4] + 2, TABLE[1] + 2])
