"""``import torch`` with this package's autoload against without it, in pairs; prints medians and their difference.

python benchmarks/import_time.py [PAIRS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

CODE = "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"


def seconds(autoload: str) -> float:
    """Time of one ``import torch`` in a fresh process."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Print the two medians and the median of the paired differences."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    seconds("1"), seconds("0")
    rows = [(seconds("1"), seconds("0")) for _ in range(pairs)]
    with_package, without = (statistics.median(column) for column in zip(*rows, strict=True))
    difference = statistics.median(on - off for on, off in rows)
    print(f"import torch, median of {pairs}: {with_package:.3f} s with, {without:.3f} s without")
    print(f"ratio {with_package / without:.4f}, median paired difference {difference * 1e3:+.1f} ms")


if __name__ == "__main__":
    main()
