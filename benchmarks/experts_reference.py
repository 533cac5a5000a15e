"""Experts on the CPU: the reference of `experts` against stock's grouped matmul, forward and backward, same dtype.

    python -m benchmarks.experts_reference [--rounds 20] [--quick]

Both run in turns on one core, in an order that changes with every round, on the same weights. Measured is processor
time per forward and backward pass; the ratio is stock's time to the reference's within a round. Stock computes in
bfloat16 only; in float32 its own products are called without the casts around them.
"""

from __future__ import annotations

import functools
import time

import torch
from torchtitan.models.common.moe import GroupedExperts

from benchmarks.rounds import command_line, median, ratio, run_rounds, say
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


def one_run(module: GroupedExperts, x_RD: torch.Tensor, counts_E: torch.Tensor, runs: int) -> dict[str, float]:
    """Processor milliseconds per forward and backward pass, over ``runs`` of them."""
    dy_RD, total = torch.ones_like(x_RD), 0.0
    for _ in range(runs):
        module.zero_grad()
        x_RD.grad = None
        start = time.process_time()
        module(x_RD, counts_E).backward(dy_RD)
        total += time.process_time() - start
    return {"ms": total / runs * 1e3}


def main() -> None:
    """Measure every size."""
    arguments = command_line(__doc__, rounds=20, quick="5 rounds, without the largest size").parse_args()
    rounds = arguments.rounds or (5 if arguments.quick else 20)
    torch.set_num_threads(1)
    summary = []
    for tokens, k, num_experts, dim, hidden_dim, runs in SIZES[: 2 if arguments.quick else None]:
        counts_E = torch.bincount(torch.rand(tokens, num_experts).topk(k).indices.flatten(), minlength=num_experts)
        for dtype in (torch.bfloat16, torch.float32):
            size = f"T={tokens} K={k} E={num_experts} D={dim} F={hidden_dim} {str(dtype).removeprefix('torch.')}"
            say(size)
            x_RD = torch.randn(tokens * k, dim, dtype=dtype, requires_grad=True)
            modules = dict(zip(("stock", "reference"), both(num_experts, dim, hidden_dim, dtype), strict=True))
            variants = {
                name: functools.partial(one_run, module, x_RD, counts_E, runs) for name, module in modules.items()
            }
            for run in variants.values():
                run()  # warms up
            times = run_rounds(variants, rounds)
            speedup = ratio(times, "ms", "stock", "reference")
            summary.append(
                f"{size:40} stock {median(times, 'stock', 'ms'):7.1f} ms   reference {speedup} times as fast"
            )
    say("\n".join(summary))


if __name__ == "__main__":
    main()
