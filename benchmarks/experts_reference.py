"""Experts on the CPU: the reference of `experts` against stock's grouped matmul, forward and backward, same dtype.

    OMP_NUM_THREADS=1 python benchmarks/experts_reference.py [PAIRS]

Both run in turns, in an order that changes with every pair, on the same weights. Prints, for each size and dtype, the
median processor milliseconds of stock, and how many times faster the reference is: the median of the ratios of all
pairs. Stock computes in bfloat16 only; in float32 its own products are called without the casts around them.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torchtitan.models.common.moe import GroupedExperts

from torchtitan_qwen3_trn.overrides.static_moe import kernel_experts

# (tokens, experts per token, experts, model dimension, hidden dimension, runs per pair)
SIZES = [(256, 4, 64, 128, 64, 4), (512, 4, 16, 512, 256, 2), (512, 4, 64, 2048, 768, 1)]


class UncastExperts(GroupedExperts):
    """Stock's experts in the dtype of their weights."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """`GroupedExperts.forward` without casts."""
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        g_RF = self._grouped_mm(A=x_RD, B_t=self.w1_EFD.mT, offs=offsets_E)
        u_RF = self._grouped_mm(A=x_RD, B_t=self.w3_EFD.mT, offs=offsets_E)
        return self._grouped_mm(A=torch.nn.functional.silu(g_RF) * u_RF, B_t=self.w2_EDF.mT, offs=offsets_E)


def both(num_experts: int, dim: int, hidden_dim: int, dtype: torch.dtype) -> list[GroupedExperts]:
    """Stock's module and ours, with the same weights."""
    torch.manual_seed(0)
    config = GroupedExperts.Config(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)
    stock = GroupedExperts(config) if dtype == torch.bfloat16 else UncastExperts(config)
    modules = [stock.to(dtype), kernel_experts(config).build().to(dtype)]
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        torch.nn.init.normal_(one, std=0.02)
        other.data = one.data
    return modules


def seconds(module: GroupedExperts, x_RD: torch.Tensor, counts_E: torch.Tensor, runs: int) -> float:
    """Processor time of ``runs`` times forward and backward."""
    dy_RD, total = torch.ones_like(x_RD), 0.0
    for _ in range(runs):
        module.zero_grad()
        x_RD.grad = None
        start = time.process_time()
        module(x_RD, counts_E).backward(dy_RD)
        total += time.process_time() - start
    return total


def main() -> None:
    """Measure every size."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for tokens, k, num_experts, dim, hidden_dim, runs in SIZES:
        counts_E = torch.bincount(torch.rand(tokens, num_experts).topk(k).indices.flatten(), minlength=num_experts)
        for dtype in (torch.bfloat16, torch.float32):
            x_RD = torch.randn(tokens * k, dim, dtype=dtype, requires_grad=True)
            modules = both(num_experts, dim, hidden_dim, dtype)
            times = []
            for pair in range(pairs + 1):  # the first warms up
                order = (0, 1) if pair % 2 else (1, 0)
                taken = {which: seconds(modules[which], x_RD, counts_E, runs) for which in order}
                times.append((taken[0], taken[1]))
            ratios = [stock / ours for stock, ours in times[1:]]
            milliseconds = 1e3 * statistics.median(stock for stock, _ in times[1:]) / runs
            size = f"T={tokens} K={k} E={num_experts} D={dim} F={hidden_dim} {str(dtype).removeprefix('torch.')}"
            low, _, high = statistics.quantiles(ratios)
            print(
                f"{size:40} stock {milliseconds:7.1f} ms   reference {statistics.median(ratios):5.2f} times as fast "
                f"({low:.2f} to {high:.2f} in half of the pairs)",
                flush=True,
            )


if __name__ == "__main__":
    main()
