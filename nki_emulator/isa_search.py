"""Search: largest values, their positions, and nonzero elements."""

from __future__ import annotations

import numpy as np

from . import cost
from .dtypes import bfloat16, float32, int32, to_float32, uint16, uint32
from .errors import fail
from .isa_common import (
    NkiInstruction,
    begin,
    end,
    engine,
    read,
    read32,
    same_elements,
    same_partitions,
    tile,
    write,
    write32,
)
from .launch import Core
from .memory import MemoryRegion
from .views import NkiTensor


def _eight(instruction: str, core: Core, operand: str, data: NkiTensor) -> np.ndarray:
    where = f"nisa.{instruction}: {operand}"
    tile(core, instruction, operand, data)
    if not 8 <= data.per_partition <= 16384:
        fail(where, f"{data!r} must have 8 to 16384 elements per partition, got {data.per_partition}")
    if data.ndim > 3:
        fail(where, f"{data!r} must have at most 3 dimensions, got {data.ndim}")
    return read32(data, where)


def _check_eight(where: str, tensor: NkiTensor) -> None:
    if tensor.per_partition != 8:
        fail(where, f"{tensor!r} must have 8 elements per partition")


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> NkiInstruction:
    """The 8 largest values of each partition, descending."""
    core = begin("max8")
    tile(core, "max8", "dst", dst)
    values = _eight("max8", core, "src", src)
    _check_eight("nisa.max8: dst", dst)
    same_partitions("max8", dst, src=src)
    top = np.partition(values, values.shape[1] - 8, axis=1)[:, -8:]
    write32(dst, np.sort(top, axis=1)[:, ::-1], "nisa.max8: dst")
    return end(core, engine.vector, "max8", cost.streaming(src.per_partition))


