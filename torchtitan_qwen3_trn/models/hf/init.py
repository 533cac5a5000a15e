"""Random weights for a Transformers model that was built on the meta device and may be sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from torchtitan_qwen3_trn.models.hf.sharding import local_slice


@torch.no_grad()
def initialize(model: PreTrainedModel, *, buffer_device: torch.device | None = None) -> None:
    """Give every parameter and buffer of ``model`` the value Transformers' rule gives it, and tie what is tied.

    Transformers' rule runs on one module after the other, on whole tensors, of which each rank keeps its part: the
    same seed gives the same weights on any number of ranks and under any sharding. The most that exists beside the
    model is one module's own parameters, and nothing where a rank holds the whole tensor anyway.

    Args:
        model: on its real device, values undefined (after ``to_empty``).
        buffer_device: where buffers go; ``None`` leaves them beside the parameters.
    """
    tied = set(model.all_tied_weights_keys)
    for name, module in _children_first(model, ""):
        if f"{name}.weight" not in tied:
            _initialize_module(model, module)
    if tied:
        model.tie_weights()
    if buffer_device is not None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(buffer_device)


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules with their names in the order Transformers initialises them, so that random numbers fall alike."""
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    sharded = {name: value for name, value in module.named_parameters(recurse=False) if isinstance(value, DTensor)}
    whole = {name: _whole_tensor(value) for name, value in sharded.items()}
    try:
        module._parameters.update(whole)
        model._init_weights(module)
    finally:
        module._parameters.update(sharded)
    for name, value in sharded.items():
        local = value.to_local()
        if local.shape != value.shape:
            local.copy_(whole[name][local_slice(value)])


def _whole_tensor(value: DTensor) -> nn.Parameter:
    """A parameter of the global shape: the local tensor where it is the whole, else a new one."""
    local = value.to_local()
    if local.shape != value.shape:
        local = torch.empty(value.shape, dtype=value.dtype, device=local.device)
    return nn.Parameter(local, requires_grad=False)
