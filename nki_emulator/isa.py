"""The module `nki.isa`."""

from __future__ import annotations

from .errors import NkiValidationError
from .isa_common import (
    NkiInstruction,
    VirtualRegister,
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from .isa_control import (
    affine_select,
    core_barrier,
    get_nc_sub_version,
    get_nc_version,
    iota,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)
from .isa_dma import dma_compute, dma_copy, dma_transpose
from .isa_reduce import tensor_partition_reduce, tensor_reduce, tensor_scalar_reduce
from .isa_running import bn_aggr, bn_stats, tensor_scalar_cumulative, tensor_tensor_scan
from .isa_scalar import activation, activation_reduce
from .isa_search import max8, nc_find_index8, nc_match_replace8, nonzero_with_count, topk
from .isa_select import (
    local_gather,
    nc_n_gather,
    nc_stream_shuffle,
    range_select,
    select_reduce,
    sequence_bounds,
    tensor_copy_predicated,
)
from .isa_tensor import nc_matmul, nc_transpose
from .isa_vector import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_scalar,
    tensor_tensor,
)

tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]

_NOT_EMULATED = {
    "activate2": "NeuronCore-v4",
    "dropout": "random numbers",
    "exponential": "NeuronCore-v4",
    "nc_matmul_mx": "NeuronCore-v4",
    "quantize_mx": "NeuronCore-v4",
    "rand2": "random numbers",
    "rand_get_state": "random numbers",
    "rand_set_state": "random numbers",
    "rng": "random numbers",
    "set_rng_seed": "random numbers",
}


def __getattr__(name: str) -> None:
    if name in _NOT_EMULATED:
        raise AttributeError(f"nisa.{name} exists but is not emulated ({_NOT_EMULATED[name]})")
    raise AttributeError(f"nki.isa has no {name!r}")
