"""What the fused and transpose-free kernels are compared with: QK-norm on its own, and changes of layout.

Written with the same care as the package's kernels, so that a ratio measures fusion and not neglect.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.qk_norm_rope_backward_nki import (
    add_columns,
    add_scaled_heads,
    inverse_weights,
    negative_mean_square,
    new_column_tiles,
    raise_small_weights,
    rows_without_weight,
    sums_of_heads,
)
from torchtitan_qwen3_trn.kernels.qk_norm_rope_nki import (
    load_weights,
    new_tile,
    reciprocal_rms,
    repeat_for_heads,
    scale_heads,
)
from torchtitan_qwen3_trn.kernels.rope_nki import (
    GPSIMD_SHARE,
    TILE_BYTES,
    blocks_of_core,
    bytes_of,
    head_groups,
    in_blocks,
    load_block,
    positions_per_partition,
)


@nki.jit
def swap_heads_and_positions(x_BXYH):
    """(B, X, Y, H) to (B, Y, X, H), copied from HBM to HBM by DMA."""
    batch, rows, columns, head_dim = x_BXYH.shape
    out_BYXH = nl.ndarray((batch, columns, rows, head_dim), dtype=x_BXYH.dtype, buffer=nl.shared_hbm)
    share = rows // nl.num_programs()
    start = nl.program_id(0) * share
    for b in range(batch):
        for column in range(columns):
            nisa.dma_copy(
                dst=out_BYXH[b, column, start : start + share, :], src=x_BXYH[b, start : start + share, column, :]
            )
    return out_BYXH


@nki.jit
def qk_norm_kernel(q_BLNH, k_BLMH, q_weight_H, k_weight_H, eps):
    """RMSNorm of each head of queries and keys; returns both and their reciprocal root mean squares."""
    batch, length, q_heads, head_dim = q_BLNH.shape
    k_heads = k_BLMH.shape[2]
    positions = positions_per_partition(length, (q_heads + k_heads) * head_dim * bytes_of(q_BLNH.dtype), head_dim)
    weights_P2H = load_weights(q_weight_H, k_weight_H, nl.psum)
    results = []
    first_block, past_last_block = blocks_of_core(length, positions)
    for i, x_BLXH in ((0, q_BLNH), (1, k_BLMH)):
        out_BLXH = nl.ndarray(x_BLXH.shape, dtype=x_BLXH.dtype, buffer=nl.shared_hbm, name=f"out{i}")
        rms_BLX = nl.ndarray(x_BLXH.shape[:3], dtype=nl.float32, buffer=nl.shared_hbm, name=f"rms{i}")
        results.append((out_BLXH, rms_BLX))
        for block in range(first_block, past_last_block):
            for b in range(batch):
                x = load_block(in_blocks(x_BLXH, positions)[b, block])
                r = reciprocal_rms(x, eps)
                out = new_tile(x.shape, x.dtype)
                for j in range(positions):
                    for head in range(x.shape[2]):
                        nisa.scalar_tensor_tensor(
                            dst=out[:, j, head, :],
                            data=x[:, j, head, :],
                            op0=nl.multiply,
                            operand0=r[:, j, head : head + 1],
                            op1=nl.multiply,
                            operand1=weights_P2H[:, i, :],
                        )
                nisa.dma_copy(dst=in_blocks(out_BLXH, positions)[b, block], src=out)
                nisa.dma_copy(dst=in_blocks(rms_BLX, positions)[b, block], src=r)
    return results[0][0], results[1][0], results[0][1], results[1][1]


@nki.jit
def qk_norm_backward_kernel(dq_BLNH, dk_BLMH, q_BLNH, k_BLMH, q_weight_H, k_weight_H, q_rms_BLN, k_rms_BLM):
    """Gradients of `qk_norm_kernel`, by the formulas of the fused kernel."""
    batch, length, q_heads, head_dim = q_BLNH.shape
    k_heads = k_BLMH.shape[2]
    row_bytes = (q_heads + k_heads) * head_dim * bytes_of(q_BLNH.dtype) * 3 // 2
    positions = positions_per_partition(length, row_bytes, head_dim)
    weights_P2H = load_weights(q_weight_H, k_weight_H, nl.sbuf)
    raise_small_weights(weights_P2H)
    psum_weights_P2H = nl.ndarray(weights_P2H.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=psum_weights_P2H, src=weights_P2H, engine=nisa.engine.scalar)
    identity = nl.shared_identity_matrix(128, dtype=nl.float32)
    ones_P1 = new_tile((128, 1), nl.float32)
    nisa.memset(dst=ones_P1, value=1.0, engine=nisa.engine.gpsimd)
    inverses = inverse_weights(weights_P2H, ones_P1)
    groups = head_groups(q_heads, k_heads, head_dim, TILE_BYTES, GPSIMD_SHARE)
    tensors = ((dq_BLNH, q_BLNH, q_rms_BLN), (dk_BLMH, k_BLMH, k_rms_BLM))
    results = []
    first_block, past_last_block = blocks_of_core(length, positions)
    for i in range(2):
        dy_BLXH, x_BLXH, rms_BLX = tensors[i]
        dx_BLXH = nl.ndarray(x_BLXH.shape, dtype=x_BLXH.dtype, buffer=nl.shared_hbm, name=f"dx{i}")
        tiles = batch * length // 128
        dweight_RH = nl.ndarray((tiles, head_dim), dtype=nl.float32, buffer=nl.shared_hbm, name=f"dweight{i}")
        rows = dweight_RH.reshape((batch, length // 128 // positions, positions, head_dim))
        results.append((dx_BLXH, dweight_RH))
        for block in range(first_block, past_last_block):
            for b in range(batch):
                dy = load_block(in_blocks(dy_BLXH, positions)[b, block])
                x = load_block(in_blocks(x_BLXH, positions)[b, block])
                r = load_block(in_blocks(rms_BLX, positions)[b, block])
                mean_factors = negative_mean_square(r, head_dim)
                dx = new_tile(x.shape, x_BLXH.dtype)
                sums = new_column_tiles(head_dim, positions)
                for j in range(positions):
                    for number, (_, start, stop, on_vector) in enumerate(g for g in groups if g[0] == i):
                        r_PG, x_PGH = r[:, j, start:stop], x[:, j, start:stop, :]
                        weights = psum_weights_P2H if on_vector else weights_P2H
                        w_PGH = weighted(dy[:, j, start:stop, :], r_PG, weights, i, on_vector)
                        product_PGH = new_tile(w_PGH.shape, nl.float32)
                        engine = nisa.engine.vector if on_vector else nisa.engine.gpsimd
                        nisa.tensor_tensor(dst=product_PGH, data1=w_PGH, data2=x_PGH, op=nl.multiply, engine=engine)
                        add_columns(sums, j, product_PGH, ones_P1, number == 0)
                        mean_PG = sums_of_heads(product_PGH, mean_factors[:, j, start:stop])
                        subtract_mean(w_PGH, x_PGH, mean_PG, dx[:, j, start:stop, :], on_vector)
                nisa.dma_copy(dst=in_blocks(dx_BLXH, positions)[b, block], src=dx)
                nisa.dma_copy(dst=rows[b, block], src=rows_without_weight(sums, inverses, i, head_dim, identity))
    return results[0][0], results[1][0], results[0][1], results[1][1]


def weighted(dy_PGH, r_PG, weights_P2H, row, on_vector):
    """dy r g, in PSUM for the Vector Engine's heads and in SBUF for GpSimd's."""
    w_PGH = nl.ndarray(dy_PGH.shape, dtype=nl.float32, buffer=nl.psum if on_vector else nl.sbuf)
    if not on_vector:
        weights = repeat_for_heads(weights_P2H, row, dy_PGH.shape[1])
        scaled_PGH = scale_heads(dy_PGH, r_PG)
        nisa.tensor_tensor(dst=w_PGH, data1=scaled_PGH, data2=weights, op=nl.multiply, engine=nisa.engine.gpsimd)
        return w_PGH
    for head in range(dy_PGH.shape[1]):
        nisa.scalar_tensor_tensor(
            dst=w_PGH[:, head, :],
            data=dy_PGH[:, head, :],
            op0=nl.multiply,
            operand0=r_PG[:, head : head + 1],
            op1=nl.multiply,
            operand1=weights_P2H[:, row, :],
        )
    return w_PGH


def subtract_mean(w_PGH, x_PGH, mean_PG, dx_PGH, on_vector):
    """dx = w + x times the (negative) mean."""
    if not on_vector:
        scaled_PGH = scale_heads(x_PGH, mean_PG)
        nisa.tensor_tensor(dst=dx_PGH, data1=scaled_PGH, data2=w_PGH, op=nl.add, engine=nisa.engine.gpsimd)
        return
    add_scaled_heads(w_PGH, x_PGH, mean_PG, dx_PGH)
