"""Tensor parallelism from a Transformers model's own plan (``base_model_tp_plan``), with PyTorch's DTensor styles.

Every parameter becomes a DTensor on the tensor-parallel mesh, also those the plan leaves whole: torchtitan's gradient
clipping and fused optimizer need all of them on one mesh.

Experts are split by expert rather than, as the plan says, inside each expert: the plan's split of the fused gate and up
projections is not contiguous, and distributed checkpoints can hold contiguous parts only. The sums are the same.

Shape suffixes: B batch, L sequence, T = B * L tokens, D model width, K experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

_HEAD_STYLES = ("colwise_gather_output", "colwise_rep", "colwise")
_EXPERT_STYLES = ("moe_tp_experts",)
# The experts' parameters are split along with their module; the embedding follows the output layer.
_COVERED = ("packed_colwise", "embedding_rowwise")


class _Whole(ParallelStyle):
    """Parameters are replicated; the module computes on plain tensors.

    Args:
        summed: whether each rank computes one term of the gradient's sum, because it has only its own heads.
    """

    def __init__(self, *, summed: bool = False) -> None:
        super().__init__()
        self.summed = summed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate(), summed=self.summed)
        return module


class _ByExpert(ParallelStyle):
    """Fused experts [E, ...] are split by expert; every rank sees all tokens, and the ranks' outputs are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        experts: Any = module
        first, held = _own_range(experts.num_experts, device_mesh)
        # Transformers' experts skip the id `num_experts`; this is how its own expert parallelism marks foreign ones.
        experts.num_experts = held
        experts._is_expert_parallel = True

        def own_experts(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden_TD, experts_TK, weights_TK, *rest = args
            foreign_TK = (experts_TK < first) | (experts_TK >= first + held)
            local_TK = torch.where(foreign_TK, held, experts_TK - first)
            weights_TK = _summed_gradient(weights_TK, device_mesh).masked_fill(foreign_TK, 0.0)
            return (_summed_gradient(hidden_TD, device_mesh), local_TK, weights_TK, *rest)

        module.register_forward_pre_hook(own_experts)
        module.register_forward_hook(lambda _, __, output_TD: _sum_over_ranks(output_TD, device_mesh))
        return module


class _ByVocabulary(ParallelStyle):
    """An embedding's rows are split; each rank looks up its own, and the ranks' outputs are summed.

    PyTorch's `RowwiseParallel` for embeddings masks by boolean indices, whose number depends on the data; compilers for
    fixed shapes, as Neuron's, want `where` and `masked_fill`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        first, held = _own_range(cast(nn.Embedding, module).num_embeddings, device_mesh)
        foreign: list[torch.Tensor] = []

        def own_rows(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            (ids_BL,) = args
            foreign.append((ids_BL < first) | (ids_BL >= first + held))
            return (torch.where(foreign[-1], 0, ids_BL - first),)

        def add_up(_: nn.Module, __: Any, output_BLD: torch.Tensor) -> torch.Tensor:
            return _sum_over_ranks(output_BLD.masked_fill(foreign.pop()[..., None], 0.0), device_mesh)

        module.register_forward_pre_hook(own_rows)
        module.register_forward_hook(add_up)
        return module


def unknown_styles(plan: Mapping[str, str]) -> set[str]:
    """Names of styles in a model's ``tp_plan`` that have no counterpart here."""
    known = {*_linear_styles(), *_HEAD_STYLES, *_EXPERT_STYLES, *_COVERED}
    return {style for style in plan.values() if style not in known}


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split ``model`` (on the meta device) over the one-dimensional ``mesh``; its logits come out split by vocabulary.

    Split logits are what torchtitan's cross-entropy takes: each rank its share of the vocabulary, as a plain tensor.
    """
    linear = _linear_styles()
    plan = {re.escape(name).replace(r"\*", r"\d+"): style for name, style in model.tp_plan.items()}
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if re.fullmatch(pattern, name)), None)
        if module is model.lm_head:
            _split(module, mesh, ColwiseParallel(use_local_output=True))
        elif style in _EXPERT_STYLES:
            _split(module, mesh, _ByExpert())
        elif style in linear:
            _split(module, mesh, linear[style])
    if model.all_tied_weights_keys:
        _split(model.get_input_embeddings(), mesh, _ByVocabulary())
        model.tie_weights()
    for module in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            _split(module, mesh, _Whole())


def _split(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    # On the meta device no rank has data to send.
    parallelize_module(module, mesh, style, src_data_rank=None)


def _linear_styles() -> dict[str, ParallelStyle]:
    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "replicated_with_grad_allreduce": _Whole(summed=True),
    }


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement, *, summed: bool = False) -> None:
    """Make the parameters of ``module`` DTensors, which it sees as local tensors during forward.

    Args:
        module: on the meta device.
        mesh: one-dimensional.
        placement: of every parameter.
        summed: whether each rank computes one term of a sum that is their gradient.
    """
    for name, parameter in module.named_parameters(recurse=False):
        split = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    kept: list[dict[str, nn.Parameter | None]] = []

    def to_local(_: nn.Module, __: Any) -> None:
        kept.append(dict(module._parameters))
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                module._parameters[name] = _summed_gradient(local, parameter.device_mesh) if summed else local

    def restore(_: nn.Module, __: Any, ___: Any) -> None:
        module._parameters.update(kept.pop())

    module.register_forward_pre_hook(to_local)
    module.register_forward_hook(restore, always_call=True)


def _own_range(count: int, mesh: DeviceMesh) -> tuple[int, int]:
    """First of this rank's rows of ``count``, and their number."""
    held = count // mesh.size()
    return held * mesh.get_local_rank(), held


def _sum_over_ranks(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' ``value``, the same on all of them; each rank's ``value`` gets the whole gradient."""
    partial = DTensor.from_local(value, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


def _summed_gradient(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """``value``, which is the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
