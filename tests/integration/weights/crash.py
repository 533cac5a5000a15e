"""Exports from two ranks that are killed at random moments.

    python crash.py FOLDER TRIALS

The ranks are forked from this process, which has everything imported already; it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Qwen3Config

from torchtitan_qwen3_trn import assets
from torchtitan_qwen3_trn.weights.assets import layout_and_class
from torchtitan_qwen3_trn.weights.export import Export, export
from torchtitan_qwen3_trn.weights.manifest import manifest_problems
from torchtitan_qwen3_trn.weights.verify import verify

CONFIG = Qwen3Config(
    vocab_size=16384, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=128,
)  # fmt: skip


def rank(number: int, folder: Path, trial: int, ready: int) -> None:
    """One rank of one export; ends the process."""
    store = folder.parent / f"store-{trial}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    shapes = layout_and_class(CONFIG)[0].shapes
    state_dict = {name: distribute_tensor(torch.ones(shape), mesh, [Shard(0)]) for name, shape in shapes.items()}
    dist.barrier()
    os.write(ready, b"x")
    wanted = Export(
        destination=folder / "out", config=CONFIG, dtype=torch.float32, limit=20_000_000, assets=assets.tokenizer_path()
    )
    export(state_dict, wanted)
    dist.barrier()


def start(folder: Path, trial: int) -> list[int]:
    """Fork both ranks; returns their process ids as soon as both are about to export."""
    readable, ready = os.pipe()
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                sys.stderr = open(folder.parent / f"stderr-{number}", "a")  # noqa: SIM115
                rank(number, folder, trial, ready)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for _ in range(2):
        os.read(readable, 1)
    os.close(readable)
    os.close(ready)
    return children


def finish(children: list[int]) -> list[int]:
    """Exit statuses, negative for signals; a rank that outlives its partner by long is killed."""
    deadline, statuses = time.monotonic() + 30, dict.fromkeys(children, 0)
    left = set(children)
    while left:
        for child in list(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.remove(child)
                statuses[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[child] for child in children]


def sound(folder: Path) -> bool:
    """Whether the export is complete, by headers and checksums."""
    cheap = all(finding.outcome != "failed" for finding in verify(folder, cheap=True))
    return cheap and manifest_problems(folder, checksums=True) == []


def main(folder: Path, trials: int) -> None:
    """Kill exports, then let one finish."""
    folder.mkdir()
    children, began = start(folder, 0), time.monotonic()
    assert finish(children) == [0, 0]
    whole = time.monotonic() - began
    assert sound(folder / "out")
    (folder / "out").rename(folder.parent / "first")
    draw, absent, complete, partial, drafts = random.Random(1), 0, 0, 0, 0
    for trial in range(1, trials + 1):
        children = start(folder, trial)
        time.sleep(draw.uniform(0, whole))
        # Every third time only one of the ranks dies.
        for child in children[1:] if trial % 3 == 0 else children:
            os.kill(child, signal.SIGKILL)
        finish(children)
        drafts += (folder / ".out.partial").exists()
        if not (folder / "out").exists():
            absent += 1
            continue
        complete, partial = complete + sound(folder / "out"), partial + (not sound(folder / "out"))
        (folder / "out").rename(folder.parent / f"trial-{trial}")
    last = finish(start(folder, trials + 1))
    left = sorted(path.name for path in folder.iterdir())
    counts = {"absent": absent, "complete": complete, "partial": partial, "drafts": drafts}
    print(json.dumps({**counts, "last": last, "sound": sound(folder / "out"), "left": left}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
