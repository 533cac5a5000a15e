"""Registers, affine patterns, barriers, and transfers between the two cores of LNC 2."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cost, launch
from .dtypes import from_float32, to_float32
from .errors import fail
from .isa_common import (
    ISSUED,
    NkiInstruction,
    VirtualRegister,
    begin,
    dma_engine,
    end,
    engine,
    nc_version,
    read,
    same_elements,
    tile,
    write,
)
from .memory import MemoryRegion
from .ops import as_op, equal
from .views import NkiTensor


def get_nc_version() -> nc_version:
    return nc_version(launch.generation())


def get_nc_sub_version() -> int:
    return 0


def register_alloc(x: int | None = None) -> VirtualRegister:
    if isinstance(x, NkiTensor):
        fail("nisa.register_alloc: x", "must be None or an integer; use register_load for a tensor")
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: Any) -> None:
    begin("register_move")
    dst.value = src.value if isinstance(src, VirtualRegister) else src


def _one_element(instruction: str, operand: str, tensor: Any) -> NkiTensor:
    where = f"nisa.{instruction}: {operand}"
    if not isinstance(tensor, NkiTensor) or tensor.size != 1:
        fail(where, f"must be a tensor of exactly one element, got {tensor!r}")
    if tensor.buffer is MemoryRegion.psum:
        fail(where, f"{tensor!r} is in psum; registers load from and store to HBM and sbuf")
    return tensor


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    core = begin("register_load")
    core.use(_one_element("register_load", "src", src).storage)
    dst.value = int(read(src, "nisa.register_load: src").reshape(-1)[0])


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    core = begin("register_store")
    core.use(_one_element("register_store", "dst", dst).storage)
    value = src.value if isinstance(src, VirtualRegister) else int(src)
    write(dst, np.array([value]).astype(dst.dtype.np), "nisa.register_store: dst")


def affine(
    instruction: str, pattern: Any, offset: float, channel_multiplier: float, partitions: int, n: int
) -> np.ndarray:
    """offset + partition * channel_multiplier + sum of step * index, [partitions, n], 32-bit integers."""
    where = f"nisa.{instruction}: pattern"
    if not 1 <= len(pattern) <= 4:
        fail(where, f"must have 1 to 4 dimensions, got {pattern}")
    count = int(np.prod([num for _, num in pattern]))
    if count != n:
        fail(where, f"{pattern} yields {count} values per partition; the tile has {n}")
    free = np.zeros((), np.int64)
    for step, num in pattern:
        free = free[..., None] + np.arange(int(num), dtype=np.int64) * int(step)
    rows = np.arange(partitions, dtype=np.int64) * int(channel_multiplier) + int(offset)
    return (rows[:, None] + free.reshape(1, -1)).astype(np.int32)


def iota(
    dst: NkiTensor, pattern: Any, offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> NkiInstruction:
    """Write an affine pattern of integers."""
    core = begin("iota")
    tile(core, "iota", "dst", dst, MemoryRegion.sbuf)
    n = dst.per_partition
    values = affine("iota", pattern, offset, channel_multiplier, dst.shape[0], n)
    if dst.dtype.is_int:
        write(dst, values.astype(dst.dtype.np), "nisa.iota: dst")
    else:
        write(dst, from_float32(values.astype(np.float32), dst.dtype), "nisa.iota: dst")
    return end(core, engine.gpsimd, "iota", cost.gpsimd_pattern(n))


def affine_select(
    dst: NkiTensor,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = equal,
    offset: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true_tile where cmp_op(affine pattern, 0), on_false_value elsewhere."""
    core = begin("affine_select")
    where = "nisa.affine_select"
    tile(core, "affine_select", "dst", dst, MemoryRegion.sbuf)
    tile(core, "affine_select", "on_true_tile", on_true_tile, MemoryRegion.sbuf)
    same_elements("affine_select", dst, on_true_tile=on_true_tile)
    if isinstance(on_false_value, NkiTensor):
        fail(f"{where}: on_false_value", "must be a number")
    compare = as_op(cmp_op, f"{where}: cmp_op")
    if not compare.name.startswith(("equal", "not_equal", "less", "greater")):
        fail(f"{where}: cmp_op", f"must be a comparison, got {compare!r}")
    n = dst.per_partition
    values = affine("affine_select", pattern, offset, channel_multiplier, dst.shape[0], n)
    assert compare.native is not None
    kept = compare.native(values, 0)
    stored = read(on_true_tile, f"{where}: on_true_tile").reshape(dst.shape[0], n)
    if on_true_tile.dtype is not dst.dtype:
        stored = from_float32(to_float32(stored), dst.dtype)
    other = from_float32(np.array(on_false_value, np.float32), dst.dtype)
    write(dst, np.where(kept, stored, other), f"{where}: dst")
    return end(core, engine.gpsimd, "affine_select", cost.gpsimd_pattern(n))


