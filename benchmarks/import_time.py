"""What this package adds to ``import torch``.

    python -m benchmarks.import_time [--rounds 20] [--quick]

PyTorch looks for entry points of the group ``torch.backends`` at the end of ``import torch`` whether any package has
one or not, and calls each. Every round takes three measurements, each in a fresh process:

- with: ``import torch`` as it is;
- without: the same where the scan for entry points does not find this package's;
- hook: the time in which torch loads and calls this package's entry point, taken within ``import torch``.

The two imports differ by chance more than by what is measured, so the figure is that of the hook. It counts the modules
that the entry point imports, and whatever else they import first, and is measured on the processor clock.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.rounds import command_line, difference, median, run_rounds, say, spread

# Runs before `import torch`; `importlib.metadata` is what torch takes its entry points from.
_SETUP = """
import importlib.metadata as metadata, sys, time
real = metadata.entry_points
def is_ours(point):
    return point.value.startswith("torchtitan_qwen3_trn.")
hook, modules = 0.0, 0
"""
_WITHOUT = """
def entry_points(**arguments):
    return tuple(point for point in real(**arguments) if not is_ours(point))
metadata.entry_points = entry_points
"""
_HOOK = """
class Timed:
    def __init__(self, point):
        self.point, self.name = point, point.name
    def load(self):
        global hook, modules
        began, before = time.process_time(), len(sys.modules)
        function = self.point.load()
        def call():
            global hook, modules
            function()
            hook, modules = time.process_time() - began, len(sys.modules) - before
        return call
def entry_points(**arguments):
    return tuple(Timed(point) if is_ours(point) else point for point in real(**arguments))
metadata.entry_points = entry_points
"""
_IMPORT = """
began, cpu = time.perf_counter(), time.process_time()
import torch
print(time.perf_counter() - began, time.process_time() - cpu, hook, modules)
"""
_SETUPS = {"with": "", "without": _WITHOUT, "hook": _HOOK}


def import_torch(variant: str) -> dict[str, float]:
    """Figures of one ``import torch`` in a fresh process."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    code = _SETUP + _SETUPS[variant] + _IMPORT
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    wall, cpu, hook, modules = map(float, done.stdout.split())
    return {"wall": wall, "cpu": cpu, "hook": hook, "modules": modules}


def main() -> None:
    """Measure and print."""
    arguments = command_line(__doc__, rounds=20, quick="4 rounds").parse_args()
    for variant in _SETUPS:
        import_torch(variant)  # fills the caches of files and bytecode
    rounds = run_rounds(
        {variant: lambda variant=variant: import_torch(variant) for variant in _SETUPS},
        arguments.rounds or (4 if arguments.quick else 20),
        show=lambda run: (
            f"wall {run['wall']:.3f} s  cpu {run['cpu']:.3f} s"
            + (f"  of it {run['hook'] * 1e3:.2f} ms in the hook" if run["hook"] else "")
        ),
    )
    say(f"import torch: {median(rounds, 'with', 'wall'):.3f} s, on the processor {median(rounds, 'with', 'cpu'):.3f} s")
    both = difference(rounds, "cpu", "with", "without")
    say(
        f"with the entry point - without it: {both.median * 1e3:+.1f} ms on the processor, "
        f"half of the rounds between {both.low * 1e3:+.1f} and {both.high * 1e3:+.1f}"
    )
    hook = spread([each["hook"]["hook"] * 1e3 for each in rounds])
    count = median(rounds, "hook", "modules")
    share = hook.median / 1e3 / median(rounds, "hook", "cpu")
    say(f"this package's hook: {hook} ms, {share:.2%} of import torch, {count:.0f} modules imported")


if __name__ == "__main__":
    main()
