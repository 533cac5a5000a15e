"""The plugin route against stock's ``Trainer`` wired by hand: steps per second, and start to first step.

    python -m benchmarks.route_overhead [--rounds 60] [--starts 5] [--quick]

Steps: three trainers live in one process with one thread and take one step each per round, in an order that turns. One
comes from a job file through the plugin route, two are wired by hand (see `hand_wired`): with the overrides of the
plugin route, so that only what carries the plugins is between them, and with torchtitan's own rotary embedding, which
the native route replaces. All log every step. Measured is processor time, which other load disturbs less than the
clock; ratios are taken within a round. In the end all three must hold the same weights, bit for bit: they have done the
same work.

Start: processes of their own, one after the other, up to the line of the first step in the log. The hand-wired one runs
without the two seams and sets the CPU device by hand. Processor time is read at three lines of the log: when torchtitan
begins, when it has prepared the training, and after the first step. Before the first and after the second both do the
same, so preparation is where they differ; its difference wavers less than that of the whole.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rounds import Figures, command_line, difference, median, ratio, run_rounds, say, single_rank

JOB = """
[model]
flavor = "debugmodel"
vocab_size = 4096
[training]
local_batch_size = 2
seq_len = 256
steps = 10000
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[debug]
seed = 1
"""
PLUGINS, BY_HAND, STOCK_ROPE = "plugin route", "by hand", "by hand, stock's rope"
WARM_UP = 2
STAGES = {"imports": "torchtitan version", "preparation": "Training starts at step 1", "first step": "step:  1 "}
"""The stages of a start, and what the log says when each is over."""

HAND_WIRED = """
from torchtitan.tools import utils
from torchtitan_qwen3_trn.device.cpu import cpu_device_module
utils.device_type, utils.device_module = "cpu", cpu_device_module
from torchtitan import train
train.main()
"""


def stepper(config: Any) -> tuple[Any, Callable[[], Figures]]:
    """The trainer of ``config``, and a function that takes one step with it as its training loop does."""
    trainer = config.build()
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> Figures:
        began, cpu = time.perf_counter(), time.process_time()
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - began}

    return trainer, step


def compare_steps(job: Path, rounds: int) -> None:
    """Let the three trainers take turns; print the ratios of their speeds."""
    os.environ.update(single_rank())
    import torch
    from torchtitan.config import ConfigManager

    from benchmarks import hand_wired

    torch.set_num_threads(1)
    configs = {
        PLUGINS: ConfigManager().parse_args(["--job.config_file", str(job)]),  # first: it makes the process group
        BY_HAND: hand_wired.with_same_rope(),
        STOCK_ROPE: hand_wired.with_stock_rope(),
    }
    trainers, steps = {}, {}
    for name, config in configs.items():
        trainers[name], steps[name] = stepper(config)
    logging.disable(logging.INFO)  # three trainers would write a line each
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    results = run_rounds(
        steps,
        rounds,
        order=turned,
        show=lambda run: f"{run['cpu'] * 1e3:6.1f} ms, by the clock {run['wall'] * 1e3:6.1f}",
    )
    weights = [
        [each.detach() for part in trainer.model_parts for each in part.parameters()] for trainer in trainers.values()
    ]
    same = all(
        torch.equal(ours, theirs) for others in weights[1:] for ours, theirs in zip(weights[0], others, strict=True)
    )
    say(f"the weights of all three are {'the same' if same else 'NOT THE SAME: they did different work'}")
    for name in steps:
        say(f"{name:22} {median(results, name, 'cpu') * 1e3:6.1f} ms per step on the processor")
    for other in (BY_HAND, STOCK_ROPE):
        for figure, clock in (("cpu", "processor time"), ("wall", "wall-clock time")):
            say(f"steps per second, {PLUGINS} / {other}, {clock}: {ratio(results, figure, other, PLUGINS)}")
    torch.distributed.destroy_process_group()


def turned(names: Sequence[str], number: int) -> Sequence[str]:
    """Every name is first, second and last equally often, before and after each of the others."""
    first = number // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order if number % 2 == 0 else order[::-1]


def start(command: list[str], folder: Path, seams: str) -> Figures:
    """Processor seconds of each stage of a start, of all, and by the clock."""
    env = {**single_rank(), "PYTHONUNBUFFERED": "1", "TORCHTITAN_QWEN3_TRN_SEAMS": seams}
    began, log, ends = time.perf_counter(), [], [0.0]
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or []:
            log.append(line)
            if list(STAGES.values())[len(ends) - 1] in re.sub(r"\x1b\[[0-9;]*m", "", line):
                used = psutil.Process(process.pid).cpu_times()
                ends.append(used.user + used.system)
            if len(ends) > len(STAGES):
                wall = time.perf_counter() - began
                process.kill()
                stages = {name: ends[number + 1] - ends[number] for number, name in enumerate(STAGES)}
                return {**stages, "cpu": ends[-1], "wall": wall}
    sys.exit("".join(log))


def compare_starts(job: Path, rounds: int) -> None:
    """Start both, one after the other; print the differences."""
    plugins = [sys.executable, "-m", "torchtitan.train", "--job.config_file", str(job)]
    by_hand = [sys.executable, "-c", HAND_WIRED, "--module", "benchmarks.hand_wired", "--config", "with_same_rope"]
    results = run_rounds(
        {
            PLUGINS: functools.partial(start, plugins, job.parent, "1"),
            BY_HAND: functools.partial(start, by_hand, job.parent, "0"),
        },
        rounds,
        show=lambda run: (
            "  ".join(f"{name} {run[name]:5.2f} s" for name in STAGES) + f"  by the clock, all {run['wall']:6.2f} s"
        ),
    )
    for figure, text in (
        ("preparation", "preparation, processor time"),
        ("cpu", "start to first step, processor time"),
        ("wall", "start to first step, wall-clock time"),
    ):
        medians = " and ".join(f"{median(results, name, figure):.2f} s" for name in (PLUGINS, BY_HAND))
        say(f"{text}, {PLUGINS} - {BY_HAND}: {difference(results, figure, PLUGINS, BY_HAND)} s ({medians})")


def main() -> None:
    """Compare steps, then starts."""
    parser = command_line(__doc__, rounds=60, quick="4 rounds of steps, 1 start of each")
    parser.add_argument("--starts", type=int, help="how often each is started (default 5)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.toml")
        job.write_text(JOB)
        compare_starts(job, arguments.starts or (1 if arguments.quick else 5))
        os.chdir(folder)
        compare_steps(job, arguments.rounds or (4 if arguments.quick else 60))


if __name__ == "__main__":
    main()
