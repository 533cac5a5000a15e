"""NKI kernels of grouped SwiGLU experts for Trainium2: forward, input gradient, weight gradients.

Shape suffixes: R rows sorted by expert, D model dimension, F hidden dimension, E experts, N blocks, S rows of a
block; on chip P = 128 partitions, T tokens (rows) of a tile, at most 128, K tiles of 128 of a contracted dimension, C
columns.

Blocks. The plan (`torchtitan_qwen3_trn.kernels.experts.block_plan`) says which rows a block holds and which blocks an
expert owns. Loops over experts are unrolled; the loop over an expert's blocks, or its tiles of 128 rows, runs on the
device with bounds read from the plan, so the time follows the tokens, shapes stay static, and the host never waits.
Rows are gathered and scattered by index; slots without a row (-1) are skipped by the DMA engines.

Two cores. Both work on every expert: what is F wide is split by F between them, what is D wide by D. Each weight is
read once, the split does not depend on routing, and every element is computed by the same instructions in the same
order on one core as on two, so results are bit-identical. Between the F-wide and the D-wide half the cores meet at a
barrier.

Forward streams weights through the Tensor Engine against stationary rows, so W1, W3 and W2 are needed with the
contracted dimension on partitions: their transposes, made by DMA on the way in (in float32 on the Tensor Engine). The
gradients contract the other dimension and take the weights as they lie.

Written for the language subset of nki 0.6; imported only where `nki` is.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.nki_rope import bytes_of

__all__ = ["experts_input_gradient_kernel", "experts_kernel", "experts_weight_gradients_kernel"]

TILE = 128
"""Partitions; rows of a tile."""
MOVING = 512
"""Columns a matmul streams, and float32 elements of a PSUM bank."""
BANK_BYTES = 2048
WEIGHT_BUDGET = 128 * 1024
"""Bytes per partition for the weights of two experts, the one at work and the next. Wider weights are worked on in
parts, with a pass over the rows for each."""
ACCUMULATOR_BUDGET = 120 * 1024
"""Bytes per partition for the weight gradients of one expert: float32 sums, and their copy in the weights' dtype."""


@nki.jit
def experts_kernel(x_RD, w1_EFD, w2_EDF, w3_EFD, counts_E, first_block_E2, row_NS):
    """y = (silu(x W1^T) * (x W3^T)) W2^T, each row with the weights of its expert.

    Args:
        x_RD: rows in HBM, float32 or bfloat16.
        w1_EFD: gate projections, dtype of ``x_RD``; D and F are multiples of 128.
        w2_EDF: down projections.
        w3_EFD: up projections.
        counts_E: int32; rows of each expert.
        first_block_E2: int32 (E + 2,); expert e owns blocks first_block_E2[e] to first_block_E2[e + 1], of which only
            tiles of 128 with rows are worked on; the last pair bounds the blocks of rows without expert.
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

    # Weights of the next expert are requested before the rows of this one are worked on.
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
        g_RF: second result of `experts_kernel`.
        u_RF: third result of `experts_kernel`.
        w1_EFD: as given to `experts_kernel`, as the rest.
        w2_EDF: likewise.
        w3_EFD: likewise.
        counts_E: likewise.
        first_block_E2: likewise.
        row_NS: likewise.

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
    tiles = hidden // TILE

    def tile(i):
        index = load_index(row_NT, i, 0)
        dg_PKT = transpose(gather(dg_RF, index, 0, hidden))
        du_PKT = transpose(gather(du_RF, index, 0, hidden))
        dx_TC = nl.ndarray((TILE, columns), dtype=dx_RD.dtype, buffer=nl.sbuf)
        for part in chunks(columns, MOVING):
            start, stop = part
            total = nl.ndarray((TILE, stop - start), dtype=nl.float32, buffer=nl.psum)
            for k in range(tiles):
                nisa.nc_matmul(dst=total, stationary=dg_PKT[:, k, :], moving=w1_PKC[:, k, start:stop], accumulate=k > 0)
            for k in range(tiles):
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
        h_RF: fourth result of `experts_input_gradient_kernel`.
        dg_RF: its second result.
        du_RF: its third result.
        counts_E: int32; rows of each expert.
        first_block_E2: as given to `experts_kernel`; every expert owns at least one block.
        row_NS: likewise. S = 256 amortises emptying PSUM; other multiples of 128 work.

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
            start, stop = part
            sums = sum_weight_gradients(
                dy_RD, x_RD, h_RF, dg_RF, du_RF, row_NS, bounds, expert, d_start + start, stop - start
            )
            first, past = d_start + start, d_start + stop
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
    """sums (+)= left^T right over a block's tiles; the first block is copied by ``engine``, others are added."""
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


