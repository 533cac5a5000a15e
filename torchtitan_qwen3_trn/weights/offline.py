"""Training checkpoint <-> Hugging Face folder in one process, tensor by tensor.

Which tensors of the files make up a tensor of the checkpoint is asked of the adapters that training uses, with a model
on the meta device. Values are read one tensor at a time, when the planner of ``torch.distributed.checkpoint`` asks for
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import require_folder
from torchtitan_qwen3_trn.hf_files.headers import DTYPES, TensorHeader, check_tensors, read_headers
from torchtitan_qwen3_trn.hf_files.tensor_names import listed, shape_differences
from torchtitan_qwen3_trn.hf_files.tying import tying_problems
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.config import from_folder
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter
from torchtitan_qwen3_trn.models.qwen3.hf_config import from_hf_config, read_hf_config
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import EXPERT_BIAS, Qwen3StateDictAdapter
from torchtitan_qwen3_trn.weights.export import Export, export, problems_of
from torchtitan_qwen3_trn.weights.folder_assets import layout_and_class, write_assets
from torchtitan_qwen3_trn.weights.folder_check import layout_of_folder
from torchtitan_qwen3_trn.weights.job_export import ASSETS, without_expert_bias
from torchtitan_qwen3_trn.weights.publish import Draft

__all__ = ["Route", "checkpoint_tensors", "export_checkpoint", "import_folder", "read_tensor", "route_of"]

Route = Literal["native", "huggingface_v5"]

_EMBEDDINGS: dict[Route, str] = {"native": "tok_embeddings.weight", "huggingface_v5": "model.embed_tokens.weight"}
# A layer's three projections of all experts, whose tensors alternate in the files.
_CACHED_KEYS = 3


@dataclass(frozen=True)
class _MetaModel:
    """A model on the meta device.

    Attributes:
        state_dict: its tensors, by the names that training checkpoints have.
        adapter: between those names and the files'.
        names: for each key the tensors of the files it is made of.
        tied: keys that share another key's tensor, and whose.
    """

    state_dict: dict[str, torch.Tensor]
    adapter: Qwen3StateDictAdapter | HFStateDictAdapter
    names: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]


def route_of(checkpoint: Path) -> Route:
    """Which route wrote a training checkpoint.

    Raises:
        JobError: it is not one, or not of a model of these routes.
    """
    keys = _metadata(checkpoint).state_dict_metadata
    for route, embedding in _EMBEDDINGS.items():
        if embedding in keys:
            return route
    what = "holds no model of the native or the huggingface_v5 route"
    raise JobError([Problem(str(checkpoint), what, "name the folder step-N of a training checkpoint")])


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
    route = route_of(checkpoint)
    assets = assets or checkpoint / ASSETS
    if not (assets / "config.json").is_file():
        what = "there is no config.json that says what model this is"
        raise JobError([Problem(str(assets), what, "name a folder that has it with --assets")])
    stored = _Checkpoint(checkpoint, assets, route)
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
        dtype=dtype or stored.dtype_of(_EMBEDDINGS[route]),
        limit=limit,
        assets=assets,
        facts={"checkpoint": str(checkpoint.absolute()), "model": {"backend": route}},
    )
    parts = {key: value for key, value in model.state_dict.items() if not EXPERT_BIAS.fullmatch(key)}
    export(model.adapter.to_hf(parts), wanted, planner=_LazyPlanner(value))


def checkpoint_tensors(checkpoint: Path, assets: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a training checkpoint by their names in files, one after the other, in the checkpoint's types.

    Args:
        checkpoint: folder ``step-N``.
        assets: folder with the model's config.json.

    Raises:
        JobError: the checkpoint is not of that model, or has an expert bias that files have no place for.
    """
    stored = _Checkpoint(checkpoint, assets, route_of(checkpoint))
    stored.require_no_bias(stored.expert_biases(), "the folder computes something else than the trained model")
    for key, names in stored.model.names.items():
        if names:
            yield from stored.model.adapter.to_hf({key: stored.read(key)}).items()


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
    published = _Folder(folder, found, _meta_model(route, config, folder))
    state_dict = published.state_dict()
    draft = Draft(checkpoint)
    try:
        # A file per tensor: stock's writer keeps the tensors of a file in memory until the file is complete.
        writer = FileSystemWriter(draft.folder, single_file_per_rank=False, sync_files=True)
        save(state_dict, storage_writer=writer, planner=_LazyPlanner(published.read), no_dist=True)
        dtype, class_name = next(iter(state_dict.values())).dtype, layout_and_class(config)[1]
        write_assets(draft.folder / ASSETS, config, class_name=class_name, dtype=dtype, source=folder)
        draft.publish()
    except BaseException as error:
        draft.discard()
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        if isinstance(error, CheckpointException | OSError) and isinstance(cause, Exception):
            raise JobError(problems_of(cause, checkpoint), "import") from error
        raise


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


