"""NKI kernels of `qk_norm_rope` and its gradient, for Trainium2: one pass over HBM for norm and rotation.

Shape suffixes: B batch, b = B or 1, L sequence, N query heads, M key heads, H head dimension, E = H / 2 frequencies,
R = B L / 128; on chip P = 128 partitions, J positions of a partition, X = N or M, G heads of one instruction.

Positions lie on partitions and heads are shared out between engines as in `nki_rope`.

Forward. With g the norm's weight and r the reciprocal root mean square, x r g rotated is (x r) rotated with the
tables cos g and sin g, which are made once per position for all heads. The Scalar Engine squares and sums, and
multiplies by r; the Vector Engine and GpSimd rotate, so neither has more to do than without the norm.

Backward. With u the gradient rotated back, v = u g and xhat = x r, the usual dx = r (v - xhat mean(v xhat)) is, in
terms of what is at hand, with dy r instead of dy rotated back and multiplied by g, giving w = r v::

    dx = w - x r^2 mean(w x)        dg = sum(u xhat) = sum(u r x)

The sum over rows and heads for dg is the diagonal of (u r)^T x, accumulated on the Tensor Engine in float32, in an
order that does not depend on the number of cores. The Tensor Engine also adds up the products of the rotation for the
Vector Engine's heads, as matmuls with the identity.

Written for the language subset of nki 0.6; imported only where `nki` is.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.nki_rope import (
    GPSIMD_SHARE,
    PARTITIONS,
    TILE_BYTES,
    blocks_of_core,
    bytes_of,
    head_groups,
    in_blocks,
    load_block,
    positions_per_partition,
    rotate,
    spread_over_heads,
)

__all__ = ["qk_norm_rope_backward_kernel", "qk_norm_rope_kernel"]

BACKWARD_TILE_BYTES = 2048
"""One PSUM bank, which a matmul cannot exceed."""
BACKWARD_GPSIMD_SHARE = (1, 3)
"""Heads GpSimd takes in backward: 6 passes of 2 N cycles at 1.2 GHz against the Vector Engine's 5 of N at 0.96 GHz, and
some short instructions."""


@nki.jit
def qk_norm_rope_kernel(q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH, eps):
    """Normalise each head of queries and keys, then rotate.

    Args:
        q_BLNH: queries in HBM, float32 or bfloat16; L a multiple of 128 times the number of cores.
        k_BLMH: keys, same dtype.
        q_weight_H: weight of the queries' norm, any float dtype.
        k_weight_H: weight of the keys' norm.
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
    first_block, past_last_block = blocks_of_core(length, positions)
    for block in range(first_block, past_last_block):
        for b in range(batch):
            if b == 0 or tables.shape[0] > 1:
                table_PJH = load_block(tables[b, block])
            x = (load_block(inputs[0][b, block]), load_block(inputs[1][b, block]))
            r = (reciprocal_rms(x[0], eps), reciprocal_rms(x[1], eps))
            out = (new_tile(x[0].shape, x[0].dtype), new_tile(x[1].shape, x[1].dtype))
            for j in range(positions):
                psum_factors_P4H, factors_P4H = weighted_tables(table_PJH, weights_P2H, j)
                for group in head_groups(q_heads, k_heads, head_dim, TILE_BYTES, GPSIMD_SHARE):
                    q_or_k, start, stop, on_vector = group
                    scaled_PGH = scale_heads(x[q_or_k], r[q_or_k], j, start, stop)
                    factors = psum_factors_P4H if on_vector else factors_P4H
                    rotate(
                        scaled_PGH,
                        out[q_or_k][:, j, start:stop, :],
                        repeat_for_heads(factors, 2 * q_or_k, stop - start),
                        repeat_for_heads(factors, 2 * q_or_k + 1, stop - start),
                        nl.subtract,
                        nl.add,
                        on_vector,
                    )
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


