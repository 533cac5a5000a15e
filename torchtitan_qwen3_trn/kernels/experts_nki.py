"""NKI kernels of grouped SwiGLU experts for Trainium2: forward, input gradient, weight gradients.

Shape suffixes: R rows sorted by expert, D model dimension, F hidden dimension, E experts, N blocks, S rows of a
block; on chip P = 128 partitions, T tokens (rows) of a tile, at most 128, K tiles of 128 of a contracted dimension, C
columns.

Blocks. The plan (`torchtitan_qwen3_trn.kernels.experts.block_plan`) says which rows a block holds and which blocks an
expert owns. Loops over experts are unrolled; the loop over an expert's blocks, or its tiles of 128 rows, runs on the
device with bounds read from the plan, so run time grows with the tokens, shapes are static, and the host never waits.
Rows are gathered and scattered by index; slots without a row (-1) are skipped by the DMA engines.

Two cores. Both work on every expert. Results of width F are split along F between them, results of width D along D.
Each weight is read once, the split does not depend on routing, and every element is computed by the same instructions
in the same order on one core and on two, so results are bit-identical. A barrier separates the two phases.

Forward streams weights through the Tensor Engine against stationary rows, so W1, W3 and W2 are needed with the
contracted dimension on partitions. DMA transposes them while loading (in float32 the Tensor Engine does). The gradients
contract the other dimension and use the weights without transposing.

Written for the language subset of nki 0.6; imported only where `nki` is.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.expert_tiles_nki import (
    MOVING,
    TILE,
    block_bounds,
    chunks,
    columns_that_fit,
    gather,
    gather_or_zero,
    in_tiles,
    load_as_is,
    load_index,
    load_transposed,
    meet_other_core,
    multiply_tiles,
    new_tiles,
    over_tiles,
    scatter,
    share_of_core,
    store_tiles,
    tile_bounds,
    tile_of,
    transpose,
    weight_columns_that_fit,
    write_zeros,
)


@nki.jit
def experts_kernel(x_RD, w1_EFD, w2_EDF, w3_EFD, counts_E, first_block_E2, row_NS):
    """y = (silu(x W1^T) * (x W3^T)) W2^T, each row with the weights of its expert.

    Args:
        x_RD: rows in HBM, float32 or bfloat16.
        w1_EFD, w2_EDF, w3_EFD: gate, down and up projections, dtype of ``x_RD``; D and F are multiples of 128.
        counts_E: int32; rows of each expert.
        first_block_E2: int32 (E + 2,); expert e owns blocks first_block_E2[e] to first_block_E2[e + 1], of which only
            tiles of 128 with rows are processed; the last pair bounds the blocks of rows without expert.
        row_NS: int32; row in each slot of each block, ascending, then -1; S a multiple of 128.

    Returns:
        ``y_RD`` with zeros in rows without expert, and g = x W1^T and u = x W3^T, ``(R, F)``, unwritten in those rows.
    """
    rows, dim = x_RD.shape
    num_experts, hidden = w1_EFD.shape[0], w1_EFD.shape[1]
    y_RD = nl.ndarray((rows, dim), dtype=x_RD.dtype, buffer=nl.shared_hbm, name="y")
    g_RF = nl.ndarray((rows, hidden), dtype=x_RD.dtype, buffer=nl.shared_hbm, name="g")
    u_RF = nl.ndarray((rows, hidden), dtype=x_RD.dtype, buffer=nl.shared_hbm, name="u")
    row_NT = in_tiles(row_NS)
    h_NTF = nl.ndarray((row_NT.shape[0], TILE, hidden), dtype=x_RD.dtype, buffer=nl.shared_hbm, name="h")
    bounds = tile_bounds(counts_E, first_block_E2, row_NS)
    f_start, f_stop = share_of_core(hidden)
    d_start, d_stop = share_of_core(dim)

    # Load the weights of the next expert before processing the rows of this one.
    for part in chunks(f_stop - f_start, weight_columns_that_fit(2, dim, x_RD.dtype)):
        start, stop = f_start + part[0], f_start + part[1]
        w1, w3 = load_transposed(w1_EFD[0, start:stop, :]), load_transposed(w3_EFD[0, start:stop, :])
        for expert in range(num_experts):
            w1_now, w3_now = w1, w3
            if expert + 1 < num_experts:
                w1 = load_transposed(w1_EFD[expert + 1, start:stop, :])
                w3 = load_transposed(w3_EFD[expert + 1, start:stop, :])
            gate_and_up(x_RD, w1_now, w3_now, g_RF, u_RF, h_NTF, row_NT, bounds, expert, start)
    meet_other_core(h_NTF)
    for part in chunks(d_stop - d_start, weight_columns_that_fit(1, hidden, x_RD.dtype)):
        start, stop = d_start + part[0], d_start + part[1]
        w2 = load_transposed(w2_EDF[0, start:stop, :])
        for expert in range(num_experts):
            w2_now = w2
            if expert + 1 < num_experts:
                w2 = load_transposed(w2_EDF[expert + 1, start:stop, :])
            down(h_NTF, w2_now, y_RD, row_NT, bounds, expert, start)
    write_zeros(y_RD, row_NT, bounds, num_experts, d_start, d_stop)
    return y_RD, g_RF, u_RF


def gate_and_up(x_RD, w1_PKC, w3_PKC, g_RF, u_RF, h_NTF, row_NT, bounds, expert, f_start):
    """g, u and silu(g) u of this core's columns, for every tile of one expert."""
    dim, columns = x_RD.shape[1], w1_PKC.shape[2]
    hidden = g_RF.shape[1]

    def tile(i):
        index = load_index(row_NT, i, 0)
        x_TD = gather(x_RD, index, 0, dim)
        x_PKT = transpose(x_TD)
        for part in chunks(columns, MOVING):
            start, stop = part
            width = stop - start
            gate = multiply_tiles(x_PKT, w1_PKC, start, stop)
            up = multiply_tiles(x_PKT, w3_PKC, start, stop)
            g_TC = nl.ndarray((TILE, width), dtype=x_RD.dtype, buffer=nl.sbuf)
            u_TC = nl.ndarray((TILE, width), dtype=x_RD.dtype, buffer=nl.sbuf)
            silu_TC = nl.ndarray((TILE, width), dtype=nl.float32, buffer=nl.sbuf)
            h_TC = nl.ndarray((TILE, width), dtype=x_RD.dtype, buffer=nl.sbuf)
            nisa.activation(dst=g_TC, op=nl.copy, data=gate)
            nisa.tensor_copy(dst=u_TC, src=up, engine=nisa.engine.vector)
            nisa.activation(dst=silu_TC, op=nl.silu, data=g_TC)
            nisa.tensor_tensor(dst=h_TC, data1=silu_TC, data2=u_TC, op=nl.multiply)
            scatter(g_RF, index, g_TC, f_start + start)
            scatter(u_RF, index, u_TC, f_start + start)
            nisa.dma_copy(dst=tile_of(h_NTF, i, f_start + start, width, hidden), src=h_TC)

    over_tiles(bounds, expert, tile)


