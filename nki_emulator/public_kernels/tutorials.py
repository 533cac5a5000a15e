"""The kernels of the documentation, and of nki-samples where they are written for `nki`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .cases import CASES, case, example, randn, simulate


def matmul(source: str, path: str, name: str) -> Any:
    big = "optimized" in name
    k, m, n = (1024, 4096, 2048) if big else (1024, 1024, 1024)
    if name.endswith("basic_"):
        k, m, n = 128, 64, 512
    left, right = randn(k, m, dtype=torch.bfloat16), randn(k, n, seed=1, dtype=torch.bfloat16)
    got = simulate(getattr(example(source, path), name), left, right)
    return got, left.float().T @ right.float(), 2**-8, 1e-3  # one bfloat16 rounding


for _name in ("basic_", "tiled_", "hoist_load_", "block_free_dimension_", "fully_optimized_"):
    for _source, _path in (
        ("nki-samples", "src/nki_samples/tutorials/matrix_multiplication/matrix_multiplication_nki_kernels.py"),
        ("aws-neuron-sdk", "nki/examples/matrix_multiplication/matrix_multiplication_nki_kernels.py"),
    ):
        CASES.append((_source, f"nki_matmul_{_name}", partial(matmul, _source, _path, f"nki_matmul_{_name}")))


@case("aws-neuron-sdk", "nki_tensor_add")
def _() -> Any:
    a, b = randn(256, 1024), randn(256, 1024, seed=1)
    module = example("aws-neuron-sdk", "nki/examples/tensor_addition/tensor_addition_nki_kernels.py")
    return simulate(module.nki_tensor_add, a, b), a + b, 0, 0


@case("aws-neuron-sdk", "tensor_avgpool_kernel")
def _() -> Any:
    x = randn(64, 12, 18)
    module = example("aws-neuron-sdk", "nki/examples/average_pool2d/average_pool2d_nki_kernels.py")
    return simulate(module.tensor_avgpool_kernel, x, 2), module.np_average_pool_2D(x.numpy(), 2), 1e-5, 1e-6


@case("aws-neuron-sdk", "tensor_transpose2D_kernel_")
def _() -> Any:
    x = randn(64, 12 * 20)
    module = example("aws-neuron-sdk", "nki/examples/transpose2d/transpose2d_nki_kernels.py")
    want = x.reshape(64, 12, 20).transpose(1, 2).reshape(64, 240)
    return simulate(module.tensor_transpose2D_kernel_, x, (12, 20)), want, 0, 0


def mamba(version: str) -> Any:
    delta, u = randn(1, 256, 512, scale=0.5), randn(1, 256, 512, seed=1)
    a, b, c = -randn(256, 4, seed=2).abs(), randn(1, 4, 512, seed=3), randn(1, 4, 512, seed=4)
    delta = delta.abs()
    module = example("aws-neuron-sdk", "nki/examples/fused_mamba/mamba_nki_kernels.py")
    got = simulate(getattr(module, version), delta, u, a, b, c)
    gate = torch.exp(delta[:, :, None, :] * a[None, :, :, None])
    value = delta[:, :, None, :] * b[:, None, :, :] * u[:, :, None, :]
    state, states = torch.zeros(1, 256, 4), []
    for t in range(512):
        state = gate[..., t] * state + value[..., t]
        states.append(state)
    return got, (c[:, None] * torch.stack(states, dim=-1)).sum(dim=2), 1e-4, 1e-4


for _name in ("mamba_v1", "mamba_v2", "mamba_v3"):
    CASES.append(("aws-neuron-sdk", _name, partial(mamba, _name)))
