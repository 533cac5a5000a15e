"""Start a real training run and read its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STEP = re.compile(r"step:\s*(\d+)\s+loss:\s*([-\d.einfa]+)")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


WORKER = Path(__file__).parent / "hf" / "worker.py"


@dataclass(frozen=True)
class Run:
    """A finished run: exit status, log without colours, losses by step."""

    status: int
    log: str
    losses: dict[int, float]


def train(
    *args: str | Path,
    ranks: int = 1,
    cwd: Path,
    environment: dict[str, str] | None = None,
    show_all_ranks: bool = False,
) -> Run:
    """Run ``torchrun -m torchtitan.train`` with ``args`` in ``cwd``; the log is rank 0's unless all are asked for."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [] if show_all_ranks else ["--local-ranks-filter", "0"]
    command += ["-m", "torchtitan.train", *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    log = _COLOR.sub("", done.stdout + done.stderr)
    losses = {int(step): float(loss) for step, loss in _STEP.findall(log)}
    return Run(done.returncode, log, losses)


def run_cases(cases: list[dict[str, Any]], ranks: int, folder: Path) -> dict[str, Any]:
    """Run many jobs in one launch (see ``hf/worker.py``), which saves their start-up; results by the cases' names."""
    cases_file, out = folder / f"cases{ranks}.json", folder / f"out{ranks}.json"
    cases_file.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, str(WORKER), str(cases_file), str(out)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.exists(), done.stdout + done.stderr
    return json.loads(out.read_text())