def down(h_NTF, w2_PKC, y_RD, row_NT, bounds, expert, d_start):
    """y of this core's columns, for every tile of one expert."""
    hidden, columns = h_NTF.shape[2], w2_PKC.shape[2]

    def tile(i):
        index = load_index(row_NT, i, 0)
        h_TF = nl.ndarray((TILE, hidden), dtype=h_NTF.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=h_TF, src=tile_of(h_NTF, i, 0, hidden, hidden))
        h_PKT = transpose(h_TF)
        y_TC = nl.ndarray((TILE, columns), dtype=y_RD.dtype, buffer=nl.sbuf)
        for part in chunks(columns, MOVING):
            start, stop = part
            nisa.activation(dst=y_TC[:, start:stop], op=nl.copy, data=multiply_tiles(h_PKT, w2_PKC, start, stop))
        scatter(y_RD, index, y_TC, d_start)

    over_tiles(bounds, expert, tile)


@nki.jit
def experts_input_gradient_kernel(dy_RD, g_RF, u_RF, w1_EFD, w2_EDF, w3_EFD, counts_E, first_block_E2, row_NS):
    """Gradient of the rows, and the operands of the weights' gradients.

    Args:
        dy_RD: gradient of the outputs in HBM.
        g_RF, u_RF: second and third result of `experts_kernel`.
        w1_EFD, w2_EDF, w3_EFD, counts_E, first_block_E2, row_NS: as given to `experts_kernel`.

    Returns:
        ``dx_RD`` with zeros in rows without expert; gradients of g and u and the recomputed h = silu(g) u, ``(R, F)``,
        unwritten in those rows.
    """
    rows, dim = dy_RD.shape
    num_experts, hidden = w1_EFD.shape[0], w1_EFD.shape[1]
    dx_RD = nl.ndarray((rows, dim), dtype=dy_RD.dtype, buffer=nl.shared_hbm, name="dx")
    dg_RF = nl.ndarray((rows, hidden), dtype=dy_RD.dtype, buffer=nl.shared_hbm, name="dg")
    du_RF = nl.ndarray((rows, hidden), dtype=dy_RD.dtype, buffer=nl.shared_hbm, name="du")
    h_RF = nl.ndarray((rows, hidden), dtype=dy_RD.dtype, buffer=nl.shared_hbm, name="h")
    row_NT = in_tiles(row_NS)
    bounds = tile_bounds(counts_E, first_block_E2, row_NS)
    f_start, f_stop = share_of_core(hidden)
    d_start, d_stop = share_of_core(dim)

    for part in chunks(f_stop - f_start, weight_columns_that_fit(1, dim, dy_RD.dtype)):
        start, stop = f_start + part[0], f_start + part[1]
        w2 = load_as_is(w2_EDF[0, :, start:stop])
        for expert in range(num_experts):
            w2_now = w2
            if expert + 1 < num_experts:
                w2 = load_as_is(w2_EDF[expert + 1, :, start:stop])
            gate_and_up_backward(dy_RD, g_RF, u_RF, w2_now, dg_RF, du_RF, h_RF, row_NT, bounds, expert, start)
    meet_other_core(dg_RF)
    meet_other_core(du_RF)
    for part in chunks(d_stop - d_start, weight_columns_that_fit(2, hidden, dy_RD.dtype)):
        start, stop = d_start + part[0], d_start + part[1]
        w1, w3 = load_as_is(w1_EFD[0, :, start:stop]), load_as_is(w3_EFD[0, :, start:stop])
        for expert in range(num_experts):
            w1_now, w3_now = w1, w3
            if expert + 1 < num_experts:
                w1 = load_as_is(w1_EFD[expert + 1, :, start:stop])
                w3 = load_as_is(w3_EFD[expert + 1, :, start:stop])
            input_gradient(dg_RF, du_RF, w1_now, w3_now, dx_RD, row_NT, bounds, expert, start)
    write_zeros(dx_RD, row_NT, bounds, num_experts, d_start, d_stop)
    return dx_RD, dg_RF, du_RF, h_RF


