"""The Hugging Face route against a plain PyTorch loop and ``transformers.Trainer`` over the same Transformers model.

    python -m benchmarks.hf_route [--rounds 5] [--steps 30] [--experts] [--dtype float32] [--quick]

All three train the same model on the same batches in one process: cross-entropy over packed documents, gradient
clipping, fused AdamW, no activation checkpointing. The first five steps are not counted; of the others the first
quartile is taken, which other load disturbs least. Each round runs all three one after the other, each in a process of
its own; printed are medians over the rounds of the ratios within a round: tokens per second, and peak resident memory
beyond what was resident before the model was built.

``transformers.Trainer`` needs the package accelerate and is left out without it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.rounds import command_line, median, ratio, run_rounds, say, single_rank

BATCH, SEQ_LEN, WARM_UP = 2, 256, 5
JOB = """
[model]
backend = "huggingface_v5"
flavor = "{flavor}"
vocab_size = 4096
load_balance = "none"
{sizes}
[training]
local_batch_size = {batch}
seq_len = {seq_len}
steps = {steps}
dtype = "{dtype}"
mixed_precision_param = "{dtype}"
[activation_checkpoint]
mode = "none"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 0
min_lr_factor = 1.0
[metrics]
log_freq = 10
[debug]
seed = 1
"""
EXPERTS = "num_experts = 16\ntop_k = 4\nmoe_hidden_dim = 96"


class Clock:
    """Time and memory of one run."""

    def __init__(self) -> None:
        from torchtitan_qwen3_trn.device.cpu import cpu_device_module

        self.device = cpu_device_module
        self.before = self.device.memory_allocated()
        self.device.reset_peak_memory_stats()
        self.times: list[float] = []
        self.peak = 0

    def step(self) -> None:
        """Call after each optimizer step."""
        self.times.append(time.perf_counter())
        self.peak = max(self.peak, self.device.max_memory_allocated())

    def report(self) -> None:
        """Print the figures as one line of JSON."""
        seconds = [
            after - before for before, after in zip(self.times[WARM_UP:], self.times[WARM_UP + 1 :], strict=False)
        ]
        speed = BATCH * SEQ_LEN / statistics.quantiles(seconds, n=4)[0]
        say("RESULT " + json.dumps({"speed": speed, "memory": self.peak - self.before}))


def parsed(job: str) -> Any:
    """The job's configuration, as ``torchtitan.train`` gets it."""
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--job.config_file", job])


def run_route(job: str) -> None:
    """Stock's training loop."""
    import torch

    from torchtitan_qwen3_trn.trainer import PluginTrainer

    config = parsed(job)
    clock = Clock()

    class Timed(PluginTrainer):
        def train_step(self, data_iterator: Iterator[Any]) -> None:
            super().train_step(data_iterator)
            clock.step()

    trainer = Timed(config)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    clock.report()


def batches(config: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """The job's batches."""
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    loader = config.dataloader.build(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=BATCH
    )
    return iter(loader)


def transformers_model(config: Any) -> Any:
    """The job's model, built by Transformers as a user would build it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    dtype = getattr(torch, config.training.dtype)
    return AutoModelForCausalLM.from_config(config.model_spec.model.architecture, dtype=dtype).train()


def run_loop(job: str) -> None:
    """A plain loop."""
    import torch

    config = parsed(job)
    clock = Clock()
    model = transformers_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    source = batches(config)
    for step in range(config.training.steps):
        inputs, labels = next(source)
        optimizer.zero_grad()
        logits = model(input_ids=inputs["input"], position_ids=inputs["positions"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.step()
        if step % 10 == 0:
            loss.item()
    clock.report()


def run_trainer(job: str) -> None:
    """``transformers.Trainer``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    config = parsed(job)
    steps = config.training.steps
    source = batches(config)
    rows: list[dict[str, Any]] = []
    for _ in range(steps):
        inputs, labels = next(source)
        for row in range(BATCH):
            # Its loss takes labels that are already next tokens under this name.
            rows.append(
                {
                    "input_ids": inputs["input"][row],
                    "position_ids": inputs["positions"][row],
                    "labels": labels[row],
                    "shift_labels": labels[row],
                }
            )
    clock = Clock()

    class Ticking(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        Trainer(transformers_model(config), arguments, train_dataset=rows, callbacks=[Ticking()]).train()
    clock.report()


RUNS: dict[str, Callable[[str], None]] = {"route": run_route, "loop": run_loop, "trainer": run_trainer}


def measure(kind: str, job: Path) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.hf_route", "--run", kind, str(job)]
    done = subprocess.run(command, env=single_rank(), cwd=job.parent, capture_output=True, text=True, check=False)
    if done.returncode or "RESULT " not in done.stdout:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])


def main() -> None:
    """Alternate the runs and print the ratios."""
    arguments = _arguments()
    if arguments.run:
        RUNS[arguments.run[0]](arguments.run[1])
        return
    kinds = [kind for kind in RUNS if kind != "trainer" or importlib.util.find_spec("accelerate")]
    sizes, flavor = (EXPERTS, "debugmodel_moe") if arguments.experts else ("", "debugmodel")
    settings = {"batch": BATCH, "seq_len": SEQ_LEN, "steps": arguments.steps, "dtype": arguments.dtype}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.toml")
        job.write_text(JOB.format(flavor=flavor, sizes=sizes, **settings))
        rounds = run_rounds(
            {kind: functools.partial(measure, kind, job) for kind in kinds},
            arguments.rounds,
            show=lambda run: f"{run['speed']:8,.0f} tokens per second  {run['memory'] / 1e6:6,.0f} MB",
        )
    for other in kinds[1:]:
        for figure in ("speed", "memory"):
            say(f"{figure:6} route / {other:7}: {ratio(rounds, figure, 'route', other)}")
    say("tokens per second: " + ", ".join(f"{kind} {median(rounds, kind, 'speed'):,.0f}" for kind in kinds))


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, rounds=5, quick="1 round of 15 steps")
    parser.add_argument("--steps", type=int, help="steps of a run (default 30)")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(default float32)")
    parser.add_argument("--run", nargs=2, metavar=("KIND", "JOB"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    arguments.steps = arguments.steps or (15 if arguments.quick else 30)
    return arguments


if __name__ == "__main__":
    main()
