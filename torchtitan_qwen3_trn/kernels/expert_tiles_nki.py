"""Helpers of the experts' kernels: the work of each core, the tiles of an expert, loading and storing rows and weights.

Shape suffixes are those of `experts_nki`. Written for the language subset of nki 0.6; imported only where `nki` is.
"""

import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.rope_nki import bytes_of

TILE = 128
"""Partitions; rows of a tile."""
MOVING = 512
"""Most moving columns of a matmul, and float32 elements of a PSUM bank."""
BANK_BYTES = 2048
WEIGHT_BUDGET = 128 * 1024
"""Bytes per partition for the weights of two experts, the current and the next. Wider weights are processed in parts,
with one pass over the rows for each."""
ACCUMULATOR_BUDGET = 120 * 1024
"""Bytes per partition for the weight gradients of one expert: float32 sums, and their copy in the weights' dtype."""


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
    """The part of a dimension that this core computes, all or one half, as (start, stop)."""
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
    """Each expert's first tile, and the tile after its last one that has rows: two (1, E + 1) int32 rows in SBUF.

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
    """Indexed rows in a new tile, (T, width); unused slots are undefined."""
    tile = nl.ndarray((TILE, width), dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows_at(source, index_T1, start, width), oob_mode=nisa.oob_mode.skip)
    return tile


def gather_or_zero(source, index_T1, start, width):
    """Indexed rows in a new tile, (T, width); zeros in unused slots."""
    tile = nl.ndarray((TILE, width), dtype=source.dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=tile, src=rows_at(source, index_T1, start, width), oob_mode=nisa.oob_mode.skip)
    return tile


def scatter(target, index_T1, tile, start):
    """Write a tile to the indexed rows of a matrix in HBM, from column ``start`` on; unused slots are not written."""
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
    """Transpose rows on the Tensor Engine into columns ``start`` on of every K, with one copy from each PSUM bank."""
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