def gate_and_up_backward(dy_RD, g_RF, u_RF, w2_PKC, dg_RF, du_RF, h_RF, row_NT, bounds, expert, f_start):
    """dg, du and h of this core's columns, for every tile of one expert."""
    dim, columns = dy_RD.shape[1], w2_PKC.shape[2]

    def tile(i):
        index = load_index(row_NT, i, 0)
        dy_TD = gather(dy_RD, index, 0, dim)
        dy_PKT = transpose(dy_TD)
        for part in chunks(columns, MOVING):
            start, stop = part
            width = stop - start
            g_TC = gather(g_RF, index, f_start + start, width)
            u_TC = gather(u_RF, index, f_start + start, width)
            dh_TC = multiply_tiles(dy_PKT, w2_PKC, start, stop)
            silu_TC = nl.ndarray((TILE, width), dtype=nl.float32, buffer=nl.sbuf)
            slope_TC = nl.ndarray((TILE, width), dtype=nl.float32, buffer=nl.sbuf)
            dh_u_TC = nl.ndarray((TILE, width), dtype=nl.float32, buffer=nl.sbuf)
            h_TC = nl.ndarray((TILE, width), dtype=dy_RD.dtype, buffer=nl.sbuf)
            du_TC = nl.ndarray((TILE, width), dtype=dy_RD.dtype, buffer=nl.sbuf)
            dg_TC = nl.ndarray((TILE, width), dtype=dy_RD.dtype, buffer=nl.sbuf)
            nisa.activation(dst=silu_TC, op=nl.silu, data=g_TC)
            nisa.activation(dst=slope_TC, op=nl.silu_dx, data=g_TC)
            nisa.tensor_tensor(dst=h_TC, data1=silu_TC, data2=u_TC, op=nl.multiply)
            nisa.tensor_tensor(dst=du_TC, data1=dh_TC, data2=silu_TC, op=nl.multiply)
            nisa.tensor_tensor(dst=dh_u_TC, data1=dh_TC, data2=u_TC, op=nl.multiply)
            nisa.tensor_tensor(dst=dg_TC, data1=dh_u_TC, data2=slope_TC, op=nl.multiply)
            scatter(h_RF, index, h_TC, f_start + start)
            scatter(du_RF, index, du_TC, f_start + start)
            scatter(dg_RF, index, dg_TC, f_start + start)

    over_tiles(bounds, expert, tile)


