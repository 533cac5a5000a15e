"""Hugging Face tensors <-> torchtitan's Qwen3 tensors, with nothing dropped or missing in silence.

torchtitan's adapter supplies the name table and the handling of sharded experts; this one the checks.

Shapes: E experts, F inner width of an expert, D model width. Files hold one [F, D] or [D, F] tensor per
expert and projection, memory one [E, F, D] or [E, D, F] tensor per layer and projection.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter as StockAdapter

from torchtitan_qwen3_trn.hf_files.index import file_numbers
from torchtitan_qwen3_trn.hf_files.tensor_names import ROTARY_FREQUENCIES, listed
from torchtitan_qwen3_trn.hf_files.windowed_reader import WindowedLoading

_EMBEDDING, _OUTPUT = "tok_embeddings.weight", "lm_head.weight"
EXPERT_BIAS = re.compile(r"layers\.(\d+)\.moe\.expert_bias_E")


class Qwen3StateDictAdapter(WindowedLoading, StockAdapter):
    """Adapter for plain and sharded (FSDP, tensor, expert parallel) state dicts of native Qwen3.

    The checkpointer calls `to_hf` to save, and also to plan a load: it fills the tensors `to_hf` returned
    from the files and gives them to `from_hf`. Both take partial dicts, as a pipeline stage or a rank with
    some of the experts has them, and change neither.
    """

    def __init__(self, model_config: Qwen3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, None)
        self.hf_assets_path = hf_assets_path
        self._hf_names = dict(_names(model_config, self.from_hf_map))
        self._native_name = {name: key for key, names in self._hf_names.items() for name in names}
        self._split: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self.fqn_to_index_mapping = file_numbers(hf_assets_path, set(self._native_name))

    @property
    def file_names(self) -> Mapping[str, tuple[str, ...]]:
        """For each native key the tensors of files it is made of; none for a tied ``lm_head``."""
        return self._hf_names

    def to_hf(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of ``state_dict`` by Hugging Face name: the tensors themselves, and views of experts.

        A sharded expert tensor comes apart into the experts of this rank. A tied ``lm_head`` is left out, as
        published checkpoints leave it out.

        Raises:
            ValueError: a tensor that Hugging Face's Qwen3 has no place for, or a load-balancing bias of the
                router that is not zero (a zero one is left out).
        """
        unknown = [key for key in state_dict if key not in self._hf_names and not EXPERT_BIAS.fullmatch(key)]
        if unknown:
            raise ValueError(f"no Hugging Face name for {listed(unknown)} of the native Qwen3 model")
        _refuse_moved_bias(state_dict)
        hf: dict[str, Any] = {}
        for key, value in state_dict.items():
            names = self._hf_names.get(key, ())
            if not _is_experts(key):
                hf.update((name, value) for name in names)
                continue
            self._split[key] = value
            if isinstance(value, DTensor):
                hf.update(self._local_experts(key, value))
            else:
                hf.update((name, value[expert]) for expert, name in enumerate(names))
        return hf

    def from_hf(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of ``hf_state_dict`` by native name, experts stacked.

        With tied weights the embedding also becomes ``lm_head.weight``, whether or not the checkpoint has
        one.

        Raises:
            ValueError: a tensor the model has no place for, or a layer that lacks some of its experts.
        """
        self._validate_hf_rope_config(CosSinRoPE.Config)
        unknown = [name for name in hf_state_dict if name not in self._native_name and not self._ignored(name)]
        if unknown:
            raise ValueError(f"no place in this Qwen3 model for {listed(unknown)}")
        native: dict[str, Any] = {}
        experts: dict[str, dict[int, Any]] = {}
        for name, value in hf_state_dict.items():
            key = self._native_name.get(name)
            if key is not None and _is_experts(key):
                experts.setdefault(key, {})[self._hf_names[key].index(name)] = value
            elif key is not None:
                native[key] = value
        native.update((key, self._stacked(key, parts)) for key, parts in experts.items())
        if self.model_config.enable_weight_tying and _EMBEDDING in native:
            native[_OUTPUT] = native[_EMBEDDING]
        return native

    def _ignored(self, name: str) -> bool:
        """Whether a published tensor is known to be redundant."""
        tied_output = self.model_config.enable_weight_tying and name == _OUTPUT
        return tied_output or ROTARY_FREQUENCIES.fullmatch(name) is not None

    def _local_experts(self, key: str, value: DTensor) -> dict[str, Any]:
        """This rank's experts of a sharded [E, ...] tensor; remembers the sharding for `_stacked`."""
        abstract, layer = _abstract(key)
        self.grouped_expert_weight_placements[abstract] = value.placements
        self.grouped_expert_weight_shape[abstract] = value.shape
        self.grouped_expert_weight_mesh[abstract] = value.device_mesh
        template = next(hf for hf, native in self.from_hf_map.items() if native == abstract)
        return self._get_local_experts_weights(template, abstract, layer, value)

    def _stacked(self, key: str, parts: dict[int, Any]) -> torch.Tensor:
        """One [E, ...] tensor from its experts, or from this rank's if those are what `to_hf` gave.

        What `to_hf` split comes back as the very tensor it was, with no copy, as long as that tensor lives.
        """
        abstract, layer = _abstract(key)
        everyone = range(len(self._hf_names[key]))
        expected = range(*self.local_experts_indices.get(abstract, (0, len(everyone))))
        if lacking := [expert for expert in expected if expert not in parts]:
            names = [self._hf_names[key][expert] for expert in lacking]
            raise ValueError(f"a part of {key} is missing: {listed(names)}")
        origin = self._split.get(key)
        if origin is not None and _are_views(parts, origin, expected.start):
            return origin
        if abstract in self.local_experts_indices and len(parts) == len(expected):
            return self._concatenate_expert_weights_dtensor({layer: {abstract: parts}}, abstract, layer)
        return torch.stack([parts[expert] for expert in everyone])

    def _caculate_indices_from_placements(
        self, dim: int, dim_size: int, dtensor_placements: tuple[Any, ...], device_mesh: Any
    ) -> tuple[int, int]:
        """torchtitan's calculation (its spelling) without the replicated mesh axes, which it cannot read."""
        axes = zip(device_mesh.mesh_dim_names, dtensor_placements, strict=True)
        kept = [(name, placement) for name, placement in axes if not isinstance(placement, Replicate)]
        if not kept:
            return 0, dim_size
        mesh = device_mesh[tuple(name for name, _ in kept)]
        placements = tuple(placement for _, placement in kept)
        return super()._caculate_indices_from_placements(dim, dim_size, placements, mesh)


def _names(config: Qwen3Model.Config, from_hf_map: Mapping[str, str | None]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every native key of ``config`` with the Hugging Face names it is made of (none: left out of files)."""
    for template, native in from_hf_map.items():
        if native is None:
            continue
        if "{}" not in native:
            tied_output = native == _OUTPUT and config.enable_weight_tying
            yield native, () if tied_output else (template,)
            continue
        for index, layer in enumerate(config.layers):
            key = native.format(index)
            if _is_experts(native) and layer.moe is not None:
                yield key, tuple(template.format(index, expert) for expert in range(layer.moe.num_experts))
            elif not _is_experts(native) and _has(layer, native):
                yield key, (template.format(index),)


def _has(layer: Any, native: str) -> bool:
    """Whether a layer has the block a key template belongs to."""
    if ".moe." in native:
        return layer.moe is not None
    return ".feed_forward." not in native or layer.feed_forward is not None


def _is_experts(key: str) -> bool:
    return ".routed_experts.inner_experts." in key


def _are_views(parts: Mapping[int, Any], origin: torch.Tensor, first: int) -> bool:
    """Whether ``parts`` are the memory of ``origin``, whose first expert on this rank has the number ``first``."""
    whole = origin.to_local() if isinstance(origin, DTensor) else origin
    if len(parts) != whole.shape[0]:
        return False
    pieces = ((expert, part.to_local() if isinstance(part, DTensor) else part) for expert, part in parts.items())
    return all(
        piece.data_ptr() == whole[expert - first].data_ptr() and piece.numel() == whole[0].numel()
        for expert, piece in pieces
    )


def _abstract(key: str) -> tuple[str, str]:
    """``layers.3.x`` -> ``layers.{}.x`` and ``3``."""
    layer = key.split(".")[1]
    return key.replace(f".{layer}.", ".{}.", 1), layer


def moved_expert_biases(state_dict: Mapping[str, Any]) -> dict[str, float]:
    """Largest absolute value of each expert bias that is not zero, by key; the largest first, NaN before any number."""
    moved = {}
    for key, value in state_dict.items():
        if not EXPERT_BIAS.fullmatch(key):
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        if not local.is_meta and local.numel() and (largest := float(local.detach().abs().max())) != 0:
            moved[key] = largest
    # max() would pass over NaN, which compares false with any number.
    return dict(sorted(moved.items(), key=lambda item: (math.isnan(item[1]), item[1]), reverse=True))


def _refuse_moved_bias(state_dict: Mapping[str, Any]) -> None:
    if moved := moved_expert_biases(state_dict):
        key, largest = next(iter(moved.items()))
        raise ValueError(
            f"the load-balancing bias of the router has moved in {len(moved)} layers (furthest in {key}: "
            f"{largest:g}) and a Hugging Face checkpoint has no place for it; without it tokens would go to "
            "other experts. Keep torchtitan's own checkpoint format, or train with model.load_balance "
            '"aux_loss" or "none"'
        )
