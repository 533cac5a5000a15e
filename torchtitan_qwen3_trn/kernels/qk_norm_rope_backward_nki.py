"""NKI kernel of the gradient of `qk_norm_rope`, for Trainium2.

Shape suffixes: as in `qk_norm_rope_nki`.

Per head, with u the gradient rotated back, g the weight and r the reciprocal root mean square::

    w = r u g        dx = w - x r^2 mean(w x)        dg = sum(u x r) = sum(w x) / g

The tables, not u, are multiplied by g. Dividing by g once, at the end, lets both gradients use one rotation and one
product w x. Weights smaller than `SMALLEST_WEIGHT` are replaced by it, without effect on dx; see there.

Time. All engines work at the same time:

- Rotation, two products per element: GpSimd for most heads, which the Scalar Engine multiplies by r beforehand; the
  Vector Engine for the rest, multiplying by r in the same pass. The Tensor Engine adds the products by matmuls with
  the identity; w is then in PSUM, where the Vector Engine reads it at full rate.
- w x: the Vector Engine. The sums over a head: the Scalar Engine. The sums over positions and heads: the Tensor
  Engine, in float32 and in an order that does not depend on the number of cores.
- dx: the Vector Engine, in one pass, for heads that GpSimd rotated; for the others the Scalar Engine multiplies x, the
  Tensor Engine adds that to w, and the Scalar Engine rounds the sum.

With a the Vector Engine's share of the rotation, `GPSIMD_SHARE` balances, per element of all heads, 2 (1 - a) passes of
2 cycles at 1.2 GHz on GpSimd against 2 + a passes of 1 cycle at 0.96 GHz on the Vector Engine and 2 + a of 1 cycle at
1.2 GHz on the Scalar Engine, which also takes 64 cycles to read out each sum.

Written for the language subset of nki 0.6; imported only where `nki` is.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.qk_norm_rope_nki import (
    load_weights,
    new_tile,
    scale_heads,
    scaled_products,
    weighted_tables,
)
from torchtitan_qwen3_trn.kernels.rope_nki import (
    PARTITIONS,
    blocks_of_core,
    bytes_of,
    head_groups,
    in_blocks,
    load_block,
    positions_per_partition,
)

GPSIMD_SHARE = (3, 4)
"""Heads that GpSimd rotates, as a fraction."""
BANK_BYTES = 2048
"""Bytes per partition of a PSUM bank, which a matmul cannot exceed."""
SMALLEST_WEIGHT = 2.0**-40
"""Replaces weights of smaller magnitude, 0 included, so that a product with the weight can be divided by it again. It
changes dx by at most 2^-40 of r u, where float32 rounds to 2^-24 of the largest such term, and products u x r of
2^-86 and more do not underflow."""


@nki.jit
def qk_norm_rope_backward_kernel(
    dq_BLNH, dk_BLMH, q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH, q_rms_BLN, k_rms_BLM
):
    """Gradients of `qk_norm_rope_kernel`.

    Args:
        dq_BLNH, dk_BLMH: gradients of the rotated queries and keys in HBM.
        q_BLNH, k_BLMH, q_weight_H, k_weight_H, cos_sin_bLH: as given to forward.
        q_rms_BLN, k_rms_BLM: third and fourth result of forward.

    Returns:
        Gradients of queries and keys, like them, and of the weights, ``(R, H)`` float32: a row is the sum over all
        heads of 128 positions. Which ones depends on the shapes only. The caller sums the rows.
    """
    batch, length, q_heads, head_dim = q_BLNH.shape
    k_heads = k_BLMH.shape[2]
    # 1.5 times the memory of forward: three tensors instead of two.
    row_bytes = (q_heads + k_heads) * head_dim * bytes_of(q_BLNH.dtype) * 3 // 2
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
    weight_shape = (batch, length // PARTITIONS // positions, positions, head_dim)
    weight_outputs = (dq_weight_RH.reshape(weight_shape), dk_weight_RH.reshape(weight_shape))
    tables = in_blocks(cos_sin_bLH, positions)
    weights_P2H = load_weights(q_weight_H, k_weight_H, nl.sbuf)
    raise_small_weights(weights_P2H)
    turned_weights = weights_for_rotation(weights_P2H)
    identity = nl.shared_identity_matrix(PARTITIONS, dtype=nl.float32)
    ones_P1 = new_tile((PARTITIONS, 1), nl.float32)
    nisa.memset(dst=ones_P1, value=1.0, engine=nisa.engine.gpsimd)
    inverses = inverse_weights(weights_P2H, ones_P1)
    first_block, past_last_block = blocks_of_core(length, positions)
    for block in range(first_block, past_last_block):
        for b in range(batch):
            if b == 0 or tables.shape[0] > 1:
                table_PJH = load_block(tables[b, block])
            dy = (load_block(gradients[0][b, block]), load_block(gradients[1][b, block]))
            x = (load_block(inputs[0][b, block]), load_block(inputs[1][b, block]))
            r = (load_block(rms[0][b, block]), load_block(rms[1][b, block]))
            mean_factors = (negative_mean_square(r[0], head_dim), negative_mean_square(r[1], head_dim))
            dx = (new_tile(x[0].shape, q_BLNH.dtype), new_tile(x[1].shape, k_BLMH.dtype))
            sums = (new_column_tiles(head_dim, positions), new_column_tiles(head_dim, positions))
            for j in range(positions):
                psum_factors_P4H, factors_P4H = weighted_tables(table_PJH, turned_weights, j)
                for group in head_groups(q_heads, k_heads, head_dim, BANK_BYTES, GPSIMD_SHARE):
                    i, start, stop, on_vector = group
                    r_PG, x_PGH = r[i][:, j, start:stop], x[i][:, j, start:stop, :]
                    factors = psum_factors_P4H if on_vector else factors_P4H
                    w_PGH = rotate_back(dy[i][:, j, start:stop, :], r_PG, factors, 2 * i, on_vector, identity)
                    product_PGH = new_tile(w_PGH.shape, nl.float32)
                    nisa.tensor_tensor(
                        dst=product_PGH, data1=w_PGH, data2=x_PGH, op=nl.multiply, engine=nisa.engine.vector
                    )
                    add_columns(sums[i], j, product_PGH, ones_P1, start == 0)
                    mean_PG = sums_of_heads(product_PGH, mean_factors[i][:, j, start:stop])
                    subtract_mean(w_PGH, x_PGH, mean_PG, dx[i][:, j, start:stop, :], on_vector, identity)
            for i in range(2):
                nisa.dma_copy(dst=outputs[i][b, block], src=dx[i])
                nisa.dma_copy(
                    dst=weight_outputs[i][b, block], src=rows_without_weight(sums[i], inverses, i, head_dim, identity)
                )
    return dq_in_BLNH, dk_in_BLMH, dq_weight_RH, dk_weight_RH


def raise_small_weights(weights_P2H):
    """Replace smaller weights by `SMALLEST_WEIGHT`."""
    small_P2H = new_tile(weights_P2H.shape, nl.uint8)
    nisa.tensor_scalar(
        dst=small_P2H, data=weights_P2H, op0=nl.square, operand0=0.0, op1=nl.less, operand1=SMALLEST_WEIGHT**2
    )
    nisa.tensor_copy_predicated(dst=weights_P2H, src=SMALLEST_WEIGHT, predicate=small_P2H)


def weights_for_rotation(weights_P2H):
    """Weights for `weighted_tables`: g for cosines, (-g_high, g_low) for sines, whose products go to the other half."""
    head_dim = weights_P2H.shape[2]
    half = head_dim // 2
    turned = []
    for i in range(2):
        turned_P2H = nl.ndarray((PARTITIONS, 2, head_dim), dtype=nl.float32, buffer=nl.psum)
        nisa.tensor_copy(dst=turned_P2H[:, 0, :], src=weights_P2H[:, i, :], engine=nisa.engine.scalar)
        nisa.activation(dst=turned_P2H[:, 1, :half], op=nl.copy, data=weights_P2H[:, i, half:], scale=-1.0)
        nisa.tensor_copy(dst=turned_P2H[:, 1, half:], src=weights_P2H[:, i, :half], engine=nisa.engine.scalar)
        turned.append(turned_P2H)
    return turned


def rotate_back(dy_PGH, r_PG, factors_P4H, row, on_vector, identity):
    """w: some heads' gradient times r, rotated by the opposite angle and multiplied by the weight; in PSUM."""
    half = dy_PGH.shape[2] // 2
    by_cos_PGH, by_sin_PGH = scaled_products(dy_PGH, r_PG, factors_P4H, row, on_vector, nl.sbuf)
    w_PGH = nl.ndarray(dy_PGH.shape, dtype=nl.float32, buffer=nl.psum)
    add(w_PGH, by_cos_PGH, identity, False)
    add(w_PGH[:, :, :half], by_sin_PGH[:, :, half:], identity, True)
    add(w_PGH[:, :, half:], by_sin_PGH[:, :, :half], identity, True)
    return w_PGH


