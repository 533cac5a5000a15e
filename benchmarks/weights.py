"""Weights out and in, side by side: time ratios and peak resident memory, each run in a process of its own.

    python benchmarks/weights.py [--rounds 4] [--gigabytes 2] [--files float32] [--folder /tmp/weights_benchmark]

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
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD = 500_000_000
HIDDEN, INNER, VOCAB = 2048, 6144, 32768
PAGE = 4096


@dataclass(frozen=True)
class Case:
    """What a run works on.

    Attributes:
        folder: where everything is written.
        config: of the model.
        files: type of the tensors in the files.
    """

    folder: Path
    config: Any
    files: Any


def config_of(gigabytes: float) -> Any:
    """A dense Qwen3 in float32 of about that size."""
    layer = 4 * (HIDDEN * 128 * (16 + 16 + 8 + 8) + 3 * HIDDEN * INNER)
    layers = max(round((gigabytes * 1e9 - 8 * HIDDEN * VOCAB) / layer), 1)
    return _qwen3(layers, HIDDEN, INNER, VOCAB)


def tiny_config() -> Any:
    """What imports and first calls are done with."""
    return _qwen3(2, 64, 128, 512)


def _qwen3(layers: int, hidden: int, inner: int, vocab: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
    )  # fmt: skip


def tensors_of(config: Any) -> dict[str, Any]:
    """Weights by their names in files; not zeros, which a file system may not store."""
    import torch

    from torchtitan_qwen3_trn.models.hf.build import build_on_meta
    from torchtitan_qwen3_trn.models.hf.layout import layout_of

    generator = torch.Generator().manual_seed(0)
    shapes = layout_of(build_on_meta(config)).shapes
    return {name: torch.empty(shape).uniform_(-1, 1, generator=generator) for name, shape in shapes.items()}


def measured(action: Callable[[], object]) -> dict[str, float]:
    """Seconds and extra bytes resident of ``action``."""
    from torchtitan_qwen3_trn.device.cpu import cpu_device_module as device

    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    began = time.perf_counter()
    action()
    return {"seconds": time.perf_counter() - began, "extra": device.max_memory_allocated() - before}


def export(case: Case) -> dict[str, float]:
    """The export plugin's work on one rank."""
    from torchtitan_qwen3_trn.assets import tokenizer_path
    from torchtitan_qwen3_trn.weights.export import Export
    from torchtitan_qwen3_trn.weights.export import export as run

    tensors = tensors_of(case.config)
    wanted = Export(
        destination=case.folder / "export", config=case.config, dtype=case.files, limit=SHARD, assets=tokenizer_path()
    )
    return measured(lambda: run(tensors, wanted))


def sequential(case: Case) -> dict[str, float]:
    """The same bytes in the same files, one write after the other."""
    import torch

    from torchtitan_qwen3_trn.hf_files.file_plan import plan_files

    tensors = {name: value.to(case.files) for name, value in tensors_of(case.config).items()}
    plan = plan_files({name: tuple(value.shape) for name, value in tensors.items()}, case.files, SHARD)
    folder = case.folder / "sequential"
    folder.mkdir()

    def write() -> None:
        for file, header in plan.headers.items():
            with open(folder / file, "wb") as opened:
                opened.write(header)
                for name, place in plan.places.items():
                    if place.file == file:
                        opened.write(memoryview(tensors[name].view(torch.uint8).numpy()).cast("B"))
                opened.flush()
                os.fsync(opened.fileno())

    return measured(write)


def save_pretrained(case: Case) -> dict[str, float]:
    """Transformers' own way out."""
    model = _transformers_model(case)
    return measured(lambda: model.save_pretrained(case.folder / "save_pretrained", max_shard_size=SHARD))


def save_pretrained_fsync(case: Case) -> dict[str, float]:
    """The same with files that a power failure leaves, as the export's."""
    model = _transformers_model(case)
    folder = case.folder / "save_pretrained_fsync"

    def save() -> None:
        model.save_pretrained(folder, max_shard_size=SHARD)
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())

    return measured(save)


def _transformers_model(case: Case) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config, dtype=case.files)
    tensors = {name: value.to(case.files) for name, value in tensors_of(case.config).items()}
    model.load_state_dict(tensors, assign=True)
    return model


def from_pretrained(case: Case) -> dict[str, float]:
    """Transformers' own way in."""
    import torch
    from transformers import AutoModelForCausalLM

    return measured(
        lambda: _write_to(
            AutoModelForCausalLM.from_pretrained(case.folder / "export", dtype=torch.float32).parameters()
        )
    )


def _write_to(parameters: Iterable[Any]) -> None:
    """Write to every page of the parameters once."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            parameter.view(-1)[:: PAGE // parameter.element_size()].add_(0)


def import_hf(case: Case) -> dict[str, float]:
    """Into the model of the huggingface_v5 route, as torchtitan's checkpointer does it."""
    from torchtitan_qwen3_trn.models.hf.build import build_on_meta
    from torchtitan_qwen3_trn.models.hf.layout import layout_of
    from torchtitan_qwen3_trn.models.hf.model import HFModel
    from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter
    from torchtitan_qwen3_trn.models.hf_config import from_folder

    def load() -> None:
        config = from_folder(case.folder / "export")
        layout = layout_of(build_on_meta(config, document_mask=True, experts="eager"))
        ours = HFModel.Config(architecture=config, layout=layout, tensor_parallel_plan={}, vocab_size=config.vocab_size)
        _load(ours, HFStateDictAdapter(ours, None), case.folder / "export")

    return measured(load)


