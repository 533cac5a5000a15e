"""Training checkpoint <-> Hugging Face folder in one process.

Values are read one tensor at a time, when the planner of ``torch.distributed.checkpoint`` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.hf_files.folder import require_folder
from torchtitan_qwen3_trn.hf_files.headers import DTYPES, TensorHeader, check_tensors, read_headers
from torchtitan_qwen3_trn.hf_files.tying import tying_problems
from torchtitan_qwen3_trn.models.hf_config import from_folder
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import EXPERT_BIAS
from torchtitan_qwen3_trn.weights.export import Export, export, problems_of
from torchtitan_qwen3_trn.weights.folder_assets import write_assets
from torchtitan_qwen3_trn.weights.folder_check import layout_of_folder
from torchtitan_qwen3_trn.weights.job_export import ASSETS, without_expert_bias
from torchtitan_qwen3_trn.weights.publish import Draft
from torchtitan_qwen3_trn.weights.training_checkpoint import MetaModel, Route, TrainingCheckpoint, cause_of, meta_model


def export_checkpoint(
    checkpoint: Path,
    destination: Path,
    *,
    assets: Path | None = None,
    dtype: torch.dtype | None = None,
    limit: int = 5 * 10**9,
    drop_expert_bias: bool = False,
) -> None:
    """Write a training checkpoint as a Hugging Face folder.

    Reads the checkpoint's ``.metadata``, which is a pickle: use it on checkpoints of your own.

    Args:
        checkpoint: folder ``step-N``.
        destination: the folder to publish; it must not exist.
        assets: folder with config.json and tokenizer; by default the one the checkpoint carries.
        dtype: type of the tensors; by default that of the checkpoint's embedding.
        limit: bytes of tensors in one file at most.
        drop_expert_bias: export although torchtitan's expert bias has no place in the files.

    Raises:
        JobError: with what is wrong; nothing is published then.
    """
    assets = assets or checkpoint / ASSETS
    stored = TrainingCheckpoint(checkpoint, assets)
    biases = stored.expert_biases()
    stored.require_no_bias(without_expert_bias(biases) if drop_expert_bias else biases, "or --drop-expert-bias")
    model = stored.model
    key_of = {name: key for key, names in model.names.items() for name in names}

    def value(name: str) -> torch.Tensor:
        key = key_of[name]
        return model.adapter.to_hf({key: stored.read(key)})[name]

    wanted = Export(
        destination=destination,
        config=from_folder(assets),
        dtype=dtype or stored.dtype,
        limit=limit,
        assets=assets,
        facts={"checkpoint": str(checkpoint.absolute()), "model": {"backend": stored.route}},
    )
    parts = {key: value for key, value in model.state_dict.items() if not EXPERT_BIAS.fullmatch(key)}
    export(model.adapter.to_hf(parts), wanted, planner=_LazyPlanner(value))


def import_folder(folder: Path, checkpoint: Path, *, route: Route = "native") -> None:
    """Write a Hugging Face folder as a training checkpoint that ``checkpoint.initial_load_path`` takes.

    Tensors keep their type; training converts them when it loads them. Published completely or not at all.

    Args:
        folder: config.json and safetensors.
        checkpoint: the folder to publish; it must not exist.
        route: whose names the checkpoint gets.

    Raises:
        JobError: with everything that is wrong with ``folder``, or why ``checkpoint`` cannot be written.
    """
    require_folder(folder)
    layout = layout_of_folder(folder)
    found, _ = read_headers(folder)
    problems = check_tensors(folder, layout.shapes, ignores=layout.ignores)
    if problems := problems or tying_problems(folder, layout.tied, found):
        raise JobError(problems, str(folder))
    config = from_folder(folder)
    published = _Folder(folder, found, meta_model(route, config, folder))
    state_dict = {key: published.on_meta(key) for key in published.model.state_dict}
    try:
        with Draft(checkpoint) as draft:
            # A file per tensor: stock's writer keeps the tensors of a file in memory until the file is complete.
            writer = FileSystemWriter(draft.folder, single_file_per_rank=False, sync_files=True)
            save(state_dict, storage_writer=writer, planner=_LazyPlanner(published.read), no_dist=True)
            dtype = next(iter(state_dict.values())).dtype
            write_assets(draft.folder / ASSETS, config, dtype=dtype, source=folder)
            draft.publish()
    except (CheckpointException, OSError) as error:
        cause = cause_of(error) if isinstance(error, CheckpointException) else error
        if not isinstance(cause, Exception):
            raise
        raise JobError(problems_of(cause, checkpoint), "import") from error


def read_tensor(folder: Path, found: Mapping[str, TensorHeader], name: str) -> torch.Tensor:
    """One tensor of a Hugging Face folder whose headers are ``found``."""
    # Opened anew each time: pages once read stay resident until the file is closed.
    with safe_open(folder / found[name].file, framework="pt") as opened:
        return opened.get_tensor(name)


class _LazyPlanner(DefaultSavePlanner):
    """Stock's planner, for a state dict on the meta device: ``value`` gives a tensor when it is written."""

    def __init__(self, value: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._value = value

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor itself."""
        return self._value(index.fqn)


@dataclass(frozen=True)
class _Folder:
    """A Hugging Face folder, its headers, and the model whose training checkpoint it becomes."""

    path: Path
    found: Mapping[str, TensorHeader]
    model: MetaModel

    def on_meta(self, key: str) -> torch.Tensor:
        """A tensor of the checkpoint on the meta device, in the type that the files have."""
        bias = EXPERT_BIAS.fullmatch(key)
        dtype = torch.float32 if bias else DTYPES[self.found[self._sources(key)[0]].dtype]
        return torch.empty(self.model.state_dict[key].shape, device="meta", dtype=dtype)

    def read(self, key: str) -> torch.Tensor:
        """A tensor of the checkpoint, made of tensors of the files; the expert bias is zero."""
        if EXPERT_BIAS.fullmatch(key):
            return torch.zeros(self.model.state_dict[key].shape)
        tensors = {name: read_tensor(self.path, self.found, name) for name in self._sources(key)}
        return self.model.adapter.from_hf(tensors)[key]

    def _sources(self, key: str) -> tuple[str, ...]:
        """The tensors of files that ``key`` is made of; for a tied output layer those of the embedding."""
        return self.model.names[key] or ("model.embed_tokens.weight",)
