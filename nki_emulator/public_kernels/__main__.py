"""Run AWS's public kernels, unmodified, through the emulator and compare them with their own references.

    python -m nki_emulator.public_kernels --nki-library PATH --nki-samples PATH [--sdk PATH] [--only TEXT]

The paths are checkouts of github.com/aws-neuron/nki-library, nki-samples and, for the kernels printed in the
documentation, aws-neuron-sdk. Nothing of them is copied here. Prints one line per kernel and exits with 1 if a kernel
that is listed as running does not.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

import nki_emulator
from nki_emulator.public_kernels import basic, layers, tutorials  # noqa: F401  their cases
from nki_emulator.public_kernels.cases import CASES, ROOTS, Case, flatten
from nki_emulator.public_kernels.library_tests import neuron_dtypes

# Kernels that do not run here, and why.
KNOWN_FAILURES = {
    "moe_cte bwmm_shard_on_I hybrid": "passes an SBUF tile to core_barrier, which must be given shared HBM (nki.isa)",
    "nki-samples: nki_matmul_basic_": "passes tensor_copy(dtype=), which NKI 0.6 no longer has",
    "nki-samples: nki_matmul_tiled_": "passes tensor_copy(dtype=), which NKI 0.6 no longer has",
    "nki-samples: nki_matmul_hoist_load_": "passes tensor_copy(dtype=), which NKI 0.6 no longer has",
}


@dataclass
class Result:
    source: str
    name: str
    status: str
    detail: str
    seconds: float


def compare(got: Any, want: Any, rtol: float, atol: float) -> tuple[str, str]:
    a, b = list(flatten(got)), list(flatten(want))
    if len(a) != len(b):
        return "FAIL", f"{len(a)} outputs, {len(b)} in the reference"
    worst = relative = 0.0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.numel() != y.numel():
            return "FAIL", f"output {i}: shape {tuple(x.shape)}, {tuple(y.shape)} in the reference"
        error = (x.reshape(-1) - y.reshape(-1)).abs()
        if not torch.isfinite(error).all():
            return "FAIL", f"output {i}: {int((~torch.isfinite(error)).sum())} values are not finite"
        worst = max(worst, float(error.max()))
        relative = max(relative, float(error.norm() / y.norm().clamp_min(1e-30)))
        outside = error > atol + rtol * y.reshape(-1).abs()
        if outside.any():
            return (
                "FAIL",
                f"output {i}: {int(outside.sum())} of {x.numel()} values differ, by up to {float(error.max()):.3g}",
            )
    return "ok", f"max |difference| {worst:.2g}, relative {relative:.2g} (rtol {rtol:.2g}, atol {atol:g})"


def run(source: str, name: str, function: Case) -> Result:
    start = time.perf_counter()
    try:
        with redirect_stdout(StringIO()):
            status, detail = compare(*function())
    except Exception as error:
        status, detail = "FAIL", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if os.environ.get("TRACEBACK"):
            import traceback

            traceback.print_exc()
    return Result(source, name, status, detail, time.perf_counter() - start)


def commit(path: Path) -> str:
    done = subprocess.run(["git", "-C", str(path), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:12] or "unknown commit"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nki-library", type=Path)
    parser.add_argument("--nki-samples", type=Path)
    parser.add_argument("--sdk", type=Path)
    parser.add_argument("--only", default="", help="run the kernels whose name contains this text")
    options = parser.parse_args()
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    logging.disable(logging.CRITICAL)
    nki_emulator.install(force=True)
    sys.modules.setdefault("neuron_dtypes", neuron_dtypes())
    roots = {"nki-library": options.nki_library, "nki-samples": options.nki_samples, "aws-neuron-sdk": options.sdk}
    ROOTS.update({source: path.resolve() for source, path in roots.items() if path})
    for source, below in (("nki-library", "src"), ("nki-samples", "src"), ("aws-neuron-sdk", ".")):
        if roots[source]:
            sys.path[:0] = [str(roots[source] / below), str(roots[source])]
    print(", ".join(f"{source} {commit(path)}" for source, path in ROOTS.items()))
    failed = 0
    for source, name, function in CASES:
        if roots[source] is None or options.only not in name:
            continue
        result = run(source, name, function)
        known = [why for text, why in KNOWN_FAILURES.items() if text in f"{source}: {name}"]
        if known and result.status == "FAIL":
            result.status, result.detail = "known", f"{known[0]}; {result.detail}"
        failed += result.status == "FAIL"
        print(
            f"{result.status:5s} {result.seconds:6.1f} s  {result.source}: {result.name}: {result.detail}", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
