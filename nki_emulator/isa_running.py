"""Statistics for batch normalisation, and running results along the free dimension."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cost
from .dtypes import int32, uint32
from .errors import fail
from .isa_common import (
    NkiInstruction,
    arithmetic,
    begin,
    end,
    engine,
    not_both_psum,
    read32,
    reduce_cmd,
    same_elements,
    same_partitions,
    scalar_operand,
    tile,
    write32,
)
from .isa_vector import scalar_step
from .views import NkiTensor


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Count, mean and variance times count of the even and of the odd elements of each partition."""
    core = begin("bn_stats")
    where = "nisa.bn_stats"
    tile(core, "bn_stats", "dst", dst)
    tile(core, "bn_stats", "data", data)
    same_partitions("bn_stats", dst, data=data)
    if data.per_partition > 512:
        fail(f"{where}: data", f"{data!r} has {data.per_partition} elements per partition; the limit is 512")
    if dst.per_partition != 6:
        fail(f"{where}: dst", f"{dst!r} must have 6 elements per partition")
    x = read32(data, f"{where}: data")
    out = np.zeros((x.shape[0], 6), np.float32)
    for i in range(2):
        part = x[:, i::2]
        if part.shape[1]:
            mean = part.mean(axis=1, dtype=np.float32)
            spread = np.square(part - mean[:, None]).sum(axis=1, dtype=np.float32)
            out[:, 3 * i], out[:, 3 * i + 1], out[:, 3 * i + 2] = part.shape[1], mean, spread
    write32(dst, out, f"{where}: dst")
    return end(core, engine.vector, "bn_stats", cost.streaming(data.per_partition))


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Mean and variance from (count, mean, variance times count) triples."""
    core = begin("bn_aggr")
    where = "nisa.bn_aggr"
    tile(core, "bn_aggr", "dst", dst)
    tile(core, "bn_aggr", "data", data)
    same_partitions("bn_aggr", dst, data=data)
    if data.per_partition % 3 or dst.per_partition != 2:
        fail(where, f"data {data!r} must hold triples and dst {dst!r} 2 elements per partition")
    count, mean, spread = read32(data, f"{where}: data").reshape(data.shape[0], -1, 3).transpose(2, 0, 1)
    total = count.sum(axis=1, keepdims=True)
    center = (count * mean).sum(axis=1, keepdims=True) / total
    variance = (spread + count * np.square(mean - center)).sum(axis=1, keepdims=True) / total
    write32(dst, np.concatenate([center, variance], axis=1).astype(np.float32), f"{where}: dst")
    return end(core, engine.vector, "bn_aggr", cost.streaming(data.per_partition))


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """r[i] = (data0[i] op0 r[i-1]) op1 data1[i] along each partition."""
    core = begin("tensor_tensor_scan")
    where = "nisa.tensor_tensor_scan"
    for operand, t in (("dst", dst), ("data0", data0), ("data1", data1)):
        tile(core, "tensor_tensor_scan", operand, t)
    same_elements("tensor_tensor_scan", dst, data0=data0, data1=data1)
    not_both_psum("tensor_tensor_scan", "data0", data0, "data1", data1)
    first, second = arithmetic(op0, f"{where}: op0").arithmetic, arithmetic(op1, f"{where}: op1").arithmetic
    assert first is not None
    assert second is not None
    a, b = read32(data0, f"{where}: data0").T.copy(), read32(data1, f"{where}: data1").T.copy()
    state = np.broadcast_to(
        scalar_operand(core, "tensor_tensor_scan", "initial", initial, dst.shape[0]), (dst.shape[0], 1)
    )
    row = state[:, 0].astype(np.float32)
    out = np.empty_like(a)
    with np.errstate(all="ignore"):
        for i in range(len(a)):  # one step per column; a column holds all partitions
            mixed = first(row, a[i]) if reverse0 else first(a[i], row)
            row = second(b[i], mixed) if reverse1 else second(mixed, b[i])
            out[i] = row
    write32(dst, np.ascontiguousarray(out.T), f"{where}: dst")
    return end(core, engine.vector, "tensor_tensor_scan", cost.streaming(2 * dst.per_partition))


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> NkiInstruction:
    """r[i] = (src[i] op0 imm0) op1 r[i-1], r kept in the accumulator registers."""
    core = begin("tensor_scalar_cumulative")
    where = "nisa.tensor_scalar_cumulative"
    tile(core, "tensor_scalar_cumulative", "dst", dst)
    tile(core, "tensor_scalar_cumulative", "src", src)
    same_elements("tensor_scalar_cumulative", dst, src=src)
    for operand, t in (("dst", dst), ("src", src)):
        if t.dtype in (int32, uint32):
            fail(f"{where}: {operand}", f"{t!r} must not be int32 or uint32")
    second = arithmetic(op1, f"{where}: op1")
    if second.name not in ("add", "subtract", "multiply", "maximum", "minimum"):
        fail(f"{where}: op1", f"must be add, subtract, multiply, maximum or minimum, got {second!r}")
    x = scalar_step(
        core, "tensor_scalar_cumulative", arithmetic(op0, f"{where}: op0"), read32(src, where), imm0, False, "imm0"
    )
    p = dst.shape[0]
    row = core.vector_accumulator[:p]
    if reduce_cmd.name == "reset_reduce":
        assert second.identity is not None
        row[:] = second.identity
    elif reduce_cmd.name == "load_reduce":
        if imm1 is None:
            fail(f"{where}: imm1", "is missing; load_reduce starts from it")
        row[:] = np.broadcast_to(scalar_operand(core, "tensor_scalar_cumulative", "imm1", imm1, p), (p, 1))[:, 0]
    elif reduce_cmd.name != "reduce":
        fail(f"{where}: reduce_cmd", f"must be reset_reduce, load_reduce or reduce, got {reduce_cmd.name}")
    out = np.empty((x.shape[1], p), np.float32)
    assert second.arithmetic is not None
    with np.errstate(all="ignore"):
        for i, column in enumerate(np.ascontiguousarray(x.T)):
            row[:] = second.arithmetic(column, row)
            out[i] = row
    write32(dst, np.ascontiguousarray(out.T), f"{where}: dst")
    return end(core, engine.vector, "tensor_scalar_cumulative", cost.streaming(dst.per_partition))
