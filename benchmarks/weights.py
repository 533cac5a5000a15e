"""Weights out and in, side by side: time ratios and peak resident memory, each run in a process of its own.

    python -m benchmarks.weights [--rounds 4] [--gigabytes 2] [--files float32] [--folder FOLDER] [--quick]

Out: the export, with checksums and check, against one plain sequential writer of the same bytes that fsyncs every file
(its rate is the disk's), and against ``save_pretrained``, as it is and with an fsync of its files. In: files of the
given type into a float32 model that is built on the meta device, against ``from_pretrained``, both until every weight
has been written to once in place, as the first optimizer step does: of files in the model's type ``from_pretrained``
only maps the pages, and they are read when they are used. Offline: ``torchtitan-trn export`` of a training checkpoint.

Each process first does the same with a tiny model, so that imports count for nobody. Memory is what was resident at
most beyond what was resident before, that is, beyond the weights where they are there already. Printed are medians over
the rounds of the ratios within a round; every other round writes out in the other order, because a disk may be fast
only as long as its cache lasts.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rounds import Figures, Round, alternate, command_line, median, ratio, run_rounds, say
from benchmarks.weights_runs import HIDDEN, OUT, RUNS, SHARD, VOCAB, Case, config_of, run_after_tiny

QUICK = ("export", "sequential", "save_pretrained", "from_pretrained", "import_native")
# Where a run writes to, if that is not a folder of its name.
FOLDERS = {"import_offline": "dcp", "export_offline": "offline"}
BYTES = {"float32": 4, "bfloat16": 2}


def one_run(name: str, folder: Path, arguments: argparse.Namespace) -> Figures:
    """Figures of ``name`` in a process of its own."""
    shutil.rmtree(folder / FOLDERS.get(name, name), ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.weights", "--run", name, "--folder", str(folder)]
    command += ["--gigabytes", str(arguments.gigabytes), "--files", arguments.files]
    os.sync()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def order_of(names: Sequence[str], number: int) -> list[str]:
    """Those that write weights out first, the other way round in every other round; the others read what they wrote."""
    out = [name for name in names if name in OUT]
    return [*alternate(out, number), *(name for name in names if name not in OUT)]


def report(rounds: Sequence[Round], size: int, files: str) -> None:
    """Print rates, memory and ratios of what ran; ``size`` is that of the files in bytes."""
    names, weights = list(rounds[0]), size // BYTES[files] * 4
    say(f"{size / 1e9:.2f} GB in files of {SHARD / 1e9:.1f} GB, {files}, medians of {len(rounds)} rounds")
    for name in names:
        rate = size / median(rounds, name, "seconds") / 1e9
        say(f"  {name:22} {shown({key: median(rounds, name, key) for key in rounds[0][name]})}  {rate:5.2f} GB/s")
    for one, other, wanted in (
        ("export", "sequential", "at least 0.8"),
        ("export", "save_pretrained", "above 1"),
        ("export", "save_pretrained_fsync", "above 1"),
        ("import_hf", "from_pretrained", "above 1"),
        ("import_native", "from_pretrained", "above 1"),
    ):
        if one in names and other in names:
            text = f"rate, {one} / {other}"
            say(f"{text:44} {ratio(rounds, 'seconds', other, one)}   (wanted: {wanted})")
    for name, unit, of, wanted in (
        ("export", "one file", SHARD, "at most 1"),
        ("export_offline", "(file + tensor)", SHARD + BYTES[files] * HIDDEN * VOCAB, "at most 1"),
        ("import_hf", "weights", weights, "at most 1.25"),
        ("import_native", "weights", weights, "at most 1.25"),
        ("from_pretrained", "weights", weights, "for comparison"),
    ):
        if name in names:
            text = f"extra resident, {name} / {unit}"
            say(f"{text:44} {median(rounds, name, 'extra') / of:.3f}   (wanted: {wanted})")


def shown(run: Figures) -> str:
    """The figures of a run."""
    return f"{run['seconds']:6.2f} s  extra resident {run['extra'] / 1e9:5.2f} GB"


def main() -> None:
    """Run the rounds and print the ratios."""
    arguments = _arguments()
    if arguments.run:
        import torch

        case = Case(arguments.folder, config_of(arguments.gigabytes), getattr(torch, arguments.files))
        say(json.dumps(run_after_tiny(arguments.run, case)))
        return
    with tempfile.TemporaryDirectory(prefix="weights_", dir=arguments.folder) as path:
        folder = Path(path)
        variants = {name: functools.partial(one_run, name, folder, arguments) for name in arguments.names}
        rounds = run_rounds(variants, arguments.rounds, order=order_of, show=shown)
        size = sum(file.stat().st_size for file in (folder / "export").glob("*.safetensors"))
    report(rounds, size, arguments.files)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, rounds=4, quick=f"1 round of 0.75 GB, of {', '.join(QUICK)} only")
    parser.add_argument("--gigabytes", type=float, help="size of the model in float32 (default 2)")
    parser.add_argument("--files", choices=BYTES, default="float32", help="type in the files (default float32)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="writes below this folder")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 4)
    arguments.gigabytes = arguments.gigabytes or (0.75 if arguments.quick else 2.0)
    arguments.names = QUICK if arguments.quick else tuple(RUNS)
    return arguments


if __name__ == "__main__":
    main()
