"""Weights out and in, side by side: time ratios and peak resident memory, each run in a process of its own.

    python benchmarks/weights.py [--rounds 3] [--gigabytes 2] [--folder /tmp/weights_benchmark]

Out: the export, with checksums and check, against one plain sequential writer of the same bytes that fsyncs every file
(its rate is the disk's), and against ``save_pretrained``, which does not fsync. In: published files into a model that
is built on the meta device, against ``from_pretrained``. Offline: ``torchtitan-trn export`` of a training checkpoint.
Memory is what was resident at most beyond what was resident before, that is, beyond the weights where they are there
already. Printed are medians over the rounds of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARD = 500_000_000
HIDDEN, INNER, VOCAB = 2048, 6144, 32768


def config_of(gigabytes: float) -> Any:
    """A dense Qwen3 in float32 of about that size."""
    from transformers import Qwen3Config

    layer = 4 * (HIDDEN * 128 * (16 + 16 + 8 + 8) + 3 * HIDDEN * INNER)
    layers = max(round((gigabytes * 1e9 - 8 * HIDDEN * VOCAB) / layer), 1)
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
    )  # fmt: skip


def tensors_of(config: Any) -> dict[str, Any]:
    """Weights by their names in files; not zeros, which a file system may not store."""
    import torch

    from torchtitan_qwen3_trn.weights.assets import layout_and_class

    generator = torch.Generator().manual_seed(0)
    shapes = layout_and_class(config)[0].shapes
    return {name: torch.empty(shape).uniform_(-1, 1, generator=generator) for name, shape in shapes.items()}


def measured(action: Callable[[], object]) -> dict[str, float]:
    """Seconds and extra bytes resident of ``action``."""
    from torchtitan_qwen3_trn.device.cpu import cpu_device_module as device

    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    began = time.perf_counter()
    action()
    return {"seconds": time.perf_counter() - began, "extra": device.max_memory_allocated() - before}


def export(folder: Path, gigabytes: float) -> dict[str, float]:
    """The export plugin's work on one rank."""
    import torch

    from torchtitan_qwen3_trn.assets import tokenizer_path
    from torchtitan_qwen3_trn.weights.export import Export
    from torchtitan_qwen3_trn.weights.export import export as run

    config = config_of(gigabytes)
    tensors = tensors_of(config)
    wanted = Export(
        destination=folder / "export", config=config, dtype=torch.float32, limit=SHARD, assets=tokenizer_path()
    )
    return measured(lambda: run(tensors, wanted))


def sequential(folder: Path, gigabytes: float) -> dict[str, float]:
    """The same bytes in the same files, one write after the other."""
    import torch

    from torchtitan_qwen3_trn.weights.files import plan_files

    tensors = tensors_of(config_of(gigabytes))
    plan = plan_files({name: tuple(value.shape) for name, value in tensors.items()}, torch.float32, SHARD)
    (folder / "sequential").mkdir()

    def write() -> None:
        for file, header in plan.headers.items():
            with open(folder / "sequential" / file, "wb") as opened:
                opened.write(header)
                for name, place in plan.places.items():
                    if place.file == file:
                        opened.write(memoryview(tensors[name].numpy()).cast("B"))
                opened.flush()
                os.fsync(opened.fileno())

    return measured(write)


def save_pretrained(folder: Path, gigabytes: float) -> dict[str, float]:
    """Transformers' own way out."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(gigabytes)
    tensors = tensors_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(tensors, assign=True)
    return measured(lambda: model.save_pretrained(folder / "save_pretrained", max_shard_size=SHARD))


def from_pretrained(folder: Path, gigabytes: float) -> dict[str, float]:
    """Transformers' own way in."""
    import torch
    from transformers import AutoModelForCausalLM

    return measured(lambda: AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32))


def import_hf(folder: Path, gigabytes: float) -> dict[str, float]:
    """Into the model of the huggingface_v5 route, as torchtitan's checkpointer does it."""
    from torchtitan_qwen3_trn.models.hf.build import build_on_meta
    from torchtitan_qwen3_trn.models.hf.config import from_folder
    from torchtitan_qwen3_trn.models.hf.layout import layout_of
    from torchtitan_qwen3_trn.models.hf.model import HFModel
    from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter

    def load() -> None:
        config = from_folder(folder / "export")
        layout = layout_of(build_on_meta(config, document_mask=True, experts="eager"))
        ours = HFModel.Config(architecture=config, layout=layout, tensor_parallel_plan={}, vocab_size=VOCAB)
        _load(ours, HFStateDictAdapter(ours, None), folder / "export")

    return measured(load)


