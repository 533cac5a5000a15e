"""Grouped experts on one logical core of Trainium2 (LNC 2): bytes and modelled time, as ratios to the least possible.

    python -m benchmarks.kernels.experts

Sizes of Qwen3-30B-A3B's experts, 64 of them on the core: T = 4096 tokens, K = 4, D = 2048, F = 768, bfloat16. Loops
run over experts and over tiles (forward, input gradient) or blocks (weight gradients) of their rows, and do the same
work in every round. So a kernel's counts are a constant, plus so much per expert, plus so much per round. The three
are taken from small launches, one more launch checks that they predict it, and any routing is priced by its number of
rounds. See model.py for what "modelled" means. Free slots of a tile count as moved, though DMA skips them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels import model
from benchmarks.kernels.model import Work

from torchtitan_qwen3_trn.kernels import experts_nki as nki_experts  # isort: skip  (imports nki, which model provides)
from torchtitan_qwen3_trn.kernels.experts import block_plan

TOKENS, TOP_K, EXPERTS, DIM, HIDDEN = 4096, 4, 64, 2048, 768
ROWS = TOKENS * TOP_K
TILE, BLOCK = 128, 256
BYTES = 2
ZIPF_EXPONENT = 1.0


def launches(counts: list[int]) -> dict[str, list[Work]]:
    """Work of each kernel for these rows per expert."""
    torch.manual_seed(0)
    rows, num_experts = sum(counts), len(counts)
    x, dy = (torch.randn(rows, DIM).bfloat16() for _ in range(2))
    w1, w3 = ((torch.randn(num_experts, HIDDEN, DIM) * DIM**-0.5).bfloat16() for _ in range(2))
    w2 = (torch.randn(num_experts, DIM, HIDDEN) * HIDDEN**-0.5).bfloat16()
    plan = block_plan(torch.tensor(counts), rows, BLOCK)
    (_, g, u), forward = model.run(nki_experts.experts_kernel, x, w1, w2, w3, *plan)
    (_, dg, du, h), inputs = model.run(nki_experts.experts_input_gradient_kernel, dy, g, u, w1, w2, w3, *plan)
    weights = model.run(nki_experts.experts_weight_gradients_kernel, dy, x, h, dg, du, *plan)[1]
    return {"forward": forward, "input gradient": inputs, "weight gradients": weights}


def tiles(counts: list[int]) -> int:
    """Tiles of 128 rows that forward and the input gradient work on."""
    return sum(-(-count // TILE) for count in counts)


def blocks(counts: list[int]) -> int:
    """Blocks of 256 rows the weight gradients work on: at least one per expert."""
    return sum(max(1, -(-count // BLOCK)) for count in counts)


ROUNDS: dict[str, Callable[[list[int]], int]] = {"forward": tiles, "input gradient": tiles, "weight gradients": blocks}


def combine(parts: list[tuple[float, Work]]) -> Work:
    """A weighted sum."""
    cycles: Counter[str] = Counter()
    runs: Counter[int] = Counter()
    for factor, part in parts:
        for total, more in ((cycles, part.cycles), (runs, part.runs)):
            for key, value in more.items():
                total[key] += factor * value  # type: ignore[assignment]
    return Work(cycles, sum(f * p.hbm_bytes for f, p in parts), sum(f * p.dma_us for f, p in parts), runs)  # type: ignore[arg-type]


@dataclass
class Prices:
    """Launches of one kernel that differ by one term each, from which `work` prices any other.

    Attributes:
        rounds: rounds of the inner loop for given rows per expert.
        base: one expert with `BLOCK` rows.
        longer: one expert with twice the rows.
        wider: two experts with `BLOCK` rows each.
    """

    rounds: Callable[[list[int]], int]
    base: list[Work]
    longer: list[Work]
    wider: list[Work]

    def work(self, counts: list[int]) -> list[Work]:
        """Work between barriers for any rows per expert."""
        one = self.rounds([BLOCK])
        more_experts = len(counts) - 1
        more_rounds = (self.rounds(counts) - len(counts) * one) / (self.rounds([2 * BLOCK]) - one)
        return [
            combine([(1 - more_rounds - more_experts, base), (more_rounds, longer), (more_experts, wider)])
            for base, longer, wider in zip(self.base, self.longer, self.wider, strict=True)
        ]


def prices() -> dict[str, Prices]:
    """Prices of the three kernels, checked on a launch they were not taken from."""
    base, longer, wider = launches([BLOCK]), launches([2 * BLOCK]), launches([BLOCK, BLOCK])
    found = {kernel: Prices(ROUNDS[kernel], base[kernel], longer[kernel], wider[kernel]) for kernel in ROUNDS}
    counts = [3 * BLOCK, 1, BLOCK]
    for kernel, measured in launches(counts).items():
        for predicted, right in zip(found[kernel].work(counts), measured, strict=True):
            # Lists of bounds grow by a few bytes per expert, and short instructions on them by nothing.
            assert all(abs(predicted.cycles[e] - right.cycles[e]) <= 1 for e in model.ENGINES), kernel
            assert abs(predicted.hbm_bytes - right.hbm_bytes) <= 64, kernel
    return found


def zipf(rows: int, num_experts: int, most: int) -> list[int]:
    """Rows per expert falling with the rank's power, none above ``most``: a token picks an expert once."""
    weights = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64) ** ZIPF_EXPONENT
    counts = (weights / weights.sum() * rows).long().clamp(max=most).tolist()
    for i in range(rows - sum(counts)):
        counts[i % num_experts] += counts[i % num_experts] < most
    return counts