def add(psum_tile, tile, identity, accumulate):
    """psum_tile (+)= tile, on the Tensor Engine."""
    nisa.nc_matmul(dst=psum_tile, stationary=identity, moving=tile, is_stationary_onezero=True, accumulate=accumulate)


def negative_mean_square(r_PJX, head_dim):
    """- r^2 / H in a new tile: times a sum of w x, the factor of x in dx."""
    factor_PJX = new_tile(r_PJX.shape, nl.float32)
    nisa.activation(dst=factor_PJX, op=nl.square, data=r_PJX)
    nisa.activation(dst=factor_PJX, op=nl.copy, data=factor_PJX, scale=-1.0 / head_dim)
    return factor_PJX


def sums_of_heads(product_PGH, factor_PG):
    """The sum over each head times the head's factor, (P, G) float32."""
    sum_PG = new_tile(factor_PG.shape, nl.float32)
    for head in range(product_PGH.shape[1]):
        scaled_PH = new_tile((PARTITIONS, product_PGH.shape[2]), nl.float32)
        nisa.activation_reduce(
            dst=scaled_PH,
            op=nl.copy,
            data=product_PGH[:, head, :],
            scale=factor_PG[:, head : head + 1],
            reduce_op=nl.add,
            reduce_res=sum_PG[:, head : head + 1],
        )
    return sum_PG


