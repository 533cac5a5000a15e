"""Training checkpoint <-> Hugging Face folder in one process, tensor by tensor.

What a tensor is made of is asked of the same adapters that training uses; only its values come later, one tensor at a
time, when the planner of ``torch.distributed.checkpoint`` asks for them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
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
from torchtitan_qwen3_trn.hf_files.headers import check_tensors, listed, read_headers
from torchtitan_qwen3_trn.hf_files.tying import tying_problems
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter
from torchtitan_qwen3_trn.models.hf_config import from_folder
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan_qwen3_trn.weights.export import Export, export, said
from torchtitan_qwen3_trn.weights.folder_assets import write_assets
from torchtitan_qwen3_trn.weights.folder_check import layout_of_folder
from torchtitan_qwen3_trn.weights.job_export import ASSETS, without_expert_bias
from torchtitan_qwen3_trn.weights.publish import Draft

__all__ = ["Route", "checkpoint_tensors", "export_checkpoint", "import_folder", "route_of"]

logger = logging.getLogger(__name__)

Route = Literal["native", "huggingface_v5"]

_EMBEDDINGS: dict[Route, str] = {"native": "tok_embeddings.weight", "huggingface_v5": "model.embed_tokens.weight"}
_EXPERT_BIAS = "expert_bias_E"
# A layer's three projections of all experts; their tensors alternate in the files.
_KEPT = 3


@dataclass(frozen=True)
class _Skeleton:
    """A model without values.

    Attributes:
        state_dict: its tensors on the meta device, by the names that training checkpoints have.
        adapter: between those names and the files'.
        names: for each key the tensors of the files it is made of.
        tied: keys that are another one, and which.
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
    metadata, route = _metadata(checkpoint), route_of(checkpoint)
    assets = assets or checkpoint / ASSETS
    if not (assets / "config.json").is_file():
        what = "there is no config.json that says what model this is"
        raise JobError([Problem(str(assets), what, "name a folder that has it with --assets")])
    config = from_folder(assets)
    skeleton = _skeleton(route, config, assets)
    _compare(checkpoint, metadata, skeleton)
    reader = _KeyReader(checkpoint, metadata, skeleton.names)
    _compare_tied(checkpoint, reader, skeleton)
    biases = {key: reader(key) for key in _biases(metadata.state_dict_metadata)}
    kept = without_expert_bias(biases) if drop_expert_bias else biases
    _refuse_bias(checkpoint, kept, skeleton, "or --drop-expert-bias")
    parts = {key: value for key, value in skeleton.state_dict.items() if not key.endswith(_EXPERT_BIAS)}
    key_of = {name: key for key, names in skeleton.names.items() for name in names}

    def value(name: str) -> torch.Tensor:
        key = key_of[name]
        return skeleton.adapter.to_hf({key: reader(key)})[name]

    embedding = metadata.state_dict_metadata[_EMBEDDINGS[route]]
    stored = embedding.properties.dtype if isinstance(embedding, TensorStorageMetadata) else torch.float32
    wanted = Export(
        destination=destination,
        config=config,
        dtype=dtype or stored,
        limit=limit,
        assets=assets,
        facts={"checkpoint": str(checkpoint.absolute()), "model": {"backend": route}},
    )
    export(skeleton.adapter.to_hf(parts), wanted, planner=_LazyPlanner(value))


