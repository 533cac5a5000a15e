"""Selection and gathers."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cost
from .dtypes import as_dtype, float32, from_float32, int32, tfloat32, uint16, uint32
from .errors import fail
from .isa_common import (
    NkiInstruction,
    begin,
    end,
    engine,
    not_both_psum,
    read,
    read32,
    reduce_cmd,
    same_elements,
    same_partitions,
    scalar_operand,
    tile,
    write,
    write32,
)
from .isa_reduce import vector_accumulate
from .memory import MemoryRegion
from .ops import as_op, maximum
from .views import NkiTensor

FP32_MIN = float(np.finfo(np.float32).min)


def tensor_copy_predicated(
    dst: NkiTensor, src: Any, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> NkiInstruction:
    """dst = src where predicate is not 0; other elements keep their value."""
    core = begin("tensor_copy_predicated")
    where = "nisa.tensor_copy_predicated"
    tile(core, "tensor_copy_predicated", "dst", dst)
    tile(core, "tensor_copy_predicated", "predicate", predicate)
    same_elements("tensor_copy_predicated", dst, predicate=predicate)
    not_both_psum("tensor_copy_predicated", "src", src, "predicate", predicate)
    if str(predicate.dtype) not in ("uint8", "uint16", "uint32", "bool"):
        fail(f"{where}: predicate", f"{predicate!r} must be uint8, uint16 or uint32")
    chosen = read(predicate, f"{where}: predicate").reshape(dst.shape) != 0
    if isinstance(src, NkiTensor):
        tile(core, "tensor_copy_predicated", "src", src)
        same_elements("tensor_copy_predicated", dst, src=src)
        if src.dtype is not dst.dtype:
            fail(f"{where}: src", f"{src!r} must have dst's type {dst.dtype}")
        values = read(src, f"{where}: src").reshape(dst.shape)
    else:
        values = from_float32(np.array(src, np.float32), dst.dtype)
    old = read(dst, f"{where}: dst")
    write(dst, np.where(chosen ^ reverse_pred, values, old), f"{where}: dst")
    n = dst.per_partition
    return end(
        core, engine.vector, "tensor_copy_predicated", cost.streaming(2 * n if isinstance(src, NkiTensor) else n)
    )


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_op: Any = maximum,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true where predicate is not 0, else on_false; and the maximum of each row."""
    core = begin("select_reduce")
    where = "nisa.select_reduce"
    for operand, t in (("dst", dst), ("predicate", predicate), ("on_true", on_true)):
        tile(core, "select_reduce", operand, t)
    same_elements("select_reduce", dst, predicate=predicate, on_true=on_true)
    not_both_psum("select_reduce", "on_true", on_true, "predicate", predicate)
    if not predicate.dtype.is_int or predicate.dtype.itemsize > 2:
        fail(f"{where}: predicate", f"{predicate!r} must be int8, uint8, int16 or uint16")
    if on_true.dtype in (tfloat32, int32, uint32):
        fail(f"{where}: on_true", f"{on_true!r} must not be {on_true.dtype}")
    _only_maximum(where, reduce_op)
    p = dst.shape[0]
    chosen = (read(predicate, f"{where}: predicate").reshape(p, -1) != 0) ^ reverse_pred
    other = scalar_operand(core, "select_reduce", "on_false", on_false, p)
    result = np.where(chosen, read32(on_true, f"{where}: on_true"), other).astype(np.float32)
    write32(dst, result, f"{where}: dst")
    vector_accumulate(core, "select_reduce", maximum, result, reduce_cmd, None, reduce_res)
    return end(core, engine.vector, "select_reduce", cost.streaming(2 * dst.per_partition))