def input_gradient(dg_RF, du_RF, w1_PKC, w3_PKC, dx_RD, row_NT, bounds, expert, d_start):
    """dx = dg W1 + du W3 of this core's columns, for every tile of one expert."""
    hidden, columns = dg_RF.shape[1], w1_PKC.shape[2]

    def tile(i):
        index = load_index(row_NT, i, 0)
        dg_PKT = transpose(gather(dg_RF, index, 0, hidden))
        du_PKT = transpose(gather(du_RF, index, 0, hidden))
        dx_TC = nl.ndarray((TILE, columns), dtype=dx_RD.dtype, buffer=nl.sbuf)
        for part in chunks(columns, MOVING):
            start, stop = part
            total = multiply_tiles(dg_PKT, w1_PKC, start, stop)
            for k in range(hidden // TILE):
                nisa.nc_matmul(dst=total, stationary=du_PKT[:, k, :], moving=w3_PKC[:, k, start:stop], accumulate=True)
            nisa.activation(dst=dx_TC[:, start:stop], op=nl.copy, data=total)
        scatter(dx_RD, index, dx_TC, d_start)

    over_tiles(bounds, expert, tile)


@nki.jit
def experts_weight_gradients_kernel(dy_RD, x_RD, h_RF, dg_RF, du_RF, counts_E, first_block_E2, row_NS):
    """dW1 = dg^T x, dW2 = dy^T h, dW3 = du^T x over the rows of each expert.

    A block is summed in PSUM, blocks are summed in SBUF, both in float32; the result is rounded once.

    Args:
        dy_RD: gradient of the outputs in HBM.
        x_RD: rows as given to `experts_kernel`.
        h_RF, dg_RF, du_RF: fourth, second and third result of `experts_input_gradient_kernel`.
        counts_E, first_block_E2, row_NS: as given to `experts_kernel`; every expert owns at least one block. With
            S = 256 fewer sums leave PSUM; other multiples of 128 work too.

    Returns:
        ``dw1_EFD``, ``dw2_EDF``, ``dw3_EFD`` in the dtype of ``x_RD``.
    """
    dim, hidden = x_RD.shape[1], h_RF.shape[1]
    num_experts = counts_E.shape[0]
    dw1_EFD = nl.ndarray((num_experts, hidden, dim), dtype=x_RD.dtype, buffer=nl.shared_hbm, name="dw1")
    dw2_EDF = nl.ndarray((num_experts, dim, hidden), dtype=x_RD.dtype, buffer=nl.shared_hbm, name="dw2")
    dw3_EFD = nl.ndarray((num_experts, hidden, dim), dtype=x_RD.dtype, buffer=nl.shared_hbm, name="dw3")
    bounds = block_bounds(first_block_E2)
    d_start, d_stop = share_of_core(dim)
    for expert in range(num_experts):
        for part in chunks(d_stop - d_start, columns_that_fit(hidden)):
            first, past = d_start + part[0], d_start + part[1]
            sums = sum_weight_gradients(dy_RD, x_RD, h_RF, dg_RF, du_RF, row_NS, bounds, expert, first, past - first)
            store_tiles(dw1_EFD[expert, :, first:past], sums[0], nisa.engine.scalar)
            store_tiles(dw2_EDF[expert, first:past, :], sums[1], nisa.engine.gpsimd)
            store_tiles(dw3_EFD[expert, :, first:past], sums[2], nisa.engine.scalar)
    return dw1_EFD, dw2_EDF, dw3_EFD


def sum_weight_gradients(dy_RD, x_RD, h_RF, dg_RF, du_RF, row_NS, bounds, expert, d_start, width):
    """Float32 sums over the rows of one expert for ``width`` of its D, each gradient as a list of tiles of 128 rows."""
    hidden = h_RF.shape[1]
    dw1 = new_tiles(hidden, width)
    dw2 = new_tiles(width, hidden)
    dw3 = new_tiles(hidden, width)

    def add_block(i, first):
        dy, x, h, dg, du = [], [], [], [], []
        for tile in range(row_NS.shape[1] // TILE):
            index = load_index(row_NS, i, tile)
            dy.append(gather_or_zero(dy_RD, index, d_start, width))
            x.append(gather_or_zero(x_RD, index, d_start, width))
            h.append(gather_or_zero(h_RF, index, 0, hidden))
            dg.append(gather_or_zero(dg_RF, index, 0, hidden))
            du.append(gather_or_zero(du_RF, index, 0, hidden))
        add_products(dw1, dg, x, first, nisa.engine.vector)
        add_products(dw2, dy, h, first, nisa.engine.scalar)
        add_products(dw3, du, x, first, nisa.engine.vector)

    def first_block(i):
        add_block(i, True)

    def other_block(i):
        add_block(i, False)

    first, second, last = nisa.register_alloc(), nisa.register_alloc(), nisa.register_alloc()
    nisa.register_load(first, bounds[0][:, expert : expert + 1])
    nisa.register_load(second, bounds[1][:, expert : expert + 1])
    nisa.register_load(last, bounds[0][:, expert + 1 : expert + 2])
    nl.fori_loop(first, second, first_block)
    nl.fori_loop(second, last, other_block)
    return dw1, dw2, dw3


def add_products(sums, left, right, first, engine):
    """sums (+)= left^T right over a block's tiles; the first block is copied by ``engine``, the others are added."""
    for tile in range(len(sums)):
        for part in chunks(sums[tile].shape[1], MOVING):
            start, stop = part
            product = nl.ndarray((sums[tile].shape[0], stop - start), dtype=nl.float32, buffer=nl.psum)
            for t in range(len(left)):
                columns = left[t][:, tile * TILE : tile * TILE + sums[tile].shape[0]]
                nisa.nc_matmul(dst=product, stationary=columns, moving=right[t][:, start:stop], accumulate=t > 0)
            total = sums[tile][:, start:stop]
            if first:
                nisa.tensor_copy(dst=total, src=product, engine=engine)
            else:
                nisa.tensor_tensor(dst=total, data1=total, data2=product, op=nl.add)
