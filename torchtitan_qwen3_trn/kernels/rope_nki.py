"""NKI kernels of `rope` and its gradient, for Trainium2.

Shape suffixes: B batch, b = B or 1, L sequence, N query heads, M key heads, H head dimension, E = H / 2 frequencies;
on chip P = 128 partitions, J positions of a partition, G heads of one instruction.

Layout. A partition holds J consecutive positions with all their heads, in the order of memory: every transfer moves J
N H or J M H contiguous elements per partition, and nothing is transposed. A block is 128 J positions. Cores take
consecutive blocks; which positions a block holds does not depend on the number of cores.

Time. Per head and position the rotation takes three passes over H elements: a product with the cosines, one with the
sines, and the sums. A pass of tensor_tensor over N elements costs N cycles with one operand in PSUM and 2 N with both
in SBUF, so the Vector Engine reads its tables, and one of each two products, from PSUM. GpSimd, which cannot reach
PSUM, rotates the remaining heads at the same time from SBUF; `GPSIMD_SHARE` balances 3 passes of N cycles at 0.96 GHz
against 3 passes of 2 N at 1.2 GHz.

Numbers. Products and sums are float32, each rounded once and in stock torchtitan's order; only the last instruction
rounds to the dtype of the result.

Written for the language subset of nki 0.6; imported only where `nki` is.
"""

import nki
import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128
FLOAT32_BYTES = 4
GPSIMD_SHARE = (5, 13)
"""Heads that GpSimd rotates, as a fraction: 1 / 5.0 ns of 1 / 3.125 ns + 1 / 5.0 ns per element."""
TILE_BYTES = 4096
"""Bytes per partition of a tile of tables or products: two of the eight PSUM banks."""
ROW_BUDGET = 40 * 1024
"""Bytes per partition of query and key rows in one block; input and output, double-buffered, are four times that."""


@nki.jit
def rope_kernel(q_BLNH, k_BLMH, cos_sin_bLH):
    """Rotate queries and keys.

    Args:
        q_BLNH, k_BLMH: queries and keys in HBM, both float32 or both bfloat16; L a multiple of 128 times the number of
            cores.
        cos_sin_bLH: float32; E cosines, then E sines, for each position.

    Returns:
        Rotated queries and keys, like the inputs.
    """
    return rotate_both(q_BLNH, k_BLMH, cos_sin_bLH, nl.subtract, nl.add)


@nki.jit
def rope_backward_kernel(dq_BLNH, dk_BLMH, cos_sin_bLH):
    """Rotate gradients back: the transpose of `rope_kernel`, with the same arguments and limits."""
    return rotate_both(dq_BLNH, dk_BLMH, cos_sin_bLH, nl.add, nl.subtract)