def import_native(folder: Path, gigabytes: float) -> dict[str, float]:
    """Into the model of the native route, as torchtitan's checkpointer does it."""
    from torchtitan_qwen3_trn.models.qwen3.hf_config import from_hf_config, read_hf_config
    from torchtitan_qwen3_trn.models.qwen3.spec import model_config
    from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    def load() -> None:
        ours = model_config(from_hf_config(read_hf_config(folder / "export")))
        _load(ours, Qwen3StateDictAdapter(ours, None), folder / "export")

    return measured(load)


def _load(config: Any, adapter: Any, folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    files = adapter.to_hf(model.state_dict())
    dcp.load(files, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    model.load_state_dict(adapter.from_hf(files), strict=False)


def import_offline(folder: Path, gigabytes: float) -> dict[str, float]:
    """``torchtitan-trn import``."""
    from torchtitan_qwen3_trn.weights.offline import import_folder

    return measured(lambda: import_folder(folder / "export", folder / "dcp"))


def export_offline(folder: Path, gigabytes: float) -> dict[str, float]:
    """``torchtitan-trn export``."""
    from torchtitan_qwen3_trn.weights.offline import export_checkpoint

    return measured(lambda: export_checkpoint(folder / "dcp", folder / "offline", limit=SHARD))


RUNS = {
    run.__name__: run
    for run in (
        export, sequential, save_pretrained, from_pretrained, import_hf, import_native, import_offline, export_offline,
    )
}  # fmt: skip


def round_of(folder: Path, gigabytes: float) -> dict[str, dict[str, float]]:
    """Every run once, each in its own process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results = {}
    for name in RUNS:
        command = [sys.executable, __file__, "--run", name, "--folder", str(folder), "--gigabytes", str(gigabytes)]
        os.sync()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        if name in ("sequential", "save_pretrained"):
            shutil.rmtree(folder / name)
    results["size"] = {"bytes": sum(file.stat().st_size for file in (folder / "export").glob("*.safetensors"))}
    shutil.rmtree(folder)
    return results


def main() -> None:
    """Run the rounds and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/weights_benchmark"))
    parser.add_argument("--run", choices=RUNS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(RUNS[arguments.run](arguments.folder, arguments.gigabytes)))
        return
    rounds = [round_of(arguments.folder, arguments.gigabytes) for _ in range(arguments.rounds)]
    size = rounds[0]["size"]["bytes"]

    def times(name: str, other: str) -> float:
        return statistics.median(each[other]["seconds"] / each[name]["seconds"] for each in rounds)

    def extra(name: str) -> float:
        return statistics.median(each[name]["extra"] for each in rounds)

    print(f"{size / 1e9:.2f} GB of weights, files of {SHARD / 1e9:.1f} GB, {arguments.rounds} rounds")
    for name in RUNS:
        seconds = statistics.median(each[name]["seconds"] for each in rounds)
        figures = f"{seconds:6.2f} s  {size / seconds / 1e9:5.2f} GB/s  extra resident {extra(name) / 1e9:5.2f} GB"
        print(f"  {name:16} {figures}")
    print(f"export / sequential writer, rate       {times('export', 'sequential'):5.2f}   (wanted: at least 0.8)")
    print(f"export / save_pretrained, rate         {times('export', 'save_pretrained'):5.2f}   (wanted: above 1)")
    print(f"export, extra resident / one file      {extra('export') / SHARD:5.2f}   (wanted: at most 1)")
    print(f"import (hf) / from_pretrained, rate    {times('import_hf', 'from_pretrained'):5.2f}   (wanted: above 1)")
    print(
        f"import (native) / from_pretrained      {times('import_native', 'from_pretrained'):5.2f}   (wanted: above 1)"
    )
    for name in ("import_hf", "import_native", "from_pretrained"):
        print(f"{name}, resident / weights".ljust(39) + f"{extra(name) / size:5.2f}   (wanted: at most 1.25)")
    offline = extra("export_offline") / (SHARD + 4 * HIDDEN * VOCAB)
    print(f"offline export, extra / (file+tensor)  {offline:5.2f}   (wanted: at most 1)")


if __name__ == "__main__":
    main()
