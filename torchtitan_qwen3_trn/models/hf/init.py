"""Random weights for a Transformers model that was built on the meta device and may be sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


@torch.no_grad()
def initialize(model: PreTrainedModel, *, buffer_device: torch.device | None = None) -> None:
    """Set every parameter and buffer of ``model`` by Transformers' rule, and tie the tied ones.

    The rule is applied to one module after the other, on whole tensors, of which each rank keeps its part: the same
    seed gives the same weights on any number of ranks and with any sharding. Beside the model, memory is needed for
    one module's own parameters at most, and for none if a rank holds the whole tensors.

    Args:
        model: on its real device, values undefined (after ``to_empty``).
        buffer_device: where buffers go; ``None`` leaves them beside the parameters.
    """
    tied = {model.get_submodule(name.rpartition(".")[0]) for name in model.all_tied_weights_keys}
    # Children first, which is Transformers' order, so that the random numbers are the same.
    model.apply(lambda module: None if module in tied else _initialize_module(model, module))
    if tied:
        model.tie_weights()
    if buffer_device is not None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(buffer_device)


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


def local_slice(value: DTensor) -> tuple[slice, ...]:
    """The index that takes this rank's part out of the whole tensor, as distributed checkpoints see it.

    Raises:
        ValueError: the part is not one contiguous block.
    """
    chunks = value.__create_chunk_list__()
    if len(chunks) != 1:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} is held in {len(chunks)} pieces on one rank")
    offsets, sizes = chunks[0].offsets, chunks[0].sizes
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
