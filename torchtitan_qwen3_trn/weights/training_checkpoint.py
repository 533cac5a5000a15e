"""Reading the training checkpoints of the native and the huggingface_v5 route, tensor by tensor.

The state dict adapters of training, with a model on the meta device, tell which tensors of Hugging Face files make up
a tensor of the checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.tensor_names import listed, shape_differences
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter
from torchtitan_qwen3_trn.models.hf_config import from_folder
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import EXPERT_BIAS, Qwen3StateDictAdapter

Route = Literal["native", "huggingface_v5"]

_EMBEDDINGS: dict[Route, str] = {"native": "tok_embeddings.weight", "huggingface_v5": "model.embed_tokens.weight"}
# A layer's three projections of all experts, whose tensors alternate in the files.
_CACHED_KEYS = 3


@dataclass(frozen=True)
class MetaModel:
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


class _Reader(FileSystemReader):
    """Stock's reader, but ``.metadata`` is read once and not for every tensor."""

    @cached_property
    def metadata(self) -> Metadata:
        """The content of ``.metadata``.

        Raises:
            JobError: it does not exist or cannot be read.
        """
        folder = Path(self.path)
        if not (folder / ".metadata").is_file():
            reason = "there is no .metadata in it" if folder.is_dir() else "there is no such folder"
            raise JobError([Problem(str(folder), f"is not a training checkpoint: {reason}", "name a folder step-N")])
        try:
            return super().read_metadata()
        except Exception as error:
            what = f"cannot be read ({type(error).__name__}: {error})"
            raise JobError([Problem(str(folder / ".metadata"), what)]) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As stock's method."""
        return self.metadata


class TrainingCheckpoint:
    """A training checkpoint of the model that ``assets/config.json`` describes.

    Reads the checkpoint's ``.metadata``, which is a pickle: use it on checkpoints of your own.

    Attributes:
        path: folder ``step-N``.
        route: the route that wrote it.
        model: the model on the meta device.

    Raises:
        JobError: ``path`` is not a checkpoint of that model: of no known route, tensors missing or of another shape,
            or tied by config.json and yet different.
    """

    def __init__(self, path: Path, assets: Path) -> None:
        self.path, self._reader = path, _Reader(path)
        self._stored = self._reader.metadata.state_dict_metadata
        self.route = _route(path, self._stored)
        self._recent: OrderedDict[str, torch.Tensor] = OrderedDict()
        if not (assets / "config.json").is_file():
            what = "there is no config.json that says what model this is"
            raise JobError([Problem(str(assets), what, "name a folder that has it with --assets")])
        self.model = meta_model(self.route, from_folder(assets), assets)
        fix = "use the config.json of the model that was trained"
        if differences := shape_differences(*self._shapes()):
            raise JobError([Problem(str(path), each, fix) for each in differences], str(path))
        # Files hold tied tensors once, so different ones cannot be exported.
        tied = self.model.tied.items()
        if different := [f"{key} differs from {source}" for key, source in tied if self._differ(key, source)]:
            what = f"{listed(different)}, to which config.json ties it"
            raise JobError([Problem(str(path), what, f"{fix}, with tie_word_embeddings false")], str(path))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the embedding."""
        embedding = self._stored[_EMBEDDINGS[self.route]]
        return embedding.properties.dtype if isinstance(embedding, TensorStorageMetadata) else torch.float32

    def read(self, key: str) -> torch.Tensor:
        """The tensor ``key``; the last few that become several tensors in files are cached."""
        if key in self._recent:
            return self._recent[key]
        stored = self._stored[key]
        if not isinstance(stored, TensorStorageMetadata):
            what = f"{key} is not a tensor"
            raise JobError([Problem(str(self.path), what, "name a folder step-N of a training checkpoint")])
        several = len(self.model.names.get(key, ())) > 1
        while len(self._recent) >= (_CACHED_KEYS if several else 1):
            self._recent.popitem(last=False)
        value = torch.empty(stored.size, dtype=stored.properties.dtype)
        try:
            load({key: value}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise JobError([self._unreadable(key, cause_of(error))]) from error
        if several:
            self._recent[key] = value
        return value

    def expert_biases(self) -> dict[str, torch.Tensor]:
        """torchtitan's load-balancing biases of the router."""
        return {key: self.read(key) for key in self._stored if EXPERT_BIAS.fullmatch(key)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors by their names in files, one after the other, in the checkpoint's types.

        Raises:
            JobError: there is an expert bias, which files have no place for.
        """
        self.require_no_bias(self.expert_biases(), "the files compute something else than the trained model")
        for key, names in self.model.names.items():
            if names:
                yield from self.model.adapter.to_hf({key: self.read(key)}).items()

    def require_no_bias(self, biases: Mapping[str, torch.Tensor], fix: str) -> None:
        """Raise `JobError` if one of ``biases`` is not zero."""
        try:
            self.model.adapter.to_hf(biases)
        except ValueError as error:
            raise JobError([Problem(str(self.path), f"{error}", fix)]) from error

    def _shapes(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Shapes that are stored, without those of the optimizer, and shapes that are needed."""
        state_dict = self.model.state_dict
        needed = {key: list(value.shape) for key, value in state_dict.items() if self.model.names.get(key)}
        stored = {
            key: list(getattr(entry, "size", []))
            for key, entry in self._stored.items()
            if key in needed or (key.startswith(("layers.", "model.layers.")) and key not in state_dict)
        }
        return stored, needed

    def _differ(self, key: str, source: str) -> bool:
        if key not in self._stored:
            return False
        one, other = self.read(key), self.read(source)
        return one.dtype != other.dtype or not torch.equal(one, other)

    def _unreadable(self, key: str, cause: BaseException) -> Problem:
        stored = self._reader.metadata.storage_data.items()
        files = sorted({info.relative_path for index, info in stored if index.fqn == key})
        reason = " ".join(str(cause).split())[:200] or "the file ends too early"
        what = f"{key} cannot be read ({type(cause).__name__}: {reason})"
        return Problem(f"{self.path}: {', '.join(files)}", what, "copy the checkpoint again, or use another step")


def _route(path: Path, keys: Collection[str]) -> Route:
    for route, embedding in _EMBEDDINGS.items():
        if embedding in keys:
            return route
    what = "holds no model of the native or the huggingface_v5 route"
    raise JobError([Problem(str(path), what, "name the folder step-N of a training checkpoint")])


def meta_model(route: Route, config: PreTrainedConfig, folder: Path) -> MetaModel:
    """The model of ``config``, which is that of ``folder/config.json``, as ``route`` trains it."""
    if route == "native":
        native = model_config(from_folder(folder))
        with torch.device("meta"):
            state_dict = native.build().state_dict()
        adapter = Qwen3StateDictAdapter(native, None)
        biases = [key for key in state_dict if EXPERT_BIAS.fullmatch(key)]
        unnamed = [key for key, sources in adapter.file_names.items() if not sources]
        names = {**adapter.file_names, **dict.fromkeys(biases, ())}
        return MetaModel(state_dict, adapter, names, dict.fromkeys(unnamed, _EMBEDDINGS[route]))
    model = build_on_meta(config)
    layout = layout_of(model)
    hf = HFModel.Config(architecture=config, layout=layout, tensor_parallel_plan={}, vocab_size=config.vocab_size)
    return MetaModel(dict(model.state_dict()), HFStateDictAdapter(hf, None), layout.names, layout.tied)


def cause_of(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed."""
    return next(iter(error.failures.values()))[0]