def weighted_tables(table_PJH, weights_P2H, j):
    """Tables of position j times the norms' weights: (P, 4, H) in PSUM, and a copy in SBUF.

    In order: cosines and sines for queries, cosines and sines for keys; each for both halves of a head.
    """
    head_dim = table_PJH.shape[2]
    psum_factors_P4H = nl.ndarray((PARTITIONS, 4, head_dim), dtype=nl.float32, buffer=nl.psum)
    factors_P4H = new_tile((PARTITIONS, 4, head_dim), nl.float32)
    for i in range(4):
        nisa.tensor_tensor(
            dst=psum_factors_P4H[:, i, :],
            data1=spread_over_heads(table_PJH, j, (i % 2) * (head_dim // 2), 1),
            data2=weights_P2H[:, i // 2, :],
            op=nl.multiply,
            engine=nisa.engine.vector,
        )
    nisa.tensor_copy(dst=factors_P4H, src=psum_factors_P4H, engine=nisa.engine.scalar)
    return psum_factors_P4H, factors_P4H


@nki.jit
def qk_norm_rope_backward_kernel(
    dq_BLNH, dk_BLMH, q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH, q_rms_BLN, k_rms_BLM
):
    """Gradients of `qk_norm_rope_kernel`.

    Args:
        dq_BLNH: gradient of the rotated queries in HBM.
        dk_BLMH: gradient of the rotated keys.
        q_BLNH: queries as given to forward, as the next four.
        k_BLMH: keys.
        q_weight_H: weight of the queries' norm.
        k_weight_H: weight of the keys' norm.
        cos_sin_bLH: cosines and sines.
        q_rms_BLN: third result of forward.
        k_rms_BLM: fourth result of forward.

    Returns:
        Gradients of queries and keys, like them, and of the weights, ``(R, H)`` float32: a row is the sum over all
        heads of 128 positions, which ones depends on the shapes only; the caller sums the rows.
    """
    batch, length, q_heads, head_dim = q_BLNH.shape
    k_heads = k_BLMH.shape[2]
    # Three tensors per row instead of two, one of them in float32.
    row_bytes = (q_heads + k_heads) * head_dim * (bytes_of(q_BLNH.dtype) + 2)
    positions = positions_per_partition(length, row_bytes, head_dim)
    dq_in_BLNH = nl.ndarray(q_BLNH.shape, dtype=q_BLNH.dtype, buffer=nl.shared_hbm, name="dq_in")
    dk_in_BLMH = nl.ndarray(k_BLMH.shape, dtype=k_BLMH.dtype, buffer=nl.shared_hbm, name="dk_in")
    tiles = batch * length // PARTITIONS
    dq_weight_RH = nl.ndarray((tiles, head_dim), dtype=nl.float32, buffer=nl.shared_hbm, name="dq_weight")
    dk_weight_RH = nl.ndarray((tiles, head_dim), dtype=nl.float32, buffer=nl.shared_hbm, name="dk_weight")
    gradients = (in_blocks(dq_BLNH, positions), in_blocks(dk_BLMH, positions))
    inputs = (in_blocks(q_BLNH, positions), in_blocks(k_BLMH, positions))
    rms = (in_blocks(q_rms_BLN, positions), in_blocks(k_rms_BLM, positions))
    outputs = (in_blocks(dq_in_BLNH, positions), in_blocks(dk_in_BLMH, positions))
    weight_shape = (batch, length // PARTITIONS // positions, 1, positions * head_dim)
    weight_outputs = (dq_weight_RH.reshape(weight_shape), dk_weight_RH.reshape(weight_shape))
    tables = in_blocks(cos_sin_bLH, positions)
    weights_P2H = load_weights(q_weight_H, k_weight_H, nl.sbuf)
    identities = plus_and_minus_identity()
    first_block, past_last_block = blocks_of_core(length, positions)
    for block in range(first_block, past_last_block):
        for b in range(batch):
            if b == 0 or tables.shape[0] > 1:
                table_PJH = load_block(tables[b, block])
                psum_table_PJH = nl.ndarray((PARTITIONS, positions, head_dim), dtype=nl.float32, buffer=nl.psum)
                nisa.tensor_copy(dst=psum_table_PJH, src=table_PJH, engine=nisa.engine.scalar)
            dy = (load_block(gradients[0][b, block]), load_block(gradients[1][b, block]))
            x = (load_in_float32(inputs[0][b, block]), load_in_float32(inputs[1][b, block]))
            r = (load_block(rms[0][b, block]), load_block(rms[1][b, block]))
            r2 = (square(r[0]), square(r[1]))
            dx = (new_tile(x[0].shape, q_BLNH.dtype), new_tile(x[1].shape, k_BLMH.dtype))
            dweight = (new_tile((1, positions * head_dim), nl.float32), new_tile((1, positions * head_dim), nl.float32))
            for j in range(positions):
                for i in range(2):
                    products = new_square_tiles(head_dim)
                    first = True
                    for group in head_groups(q_heads, k_heads, head_dim, BACKWARD_TILE_BYTES, BACKWARD_GPSIMD_SHARE):
                        q_or_k, start, stop, on_vector = group
                        if q_or_k == i:
                            factors_PXH = psum_table_PJH if on_vector else table_PJH
                            ur_PGH, read_ur_PGH = rotate_back(
                                dy[i], r[i], factors_PXH, j, start, stop, on_vector, identities
                            )
                            w_PGH = multiply_weight(read_ur_PGH, weights_P2H, i, on_vector)
                            subtract_mean(w_PGH, x[i], r2[i], dx[i], j, start, stop, on_vector)
                            add_products(products, ur_PGH, x[i][:, j, start:stop, :], first)
                            first = False
                    store_diagonals(products, dweight[i], j * head_dim)
            for i in range(2):
                nisa.dma_copy(dst=outputs[i][b, block], src=dx[i])
                nisa.dma_copy(dst=weight_outputs[i][b, block], src=dweight[i])
    return dq_in_BLNH, dk_in_BLMH, dq_weight_RH, dk_weight_RH


def rotate_back(dy_PJXH, r_PJX, factors_PXH, j, start, stop, on_vector, identities):
    """u r: the gradient of some heads of position j, times r, rotated by the opposite angle; (P, G, H) float32.

    For the Vector Engine's heads the Tensor Engine adds the products up.

    Returns:
        It in SBUF, and where the heads' engine reads it faster: in PSUM for the Vector Engine.
    """
    scaled_PGH = scale_heads(dy_PJXH, r_PJX, j, start, stop)
    ur_PGH = new_tile(scaled_PGH.shape, nl.float32)
    half = scaled_PGH.shape[2] // 2
    cos = spread_over_heads(factors_PXH, j, 0, stop - start)
    sin = spread_over_heads(factors_PXH, j, half, stop - start)
    if not on_vector:
        rotate(scaled_PGH, ur_PGH, cos, sin, nl.add, nl.subtract, False)
        return ur_PGH, ur_PGH
    by_cos_PGH = new_tile(scaled_PGH.shape, nl.float32)
    by_sin_PGH = new_tile(scaled_PGH.shape, nl.float32)
    nisa.tensor_tensor(dst=by_cos_PGH, data1=scaled_PGH, data2=cos, op=nl.multiply, engine=nisa.engine.vector)
    nisa.tensor_tensor(dst=by_sin_PGH, data1=scaled_PGH, data2=sin, op=nl.multiply, engine=nisa.engine.vector)
    psum_ur_PGH = nl.ndarray(scaled_PGH.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=psum_ur_PGH, stationary=identities[0], moving=by_cos_PGH, is_stationary_onezero=True, accumulate=False
    )
    nisa.nc_matmul(
        dst=psum_ur_PGH[:, :, :half],
        stationary=identities[0],
        moving=by_sin_PGH[:, :, half:],
        is_stationary_onezero=True,
        accumulate=True,
    )
    nisa.nc_matmul(
        dst=psum_ur_PGH[:, :, half:], stationary=identities[1], moving=by_sin_PGH[:, :, :half], accumulate=True
    )
    nisa.tensor_copy(dst=ur_PGH, src=psum_ur_PGH, engine=nisa.engine.scalar)
    return ur_PGH, psum_ur_PGH


def multiply_weight(ur_PGH, weights_PXH, row, on_vector):
    """w = u r g, in PSUM for the Vector Engine's sake, or in SBUF for GpSimd's."""
    w_PGH = nl.ndarray(ur_PGH.shape, dtype=nl.float32, buffer=nl.psum if on_vector else nl.sbuf)
    nisa.tensor_tensor(
        dst=w_PGH,
        data1=ur_PGH,
        data2=repeat_for_heads(weights_PXH, row, ur_PGH.shape[1]),
        op=nl.multiply,
        engine=engine_of(on_vector),
    )
    return w_PGH


def subtract_mean(w_PGH, x_PJXH, r2_PJX, dx_PJXH, j, start, stop, on_vector):
    """dx = w - x r^2 mean(w x) for some heads of position j."""
    heads, head_dim = w_PGH.shape[1], w_PGH.shape[2]
    product_PGH = new_tile(w_PGH.shape, nl.float32)
    nisa.tensor_tensor(
        dst=product_PGH,
        data1=w_PGH,
        data2=x_PJXH[:, j, start:stop, :],
        op=nl.multiply,
        engine=engine_of(on_vector),
    )
    factor_PG = new_tile((PARTITIONS, heads), nl.float32)
    for head in range(heads):
        scaled_PH = new_tile((PARTITIONS, head_dim), nl.float32)
        nisa.activation_reduce(
            dst=scaled_PH,
            op=nl.copy,
            data=product_PGH[:, head, :],
            scale=-1.0 / head_dim,
            reduce_op=nl.add,
            reduce_res=factor_PG[:, head : head + 1],
        )
    nisa.tensor_tensor(
        dst=factor_PG, data1=factor_PG, data2=r2_PJX[:, j, start:stop], op=nl.multiply, engine=nisa.engine.gpsimd
    )
    if on_vector:
        for head in range(heads):
            nisa.scalar_tensor_tensor(
                dst=dx_PJXH[:, j, start + head, :],
                data=x_PJXH[:, j, start + head, :],
                op0=nl.multiply,
                operand0=factor_PG[:, head : head + 1],
                op1=nl.add,
                operand1=w_PGH[:, head, :],
            )
        return
    correction_PGH = new_tile(w_PGH.shape, nl.float32)
    for head in range(heads):
        nisa.activation(
            dst=correction_PGH[:, head, :],
            op=nl.copy,
            data=x_PJXH[:, j, start + head, :],
            scale=factor_PG[:, head : head + 1],
        )
    nisa.tensor_tensor(
        dst=dx_PJXH[:, j, start:stop, :], data1=correction_PGH, data2=w_PGH, op=nl.add, engine=nisa.engine.gpsimd
    )


def square(r_PJX):
    """The squares in a new tile."""
    r2_PJX = new_tile(r_PJX.shape, nl.float32)
    nisa.tensor_tensor(dst=r2_PJX, data1=r_PJX, data2=r_PJX, op=nl.multiply, engine=nisa.engine.gpsimd)
    return r2_PJX


def new_square_tiles(head_dim):
    """PSUM tiles for the diagonal blocks, of at most 128 x 128, of an H x H matrix."""
    tiles = []
    for start in range(0, head_dim, PARTITIONS):
        width = min(PARTITIONS, head_dim - start)
        tiles.append(nl.ndarray((width, width), dtype=nl.float32, buffer=nl.psum))
    return tiles


def add_products(products, left_PGH, right_PGH, first):
    """products (+)= left^T right summed over the heads of the group; the first group of all starts the sums."""
    for head in range(left_PGH.shape[1]):
        for i in range(len(products)):
            start = i * PARTITIONS
            stop = start + products[i].shape[0]
            nisa.nc_matmul(
                dst=products[i],
                stationary=left_PGH[:, head, start:stop],
                moving=right_PGH[:, head, start:stop],
                accumulate=not (first and head == 0),
            )


def store_diagonals(products, row, offset):
    """Write the diagonals of the products to ``row``, (1, ...), from ``offset`` on."""
    for i in range(len(products)):
        width = products[i].shape[0]
        diagonal = new_tile((width, width), nl.float32)
        nisa.tensor_tensor(
            dst=diagonal,
            data1=products[i],
            data2=nl.shared_identity_matrix(width, dtype=nl.float32),
            op=nl.multiply,
            engine=nisa.engine.vector,
        )
        ones = new_tile((width, 1), nl.float32)
        nisa.memset(dst=ones, value=1.0, engine=nisa.engine.gpsimd)
        total = nl.ndarray((1, width), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=ones, moving=diagonal, is_stationary_onezero=True, accumulate=False)
        start = offset + i * PARTITIONS
        nisa.tensor_copy(dst=row[:, start : start + width], src=total, engine=nisa.engine.scalar)


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


def scale_heads(x_PJXH, r_PJX, j, start, stop):
    """Some heads of position j times their r, (P, G, H) float32."""
    scaled_PGH = new_tile((PARTITIONS, stop - start, x_PJXH.shape[3]), nl.float32)
    for head in range(start, stop):
        nisa.activation(
            dst=scaled_PGH[:, head - start, :],
            op=nl.copy,
            data=x_PJXH[:, j, head, :],
            scale=r_PJX[:, j, head : head + 1],
        )
    return scaled_PGH


def repeat_for_heads(rows_PXH, row, heads):
    """One row of H factors per partition, repeated for every head: (P, heads, H)."""
    count, head_dim = rows_PXH.shape[1], rows_PXH.shape[2]
    return rows_PXH.ap(pattern=[[count * head_dim, PARTITIONS], [0, heads], [1, head_dim]], offset=row * head_dim)


def load_in_float32(source):
    """A new SBUF tile with a block's rows, widened by DMA: the Tensor Engine wants both operands in one type."""
    tile = new_tile(source.shape, nl.float32)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def plus_and_minus_identity():
    """The identity matrix of one row per partition, and its negative, float32."""
    plus = nl.shared_identity_matrix(PARTITIONS, dtype=nl.float32)
    minus = new_tile((PARTITIONS, PARTITIONS), nl.float32)
    nisa.tensor_scalar(dst=minus, data=plus, op0=nl.multiply, operand0=-1.0)
    return plus, minus


def new_tile(shape, dtype):
    """An uninitialised SBUF tile."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def engine_of(on_vector):
    """The engine of a group of heads."""
    return nisa.engine.vector if on_vector else nisa.engine.gpsimd
