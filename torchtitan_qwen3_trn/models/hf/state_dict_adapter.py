"""Checkpoint files' tensors <-> a Transformers model's parameters, without a copy.

`to_hf` returns views of the parameters, in the shapes of the files. The checkpointer reads the files into these
views, so that after a load nothing is left to do: `from_hf` returns the parameters that the views belong to.

Shapes: E experts, F inner width of an expert, D model width. Memory: ``gate_up_proj`` [E, 2F, D], ``down_proj``
[E, D, F]. Files: one [F, D] or [D, F] tensor per expert and projection.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_qwen3_trn.hf_files.index import file_numbers
from torchtitan_qwen3_trn.hf_files.tensor_names import listed
from torchtitan_qwen3_trn.hf_files.windowed_reader import WindowedLoading
from torchtitan_qwen3_trn.models.hf.init import local_slice
from torchtitan_qwen3_trn.models.hf.model import HFModel


class HFStateDictAdapter(WindowedLoading, BaseStateDictAdapter):
    """Adapter for plain and sharded (FSDP, tensor parallel) state dicts. Changes neither argument."""

    def __init__(self, model_config: HFModel.Config, hf_assets_path: str | None) -> None:
        self.model_config = model_config
        self.hf_assets_path = hf_assets_path
        self._layout = model_config.layout
        self._key_of = {name: key for key, names in self._layout.names.items() for name in names}
        self._split: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self.fqn_to_index_mapping = file_numbers(hf_assets_path, set(self._key_of))

    def to_hf(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of ``state_dict`` by their names in files: the tensors themselves, and views of fused experts.

        For a sharded fused tensor these are the experts, or parts of experts, that this rank holds. A tied ``lm_head``
        is left out, as in published checkpoints.

        Raises:
            ValueError: a tensor that is not the model's.
        """
        unknown = [key for key in state_dict if key not in self._layout.names]
        if unknown:
            raise ValueError(f"the model has no parameter for {listed(unknown)}")
        hf: dict[str, Any] = {}
        for key, value in state_dict.items():
            names = self._layout.names[key]
            if key in self._layout.projections:
                self._split[key] = value
                hf.update(_pieces(value, names, self._layout.projections[key]))
            elif names:
                hf[names[0]] = value
        return hf

    def from_hf(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of ``hf_state_dict`` by parameter name, experts fused; with tied weights, ``lm_head`` too.

        For views that `to_hf` made, the result is the original tensor without a copy, while that tensor exists.

        Raises:
            ValueError: a tensor the model has no place for, or an incomplete set of experts.
        """
        unknown = [name for name in hf_state_dict if name not in self._key_of and not self._layout.ignores(name)]
        if unknown:
            raise ValueError(f"the model has no place for {listed(unknown)}")
        native: dict[str, Any] = {}
        fused: dict[str, dict[str, Any]] = {}
        for name, value in hf_state_dict.items():
            key = self._key_of.get(name)
            if key is None:
                continue
            if key in self._layout.projections:
                fused.setdefault(key, {})[name] = value
            else:
                native[key] = value
        native.update((key, self._whole(key, pieces)) for key, pieces in fused.items())
        native.update((key, native[source]) for key, source in self._layout.tied.items() if source in native)
        return native

    def _whole(self, key: str, pieces: Mapping[str, Any]) -> torch.Tensor:
        projections, names = self._layout.projections[key], self._layout.names[key]
        origin = self._split.get(key)
        if origin is not None:
            views = _pieces(origin, names, projections)
            if views.keys() == pieces.keys() and all(_same_memory(views[name], pieces[name]) for name in views):
                return origin
        if lacking := [name for name in names if name not in pieces]:
            raise ValueError(f"a part of {key} is missing: {listed(lacking)}")
        rows = [[pieces[name] for name in names[at : at + projections]] for at in range(0, len(names), projections)]
        return torch.stack([torch.cat(parts) for parts in rows])


def _pieces(value: torch.Tensor, names: tuple[str, ...], projections: int) -> dict[str, torch.Tensor]:
    """Views of ``value`` [E, P * rows, columns], P projections of each expert, by file name: those this rank holds."""
    local = value.to_local() if isinstance(value, DTensor) else value
    first = local_slice(value)[0].start if isinstance(value, DTensor) and local.numel() else 0
    found: dict[str, torch.Tensor] = {}
    for index, expert in enumerate(local):
        at = (first + index) * projections
        for name, piece in zip(names[at : at + projections], expert.chunk(projections), strict=True):
            found[name] = _sharded_like(value, piece, projections) if isinstance(value, DTensor) else piece
    return found


def _sharded_like(value: DTensor, piece: torch.Tensor, projections: int) -> torch.Tensor:
    """``piece``, part of one expert of ``value``, on the mesh axes that split experts inside; plain if none does."""
    names = value.device_mesh.mesh_dim_names or ()
    inner: dict[str, Placement] = {}
    for name, placement in zip(names, value.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = cast(Shard, placement).dim
        if dim == 1 and projections > 1:
            raise ValueError(f"{placement} splits the projections of one expert, which are separate tensors in files")
        if dim > 0:
            inner[name] = Shard(dim - 1)
    if not inner:
        return piece
    shape = (value.shape[1] // projections, value.shape[2])
    return DTensor.from_local(
        piece,
        value.device_mesh[tuple(inner)],
        tuple(inner.values()),
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        one, other = one.to_local(), other.to_local()
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