def import_native(case: Case) -> dict[str, float]:
    """Into the model of the native route, as torchtitan's checkpointer does it."""
    from torchtitan_qwen3_trn.models.hf_config import from_folder
    from torchtitan_qwen3_trn.models.qwen3.spec import model_config
    from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    def load() -> None:
        ours = model_config(from_folder(case.folder / "export"))
        _load(ours, Qwen3StateDictAdapter(ours, None), case.folder / "export")

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
    _write_to(model.parameters())


def import_offline(case: Case) -> dict[str, float]:
    """``torchtitan-trn import``."""
    from torchtitan_qwen3_trn.weights.offline import import_folder

    return measured(lambda: import_folder(case.folder / "export", case.folder / "dcp"))


def export_offline(case: Case) -> dict[str, float]:
    """``torchtitan-trn export``."""
    from torchtitan_qwen3_trn.weights.offline import export_checkpoint

    return measured(lambda: export_checkpoint(case.folder / "dcp", case.folder / "offline", limit=SHARD))


OUT = [export, sequential, save_pretrained, save_pretrained_fsync]
RUNS = {run.__name__: run for run in (*OUT, from_pretrained, import_hf, import_native, import_offline, export_offline)}


def run_after_tiny(name: str, case: Case) -> dict[str, float]:
    """Run ``name``, having done everything up to it with a tiny model in this process."""
    tiny = Case(case.folder / f"tiny-{name}", tiny_config(), case.files)
    tiny.folder.mkdir()
    for each, run in RUNS.items():
        run(tiny)
        if each == name:
            break
    shutil.rmtree(tiny.folder)
    return RUNS[name](case)


def round_of(folder: Path, gigabytes: float, files: str, *, backwards: bool) -> dict[str, dict[str, float]]:
    """Every run once, each in its own process; those that write weights out in the other order if asked to."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results = {}
    out = [run.__name__ for run in OUT]
    for name in [*(reversed(out) if backwards else out), *list(RUNS)[len(out) :]]:
        command = [sys.executable, __file__, "--run", name, "--folder", str(folder), "--gigabytes", str(gigabytes)]
        os.sync()
        done = subprocess.run([*command, "--files", files], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        if name in ("sequential", "save_pretrained", "save_pretrained_fsync"):
            shutil.rmtree(folder / name)
    results["size"] = {"bytes": sum(file.stat().st_size for file in (folder / "export").glob("*.safetensors"))}
    shutil.rmtree(folder)
    return results


def main() -> None:
    """Run the rounds and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--files", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/weights_benchmark"))
    parser.add_argument("--run", choices=RUNS)
    arguments = parser.parse_args()
    if arguments.run:
        import torch

        case = Case(arguments.folder, config_of(arguments.gigabytes), getattr(torch, arguments.files))
        print(json.dumps(run_after_tiny(arguments.run, case)))
        return
    rounds = [
        round_of(arguments.folder, arguments.gigabytes, arguments.files, backwards=number % 2 == 1)
        for number in range(arguments.rounds)
    ]
    size = rounds[0]["size"]["bytes"]
    nbytes = {"float32": 4, "bfloat16": 2}[arguments.files]
    weights = size // nbytes * 4

    def times(name: str, other: str) -> float:
        return statistics.median(each[other]["seconds"] / each[name]["seconds"] for each in rounds)

    def extra(name: str) -> float:
        return statistics.median(each[name]["extra"] for each in rounds)

    def row(text: str, figure: float, wanted: str) -> None:
        print(f"{text:44}{figure:5.2f}   (wanted: {wanted})")

    print(f"{size / 1e9:.2f} GB in files of {SHARD / 1e9:.1f} GB, {arguments.files}, {arguments.rounds} rounds")
    for name in RUNS:
        seconds = statistics.median(each[name]["seconds"] for each in rounds)
        figures = f"{seconds:6.2f} s  {size / seconds / 1e9:5.2f} GB/s  extra resident {extra(name) / 1e9:5.2f} GB"
        print(f"  {name:22} {figures}")
    row("export / sequential writer, rate", times("export", "sequential"), "at least 0.8")
    row("export / save_pretrained, rate", times("export", "save_pretrained"), "above 1")
    row("export / save_pretrained with fsync, rate", times("export", "save_pretrained_fsync"), "above 1")
    row("export, extra resident / one file", extra("export") / SHARD, "at most 1")
    for name in ("import_hf", "import_native"):
        row(f"{name} / from_pretrained, rate", times(name, "from_pretrained"), "above 1")
    for name in ("import_hf", "import_native", "from_pretrained"):
        row(f"{name}, resident / weights", extra(name) / weights, "at most 1.25")
    row(
        "offline export, extra / (file + tensor)",
        extra("export_offline") / (SHARD + nbytes * HIDDEN * VOCAB),
        "at most 1",
    )


if __name__ == "__main__":
    main()
