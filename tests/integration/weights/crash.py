"""Exports from two ranks that are killed at random moments, outlive each other, or find the disk full.

    python crash.py FOLDER TRIALS

The ranks are forked from this process, which has everything imported already; it prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from small_disk import small_disk
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Qwen3Config

from torchtitan_qwen3_trn import assets
from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.models.described_spec import DescribedModelSpec
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.weights.export import Export, export
from torchtitan_qwen3_trn.weights.job_export import keep_assets
from torchtitan_qwen3_trn.weights.manifest import manifest_problems
from torchtitan_qwen3_trn.weights.verify import verify

CONFIG = Qwen3Config(
    vocab_size=16384, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=128,
)  # fmt: skip


# What an export needs of the job's model is its Transformers configuration.
SPEC = DescribedModelSpec(
    name="qwen3", flavor="tiny", model=None, parallelize_fn=None, pipelining_fn=None, post_optimizer_build_fn=None,
    state_dict_adapter=None, hf_config=CONFIG,
)  # fmt: skip
SHAPES = layout_of(build_on_meta(CONFIG)).shapes
# Room for the tensors, in bytes, but not for the tokenizer that is written before them.
ROOM = 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values()) + 32768


def group(number: int, folder: Path, trial: str) -> None:
    """Join the process group of one export."""
    store = folder.parent / f"store-{trial}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)


def job(destination: Path, dtype: torch.dtype = torch.float32) -> Export:
    """An export in several files."""
    return Export(destination=destination, config=CONFIG, dtype=dtype, limit=20_000_000, assets=assets.tokenizer_path())


def sharded() -> dict[str, Any]:
    """Half of every tensor on each rank."""
    mesh = init_device_mesh("cpu", (2,))
    return {name: distribute_tensor(torch.ones(shape), mesh, [Shard(0)]) for name, shape in SHAPES.items()}


def whole(number: int, folder: Path, trial: str, ready: int) -> None:
    """One rank of an export that finishes unless it is killed."""
    group(number, folder, trial)
    tensors = sharded()
    dist.barrier()
    os.write(ready, b"x")
    export(tensors, job(folder / "out"))
    dist.barrier()


class Halting(DefaultSavePlanner):
    """Stops before the second tensor: says so, and waits until it may go on."""

    def __init__(self, ready: int, go: int) -> None:
        super().__init__()
        self._ready, self._go, self._count = ready, go, 0

    def resolve_data(self, write_item: Any) -> Any:
        """Stock's, in time."""
        self._count += 1
        if self._count == 2:
            os.write(self._ready, b"x")
            os.read(self._go, 1)
        return super().resolve_data(write_item)


def uneven(number: int, folder: Path, trial: str, ready: int) -> None:
    """One rank of an export to a disk that rank 1, which has all but one tensor, fills up.

    Where no small disk could be mounted, rank 1 may write no long files instead.
    """
    group(number, folder, trial)
    if number == 1 and not folder.is_mount():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    mine = {name for name in SHAPES if (name == "model.norm.weight") == (number == 0)}
    os.write(ready, b"x")
    with heard(folder.parent / f"said-{number}"):
        export({name: torch.ones(SHAPES[name]) for name in mine}, job(folder / "out", torch.bfloat16))


@contextlib.contextmanager
def heard(file: Path) -> Iterator[None]:
    """Write what a user would be told to ``file``."""
    try:
        yield
    except JobError as error:
        file.write_text(str(error))
        raise SystemExit(2) from error


def keeping(number: int, folder: Path, trial: str, ready: int) -> None:
    """One rank of a job that cannot keep its assets: where rank 0 wants a folder, there is a file."""
    group(number, folder, trial)
    os.environ["RANK"] = str(number)
    os.write(ready, b"x")
    config = SimpleNamespace(
        comm=SimpleNamespace(mode="default"),
        dump_folder=str(folder),
        checkpoint=SimpleNamespace(folder="checkpoint", export_dtype="float32"),
        hf_assets_path=str(folder / "model"),
        model_spec=SPEC,
    )
    with heard(folder / f"said-{number}"):
        keep_assets(config, 1)