def columns_that_fit(hidden):
    """Columns of D whose three float32 sums, and their rounded copies, stay within `ACCUMULATOR_BUDGET`."""
    per_column = 3 * (hidden // TILE) * (4 + 2)
    return max(TILE, ACCUMULATOR_BUDGET // per_column // TILE * TILE)


def weight_columns_that_fit(matrices, contracted, dtype):
    """Columns of ``matrices`` weights, for two experts at a time, that stay within `WEIGHT_BUDGET`."""
    per_column = 2 * matrices * (contracted // TILE) * bytes_of(dtype)
    return max(TILE, WEIGHT_BUDGET // per_column // TILE * TILE)


def new_tiles(rows, columns):
    """Uninitialised float32 tiles that hold a (rows, columns) matrix."""
    tiles = []
    for part in chunks(rows, TILE):
        start, stop = part
        tiles.append(nl.ndarray((stop - start, columns), dtype=nl.float32, buffer=nl.sbuf))
    return tiles


def store_tiles(target, tiles, engine):
    """Round tiles to the dtype of ``target`` on the given engine and write them, one after the other, to its rows."""
    for i in range(len(tiles)):
        rounded = nl.ndarray(tiles[i].shape, dtype=target.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rounded, src=tiles[i], engine=engine)
        nisa.dma_copy(dst=target[i * TILE : i * TILE + tiles[i].shape[0], :], src=rounded)


def share_of_core(size):
    """The part of a dimension that belongs to this core: all, or one of two halves."""
    share = size // nl.num_programs()
    return nl.program_id(0) * share, (nl.program_id(0) + 1) * share


def chunks(size, largest):
    """Ranges of at most ``largest`` that cover ``size``, as (start, stop)."""
    ranges = []
    for start in range(0, size, largest):
        ranges.append((start, min(start + largest, size)))
    return ranges


def in_tiles(row_NS):
    """The plan's rows, a tile of 128 slots per row: (N S / 128, 128)."""
    return row_NS.reshape((row_NS.shape[0] * row_NS.shape[1] // TILE, TILE))


def tile_bounds(counts_E, first_block_E2, row_NS):
    """Each expert's first tile and the one past its last with rows, (1, E + 1) int32 in SBUF.

    The last entries bound the tiles of rows without expert.
    """
    num_experts = counts_E.shape[0]
    tiles_per_block = row_NS.shape[1] // TILE
    block_12 = load_int32(first_block_E2)
    count_1E = load_int32(counts_E)
    first = nl.ndarray((1, num_experts + 1), dtype=nl.int32, buffer=nl.sbuf)
    past = nl.ndarray((1, num_experts + 1), dtype=nl.int32, buffer=nl.sbuf)
    blocks = num_experts + 1
    nisa.tensor_scalar(dst=first, data=block_12[:, :blocks], op0=nl.multiply, operand0=float(tiles_per_block))
    nisa.tensor_scalar(
        dst=past[:, num_experts:], data=block_12[:, blocks:], op0=nl.multiply, operand0=float(tiles_per_block)
    )
    # Tiles of an expert: counts / 128, rounded up.
    nisa.tensor_scalar(dst=count_1E, data=count_1E, op0=nl.add, operand0=float(TILE - 1))
    nisa.tensor_scalar(dst=count_1E, data=count_1E, op0=nl.right_shift, operand0=7)
    nisa.tensor_tensor(dst=past[:, :num_experts], data1=first[:, :num_experts], data2=count_1E, op=nl.add)
    return first, past


def block_bounds(first_block_E2):
    """Each expert's first block, and the one after that, (1, E + 2) int32 in SBUF."""
    first = load_int32(first_block_E2)
    second = nl.ndarray(first.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=second, data=first, op0=nl.add, operand0=1.0)
    return first, second


def load_int32(vector):
    """A vector in HBM as one row in SBUF."""
    row = nl.ndarray((1, vector.shape[0]), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=row, src=vector.reshape((1, vector.shape[0])))
    return row


def over_tiles(bounds, expert, body):
    """Run ``body(tile)`` on the device for each tile of an expert."""
    first, past = nisa.register_alloc(), nisa.register_alloc()
    nisa.register_load(first, bounds[0][:, expert : expert + 1])
    nisa.register_load(past, bounds[1][:, expert : expert + 1])
    nl.fori_loop(first, past, body)


def load_index(row_NS, block, tile):
    """Rows of one tile of a block, one per partition, (T, 1) int32."""
    index_T1 = nl.ndarray((TILE, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=index_T1,
        src=row_NS.ap(pattern=[[1, TILE], [1, 1]], offset=tile * TILE, scalar_offset=block, indirect_dim=0),
    )
    return index_T1


def rows_at(tensor, index_T1, start, width):
    """``width`` columns from ``start`` on of the indexed rows of a matrix in HBM."""
    return tensor.ap(
        pattern=[[tensor.shape[1], TILE], [1, width]], offset=start, vector_offset=index_T1, indirect_dim=0
    )


def gather(source, index_T1, start, width):
    """Indexed rows in a new tile, (T, width); free slots hold anything."""
    tile = nl.ndarray((TILE, width), dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows_at(source, index_T1, start, width), oob_mode=nisa.oob_mode.skip)
    return tile


def gather_or_zero(source, index_T1, start, width):
    """Indexed rows in a new tile, (T, width); zeros in free slots."""
    tile = nl.ndarray((TILE, width), dtype=source.dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=tile, src=rows_at(source, index_T1, start, width), oob_mode=nisa.oob_mode.skip)
    return tile


def scatter(target, index_T1, tile, start):
    """Write a tile to the indexed rows of a matrix in HBM, from column ``start`` on; free slots are not written."""
    nisa.dma_copy(dst=rows_at(target, index_T1, start, tile.shape[1]), src=tile, oob_mode=nisa.oob_mode.skip)


def tile_of(h_NTF, tile, start, width, hidden):
    """``width`` columns from ``start`` on of one tile in a buffer laid out by tiles."""
    return h_NTF.ap(pattern=[[hidden, TILE], [1, width]], offset=start, scalar_offset=tile, indirect_dim=0)


def write_zeros(target, row_NT, bounds, num_experts, start, stop):
    """Zeros in columns ``start`` to ``stop`` of the rows without expert."""
    zeros_TC = nl.ndarray((TILE, stop - start), dtype=target.dtype, buffer=nl.sbuf)
    nisa.memset(dst=zeros_TC, value=0.0)

    def tile(i):
        scatter(target, load_index(row_NT, i, 0), zeros_TC, start)

    over_tiles(bounds, num_experts, tile)


def load_as_is(weight):
    """A (rows, columns) weight in HBM as (P, K, columns): rows, the contracted dimension, on partitions."""
    rows, columns = weight.shape
    tile_PKC = nl.ndarray((TILE, rows // TILE, columns), dtype=weight.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_PKC, src=weight.reshape_dim(0, (rows // TILE, TILE)).permute((1, 0, 2)))
    return tile_PKC


def load_transposed(weight):
    """A (rows, columns) weight in HBM as (P, K, rows): columns, the contracted dimension, on partitions."""
    rows, columns = weight.shape
    tile_PKC = nl.ndarray((TILE, columns // TILE, rows), dtype=weight.dtype, buffer=nl.sbuf)
    if weight.dtype != nl.float32:
        nisa.dma_transpose(dst=tile_PKC, src=weight.reshape_dim(1, (columns // TILE, TILE)), axes=(2, 1, 0))
        return tile_PKC
    for part in chunks(rows, TILE):
        start, stop = part
        rows_TC = nl.ndarray((stop - start, columns), dtype=weight.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows_TC, src=weight[start:stop, :])
        transpose_into(tile_PKC, rows_TC, start)
    return tile_PKC


def transpose(x_TD):
    """A tile of rows in SBUF as (P, K, T): columns on partitions."""
    rows, columns = x_TD.shape
    x_PKT = nl.ndarray((TILE, columns // TILE, rows), dtype=x_TD.dtype, buffer=nl.sbuf)
    transpose_into(x_PKT, x_TD, 0)
    return x_PKT


def transpose_into(x_PKT, x_TD, start):
    """Transpose rows on the Tensor Engine into columns ``start`` on of every K; one copy empties a PSUM bank."""
    rows, columns = x_TD.shape
    per_bank = BANK_BYTES // (TILE * bytes_of(x_TD.dtype))
    for part in chunks(columns // TILE, per_bank):
        first, past = part
        bank = nl.ndarray((TILE, past - first, rows), dtype=x_TD.dtype, buffer=nl.psum)
        for k in range(first, past):
            nisa.nc_transpose(
                dst=bank[:, k - first, :], data=x_TD[:, k * TILE : (k + 1) * TILE], engine=nisa.engine.tensor
            )
        nisa.tensor_copy(dst=x_PKT[:, first:past, start : start + rows], src=bank, engine=nisa.engine.vector)


def multiply_tiles(x_PKT, w_PKC, start, stop):
    """x W for columns ``start`` to ``stop`` of W, contracted over K and P, in a new PSUM bank."""
    product = nl.ndarray((x_PKT.shape[2], stop - start), dtype=nl.float32, buffer=nl.psum)
    for k in range(x_PKT.shape[1]):
        nisa.nc_matmul(dst=product, stationary=x_PKT[:, k, :], moving=w_PKC[:, k, start:stop], accumulate=k > 0)
    return product


def meet_other_core(data):
    """Wait until both cores have written their part of ``data``."""
    if nl.num_programs() == 2:
        nisa.core_barrier(data=data, cores=(0, 1))
