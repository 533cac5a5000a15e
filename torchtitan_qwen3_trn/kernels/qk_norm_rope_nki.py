"""NKI kernel of `qk_norm_rope` for Trainium2: one pass over HBM for norm and rotation.

Shape suffixes: B batch, b = B or 1, L sequence, N query heads, M key heads, H head dimension, E = H / 2 frequencies,
R = B L / 128; on chip P = 128 partitions, J positions of a partition, X = N or M, G heads of one instruction.

Positions are on partitions, and heads are divided among engines, as in `rope_nki`.

With g the norm's weight and r the reciprocal root mean square, x r g rotated is (x r) rotated with the tables cos g and
sin g, which are computed once per position for all heads. The Scalar Engine squares and sums, and multiplies by r what
GpSimd rotates; the Vector Engine multiplies by r and a table in one pass. So apart from the tables, GpSimd and the
Vector Engine do the same work as without the norm. The gradient is in `qk_norm_rope_backward_nki`.

Written for the language subset of nki 0.6; imported only where `nki` is.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.rope_nki import (
    GPSIMD_SHARE,
    PARTITIONS,
    TILE_BYTES,
    blocks_of_core,
    bytes_of,
    combine_halves,
    head_groups,
    in_blocks,
    load_block,
    positions_per_partition,
)


@nki.jit
def qk_norm_rope_kernel(q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH, eps):
    """Normalise each head of queries and keys, then rotate.

    Args:
        q_BLNH, k_BLMH: queries and keys in HBM, both float32 or both bfloat16; L a multiple of 128 times the number of
            cores.
        q_weight_H, k_weight_H: weights of their norms, any float dtype.
        cos_sin_bLH: float32; E cosines, then E sines, for each position.
        eps: added to the mean square.

    Returns:
        Queries and keys, like the inputs, then float32 reciprocal root mean squares, ``(B, L, N)`` and ``(B, L, M)``.
    """
    batch, length, q_heads, head_dim = q_BLNH.shape
    k_heads = k_BLMH.shape[2]
    positions = positions_per_partition(length, (q_heads + k_heads) * head_dim * bytes_of(q_BLNH.dtype), head_dim)
    q_out_BLNH = nl.ndarray(q_BLNH.shape, dtype=q_BLNH.dtype, buffer=nl.shared_hbm, name="q_out")
    k_out_BLMH = nl.ndarray(k_BLMH.shape, dtype=k_BLMH.dtype, buffer=nl.shared_hbm, name="k_out")
    q_rms_BLN = nl.ndarray((batch, length, q_heads), dtype=nl.float32, buffer=nl.shared_hbm, name="q_rms")
    k_rms_BLM = nl.ndarray((batch, length, k_heads), dtype=nl.float32, buffer=nl.shared_hbm, name="k_rms")
    inputs = (in_blocks(q_BLNH, positions), in_blocks(k_BLMH, positions))
    outputs = (in_blocks(q_out_BLNH, positions), in_blocks(k_out_BLMH, positions))
    rms = (in_blocks(q_rms_BLN, positions), in_blocks(k_rms_BLM, positions))
    tables = in_blocks(cos_sin_bLH, positions)
    weights_P2H = load_weights(q_weight_H, k_weight_H, nl.psum)
    repeated_weights = (repeat_for_heads(weights_P2H, 0, 2), repeat_for_heads(weights_P2H, 1, 2))
    first_block, past_last_block = blocks_of_core(length, positions)
    for block in range(first_block, past_last_block):
        for b in range(batch):
            if b == 0 or tables.shape[0] > 1:
                table_PJH = load_block(tables[b, block])
            x = (load_block(inputs[0][b, block]), load_block(inputs[1][b, block]))
            r = (reciprocal_rms(x[0], eps), reciprocal_rms(x[1], eps))
            out = (new_tile(x[0].shape, x[0].dtype), new_tile(x[1].shape, x[1].dtype))
            for j in range(positions):
                psum_factors_P4H, factors_P4H = weighted_tables(table_PJH, repeated_weights, j)
                for group in head_groups(q_heads, k_heads, head_dim, TILE_BYTES, GPSIMD_SHARE):
                    i, start, stop, on_vector = group
                    by_cos_PGH, by_sin_PGH = scaled_products(
                        x[i][:, j, start:stop, :],
                        r[i][:, j, start:stop],
                        psum_factors_P4H if on_vector else factors_P4H,
                        2 * i,
                        on_vector,
                        nl.psum if on_vector else nl.sbuf,
                    )
                    engine = nisa.engine.vector if on_vector else nisa.engine.gpsimd
                    combine_halves(by_cos_PGH, by_sin_PGH, out[i][:, j, start:stop, :], nl.subtract, nl.add, engine)
            for i in range(2):
                nisa.dma_copy(dst=outputs[i][b, block], src=out[i])
                nisa.dma_copy(dst=rms[i][b, block], src=r[i])
    return q_out_BLNH, k_out_BLMH, q_rms_BLN, k_rms_BLM


def reciprocal_rms(x_PJXH, eps):
    """(mean(x^2) + eps) ^ -0.5 of each head, (P, J, X) float32."""
    positions, heads, head_dim = x_PJXH.shape[1], x_PJXH.shape[2], x_PJXH.shape[3]
    mean_PJX = new_tile((PARTITIONS, positions, heads), nl.float32)
    r_PJX = new_tile((PARTITIONS, positions, heads), nl.float32)
    for j in range(positions):
        for head in range(heads):
            square_PH = new_tile((PARTITIONS, head_dim), nl.float32)
            nisa.activation_reduce(
                dst=square_PH,
                op=nl.square,
                data=x_PJXH[:, j, head, :],
                reduce_op=nl.add,
                reduce_res=mean_PJX[:, j, head : head + 1],
            )
    nisa.tensor_scalar(dst=mean_PJX, data=mean_PJX, op0=nl.multiply, operand0=1.0 / head_dim, op1=nl.add, operand1=eps)
    # GpSimd's rsqrt is the precise one; the Scalar Engine's is an approximation.
    nisa.tensor_scalar(dst=r_PJX, data=mean_PJX, op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.gpsimd)
    return r_PJX


def weighted_tables(table_PJH, weights, j):
    """Cosines and sines of position j, each for both halves of a head, times weights: (P, 4, H) in PSUM and in SBUF.

    Args:
        table_PJH: E cosines, then E sines, for each position.
        weights: for queries and for keys, (P, 2, H) in PSUM: what the cosines and what the sines are multiplied by.
        j: which position of a partition.
    """
    positions, head_dim = table_PJH.shape[1], table_PJH.shape[2]
    half = head_dim // 2
    psum_factors_P4H = nl.ndarray((PARTITIONS, 4, head_dim), dtype=nl.float32, buffer=nl.psum)
    factors_P4H = new_tile((PARTITIONS, 4, head_dim), nl.float32)
    for i in range(2):
        nisa.tensor_tensor(
            dst=psum_factors_P4H[:, 2 * i : 2 * i + 2, :],
            data1=table_PJH.ap(
                pattern=[[positions * head_dim, PARTITIONS], [half, 2], [0, 2], [1, half]], offset=j * head_dim
            ),
            data2=weights[i],
            op=nl.multiply,
            engine=nisa.engine.vector,
        )
    nisa.tensor_copy(dst=factors_P4H, src=psum_factors_P4H, engine=nisa.engine.scalar)
    return psum_factors_P4H, factors_P4H


def scaled_products(x_PGH, r_PG, factors_P4H, row, on_vector, by_cos_buffer):
    """x r times ``factors_P4H[:, row]``, and times the next row: two float32 tiles, the second in SBUF.

    For the Vector Engine ``factors_P4H`` should be in PSUM; for GpSimd everything must be in SBUF.
    """
    heads = x_PGH.shape[1]
    by_cos_PGH = nl.ndarray(x_PGH.shape, dtype=nl.float32, buffer=by_cos_buffer)
    by_sin_PGH = new_tile(x_PGH.shape, nl.float32)
    products = ((by_cos_PGH, row), (by_sin_PGH, row + 1))
    if on_vector:
        for product in products:
            for head in range(heads):
                nisa.scalar_tensor_tensor(
                    dst=product[0][:, head, :],
                    data=x_PGH[:, head, :],
                    op0=nl.multiply,
                    operand0=r_PG[:, head : head + 1],
                    op1=nl.multiply,
                    operand1=factors_P4H[:, product[1], :],
                )
        return by_cos_PGH, by_sin_PGH
    scaled_PGH = scale_heads(x_PGH, r_PG)
    for product in products:
        nisa.tensor_tensor(
            dst=product[0],
            data1=scaled_PGH,
            data2=repeat_for_heads(factors_P4H, product[1], heads),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )
    return by_cos_PGH, by_sin_PGH


def load_weights(q_weight_H, k_weight_H, buffer):
    """Both norms' weights on every partition, (P, 2, H) float32."""
    head_dim = q_weight_H.shape[0]
    weights_P2H = nl.ndarray((PARTITIONS, 2, head_dim), dtype=nl.float32, buffer=buffer)
    for pair in ((0, q_weight_H), (1, k_weight_H)):
        i, weight_H = pair
        weight_PH = new_tile((PARTITIONS, head_dim), weight_H.dtype)
        nisa.dma_copy(dst=weight_PH, src=weight_H.ap(pattern=[[0, PARTITIONS], [1, head_dim]]))
        nisa.tensor_copy(dst=weights_P2H[:, i, :], src=weight_PH, engine=nisa.engine.vector)
    return weights_P2H


def scale_heads(x_PGH, factor_PG):
    """Each head times its factor, in a new float32 tile."""
    scaled_PGH = new_tile(x_PGH.shape, nl.float32)
    for head in range(x_PGH.shape[1]):
        nisa.activation(
            dst=scaled_PGH[:, head, :], op=nl.copy, data=x_PGH[:, head, :], scale=factor_PG[:, head : head + 1]
        )
    return scaled_PGH


def repeat_for_heads(rows_PXH, row, heads):
    """One row of H factors per partition, repeated for every head: (P, heads, H)."""
    count, head_dim = rows_PXH.shape[1], rows_PXH.shape[2]
    return rows_PXH.ap(pattern=[[count * head_dim, PARTITIONS], [0, heads], [1, head_dim]], offset=row * head_dim)


def new_tile(shape, dtype):
    """An uninitialised SBUF tile."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