def start(body: Callable[[int, Path, str, int], None], folder: Path, trial: str) -> list[int]:
    """Fork both ranks; returns their process ids as soon as both have said that they are ready."""
    readable, ready = os.pipe()
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                sys.stderr = open(folder.parent / f"stderr-{number}", "a")  # noqa: SIM115
                body(number, folder, trial, ready)
                status = 0
            except SystemExit as stop:
                status = int(stop.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
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


def killed(folder: Path, trials: int) -> dict[str, Any]:
    """Kill exports, then let one finish."""
    folder.mkdir()
    children, began = start(whole, folder, "0"), time.monotonic()
    assert finish(children) == [0, 0]
    seconds = time.monotonic() - began
    assert sound(folder / "out")
    (folder / "out").rename(folder.parent / "first")
    draw, absent, complete, partial, drafts = random.Random(1), 0, 0, 0, 0
    for trial in range(1, trials + 1):
        children = start(whole, folder, str(trial))
        time.sleep(draw.uniform(0, seconds))
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
    last = finish(start(whole, folder, "last"))
    counts = {"absent": absent, "complete": complete, "partial": partial, "drafts": drafts}
    return {**counts, "last": last, "sound": sound(folder / "out"), "left": names(folder)}


def outlived(folder: Path) -> dict[str, Any]:
    """Kill rank 0 while rank 1 is writing, export anew to the same place, and only then let rank 1 go on."""
    folder.mkdir()
    waiting, go = os.pipe()

    def body(number: int, folder: Path, trial: str, ready: int) -> None:
        group(number, folder, trial)
        tensors = sharded()
        planner = DefaultSavePlanner() if number == 0 else Halting(ready, waiting)
        if number == 0:
            os.write(ready, b"x")
        export(tensors, job(folder / "out"), planner=planner)

    first = start(body, folder, "first")
    refused = finish(start(whole, folder, "refused"))
    os.kill(first[0], signal.SIGKILL)
    os.waitpid(first[0], 0)
    left_behind = names(folder)
    second = finish(start(whole, folder, "second"))
    alive = os.waitpid(first[1], os.WNOHANG) == (0, 0)
    os.write(go, b"x")
    survivor = finish(first[1:])
    return {
        "refused": refused,
        "left behind": left_behind,
        "second": second,
        "alive": alive,
        "survivor": survivor,
        "sound": sound(folder / "out"),
        "left": names(folder),
    }


def full(disk: Path) -> dict[str, Any]:
    """Find the disk full on rank 1."""
    statuses = finish(start(uneven, disk, "full"))
    said = [(disk.parent / f"said-{number}").read_text() for number in range(2)]
    return {"statuses": statuses, "said": said, "left": names(disk)}


def unkept(folder: Path) -> dict[str, Any]:
    """Have rank 0 alone fail to keep what an export of the checkpoint would need."""
    (folder / "checkpoint/step-1").mkdir(parents=True)
    (folder / "checkpoint/step-1/hf_assets").write_text("")
    CONFIG.save_pretrained(folder / "model")
    statuses = finish(start(keeping, folder, "kept"))
    return {"statuses": statuses, "said": [(folder / f"said-{number}").read_text() for number in range(2)]}


def names(folder: Path) -> list[str]:
    """What is in ``folder``."""
    return sorted(path.name for path in folder.iterdir())


def main(folder: Path, trials: int) -> None:
    """Run everything."""
    results = {"killed": killed(folder / "killed", trials), "outlived": outlived(folder / "outlived")}
    results["unkept"] = unkept(folder / "unkept")
    with small_disk(folder / "disk", ROOM):
        results["full"] = full(folder / "disk")
    print(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
