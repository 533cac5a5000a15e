"""The kernels of QK-norm with RoPE against the operator's reference in float64."""

import pytest
import torch

from nki_emulator.testing import nki
from torchtitan_qwen3_trn.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_backward
from torchtitan_qwen3_trn.kernels.qk_norm_rope_backward_nki import qk_norm_rope_backward_kernel
from torchtitan_qwen3_trn.kernels.qk_norm_rope_nki import qk_norm_rope_kernel

EPS = 1e-6
# B, L, N, M, H: Qwen3-30B-A3B's heads, Qwen3-4B's, odd numbers of heads and tiles, a head of two matmul tiles.
SHAPES = [(1, 256, 32, 4, 128), (1, 256, 32, 8, 128), (2, 384, 3, 1, 64), (1, 128, 2, 1, 256)]
NAMES = ("q", "k", "q_rms", "k_rms", "dq", "dk", "dq_weight", "dk_weight")


def draw(shape, dtype):
    """Arguments of forward without eps, then the gradients of its first two results."""
    batch, length, q_heads, k_heads, head_dim = shape
    torch.manual_seed(0)
    q, dq = (torch.randn(batch, length, q_heads, head_dim).to(dtype) for _ in range(2))
    k, dk = (torch.randn(batch, length, k_heads, head_dim).to(dtype) for _ in range(2))
    q_weight, k_weight = (torch.randn(head_dim).to(dtype) for _ in range(2))
    q_weight[0] = 0
    angles = torch.rand(1, length, head_dim // 2) * 6
    return [q, k, q_weight, k_weight, torch.cat((angles.cos(), angles.sin()), dim=-1)], [dq, dk]


def forward_and_backward(inputs, gradients, lnc=1):
    outputs = nki.simulate(qk_norm_rope_kernel[lnc])(*inputs, EPS)
    return [*outputs, *nki.simulate(qk_norm_rope_backward_kernel[lnc])(*gradients, *inputs, *outputs[2:])]


def in_float64(inputs, gradients):
    inputs, gradients = [t.double() for t in inputs], [t.double() for t in gradients]
    outputs = qk_norm_rope.reference(*inputs, EPS)
    return [*outputs, *qk_norm_rope_backward.reference(*gradients, *inputs, *outputs[2:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward_match_float64(shape, dtype):
    case = draw(shape, dtype)
    for name, ours, exact in zip(NAMES, forward_and_backward(*case), in_float64(*case), strict=True):
        if name.endswith("weight"):  # the rows' grouping is the kernel's, their sum is the gradient
            ours, exact = ours.sum(0), exact.sum(0)
        # Float32 throughout: a few units of 2^-24 of the largest term. In bfloat16 one rounding more: 2^-8 of each.
        relative = 2**-8 if ours.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(
            ours.double(), exact, rtol=relative, atol=1e-6 * exact.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_number_of_heads_that_fills_one_engine_only():
    case = draw((1, 128, 1, 1, 128), torch.float32)
    for ours, exact in zip(forward_and_backward(*case), in_float64(*case), strict=True):
        torch.testing.assert_close(ours.double().sum(0), exact.sum(0), rtol=0, atol=1e-5 * exact.abs().max().item())


def test_weights_too_small_to_divide_by_have_gradients_like_the_others():
    inputs, gradients = draw((1, 128, 3, 1, 64), torch.float32)
    inputs[2][:6] = torch.tensor([0.0, -0.0, 1e-30, -1e-13, 1e10, -1e-45])
    inputs[3][:] = 0
    for name, ours, exact in zip(
        NAMES, forward_and_backward(inputs, gradients), in_float64(inputs, gradients), strict=True
    ):
        if name.endswith("weight"):
            ours, exact = ours.sum(0), exact.sum(0)
        # All weights of the keys being 0, so are their output and gradient, up to 2^-40 of the gradient given.
        atol = 1e-6 * exact.abs().max().item() or 1e-10
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_two_cores_give_the_bits_of_one():
    case = draw((2, 512, 8, 2, 128), torch.bfloat16)
    for one, two in zip(forward_and_backward(*case), forward_and_backward(*case, lnc=2), strict=True):
        assert torch.equal(one, two)
