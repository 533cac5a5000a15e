"""Selection, search, gathers and shuffles, with values worked out by hand from the documentation."""

import ml_dtypes
import numpy as np

from nki_emulator.testing import apply, load, nisa, nl, rows, run, store

FP32_MIN = np.finfo(np.float32).min


def test_iota():
    # offset 100, 10 per partition, 2 * [0..1] + 1 * [0..2]
    out = apply(lambda d: nisa.iota(d, [[2, 2], [1, 3]], offset=100, channel_multiplier=10), (2, 6), nl.int32)
    np.testing.assert_array_equal(out, [[100, 101, 102, 102, 103, 104], [110, 111, 112, 112, 113, 114]])


def test_affine_select_makes_a_causal_mask():
    ones = np.ones((3, 3), np.float32)
    out = apply(
        lambda d, t: nisa.affine_select(d, [[-1, 3]], 1, t, -9.0, cmp_op=nl.greater_equal), (3, 3), nl.float32, ones
    )
    np.testing.assert_array_equal(out, [[1, -9, -9], [1, 1, -9], [1, 1, 1]])


def test_range_select_masks_by_position_and_keeps_the_row_maximum():
    def kernel(x, low, high):
        out, peak = nl.ndarray((2, 4), nl.float32), nl.ndarray((2, 1), nl.float32)
        nisa.range_select(
            out, load(x), nl.greater_equal, nl.less, load(low), load(high), reduce_res=peak, range_start=10,
            on_false_value=FP32_MIN,
        )  # fmt: skip
        return store(out), store(peak)

    x = rows([1, 2, 3, 4], [5, 6, 7, 8])
    out, peak = run(kernel, x, rows([11], [0]), rows([13], [11]))  # positions are 10, 11, 12, 13
    np.testing.assert_array_equal(out, [[FP32_MIN, 2, 3, FP32_MIN], [5, FP32_MIN, FP32_MIN, FP32_MIN]])
    np.testing.assert_array_equal(peak, [[3], [5]])


def test_select_reduce():
    def kernel(predicate, x):
        out, peak = nl.ndarray((1, 3), nl.float32), nl.ndarray((1, 1), nl.float32)
        nisa.select_reduce(out, load(predicate), load(x), -1.0, peak, nisa.reduce_cmd.reset_reduce, nl.maximum)
        return store(out), store(peak)

    out, peak = run(kernel, rows([1, 0, 2], dtype=np.uint8), rows([-5, 9, -7]))
    np.testing.assert_array_equal(out, [[-5, -1, -7]])
    assert peak.item() == -1


def test_tensor_copy_predicated_keeps_the_rest():
    def copy(dst, old, new, predicate):
        nisa.tensor_copy(dst, old)
        nisa.tensor_copy_predicated(dst, new, predicate)

    arrays = rows([1, 2, 3]), rows([7, 8, 9]), rows([0, 1, 5], dtype=np.uint8)
    np.testing.assert_array_equal(apply(copy, (1, 3), nl.float32, *arrays), [[1, 8, 9]])


DATA = rows([3, 1, 9, 9, 2, 9, 5, 0, 7, 4])
TOP = [9, 9, 9, 7, 5, 4, 3, 2]


def test_max8_is_descending_with_repeats():
    np.testing.assert_array_equal(apply(nisa.max8, (1, 8), nl.float32, DATA), [TOP])


def test_nc_find_index8_gives_repeats_successive_positions_and_marks_absence():
    values = rows([9, 9, 9, 7, 5, 4, 3, -1])
    out = apply(nisa.nc_find_index8, (1, 8), nl.uint32, DATA, values)
    np.testing.assert_array_equal(out, [[2, 3, 5, 8, 6, 9, 0, 0xFFFFFFFF]])


def test_nc_match_replace8_pairs_repeats_in_descending_order():
    # The example of the documentation.
    data, values = rows([1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]), rows([3, 8, 8, 8, 8, 8, 8, 8])

    def kernel(x, v):
        out, index = nl.ndarray((1, 11), nl.float32), nl.ndarray((1, 8), nl.uint32)
        nisa.nc_match_replace8(out, load(x), load(v), -1.0, dst_idx=index)
        return store(out), store(index)

    out, index = run(kernel, data, values)
    np.testing.assert_array_equal(index, [[2, 10, 9, 8, 7, 6, 5, 4]])
    np.testing.assert_array_equal(out, [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]])


