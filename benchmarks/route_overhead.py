"""The plugin route against stock's ``Trainer`` wired by hand: steps per second, and start to first step.

The hand-wired run has the same model, data and settings, the CPU device module and the SDPA override, and nothing
else of this package. Both compute in float32, which any CPU does at full speed. The two run at the same time, each on
a core of its own, and change cores with every pair; medians of paired ratios are printed.

    python benchmarks/route_overhead.py [PAIRS] [STEPS]
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

JOB = """
[model]
flavor = "debugmodel"
vocab_size = 4096
[training]
local_batch_size = 2
seq_len = 256
steps = {steps}
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[debug]
seed = 1
"""
STEP = re.compile(r"step:\s*(\d+)\s")


def hand_wired(steps: int) -> None:
    """Stock's trainer with two things set by hand; runs in a process of its own."""
    import dataclasses

    from torchtitan.tools import utils

    from torchtitan_qwen3_trn.device.cpu import cpu_device_module

    utils.device_type, utils.device_module = "cpu", cpu_device_module
    from torchtitan import train
    from torchtitan.config.override import override
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.qwen3 import config_registry
    from torchtitan.trainer import Trainer

    from torchtitan_qwen3_trn import assets
    from torchtitan_qwen3_trn.models.qwen3.flavors import flavor
    from torchtitan_qwen3_trn.models.qwen3.spec import model_spec
    from torchtitan_qwen3_trn.overrides.document_sdpa import document_mask, sdpa

    override(target=FlexAttention.Config)(sdpa)

    class MaskedTrainer(Trainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

        def post_dataloading_process(self, input_dict, labels):  # noqa: ANN001, ANN202
            inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
            extra["attention_masks"] = document_mask(extra["positions"])
            return inputs, labels, extra

    def config() -> Trainer.Config:
        stock = config_registry.qwen3_debugmodel()
        made = MaskedTrainer.Config(**{f.name: getattr(stock, f.name) for f in dataclasses.fields(stock)})
        made.model_spec = model_spec(flavor("debugmodel", vocab_size=4096), flavor="debugmodel")
        made.loss.loss_fn.global_vocab_size = 4096
        made.training = dataclasses.replace(
            made.training,
            local_batch_size=2,
            seq_len=256,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        )
        made.hf_assets_path = str(assets.tokenizer_path())
        made.dataloader.dataset_path = str(assets.text_path())
        made.lr_scheduler = dataclasses.replace(made.lr_scheduler, warmup_steps=200, decay_ratio=None)
        made.activation_checkpoint = None
        made.debug.seed = 1
        made.override.imports = [f"{sdpa.__module__}.sdpa"]
        return made

    module = types.ModuleType("hand_wired")
    module.config = config
    sys.modules["hand_wired"] = module
    sys.argv = ["train", "--module", "hand_wired", "--config", "config"]
    train.main()


def start(command: list[str], cwd: str, core: int) -> subprocess.Popen[str]:
    """``command`` on one core, with the environment a launcher gives a single rank."""
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 400 + core), "OMP_NUM_THREADS": "1"}
    pinned = ["taskset", "--cpu-list", str(core), *command]
    return subprocess.Popen(pinned, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def measure(process: subprocess.Popen[str], steps: int) -> tuple[float, float]:
    """Seconds from start to the first step, and steps per second by the median step after it."""
    began, times = time.perf_counter(), {}
    log = []
    for line in process.stdout or []:
        log.append(line)
        found = STEP.search(re.sub(r"\x1b\[[0-9;]*m", "", line))
        if found:
            times[int(found[1])] = time.perf_counter()
    if process.wait() or steps not in times:
        sys.exit("".join(log))
    return times[1] - began, 1 / statistics.median(times[step + 1] - times[step] for step in range(1, steps))


def side_by_side(ours: list[str], stock: list[str], cwd: str, core: int, steps: int) -> list[tuple[float, float]]:
    """``measure`` of both commands while they run together, ``ours`` on ``core`` (0 or 1), ``stock`` on the other."""
    processes = [start(ours, cwd, core), start(stock, cwd, 1 - core)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda process: measure(process, steps), processes))


def main() -> None:
    """Run both side by side and print the ratios."""
    pairs, steps = (int(text) for text in (sys.argv[1:] + ["5", "30"][len(sys.argv) - 1 :])[:2])
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.toml")
        job.write_text(JOB.format(steps=steps))
        plugin = [sys.executable, "-m", "torchtitan.train", "--job.config_file", str(job)]
        by_hand = [sys.executable, __file__, "--hand-wired", str(steps)]
        rows = [side_by_side(plugin, by_hand, folder, pair % 2, steps) for pair in range(pairs)]
    speed = [ours[1] / stock[1] for ours, stock in rows]
    delay = [ours[0] - stock[0] for ours, stock in rows]
    print(f"steps per second, plugin route / hand-wired: {statistics.median(speed):.4f} (median of {pairs})")
    print(f"  each: {', '.join(f'{ratio:.3f}' for ratio in speed)}")
    print(f"start to first step, plugin route - hand-wired: {statistics.median(delay):+.2f} s (median of {pairs})")


if __name__ == "__main__":
    if "--hand-wired" in sys.argv:
        hand_wired(int(sys.argv[-1]))
    else:
        main()