def bound_us(products: int, bytes_moved: int) -> tuple[float, str]:
    """Least time on two cores of ``products`` (rows x D x F) and of moving ``bytes_moved``."""
    cycles = products * ROWS * DIM * HIDDEN / 128 / 128
    tensor = cycles / 2.4 / 1e3 / 2
    hbm = bytes_moved / model.HBM_GB_PER_S / 1e3 / 2
    return max((tensor, "Tensor Engine"), (hbm, "HBM"))


def measure() -> dict[str, float]:
    """Print times and what bounds them; return the ratios."""
    priced = prices()
    balanced = [ROWS // EXPERTS] * EXPERTS
    skewed = zipf(ROWS, EXPERTS, TOKENS)
    weights = 3 * EXPERTS * DIM * HIDDEN * BYTES
    wide, narrow = ROWS * DIM * BYTES, ROWS * HIDDEN * BYTES
    # Forward: weights, x, y, g, u. Backward: weights and their gradients, x, dy, dx, g, u.
    bounds = {"forward": bound_us(3, weights + 2 * wide + 2 * narrow)}
    bounds["backward"] = bound_us(6, 2 * weights + 3 * wide + 2 * narrow)
    print(f"{TOKENS} tokens, top-{TOP_K} of {EXPERTS} experts, D {DIM}, F {HIDDEN}, bfloat16, two cores")
    times = {}
    for routing, counts in (("balanced", balanced), ("Zipf", skewed)):
        print(
            f"{routing}: {min(counts)} to {max(counts)} rows per expert, {tiles(counts)} tiles, {blocks(counts)} blocks"
        )
        for kernel, price in priced.items():
            phases = price.work(counts)
            times[routing, kernel] = model.microseconds(phases)
            runs = model.long_runs(phases)
            print(
                f"  {kernel:17} {times[routing, kernel]:7.0f} us  {runs:4.0%} in runs >= 2 KiB  {model.busiest(phases)}"
            )
    total = {r: sum(times[r, kernel] for kernel in ROUNDS) for r in ("balanced", "Zipf")}
    for direction, (bound, by) in bounds.items():
        print(f"bound of {direction}: {bound:.0f} us, {by}")
    return {
        "forward / bound": times["balanced", "forward"] / bounds["forward"][0],
        "forward and backward / bound": total["balanced"] / sum(bound for bound, _ in bounds.values()),
        "forward, Zipf / balanced": times["Zipf", "forward"] / times["balanced", "forward"],
        "forward and backward, Zipf / balanced": total["Zipf"] / total["balanced"],
    }


def main() -> None:
    """Print the modelled ratios."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, ratio in measure().items():
        print(f"{name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
