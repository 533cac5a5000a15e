"""What the fused and transpose-free kernels are compared with: QK-norm on its own, and changes of layout.

Written with the same care as the package's kernels, so that a ratio measures fusion and not neglect.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from torchtitan_qwen3_trn.kernels.nki_qk_norm_rope import (
    add_products,
    load_in_float32,
    load_weights,
    multiply_weight,
    new_square_tiles,
    new_tile,
    reciprocal_rms,
    scale_heads,
    square,
    store_diagonals,
    subtract_mean,
)
from torchtitan_qwen3_trn.kernels.nki_rope import (
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
    """Gradients of `qk_norm_kernel`, as the fused kernel computes them."""
    batch, length, q_heads, head_dim = q_BLNH.shape
    k_heads = k_BLMH.shape[2]
    row_bytes = (q_heads + k_heads) * head_dim * (bytes_of(q_BLNH.dtype) + 2)
    positions = positions_per_partition(length, row_bytes, head_dim)
    weights_P2H = load_weights(q_weight_H, k_weight_H, nl.sbuf)
    psum_weights_P2H = load_weights(q_weight_H, k_weight_H, nl.psum)
    tensors = ((dq_BLNH, q_BLNH, q_rms_BLN), (dk_BLMH, k_BLMH, k_rms_BLM))
    results = []
    first_block, past_last_block = blocks_of_core(length, positions)
    for i in range(2):
        dy_BLXH, x_BLXH, rms_BLX = tensors[i]
        dx_BLXH = nl.ndarray(x_BLXH.shape, dtype=x_BLXH.dtype, buffer=nl.shared_hbm, name=f"dx{i}")
        tiles = batch * length // 128
        dweight_RH = nl.ndarray((tiles, head_dim), dtype=nl.float32, buffer=nl.shared_hbm, name=f"dweight{i}")
        rows = dweight_RH.reshape((batch, length // 128 // positions, 1, positions * head_dim))
        results.append((dx_BLXH, dweight_RH))
        for block in range(first_block, past_last_block):
            for b in range(batch):
                dy = load_block(in_blocks(dy_BLXH, positions)[b, block])
                x = load_in_float32(in_blocks(x_BLXH, positions)[b, block])
                r = load_block(in_blocks(rms_BLX, positions)[b, block])
                r2 = square(r)
                dx = new_tile(x.shape, x_BLXH.dtype)
                row = new_tile((1, positions * head_dim), nl.float32)
                for j in range(positions):
                    products = new_square_tiles(head_dim)
                    first = True
                    for q_or_k, start, stop, on_vector in head_groups(
                        q_heads, k_heads, head_dim, TILE_BYTES, GPSIMD_SHARE
                    ):
                        if q_or_k == i:
                            dyr_PGH = scale_heads(dy, r, j, start, stop)
                            weights = psum_weights_P2H if on_vector else weights_P2H
                            w_PGH = multiply_weight(dyr_PGH, weights, i, on_vector)
                            subtract_mean(w_PGH, x, r2, dx, j, start, stop, on_vector)
                            add_products(products, dyr_PGH, x[:, j, start:stop, :], first)
                            first = False
                    store_diagonals(products, row, j * head_dim)
                nisa.dma_copy(dst=in_blocks(dx_BLXH, positions)[b, block], src=dx)
                nisa.dma_copy(dst=rows[b, block], src=row)
    return results[0][0], results[1][0], results[0][1], results[1][1]
