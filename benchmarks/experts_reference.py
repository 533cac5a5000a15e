"""Experts on the CPU: the reference of `experts` against stock's grouped matmul, forward and backward.

    python benchmarks/experts_reference.py

Prints, for each size, the processor milliseconds of both (best of alternating runs) and how many times faster the
reference is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torchtitan.models.common.moe import GroupedExperts

from torchtitan_qwen3_trn.overrides.experts import kernel_experts

# (tokens, experts per token, experts, model dimension, hidden dimension, repetitions)
SIZES = [(256, 4, 64, 128, 64, 20), (512, 4, 16, 512, 256, 20), (512, 4, 64, 2048, 768, 3)]


def both(num_experts: int, dim: int, hidden_dim: int) -> list[GroupedExperts]:
    """Stock's module and ours, with the same bfloat16 weights."""
    torch.manual_seed(0)
    config = GroupedExperts.Config(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)
    modules = [config.build().bfloat16(), kernel_experts(config).build().bfloat16()]
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        torch.nn.init.normal_(one, std=0.02)
        other.data.copy_(one.data)
    return modules


def seconds(module: GroupedExperts, x_RD: torch.Tensor, counts_E: torch.Tensor) -> float:
    """One forward and backward."""
    module.zero_grad()
    x_RD.grad = None
    start = time.process_time()
    y_RD = module(x_RD, counts_E)
    y_RD.backward(torch.ones_like(y_RD))
    return time.process_time() - start


def fastest(functions: list[Callable[[], float]], repetitions: int) -> list[float]:
    """Best time of each, measured in turns, after one round to warm up."""
    rounds = [[function() for function in functions] for _ in range(repetitions + 1)]
    return [min(times) for times in zip(*rounds[1:], strict=True)]


def main() -> None:
    """Measure every size."""
    for tokens, k, num_experts, dim, hidden_dim, repetitions in SIZES:
        counts_E = torch.bincount(torch.rand(tokens, num_experts).topk(k).indices.flatten(), minlength=num_experts)
        x_RD = torch.randn(tokens * k, dim, dtype=torch.bfloat16, requires_grad=True)
        modules = both(num_experts, dim, hidden_dim)
        stock, ours = fastest([partial(seconds, module, x_RD, counts_E) for module in modules], repetitions)
        size = f"T={tokens} K={k} E={num_experts} D={dim} F={hidden_dim}"
        print(f"{size:40} stock {1e3 * stock:9.1f} ms   reference {1e3 * ours:9.1f} ms   {stock / ours:5.2f} times")


if __name__ == "__main__":
    main()