def rotate_both(q_BLNH, k_BLMH, cos_sin_bLH, low_op, high_op):
    """Both directions: low = x_low cos `low_op` x_high sin, high = x_high cos `high_op` x_low sin."""
    batch, length, q_heads, head_dim = q_BLNH.shape
    k_heads = k_BLMH.shape[2]
    positions = positions_per_partition(length, (q_heads + k_heads) * head_dim * bytes_of(q_BLNH.dtype), head_dim)
    q_out_BLNH = nl.ndarray(q_BLNH.shape, dtype=q_BLNH.dtype, buffer=nl.shared_hbm)
    k_out_BLMH = nl.ndarray(k_BLMH.shape, dtype=k_BLMH.dtype, buffer=nl.shared_hbm)
    q_in, q_out = in_blocks(q_BLNH, positions), in_blocks(q_out_BLNH, positions)
    k_in, k_out = in_blocks(k_BLMH, positions), in_blocks(k_out_BLMH, positions)
    tables = in_blocks(cos_sin_bLH, positions)
    first_block, past_last_block = blocks_of_core(length, positions)
    for block in range(first_block, past_last_block):
        for b in range(batch):
            if b == 0 or tables.shape[0] > 1:
                table_PJH = load_block(tables[b, block])
                psum_table_PJH = nl.ndarray((PARTITIONS, positions, head_dim), dtype=nl.float32, buffer=nl.psum)
                nisa.tensor_copy(dst=psum_table_PJH, src=table_PJH, engine=nisa.engine.scalar)
            q_PJNH = load_block(q_in[b, block])
            k_PJMH = load_block(k_in[b, block])
            q_out_PJNH = nl.ndarray(q_PJNH.shape, dtype=q_PJNH.dtype, buffer=nl.sbuf)
            k_out_PJMH = nl.ndarray(k_PJMH.shape, dtype=k_PJMH.dtype, buffer=nl.sbuf)
            for j in range(positions):
                for group in head_groups(q_heads, k_heads, head_dim, TILE_BYTES, GPSIMD_SHARE):
                    q_or_k, start, stop, on_vector = group
                    x_PJXH, out_PJXH = (q_PJNH, q_out_PJNH) if q_or_k == 0 else (k_PJMH, k_out_PJMH)
                    table = psum_table_PJH if on_vector else table_PJH
                    rotate(
                        x_PJXH[:, j, start:stop, :],
                        out_PJXH[:, j, start:stop, :],
                        spread_over_heads(table, j, 0, stop - start),
                        spread_over_heads(table, j, head_dim // 2, stop - start),
                        low_op,
                        high_op,
                        on_vector,
                    )
            nisa.dma_copy(dst=q_out[b, block], src=q_out_PJNH)
            nisa.dma_copy(dst=k_out[b, block], src=k_out_PJMH)
    return q_out_BLNH, k_out_BLMH


def rotate(x_PGH, out_PGH, cos_PGH, sin_PGH, low_op, high_op, on_vector):
    """Rotate the heads of one position per partition.

    On the Vector Engine, tables or ``x_PGH`` must be in PSUM for the products to run at full rate.
    """
    engine = nisa.engine.vector if on_vector else nisa.engine.gpsimd
    by_cos_PGH = nl.ndarray(x_PGH.shape, dtype=nl.float32, buffer=nl.psum if on_vector else nl.sbuf)
    by_sin_PGH = nl.ndarray(x_PGH.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=by_cos_PGH, data1=x_PGH, data2=cos_PGH, op=nl.multiply, engine=engine)
    nisa.tensor_tensor(dst=by_sin_PGH, data1=x_PGH, data2=sin_PGH, op=nl.multiply, engine=engine)
    combine_halves(by_cos_PGH, by_sin_PGH, out_PGH, low_op, high_op, engine)


def combine_halves(by_cos_PGH, by_sin_PGH, out_PGH, low_op, high_op, engine):
    """Add or subtract the products of a rotation: each half by cosine, and the other half by sine."""
    half = out_PGH.shape[2] // 2
    nisa.tensor_tensor(
        dst=out_PGH[:, :, :half], data1=by_cos_PGH[:, :, :half], data2=by_sin_PGH[:, :, half:], op=low_op, engine=engine
    )
    nisa.tensor_tensor(
        dst=out_PGH[:, :, half:],
        data1=by_cos_PGH[:, :, half:],
        data2=by_sin_PGH[:, :, :half],
        op=high_op,
        engine=engine,
    )


def spread_over_heads(table_PJH, j, start, heads):
    """The E factors from ``start`` on of position j, repeated for both halves of every head: (P, heads, 2, E)."""
    positions, head_dim = table_PJH.shape[1], table_PJH.shape[2]
    return table_PJH.ap(
        pattern=[[positions * head_dim, PARTITIONS], [0, heads], [0, 2], [1, head_dim // 2]],
        offset=j * head_dim + start,
    )


def load_block(source):
    """A new SBUF tile with a block's rows."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def in_blocks(tensor, positions):
    """View (B, L, ...) in HBM as (B, blocks, partitions, positions of a partition, ...)."""
    batch, length = tensor.shape[0], tensor.shape[1]
    blocks = length // (PARTITIONS * positions)
    return tensor.reshape((batch, blocks, PARTITIONS, positions) + tuple(tensor.shape[2:]))


def blocks_of_core(length, positions):
    """The blocks this core works on, as (first, past last)."""
    blocks = length // (PARTITIONS * positions) // nl.num_programs()
    return nl.program_id(0) * blocks, (nl.program_id(0) + 1) * blocks


def positions_per_partition(length, row_bytes, head_dim):
    """J: the most positions that fit in a partition and divide the sequence into blocks, for two cores if possible."""
    tiles = length // PARTITIONS
    tiles_per_core = tiles // 2 if tiles % 2 == 0 else tiles
    best = 1
    for positions in range(2, tiles_per_core + 1):
        fits = positions * row_bytes <= ROW_BUDGET and positions * head_dim * FLOAT32_BYTES <= TILE_BYTES
        if fits and tiles_per_core % positions == 0:
            best = positions
    return best


def head_groups(q_heads, k_heads, head_dim, tile_bytes, gpsimd_share):
    """Heads of one instruction each, as (0 for queries or 1 for keys, first, past last, whether on the Vector Engine).

    The first heads go to the Vector Engine, the last ``gpsimd_share`` of all, a fraction, to GpSimd. A group's
    float32 tile has at most ``tile_bytes`` per partition. Groups of queries come first.
    """
    heads = q_heads + k_heads
    on_vector = heads - (heads * gpsimd_share[0] + gpsimd_share[1] // 2) // gpsimd_share[1]
    q_on_vector = min(q_heads, on_vector)
    k_on_vector = on_vector - q_on_vector
    largest = max(1, tile_bytes // (head_dim * FLOAT32_BYTES))
    groups = []
    for group in (
        (0, 0, q_on_vector, True),
        (0, q_on_vector, q_heads, False),
        (1, 0, k_on_vector, True),
        (1, k_on_vector, k_heads, False),
    ):
        q_or_k, start, stop, vector = group
        count = -(-(stop - start) // largest)
        for i in range(count):
            first = start + (stop - start) * i // count
            groups.append((q_or_k, first, start + (stop - start) * (i + 1) // count, vector))
    return groups


def bytes_of(dtype):
    """Bytes of an element of float32 or a 16-bit type."""
    return FLOAT32_BYTES if dtype == nl.float32 else 2