def _only_maximum(where: str, op: Any) -> None:
    if as_op(op, f"{where}: reduce_op") is not maximum:
        fail(f"{where}: reduce_op", f"must be nl.maximum, got {op!r}")


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = maximum,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true_tile where the position compares true with both bounds, FP32_MIN elsewhere; row maximum."""
    core = begin("range_select")
    where = "nisa.range_select"
    if core.generation < 3:
        fail(where, "needs NeuronCore-v3")
    tile(core, "range_select", "dst", dst)
    tile(core, "range_select", "on_true_tile", on_true_tile)
    same_elements("range_select", dst, on_true_tile=on_true_tile)
    if not on_true_tile.dtype.is_float:
        fail(f"{where}: on_true_tile", f"{on_true_tile!r} must be a float type")
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        fail(f"{where}: on_false_value", f"must be {FP32_MIN}, got {on_false_value}")
    _only_maximum(where, reduce_op)
    p, n = dst.shape[0], dst.per_partition
    if abs(int(range_start)) + n > 2**24:
        fail(f"{where}: range_start", f"{range_start} plus {n} positions exceeds 2**24, up to which float32 is exact")
    position = np.arange(n, dtype=np.float32) + np.float32(int(range_start))
    kept = np.ones((p, n), bool)
    for label, op, bound in (("comp_op0", comp_op0, bound0), ("comp_op1", comp_op1, bound1)):
        compare = as_op(op, f"{where}: {label}")
        if compare.name not in ("equal", "less", "less_equal", "greater", "greater_equal"):
            fail(f"{where}: {label}", f"must be equal, less, less_equal, greater or greater_equal, got {compare!r}")
        value = scalar_operand(core, "range_select", f"bound of {label}", bound, p, only_float32=True)
        assert compare.native is not None
        kept &= compare.native(position[None, :], value)
    result = np.where(kept, read32(on_true_tile, f"{where}: on_true_tile"), np.float32(FP32_MIN))
    write32(dst, result, f"{where}: dst")
    vector_accumulate(core, "range_select", maximum, result, reduce_cmd, None, reduce_res)
    return end(core, engine.vector, "range_select", cost.streaming(n))


def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: list[int], name: str | None = None
) -> NkiInstruction:
    """Inside each 32-partition quadrant, partition i of dst = partition mask[i] of src; 255 keeps it unchanged."""
    core = begin("nc_stream_shuffle")
    where = "nisa.nc_stream_shuffle"
    tile(core, "nc_stream_shuffle", "dst", dst)
    tile(core, "nc_stream_shuffle", "src", src)
    if dst.dtype is not src.dtype or dst.per_partition != src.per_partition:
        fail(f"{where}: dst", f"{dst!r} must have the type and elements per partition of src {src!r}")
    if len(shuffle_mask) != 32 or any(not (0 <= int(m) < 32 or int(m) == 255) for m in shuffle_mask):
        fail(f"{where}: shuffle_mask", f"must be 32 numbers from 0 to 31, or 255, got {shuffle_mask}")
    active = -(-max(src.shape[0], dst.shape[0]) // 32) * 32
    step = {32: 32, 64: 64}.get(active, 128)
    for operand, t in (("dst", dst), ("src", src)):
        if t.start_partition % step:
            fail(
                f"{where}: {operand}",
                f"{t!r} starts at partition {t.start_partition}; {active} active start at multiples of {step}",
            )
    source = read(src, f"{where}: src").reshape(src.shape[0], -1).copy()
    target = read(dst, f"{where}: dst").reshape(dst.shape[0], -1).copy()
    out = np.arange(dst.shape[0])
    origin = np.array([int(m) for m in shuffle_mask])[out % 32]
    moved = origin != 255
    origin = out // 32 * 32 + origin
    if (origin[moved] >= src.shape[0]).any():
        fail(f"{where}: shuffle_mask", f"reads partition {origin[moved].max()} of src, which has {src.shape[0]}")
    target[moved] = source[origin[moved]]
    write(dst, target, f"{where}: dst")
    return end(core, engine.vector, "nc_stream_shuffle", cost.streaming(dst.per_partition))


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[p, i] = data[p, indices[p, i]]."""
    core = begin("nc_n_gather")
    where = "nisa.nc_n_gather"
    for operand, t in (("dst", dst), ("data", data), ("indices", indices)):
        tile(core, "nc_n_gather", operand, t, MemoryRegion.sbuf)
    same_partitions("nc_n_gather", dst, data=data)
    same_elements("nc_n_gather", dst, indices=indices)
    if dst.dtype is not data.dtype:
        fail(f"{where}: dst", f"{dst!r} must have data's type {data.dtype}")
    if indices.dtype is not uint32:
        fail(f"{where}: indices", f"{indices!r} must be uint32")
    index = read(indices, f"{where}: indices").reshape(dst.shape[0], -1).astype(np.int64)
    if index.max() >= data.per_partition:
        fail(
            f"{where}: indices",
            f"index {index.max()} is out of bounds for {data!r}, must be 0 to {data.per_partition - 1}",
        )
    values = read(data, f"{where}: data").reshape(data.shape[0], -1)
    write(dst, np.take_along_axis(values, index, axis=1), f"{where}: dst")
    return end(core, engine.gpsimd, "nc_n_gather", cost.gpsimd_pattern(dst.per_partition))


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Gather along the free dimension with one index list per 16 partitions, read partition first."""
    core = begin("local_gather")
    where = "nisa.local_gather"
    for operand, t in (("dst", dst), ("src_buffer", src_buffer), ("index", index)):
        tile(core, "local_gather", operand, t, MemoryRegion.sbuf)
    p = src_buffer.shape[0]
    if index.shape[0] != p or dst.shape[0] != p or p % 16:
        fail(
            where,
            f"dst {dst!r}, src_buffer {src_buffer!r}, index {index!r} must have equal partitions, a multiple of 16",
        )
    if index.dtype is not uint16:
        fail(f"{where}: index", f"{index!r} must be uint16")
    if dst.dtype is not src_buffer.dtype:
        fail(f"{where}: dst", f"{dst!r} must have src_buffer's type {src_buffer.dtype}")
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        fail(f"{where}: num_elem_per_idx", f"must be 1, 2, 4, 8, 16 or 32, got {num_elem_per_idx}")
    lists = read(index, f"{where}: index").reshape(p // 16, 16, -1).transpose(0, 2, 1).reshape(p // 16, -1)
    valid = lists.shape[1] if num_valid_indices is None else int(num_valid_indices)
    if valid > min(lists.shape[1], 4096):
        fail(f"{where}: num_valid_indices", f"must be at most {min(lists.shape[1], 4096)}, got {valid}")
    if valid * num_elem_per_idx != dst.per_partition:
        fail(f"{where}: dst", f"{dst!r} must have {valid} x {num_elem_per_idx} elements per partition")
    at = lists[:, :valid, None].astype(np.int64) + np.arange(num_elem_per_idx)
    if at.max() >= src_buffer.per_partition:
        fail(f"{where}: index", f"element {at.max()} is out of bounds for src_buffer {src_buffer!r}")
    spread = np.repeat(at.reshape(p // 16, -1), 16, axis=0)
    values = read(src_buffer, f"{where}: src_buffer").reshape(p, -1)
    write(dst, np.take_along_axis(values, spread, axis=1), f"{where}: dst")
    return end(core, engine.gpsimd, "local_gather", cost.gpsimd_pattern(dst.per_partition))


def sequence_bounds(dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Start and end of the run of equal ids that each element belongs to; (n, -1) where the id is 0."""
    core = begin("sequence_bounds")
    where = "nisa.sequence_bounds"
    tile(core, "sequence_bounds", "dst", dst, MemoryRegion.sbuf)
    tile(core, "sequence_bounds", "segment_ids", segment_ids, MemoryRegion.sbuf)
    n = segment_ids.per_partition
    if segment_ids.shape[0] != 1 or dst.shape[0] != 1 or dst.per_partition != 2 * n:
        fail(where, f"segment_ids {segment_ids!r} must be one partition and dst {dst!r} twice as long")
    for t in (dst, segment_ids):
        if t.dtype not in (float32, int32):
            fail(where, f"{t!r} must be {as_dtype('float32')} or {as_dtype('int32')}")
    ids = read(segment_ids, where).reshape(-1).astype(np.int64)
    edge = np.flatnonzero(np.diff(ids)) + 1
    starts, ends = np.r_[0, edge], np.r_[edge, n]
    run = np.repeat(np.arange(len(starts)), ends - starts)
    bounds = np.stack([np.where(ids == 0, n, starts[run]), np.where(ids == 0, -1, ends[run])])
    write(dst, bounds.astype(dst.dtype.np), f"{where}: dst")
    return end(core, engine.gpsimd, "sequence_bounds", cost.gpsimd_pattern(n))