def _find(mask: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Position of the rank-th true element (0 first) of each row; -1 where there is none."""
    hit = mask & (np.cumsum(mask, axis=1) == (rank + 1)[:, None])
    return np.where(hit.any(axis=1), hit.argmax(axis=1), -1)


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> NkiInstruction:
    """First position of each of 8 values; equal values take successive positions; all bits set if there is none."""
    core = begin("nc_find_index8")
    where = "nisa.nc_find_index8"
    tile(core, "nc_find_index8", "dst", dst)
    tile(core, "nc_find_index8", "vals", vals)
    values = _eight("nc_find_index8", core, "data", data)
    _check_eight(f"{where}: dst", dst)
    _check_eight(f"{where}: vals", vals)
    same_partitions("nc_find_index8", dst, data=data, vals=vals)
    if dst.dtype not in (uint16, uint32):
        fail(f"{where}: dst", f"{dst!r} must be uint16 or uint32")
    wanted = read32(vals, f"{where}: vals")
    found = np.empty(wanted.shape, np.int64)
    for j in range(8):
        rank = (wanted[:, :j] == wanted[:, j : j + 1]).sum(axis=1)
        found[:, j] = _find(values == wanted[:, j : j + 1], rank)
    write(dst, found.astype(dst.dtype.np), f"{where}: dst")
    return end(core, engine.vector, "nc_find_index8", cost.streaming(data.per_partition))


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> NkiInstruction:
    """Replace the first match of each of 8 values, the last value first, and note the positions."""
    core = begin("nc_match_replace8")
    where = "nisa.nc_match_replace8"
    tile(core, "nc_match_replace8", "dst", dst)
    tile(core, "nc_match_replace8", "vals", vals)
    values = _eight("nc_match_replace8", core, "data", data).copy()
    _check_eight(f"{where}: vals", vals)
    same_elements("nc_match_replace8", dst, data=data)
    wanted = read32(vals, f"{where}: vals")
    found = np.empty(wanted.shape, np.int64)
    rows = np.arange(len(values))
    for j in range(7, -1, -1):
        at = _find(values == wanted[:, j : j + 1], np.zeros(len(values), np.int64))
        found[:, j] = at
        values[rows[at >= 0], at[at >= 0]] = np.float32(imm)
    write32(dst, values, f"{where}: dst")
    if dst_idx is not None:
        tile(core, "nc_match_replace8", "dst_idx", dst_idx)
        _check_eight(f"{where}: dst_idx", dst_idx)
        write(dst_idx, found.astype(dst_idx.dtype.np), f"{where}: dst_idx")
    return end(core, engine.vector, "nc_match_replace8", cost.streaming(data.per_partition))


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> NkiInstruction:
    """Positions of nonzero elements, padding, and their number last; on partitions 0, 16, .., 112 only."""
    core = begin("nonzero_with_count")
    where = "nisa.nonzero_with_count"
    if core.generation < 3:
        fail(where, "needs NeuronCore-v3")
    tile(core, "nonzero_with_count", "dst", dst, MemoryRegion.sbuf)
    tile(core, "nonzero_with_count", "src", src, MemoryRegion.sbuf)
    same_partitions("nonzero_with_count", dst, src=src)
    n = src.per_partition
    if dst.per_partition != n + 1:
        fail(f"{where}: dst", f"{dst!r} must have {n + 1} elements per partition, one more than src")
    if src.dtype not in (float32, int32) or dst.dtype is not int32:
        fail(where, f"src {src!r} must be float32 or int32 and dst {dst!r} int32")
    values = read(src, f"{where}: src").reshape(src.shape[0], n)[::16]
    nonzero = values != 0
    order = np.argsort(~nonzero, axis=1, kind="stable")
    count = nonzero.sum(axis=1, keepdims=True)
    found = np.where(np.arange(n) < count, order + int(index_offset), int(padding_val))
    target = read(dst, f"{where}: dst").reshape(dst.shape[0], n + 1).copy()
    target[::16] = np.concatenate([found, count], axis=1)
    write(dst, target, f"{where}: dst")
    return end(core, engine.gpsimd, "nonzero_with_count", cost.gpsimd_pattern(n))


def topk(val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None) -> NkiInstruction:
    """The K largest values, ascending, and their positions; element e sits in partition e % 16, column e // 16.

    The documentation says both that each partition is independent and that 16 partitions form one list. The emulator
    uses one list and writes its result to all 16 partitions. Of equal values, the later position comes first.
    """
    core = begin("topk")
    where = "nisa.topk"
    for operand, t in (("val_dst", val_dst), ("idx_dst", idx_dst), ("src", src)):
        tile(core, "topk", operand, t, MemoryRegion.sbuf)
    k, p = val_dst.per_partition, src.shape[0]
    if src.dtype is not bfloat16 or val_dst.dtype is not bfloat16 or idx_dst.dtype is not uint32:
        fail(where, f"src {src!r} and val_dst {val_dst!r} must be bfloat16, idx_dst {idx_dst!r} uint32")
    if not 8 <= n < 65536 or not 1 <= k <= min(n, 32767) or src.per_partition * 16 < n:
        fail(where, f"n {n}, K {k}, src {src!r}: 8 <= n < 65536, 1 <= K <= n, K < 32768 and n / 16 columns in src")
    if p % 16 or val_dst.shape[0] != p or idx_dst.shape != val_dst.shape:
        fail(
            where,
            f"src {src!r}, val_dst {val_dst!r}, idx_dst {idx_dst!r} must have equal partitions, a multiple of 16",
        )
    lists = (
        to_float32(read(src, f"{where}: src")).reshape(p // 16, 16, -1).transpose(0, 2, 1).reshape(p // 16, -1)[:, :n]
    )
    order = np.argsort(-lists, axis=1, kind="stable")[:, :k][:, ::-1]
    write32(val_dst, np.repeat(np.take_along_axis(lists, order, axis=1), 16, axis=0), f"{where}: val_dst")
    write(idx_dst, np.repeat(order, 16, axis=0).astype(np.uint32), f"{where}: idx_dst")
    return end(core, engine.gpsimd, "topk", 4 * n + k)