class _CachedMetadataReader(FileSystemReader):
    """Stock's reader, which does not read ``.metadata`` again for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was read before."""
        return self._known


class _Checkpoint:
    """A training checkpoint and the model that ``assets/config.json`` says it is of.

    Raises:
        JobError: tensors are missing or of another shape, or differ although config.json ties them.
    """

    def __init__(self, path: Path, assets: Path, route: Route) -> None:
        self._path, self._metadata = path, _metadata(path)
        self._reader = _CachedMetadataReader(path, self._metadata)
        self._recent: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.model = _meta_model(route, from_folder(assets), assets)
        fix = "use the config.json of the model that was trained"
        if differences := shape_differences(*self._shapes()):
            raise JobError([Problem(str(path), each, fix) for each in differences], str(path))
        # Files hold tied tensors once, so different ones cannot be exported.
        if different := [
            f"{key} differs from {source}" for key, source in self.model.tied.items() if self._differ(key)
        ]:
            what = f"{listed(different)}, to which config.json ties it"
            raise JobError([Problem(str(path), what, f"{fix}, with tie_word_embeddings false")], str(path))

    def read(self, key: str) -> torch.Tensor:
        """The tensor ``key``; of those that become several tensors in files the last few are kept in memory."""
        if key in self._recent:
            return self._recent[key]
        stored = self._metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            what = f"{key} is not a tensor"
            raise JobError([Problem(str(self._path), what, "name a folder step-N of a training checkpoint")])
        several = len(self.model.names.get(key, ())) > 1
        while len(self._recent) >= (_CACHED_KEYS if several else 1):
            self._recent.popitem(last=False)
        value = torch.empty(stored.size, dtype=stored.properties.dtype)
        try:
            load({key: value}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise JobError([self._unreadable(key, _cause(error))]) from error
        if several:
            self._recent[key] = value
        return value

    def dtype_of(self, key: str) -> torch.dtype:
        """The type of ``key`` in the checkpoint."""
        stored = self._metadata.state_dict_metadata[key]
        return stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else torch.float32

    def expert_biases(self) -> dict[str, torch.Tensor]:
        """torchtitan's load-balancing biases of the router."""
        return {key: self.read(key) for key in self._metadata.state_dict_metadata if EXPERT_BIAS.fullmatch(key)}

    def require_no_bias(self, biases: Mapping[str, torch.Tensor], fix: str) -> None:
        """Raise `JobError` if one of ``biases`` is not zero."""
        try:
            self.model.adapter.to_hf(biases)
        except ValueError as error:
            raise JobError([Problem(str(self._path), f"{error}", fix)]) from error

    def _shapes(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Shapes that are stored, without those of the optimizer, and shapes that are needed."""
        state_dict = self.model.state_dict
        needed = {key: list(value.shape) for key, value in state_dict.items() if self.model.names.get(key)}
        stored = {
            key: list(getattr(entry, "size", []))
            for key, entry in self._metadata.state_dict_metadata.items()
            if key in needed or (key.startswith(("layers.", "model.layers.")) and key not in state_dict)
        }
        return stored, needed

    def _differ(self, key: str) -> bool:
        if key not in self._metadata.state_dict_metadata:
            return False
        one, other = self.read(key), self.read(self.model.tied[key])
        return (one.shape, one.dtype) != (other.shape, other.dtype) or not torch.equal(one, other)

    def _unreadable(self, key: str, cause: BaseException) -> Problem:
        stored = self._metadata.storage_data.items()
        files = sorted({info.relative_path for index, info in stored if index.fqn == key})
        reason = " ".join(str(cause).split())[:200] or "the file ends too early"
        what = f"{key} cannot be read ({type(cause).__name__}: {reason})"
        return Problem(f"{self._path}: {', '.join(files)}", what, "copy the checkpoint again, or use another step")


@dataclass(frozen=True)
class _Folder:
    """A Hugging Face folder, its headers, and the model whose training checkpoint it becomes."""

    path: Path
    found: Mapping[str, TensorHeader]
    model: _MetaModel

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's tensors on the meta device, in the types that the files have."""
        return {key: self._on_meta(key, value) for key, value in self.model.state_dict.items()}

    def read(self, key: str) -> torch.Tensor:
        """A tensor of the checkpoint, made of tensors of the files; the expert bias is zero."""
        if EXPERT_BIAS.fullmatch(key):
            return torch.zeros(self.model.state_dict[key].shape)
        tensors = {name: read_tensor(self.path, self.found, name) for name in self._sources(key)}
        return self.model.adapter.from_hf(tensors)[key]

    def _on_meta(self, key: str, value: torch.Tensor) -> torch.Tensor:
        bias = EXPERT_BIAS.fullmatch(key)
        dtype = torch.float32 if bias else DTYPES[self.found[self._sources(key)[0]].dtype]
        return torch.empty(value.shape, device="meta", dtype=dtype)

    def _sources(self, key: str) -> tuple[str, ...]:
        """The tensors of files behind ``key``; for a tied output layer those of the embedding."""
        return self.model.names[key] or ("model.embed_tokens.weight",)


def _metadata(checkpoint: Path) -> Metadata:
    if not (checkpoint / ".metadata").is_file():
        reason = "there is no .metadata in it" if checkpoint.is_dir() else "there is no such folder"
        what = f"is not a training checkpoint: {reason}"
        raise JobError([Problem(str(checkpoint), what, "name a folder step-N")])
    try:
        return FileSystemReader(checkpoint).read_metadata()
    except Exception as error:
        what = f"cannot be read ({type(error).__name__}: {error})"
        raise JobError([Problem(str(checkpoint / ".metadata"), what)]) from error


def _meta_model(route: Route, config: PreTrainedConfig, folder: Path) -> _MetaModel:
    if route == "native":
        native = model_config(from_hf_config(read_hf_config(folder)))
        with torch.device("meta"):
            state_dict = native.build().state_dict()
        adapter = Qwen3StateDictAdapter(native, None)
        biases = [key for key in state_dict if EXPERT_BIAS.fullmatch(key)]
        unnamed = [key for key, sources in adapter.file_names.items() if not sources]
        names = {**adapter.file_names, **dict.fromkeys(biases, ())}
        return _MetaModel(state_dict, adapter, names, dict.fromkeys(unnamed, _EMBEDDINGS[route]))
    model = build_on_meta(config, document_mask=True, experts="eager")
    layout = layout_of(model)
    hf = HFModel.Config(architecture=config, layout=layout, tensor_parallel_plan={}, vocab_size=config.vocab_size)
    return _MetaModel(dict(model.state_dict()), HFStateDictAdapter(hf, None), layout.names, layout.tied)


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed."""
    return next(iter(error.failures.values()))[0]