def core_barrier(
    data: NkiTensor, cores: tuple[int, ...], engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Wait until both cores have reached this barrier."""
    core = begin("core_barrier")
    where = "nisa.core_barrier"
    if not isinstance(data, NkiTensor) or data.buffer is not MemoryRegion.shared_hbm:
        fail(f"{where}: data", f"must be a tensor in shared_hbm, got {data!r}")
    if tuple(cores) != (0, 1):
        fail(f"{where}: cores", f"must be (0, 1), got {cores}")
    if core.group.size != 2:
        fail(where, "needs LNC 2; the kernel runs at LNC 1")
    mine, theirs = core.group.barriers[core.rank], core.group.barriers[1 - core.rank]
    mine.append(data.storage)
    position = len(mine)
    core.group.wait_until(core.rank, lambda: len(theirs) >= position, f"{where} number {position}")
    if theirs[position - 1] is not data.storage:
        fail(
            f"{where}: data",
            f"barrier {position} is on {data.name!r} here and on {theirs[position - 1].name!r} in the other core",
        )
    return end(core, engine.name, "core_barrier", cost.MIN_II)


_GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Send `src` to one core and receive `dst` from one, at the same time."""
    core = begin("sendrecv")
    where = "nisa.sendrecv"
    for operand, t in (("src", src), ("dst", dst)):
        tile(core, "sendrecv", operand, t, MemoryRegion.sbuf)
    if src.dtype is not dst.dtype or src.shape != dst.shape:
        fail(where, f"src {src!r} and dst {dst!r} must have the same shape and type")
    if core.group.size != 2:
        fail(where, "needs LNC 2; the kernel runs at LNC 1")
    send_to_rank, recv_from_rank = int(send_to_rank), int(recv_from_rank)
    if send_to_rank not in (0, 1) or recv_from_rank not in (0, 1):
        fail(where, f"send_to_rank and recv_from_rank must be 0 or 1, got {send_to_rank} and {recv_from_rank}")
    if dma_engine.name == "gpsimd_dma":
        limit, size = _GPSIMD_DMA_BYTES[src.dtype.itemsize], src.per_partition * src.dtype.itemsize
        if size > limit:
            fail(
                f"{where}: dma_engine", f"gpsimd_dma moves up to {limit} bytes per partition of {src.dtype}, got {size}"
            )
    messages = core.group.messages
    messages.setdefault((core.rank, send_to_rank, int(pipe_id)), []).append(read(src, f"{where}: src").copy())
    channel = (recv_from_rank, core.rank, int(pipe_id))
    core.group.wait_until(core.rank, lambda: bool(messages.get(channel)), f"{where} pipe_id {pipe_id}")
    received = messages[channel].pop(0)
    if received.shape != dst.shape or received.dtype != dst.dtype.np:
        fail(f"{where}: dst", f"{dst!r}, but core {recv_from_rank} sends {received.dtype} {received.shape}")
    write(dst, received, f"{where}: dst")
    size = src.size * src.dtype.itemsize
    core.report.add_dma("sendrecv", size, size, False, False, min(src.contiguous_bytes(), dst.contiguous_bytes()))
    return ISSUED