def checkpoint_tensors(checkpoint: Path, assets: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a training checkpoint by their names in files, one after the other, in the checkpoint's types.

    Args:
        checkpoint: folder ``step-N``.
        assets: folder with the model's config.json.

    Raises:
        JobError: the checkpoint is not of that model, or has an expert bias that files have no place for.
    """
    metadata, route = _metadata(checkpoint), route_of(checkpoint)
    skeleton = _skeleton(route, from_folder(assets), assets)
    _compare(checkpoint, metadata, skeleton)
    reader = _KeyReader(checkpoint, metadata, skeleton.names)
    _compare_tied(checkpoint, reader, skeleton)
    biases = {key: reader(key) for key in _biases(metadata.state_dict_metadata)}
    _refuse_bias(checkpoint, biases, skeleton, "the folder computes something else than the trained model")
    for key, names in skeleton.names.items():
        if names:
            yield from skeleton.adapter.to_hf({key: reader(key)}).items()


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
    problems = check_tensors(folder, layout.shapes, ignores=layout.ignores)
    problems = problems or tying_problems(folder, layout, read_headers(folder)[0])
    if problems:
        raise JobError(problems, str(folder))
    config = from_folder(folder)
    skeleton = _skeleton(route, config, folder)
    with ExitStack() as files:
        value = _Folder(folder, skeleton, files)
        draft = Draft(checkpoint)
        try:
            state_dict = {key: value.described(key) for key in skeleton.state_dict}
            # A file per tensor: stock's writer keeps the tensors of a file in memory until the file is complete.
            writer = FileSystemWriter(draft.folder, single_file_per_rank=False, sync_files=True)
            save(state_dict, storage_writer=writer, planner=_LazyPlanner(value), no_dist=True)
            dtype = next(iter(state_dict.values())).dtype
            class_name = type(build_on_meta(config, document_mask=True, experts="eager")).__name__
            write_assets(draft.folder / ASSETS, config, class_name=class_name, dtype=dtype, source=folder)
            draft.publish()
        except BaseException as error:
            draft.discard()
            cause = _cause(error) if isinstance(error, CheckpointException) else error
            if isinstance(error, CheckpointException | OSError) and isinstance(cause, Exception):
                raise JobError(said(cause, checkpoint), "import") from error
            raise


class _LazyPlanner(DefaultSavePlanner):
    """Stock's planner, for a state dict on the meta device: ``value`` gives a tensor when it is written."""

    def __init__(self, value: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._value = value

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor itself."""
        return self._value(index.fqn)


class _KnownMetadata(FileSystemReader):
    """Stock's reader, which does not read ``.metadata`` again for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was read before."""
        return self._known


class _KeyReader:
    """Tensors of a training checkpoint by key; of those that become several tensors in files the last few are kept."""

    def __init__(self, checkpoint: Path, metadata: Metadata, names: Mapping[str, tuple[str, ...]]) -> None:
        self._reader, self._metadata, self._names = _KnownMetadata(checkpoint, metadata), metadata, names
        self._recent: OrderedDict[str, torch.Tensor] = OrderedDict()

    def has(self, key: str) -> bool:
        """Whether the checkpoint holds ``key``."""
        return key in self._metadata.state_dict_metadata

    def __call__(self, key: str) -> torch.Tensor:
        if key in self._recent:
            return self._recent[key]
        stored = self._metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            what = f"{key} is not a tensor"
            raise JobError([Problem(str(self._reader.path), what, "name a folder step-N of a training checkpoint")])
        several = len(self._names.get(key, ())) > 1
        while len(self._recent) >= (_KEPT if several else 1):
            self._recent.popitem(last=False)
        value = torch.empty(stored.size, dtype=stored.properties.dtype)
        try:
            load({key: value}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise JobError([self._unreadable(key, _cause(error))]) from error
        if several:
            self._recent[key] = value
        return value

    def _unreadable(self, key: str, cause: BaseException) -> Problem:
        stored = self._metadata.storage_data.items()
        files = sorted({info.relative_path for index, info in stored if index.fqn == key})
        reason = " ".join(str(cause).split())[:200] or "the file ends too early"
        what = f"{key} cannot be read ({type(cause).__name__}: {reason})"
        return Problem(
            f"{self._reader.path}: {', '.join(files)}", what, "copy the checkpoint again, or use another step"
        )


class _Folder:
    """A model's tensors by the names of training checkpoints, read from a Hugging Face folder."""

    def __init__(self, folder: Path, skeleton: _Skeleton, files: ExitStack) -> None:
        self._headers = read_headers(folder)[0]
        self._folder, self._skeleton, self._files = folder, skeleton, files

    def __call__(self, key: str) -> torch.Tensor:
        if key.endswith(_EXPERT_BIAS):
            return torch.zeros(self._skeleton.state_dict[key].shape)
        tensors = {name: self._read(name) for name in self._sources(key)}
        return self._skeleton.adapter.from_hf(tensors)[key]

    def described(self, key: str) -> torch.Tensor:
        """``key`` on the meta device, in the type its file has."""
        shape = self._skeleton.state_dict[key].shape
        if key.endswith(_EXPERT_BIAS):
            return torch.empty(shape, device="meta", dtype=torch.float32)
        kind = self._headers[self._sources(key)[0]].dtype
        return torch.empty(shape, device="meta", dtype=_TYPES[kind])

    def _sources(self, key: str) -> tuple[str, ...]:
        """The tensors of files behind ``key``; for a tied output layer those of the embedding."""
        return self._skeleton.names[key] or ("model.embed_tokens.weight",)

    def _read(self, name: str) -> torch.Tensor:
        # Opened anew each time: pages once read stay resident until the file is closed.
        with safe_open(self._folder / self._headers[name].file, framework="pt") as opened:
            return opened.get_tensor(name)


_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


def _skeleton(route: Route, config: PreTrainedConfig, folder: Path) -> _Skeleton:
    if route == "native":
        native = model_config(from_folder(folder))
        with torch.device("meta"):
            state_dict = native.build().state_dict()
        adapter = Qwen3StateDictAdapter(native, None)
        names = {**adapter.file_names, **dict.fromkeys(_biases(state_dict), ())}
        unnamed = [key for key, sources in adapter.file_names.items() if not sources]
        return _Skeleton(state_dict, adapter, names, dict.fromkeys(unnamed, _EMBEDDINGS[route]))
    model = build_on_meta(config, document_mask=True, experts="eager")
    layout = layout_of(model)
    hf = HFModel.Config(architecture=config, layout=layout, tensor_parallel_plan={}, vocab_size=config.vocab_size)
    return _Skeleton(dict(model.state_dict()), HFStateDictAdapter(hf, None), layout.names, layout.tied)


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed."""
    return next(iter(error.failures.values()))[0]


def _biases(state_dict: Mapping[str, Any]) -> list[str]:
    return [key for key in state_dict if key.endswith(_EXPERT_BIAS)]


def _compare(checkpoint: Path, metadata: Metadata, skeleton: _Skeleton) -> None:
    """Whether the checkpoint holds the tensors of the model; what belongs to the optimizer is not looked at."""
    stored = metadata.state_dict_metadata
    needed = {key: value for key, value in skeleton.state_dict.items() if skeleton.names.get(key)}
    missing = [key for key in needed if key not in stored]
    misshapen = [
        f"{key} {list(getattr(stored[key], 'size', []))} instead of {list(value.shape)}"
        for key, value in needed.items()
        if key in stored and getattr(stored[key], "size", None) != value.shape
    ]
    prefix = ("layers.", "model.layers.")
    extra = [key for key in stored if key.startswith(prefix) and key not in skeleton.state_dict]
    rows = [(missing, "missing"), (misshapen, "of another shape"), (extra, "without a place in the model")]
    fix = "use the config.json of the model that was trained"
    problems = [Problem(str(checkpoint), f"{listed(names)} {what}", fix) for names, what in rows if names]
    if problems:
        raise JobError(problems, str(checkpoint))


def _compare_tied(checkpoint: Path, reader: _KeyReader, skeleton: _Skeleton) -> None:
    """Whether what config.json ties is tied in the checkpoint too; files hold such a tensor once."""
    different = [
        f"{key} differs from {source}"
        for key, source in skeleton.tied.items()
        if reader.has(key) and not _same(reader(key), reader(source))
    ]
    if different:
        what = f"{listed(different)}, to which config.json ties it"
        fix = "use the config.json of the model that was trained, with tie_word_embeddings false"
        raise JobError([Problem(str(checkpoint), what, fix)], str(checkpoint))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one, other)


def _refuse_bias(checkpoint: Path, biases: Mapping[str, torch.Tensor], skeleton: _Skeleton, fix: str) -> None:
    try:
        skeleton.adapter.to_hf(biases)
    except ValueError as error:
        raise JobError([Problem(str(checkpoint), f"{error}", fix)]) from error
