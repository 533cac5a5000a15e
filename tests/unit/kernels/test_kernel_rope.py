"""The RoPE kernels against stock torchtitan's `CosSinRoPE` and its autograd."""

import pytest
import torch
from torchtitan.models.common.rope import CosSinRoPE

import nki_emulator
from nki_emulator.testing import emulator_only, nki
from torchtitan_qwen3_trn.kernels.rope_nki import rope_backward_kernel, rope_kernel

# B, L, N, M, H: Qwen3-30B-A3B's heads, Qwen3-4B's, odd numbers of heads and tiles, a head of two PSUM rows.
SHAPES = [(1, 512, 32, 4, 128), (2, 256, 32, 8, 128), (1, 384, 3, 1, 64), (1, 128, 4, 2, 256)]


def draw(shape, dtype):
    batch, length, q_heads, k_heads, head_dim = shape
    torch.manual_seed(0)
    queries, keys = (batch, length, q_heads, head_dim), (batch, length, k_heads, head_dim)
    return [torch.randn(size).to(dtype) for size in (queries, keys, queries, keys)]


def stock(length, head_dim):
    """Stock's module, and its cache as the kernels take it: the distinct half of the cosines, then of the sines."""
    rope = CosSinRoPE(CosSinRoPE.Config(dim=head_dim, max_seq_len=length, theta=1e6))
    half = head_dim // 2
    return rope, torch.cat((rope.cache[:, :half], rope.cache[:, head_dim : head_dim + half]), dim=-1)[None].contiguous()


def run(kernel, *args, lnc=1, **options):
    return nki.simulate(kernel[lnc], **options)(*args)


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_equals_stock_bit_for_bit_forward_and_backward(shape):
    q, k, dq, dk = draw(shape, torch.float32)
    rope, table = stock(shape[1], shape[4])
    q.requires_grad_()
    k.requires_grad_()
    expected = rope(q, k)
    expected_gradients = torch.autograd.grad(expected, (q, k), (dq, dk))
    for ours, theirs in zip(run(rope_kernel, q, k, table), expected, strict=True):
        assert (ours - theirs).abs().max() == 0.0
    for ours, theirs in zip(run(rope_backward_kernel, dq, dk, table), expected_gradients, strict=True):
        assert (ours - theirs).abs().max() == 0.0


@pytest.mark.parametrize("kernel", [rope_kernel, rope_backward_kernel], ids=["forward", "backward"])
def test_bfloat16_is_the_float32_result_rounded_once(kernel):
    q, k, _, _ = draw((1, 256, 32, 4, 128), torch.bfloat16)
    _, table = stock(256, 128)
    for ours, wide in zip(run(kernel, q, k, table), run(kernel, q.float(), k.float(), table), strict=True):
        assert torch.equal(ours, wide.bfloat16())


def test_each_sequence_of_a_batch_may_have_its_own_positions():
    shape = (2, 256, 3, 1, 64)
    q, k, _, _ = draw(shape, torch.float32)
    rope, table = stock(512, 64)
    positions = torch.stack((torch.arange(256), torch.arange(256).flip(0) + 100))
    expected = rope(q, k, positions)
    for ours, theirs in zip(run(rope_kernel, q, k, table[0][positions], lnc=2), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kernel", [rope_kernel, rope_backward_kernel], ids=["forward", "backward"])
def test_two_cores_give_the_bits_of_one(kernel):
    q, k, _, _ = draw((2, 512, 8, 2, 128), torch.bfloat16)
    _, table = stock(512, 128)
    for one, two in zip(run(kernel, q, k, table), run(kernel, q, k, table, lnc=2), strict=True):
        assert torch.equal(one, two)


@emulator_only
@pytest.mark.parametrize("batch", [1, 2])
def test_each_byte_crosses_hbm_once_and_rows_move_in_runs_of_2_kib(batch):
    shape = (batch, 1024, 32, 4, 128)
    q, k, _, _ = draw(shape, torch.bfloat16)
    _, table = stock(1024, 128)
    with nki_emulator.counting() as report:
        run(rope_kernel, q, k, table, lnc=2)
    rows = q.nbytes + k.nbytes
    assert report.hbm_bytes == 2 * rows + table.nbytes
    for core in report.cores:
        in_long_runs = sum(size for run_bytes, size in core.descriptor_bytes.items() if run_bytes >= 2048)
        assert in_long_runs >= rows  # half of what is read and written
