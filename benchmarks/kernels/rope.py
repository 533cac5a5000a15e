"""RoPE and QK-norm with RoPE on one logical core of Trainium2 (LNC 2): bytes and modelled time, as ratios.

    python -m benchmarks.kernels.rope [--nki-library CHECKOUT] [--length 4096]

With a checkout of https://github.com/aws-neuron/nki-library its `rope_hf` is run too, with the four changes of layout
that torchtitan's tensors need around it, reading torchtitan's own float32 cache of 2 H numbers per position; ours reads
H, the distinct ones. Queries and keys alone make exactly a third of the bytes, for they cross HBM once each way instead
of three times. The tables come on top: 4 H bytes per position against 8 H, more than a third, unless two sequences or
more share their positions, since ours reads a table once for all and rope_hf once per sequence. See model.py for what
"modelled" means.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.kernels import model
from benchmarks.kernels.model import hbm_bytes, microseconds

from benchmarks.kernels import apart  # isort: skip  (imports nki, which model provides)
from torchtitan_qwen3_trn.kernels import qk_norm_rope_nki as nki_qk_norm_rope  # isort: skip
from torchtitan_qwen3_trn.kernels import qk_norm_rope_backward_nki as nki_qk_norm_rope_backward  # isort: skip
from torchtitan_qwen3_trn.kernels import rope_nki as nki_rope  # isort: skip

HEADS = {"Qwen3-30B-A3B": (32, 4, 128), "Qwen3-4B": (32, 8, 128)}
VECTOR_NS_PER_PASS = 1 / 0.96
"""Per element of a pass with one operand in PSUM: N cycles at 0.96 GHz."""
GPSIMD_NS_PER_PASS = 2 / 1.2
"""Both operands in SBUF: 2 N cycles at 1.2 GHz."""
EPS = 1e-6


def rope_bound_us(elements: int, bytes_moved: int) -> tuple[float, str]:
    """Least time of a rotation, per core.

    HBM: each operand once. Elements: two products with factors that differ from element to element, which only the
    Vector Engine and GpSimd can make, and a sum. The Tensor Engine could add too, but how it rounds a sum of float32
    numbers is not documented, and RoPE is to equal stock's bit for bit. So three passes on those two engines, at once
    and shared so that they end together.
    """
    hbm = bytes_moved / model.HBM_GB_PER_S / 1e3
    passes = 3 * elements / 128 / (1 / VECTOR_NS_PER_PASS + 1 / GPSIMD_NS_PER_PASS) / 1e3
    return max((hbm, "HBM"), (passes, "Vector and GpSimd"))


def measure(heads: tuple[int, int, int], length: int, library: Path | None = None) -> dict[str, float]:
    """Run all kernels at one size; print times and what bounds them; return the ratios."""
    q_heads, k_heads, head_dim = heads
    torch.manual_seed(0)
    q, dq = (torch.randn(1, length, q_heads, head_dim).bfloat16() for _ in range(2))
    k, dk = (torch.randn(1, length, k_heads, head_dim).bfloat16() for _ in range(2))
    weight = torch.ones(head_dim).bfloat16()
    angles = torch.rand(1, length, head_dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    least_bytes = (2 * (q.nbytes + k.nbytes) + table.nbytes) // 2
    bound, bound_by = rope_bound_us((q.numel() + k.numel()) // 2, least_bytes)
    print(f"  bound of RoPE: {bound:.1f} us by {bound_by}")

    (_, _, *rms), fused = model.run(nki_qk_norm_rope.qk_norm_rope_kernel, q, k, weight, weight, table, EPS)
    inputs = (dq, dk, q, k, weight, weight)
    work = {
        "RoPE forward": model.run(nki_rope.rope_kernel, q, k, table)[1],
        "RoPE backward": model.run(nki_rope.rope_backward_kernel, dq, dk, table)[1],
        "QK-norm + RoPE forward": fused,
        "QK-norm + RoPE backward": model.run(
            nki_qk_norm_rope_backward.qk_norm_rope_backward_kernel, *inputs, table, *rms
        )[1],
        "QK-norm alone, forward": model.run(apart.qk_norm_kernel, q, k, weight, weight, EPS)[1],
        "QK-norm alone, backward": model.run(apart.qk_norm_backward_kernel, *inputs, *rms)[1],
    }
    theirs = "rope_hf and four layout changes"
    if library:
        work[theirs] = rope_hf_with_layouts(library, q, k, table)
    for name, phases in work.items():
        runs = model.long_runs(phases)
        print(f"  {name:32} {microseconds(phases):7.1f} us  {runs:4.0%} in runs >= 2 KiB  {model.busiest(phases)}")

    times = {name: microseconds(phases) for name, phases in work.items()}
    ratios = {"RoPE, HBM bytes / least": hbm_bytes(work["RoPE forward"]) / least_bytes}
    for direction in ("forward", "backward"):
        ratios[f"RoPE {direction} / bound"] = times[f"RoPE {direction}"] / bound
        separate = times[f"QK-norm alone, {direction}"] + times[f"RoPE {direction}"]
        ratios[f"QK-norm and RoPE apart / fused, {direction}"] = separate / times[f"QK-norm + RoPE {direction}"]
    fused_both = times["QK-norm + RoPE forward"] + times["QK-norm + RoPE backward"]
    apart_both = sum(time for name, time in times.items() if name.startswith(("QK-norm alone", "RoPE ")))
    ratios["QK-norm and RoPE apart / fused, forward and backward"] = apart_both / fused_both
    if library:
        ratios["rope_hf / RoPE, time"] = times[theirs] / times["RoPE forward"]
        ratios["rope_hf / RoPE, HBM bytes"] = hbm_bytes(work[theirs]) / hbm_bytes(work["RoPE forward"])
        split = [t.reshape(4, length // 4, *t.shape[2:]) for t in (q, k)]
        shared = table[:, : length // 4]
        ours_shared = hbm_bytes(model.run(nki_rope.rope_kernel, *split, shared)[1])
        theirs_shared = hbm_bytes(rope_hf_with_layouts(library, *split, shared))
        ratios["the same, four sequences that share their positions"] = theirs_shared / ours_shared
    return ratios


def rope_hf_with_layouts(library: Path, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> list[model.Work]:
    """AWS's kernel on ``(B, heads, L, H)`` with torchtitan's cache, and the copies to that layout and back."""
    sys.path.insert(0, str(library / "src" / "nkilib_src"))
    from nkilib.core.embeddings.rope_hf import rope_hf

    (q_heads_first, to_q), (k_heads_first, to_k) = (model.run(apart.swap_heads_and_positions, x) for x in (q, k))
    cos, sin = (torch.cat((half, half), dim=-1) for half in table.chunk(2, dim=-1))
    cache = torch.cat((cos, sin), dim=-1)[0]
    outputs = [torch.empty_like(t) for t in (q_heads_first, k_heads_first)]
    rotated, kernel = model.run(rope_hf, q_heads_first, k_heads_first, *outputs, rope_cache=cache)
    (q_back, from_q), (_, from_k) = (model.run(apart.swap_heads_and_positions, x) for x in rotated)
    check_same(q_back, q, cos, sin)
    return [*to_q, *to_k, *kernel, *from_q, *from_k]


def check_same(rotated: torch.Tensor, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Guard against pricing a kernel that did something else."""
    low, high = q.float().chunk(2, dim=-1)
    expected = q.float() * cos[:, :, None].float() + torch.cat((-high, low), dim=-1) * sin[:, :, None].float()
    assert torch.allclose(rotated.float(), expected, atol=0.1, rtol=0.05)


def main() -> None:
    """Print the ratios at each model's sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nki-library", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    arguments = parser.parse_args()
    if arguments.nki_library is None:
        print("rope_hf is left out: give --nki-library CHECKOUT to compare with it")
    for name, heads in HEADS.items():
        print(
            f"{name}: {heads[0]} query and {heads[1]} key heads of {heads[2]}, {arguments.length} positions, bfloat16"
        )
        for ratio, value in measure(heads, arguments.length, arguments.nki_library).items():
            print(f"  {ratio}: {value:.2f}")


if __name__ == "__main__":
    main()
