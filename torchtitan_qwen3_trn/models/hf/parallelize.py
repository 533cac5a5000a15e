"""Tensor parallelism, activation checkpointing, compilation and FSDP2 for a Transformers model, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import (
    disable_fsdp_gradient_division,
    enable_fsdp_symm_mem,
    get_fsdp_reshard_after_forward_policy,
)
from torchtitan.tools.logging import logger

from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.tensor_parallel import apply_tensor_parallel

_STORAGE_AXES = ["dp_replicate", "dp_shard", "tp"]


def parallelize(
    model: HFModel,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
) -> HFModel:
    """``model``, changed in place, as torchtitan's ``ModelSpec.parallelize_fn`` asks for it."""
    mesh = parallel_dims.get_activated_mesh(_STORAGE_AXES)
    if mesh is None:
        raise ValueError(f"no mesh with one of the axes {_STORAGE_AXES}")
    if parallel_dims.tp_enabled:
        apply_tensor_parallel(model.transformers_model, mesh["tp"])
    if ac_config is not None:
        if isinstance(ac_config, SelectiveAC.Config) and model.idle_parameters():
            ac_config = derive(ac_config, RouterSafeSelectiveAC.Config)
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    data_parallel = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    _share_router_loss(model, training, parallel_dims)
    _apply_fsdp(model, mesh[data_parallel], training, parallelism)
    return model


class RouterSafeSelectiveAC(SelectiveAC):
    """Stock's selective checkpointing without keeping top-k results.

    Transformers' router divides the top-k values in place, and a kept tensor must not change.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Stock's options."""

    def get_save_ops(self) -> set[Any]:
        """Stock's operators but top-k, which is recomputed."""
        return super().get_save_ops() - {torch.ops.aten.topk.default}


def _share_router_loss(model: HFModel, training: TrainingConfig, parallel_dims: ParallelDims) -> None:
    if model.router_loss is not None:
        degree = parallel_dims.dp_replicate * parallel_dims.dp_shard
        per_step = max(training.global_batch_size, training.local_batch_size * degree)
        model.router_loss.share = training.local_batch_size / per_step


def _apply_fsdp(model: HFModel, mesh: DeviceMesh, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """One group per decoder layer, one for the embedding and one for norm and head, or one for all three if tied."""
    casts = training.mixed_precision_param != training.dtype
    if mesh.size() == 1 and not training.enable_cpu_offload and not casts:
        logger.info("One data-parallel rank and nothing to cast: the model is not wrapped in FSDP")
        return
    policy = parallelism.fsdp_reshard_after_forward
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    reshard = get_fsdp_reshard_after_forward_policy(policy, pp_enabled=False)
    # Backward needs the last group first, so it stays gathered unless the job asks for "always".
    reshard_last = policy == "always"

    embedding = model.transformers_model.get_input_embeddings()
    last = [module for module in (getattr(model.model, "norm", None), model.lm_head) if module is not None]
    if model.lm_head.weight is embedding.weight:
        fully_shard([embedding, *last], **options, reshard_after_forward=reshard_last)
    else:
        fully_shard(embedding, **options, reshard_after_forward=reshard)
        fully_shard(last, **options, reshard_after_forward=reshard_last)
    for layer in model.layers.children():
        placement = _inner_placement(layer, mesh)
        fully_shard(layer, **options, reshard_after_forward=reshard, shard_placement_fn=placement)
    fully_shard(model, **options)

    if parallelism.enable_fsdp_symm_mem:
        enable_fsdp_symm_mem(model)
    disable_fsdp_gradient_division(model)
    kind = "HSDP" if mesh.ndim > 1 else "FSDP"
    logger.info("Applied %s to the Transformers model over %d data-parallel ranks", kind, mesh.size())


def _inner_placement(layer: nn.Module, mesh: DeviceMesh) -> Any:
    """FSDP splits tensors by rows, that is, fused experts by expert. With more ranks than experts some would hold
    none: then by the last dimension, where it divides."""
    ranks = mesh.size(mesh.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard | None:
        local_rows = parameter.to_local().shape[0] if hasattr(parameter, "to_local") else parameter.shape[0]
        by_column = parameter.ndim == 3 and local_rows < ranks and parameter.shape[2] % ranks == 0
        return Shard(2) if by_column else None

    return place if any(parameter.ndim == 3 for parameter in layer.parameters()) else None
