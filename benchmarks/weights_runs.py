"""The runs that `weights` compares: one way out of or into memory each, measured in a process of its own."""

from __future__ import annotations

import os
import shutil
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


OUT = {run.__name__: run for run in (export, sequential, save_pretrained, save_pretrained_fsync)}
RUNS = OUT | {run.__name__: run for run in (from_pretrained, import_hf, import_native, import_offline, export_offline)}


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