def test_topk_reads_the_snake_and_is_ascending():
    # 16 partitions, element e in partition e % 16, column e // 16; 20 elements with values 0..19, shuffled by 7.
    values = (np.arange(32) * 7 % 20).astype(np.float32)
    values[20:] = 1000  # beyond n
    snake = values.reshape(2, 16).T.astype(ml_dtypes.bfloat16)

    def kernel(x):
        top, index = nl.ndarray((16, 3), nl.bfloat16), nl.ndarray((16, 3), nl.uint32)
        nisa.topk(top, index, load(x), n=20)
        return store(top), store(index)

    top, index = run(kernel, snake)
    np.testing.assert_array_equal(top[0].astype(np.float32), [17, 18, 19])
    np.testing.assert_array_equal(values[index[0]], [17, 18, 19])


def test_nonzero_with_count():
    # The example of the documentation.
    source = rows([0, 1, 1, 0, 0, 1, 0, 0])
    out = apply(lambda d, t: nisa.nonzero_with_count(d, t, index_offset=16, padding_val=-1), (1, 9), nl.int32, source)
    np.testing.assert_array_equal(out, [[17, 18, 21, -1, -1, -1, -1, -1, 3]])


def test_nonzero_with_count_writes_one_partition_in_16():
    out = apply(nisa.nonzero_with_count, (17, 3), nl.int32, np.ones((17, 2), np.float32))
    np.testing.assert_array_equal(out[[0, 16]], [[0, 1, 2], [0, 1, 2]])
    assert (out[1:16] == 4).all()  # not written


def test_nc_stream_shuffle_moves_partitions_and_leaves_255():
    def shuffle(dst, old, new):
        nisa.tensor_copy(dst, old)
        nisa.nc_stream_shuffle(dst, new, [1, 0, 255, *[31] * 29])

    old = np.full((64, 1), -1, np.float32)
    out = apply(shuffle, (64, 1), nl.float32, old, np.arange(64, dtype=np.float32).reshape(64, 1))
    np.testing.assert_array_equal(out[:4, 0], [1, 0, -1, 31])
    np.testing.assert_array_equal(out[32:36, 0], [33, 32, -1, 63])


def test_nc_n_gather_works_inside_a_partition():
    data, index = rows([10, 11, 12], [20, 21, 22]), rows([2, 0, 2], [1, 1, 0], dtype=np.uint32)
    np.testing.assert_array_equal(
        apply(nisa.nc_n_gather, (2, 3), nl.float32, data, index), [[12, 10, 12], [21, 21, 20]]
    )


def test_local_gather_shares_one_index_list_per_16_partitions():
    data = np.arange(32 * 40, dtype=np.float32).reshape(32, 40)
    index = np.zeros((32, 2), np.uint16)
    index[:16] = np.arange(32).reshape(2, 16).T  # read partition first: 0, 1, 2, ... 31
    index[16:] = 39
    out = apply(nisa.local_gather, (32, 32), nl.float32, data, index)
    np.testing.assert_array_equal(out[3], data[3, :32])
    np.testing.assert_array_equal(out[20], np.full(32, data[20, 39]))


def test_local_gather_takes_groups_of_elements():
    data = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    index = np.zeros((16, 1), np.uint16)
    index[:2, 0] = 6, 2  # counted in elements, also where each fetches two
    gather = lambda d, s, i: nisa.local_gather(d, s, i, num_elem_per_idx=2, num_valid_indices=2)  # noqa: E731
    out = apply(gather, (16, 4), nl.float32, data, index)
    np.testing.assert_array_equal(out, data[:, [6, 7, 2, 3]])


def test_sequence_bounds():
    out = apply(nisa.sequence_bounds, (1, 2, 5), nl.int32, rows([0, 1, 1, 2, 0], dtype=np.int32))
    np.testing.assert_array_equal(out, [[[5, 1, 1, 3, 5], [-1, 3, 3, 4, -1]]])