def subtract_mean(w_PGH, x_PGH, mean_PG, dx_PGH, rotated_on_vector, identity):
    """dx = w + x times the (negative) mean: on the Vector Engine, unless that engine did the rotation."""
    if rotated_on_vector:
        add(w_PGH, scale_heads(x_PGH, mean_PG), identity, True)
        nisa.tensor_copy(dst=dx_PGH, src=w_PGH, engine=nisa.engine.scalar)
        return
    add_scaled_heads(w_PGH, x_PGH, mean_PG, dx_PGH)


def add_scaled_heads(w_PGH, x_PGH, factor_PG, sum_PGH):
    """sum = w + x times its head's factor, in one pass of the Vector Engine."""
    for head in range(x_PGH.shape[1]):
        nisa.scalar_tensor_tensor(
            dst=sum_PGH[:, head, :],
            data=x_PGH[:, head, :],
            op0=nl.multiply,
            operand0=factor_PG[:, head : head + 1],
            op1=nl.add,
            operand1=w_PGH[:, head, :],
        )


def new_column_tiles(head_dim, columns):
    """PSUM tiles with the H elements of a head on partitions, at most 128 of them in one tile."""
    tiles = []
    for start in range(0, head_dim, PARTITIONS):
        width = min(PARTITIONS, head_dim - start)
        tiles.append(nl.ndarray((width, columns), dtype=nl.float32, buffer=nl.psum))
    return tiles


def add_columns(tiles, column, values_PGH, ones_P1, first):
    """A column of ``tiles`` (+)= values summed over partitions and heads; ``first`` starts a new sum."""
    for head in range(values_PGH.shape[1]):
        for i in range(len(tiles)):
            start = i * PARTITIONS
            nisa.nc_matmul(
                dst=tiles[i][:, column : column + 1],
                stationary=values_PGH[:, head, start : start + tiles[i].shape[0]],
                moving=ones_P1,
                is_moving_onezero=True,
                accumulate=not (first and head == 0),
            )


def inverse_weights(weights_P2H, ones_P1):
    """1 / g with a head's elements on partitions, as `new_column_tiles`: a column for queries, one for keys."""
    tiles = new_column_tiles(weights_P2H.shape[2], 2)
    inverses = []
    for i in range(len(tiles)):
        width = tiles[i].shape[0]
        start = i * PARTITIONS
        for q_or_k in range(2):
            nisa.nc_matmul(
                dst=tiles[i][:, q_or_k : q_or_k + 1],
                stationary=weights_P2H[0:1, q_or_k, start : start + width],
                moving=ones_P1[0:1, :],
                is_moving_onezero=True,
                accumulate=False,
            )
        inverse = new_tile((width, 2), nl.float32)
        nisa.reciprocal(dst=inverse, data=tiles[i])
        inverses.append(inverse)
    return inverses


def rows_without_weight(tiles, inverses, column, head_dim, identity):
    """The columns of ``tiles`` divided by the weight, as rows of a new SBUF tile (columns, H)."""
    columns = tiles[0].shape[1]
    rows = new_tile((columns, head_dim), nl.float32)
    for i in range(len(tiles)):
        width = tiles[i].shape[0]
        divided = new_tile((width, columns), nl.float32)
        nisa.activation(dst=divided, op=nl.copy, data=tiles[i], scale=inverses[i][:, column : column + 1])
        psum_rows = nl.ndarray((columns, width), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=psum_rows,
            stationary=divided,
            moving=identity[0:width, 0:width],
            is_moving_onezero=True,
            accumulate=False,
        )
        start = i * PARTITIONS
        nisa.tensor_copy(dst=rows[:, start : start + width], src=psum_rows, engine=nisa.engine.scalar)
    return rows
