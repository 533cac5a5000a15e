"""DMA: dma_copy, dma_transpose, dma_compute."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dtypes import from_float32, to_float32, uninitialised
from .errors import fail
from .isa_common import ISSUED, NkiInstruction, begin, choose, dge_mode, engine, oob_mode
from .isa_common import dge_mode as dge_modes
from .isa_common import engine as engines
from .isa_common import oob_mode as oob_modes
from .launch import Core
from .memory import HBM, PARTITIONS, MemoryRegion
from .ops import add, as_op
from .views import NkiTensor


def _operand(core: Core, instruction: str, name: str, tensor: Any) -> NkiTensor:
    where = f"nisa.{instruction}: {name}"
    if not isinstance(tensor, NkiTensor):
        fail(where, f"must be a tensor, got {type(tensor).__name__}")
    if tensor.buffer is MemoryRegion.psum:
        fail(where, f"{tensor!r} is in psum; DMA can only access HBM and sbuf")
    if tensor.storage.core not in (None, core.rank):
        fail(where, f"{tensor!r} belongs to core {tensor.storage.core}, not to core {core.rank}")
    if tensor.on_chip and tensor.shape[0] > PARTITIONS:
        fail(where, f"{tensor!r} has {tensor.shape[0]} partitions; the limit is {PARTITIONS}")
    core.use(tensor.storage)
    if tensor.indirect_by is not None and isinstance(tensor.indirect_by.index, NkiTensor):
        core.use(tensor.indirect_by.index.storage)
    return tensor


def _skip(tensor: NkiTensor, where: str, mode: oob_mode, lowest: int, highest: int, limit: int) -> None:
    if mode is oob_mode.error:
        bad = lowest if lowest < 0 else highest
        fail(
            where,
            f"runtime index {bad} is out of bounds for {tensor!r}, must be 0 to {limit - 1} unless oob_mode is skip",
        )


def gather(tensor: NkiTensor, where: str, mode: oob_mode) -> tuple[np.ndarray, np.ndarray | None]:
    """Elements of a view and, for the mask of rows that exist (None if all do)."""
    by = tensor.indirect_by
    if by is None:
        return tensor.array(where), None
    if not by.vector:
        try:
            return tensor.array(where), None
        except IndexError:
            value = tensor.scalar_index()
            _skip(tensor, where, mode, value, value, by.limit)
            return np.zeros(tensor.shape, tensor.dtype.np), np.zeros(tensor.shape[0], bool)
    table, index = tensor.rows(where)
    inside = (index >= 0) & (index < len(table))
    if inside.all():
        return table[index], None
    _skip(tensor, where, mode, int(index.min()), int(index.max()), len(table))
    values = np.zeros(tensor.shape, tensor.dtype.np)
    values[inside] = table[index[inside]]
    return values, inside


def scatter(tensor: NkiTensor, values: np.ndarray, where: str, mode: oob_mode, *, unique: bool = False) -> None:
    """Store `values` [*tensor.shape] in a view; rows that do not exist are an error or skipped."""
    by = tensor.indirect_by
    if by is None or not by.vector:
        try:
            tensor.array(where)[...] = values
        except IndexError:
            assert by is not None
            value = tensor.scalar_index()
            _skip(tensor, where, mode, value, value, by.limit)
        return
    table, index = tensor.rows(where)
    inside = (index >= 0) & (index < len(table))
    if not inside.all():
        _skip(tensor, where, mode, int(index.min()), int(index.max()), len(table))
        index, values = index[inside], values[inside]
    rows, count = np.unique(index, return_counts=True)
    twice = rows[count > 1]
    if len(twice) and unique:
        fail(where, f"row {twice[0]} of {tensor!r} occurs more than once; indices must be unique")
    table[index] = values
    for row in twice:  # which write wins is undefined, so the row becomes uninitialised
        same = values[index == row]
        if not np.array_equal(same, np.broadcast_to(same[:1], same.shape), equal_nan=False):
            table[row] = uninitialised(tensor.dtype)


def _check_read(core: Core, name: str, tensor: NkiTensor) -> None:
    """Fail where a core reads shared memory that the other core wrote since their last common barrier."""
    marks = core.group.writer_marks(tensor, make=False)
    if marks is None:
        return
    other = 1 - core.rank
    found, _ = gather(marks, f"nisa.{name}", oob_modes.skip)
    if (found == core.group.mark(other, barriers=len(core.group.barriers[core.rank]))).any():
        fail(f"nisa.{name}", f"core {core.rank} reads {tensor!r} where core {other} wrote since the last barrier")


def _note_write(core: Core, name: str, tensor: NkiTensor) -> None:
    """Record the writing core. Two cores may write the same place: both write padding rows."""
    marks = core.group.writer_marks(tensor, make=True)
    if marks is not None:
        mark = np.full(marks.shape, core.group.mark(core.rank), np.uint16)
        scatter(marks, mark, f"nisa.{name}", oob_modes.skip)


def _count(core: Core, instruction: str, dst: NkiTensor, *sources: NkiTensor) -> None:
    """Several sources are read one after the other; the result is written once."""
    for i, src in enumerate(sources):
        descriptor = min(src.contiguous_bytes(), dst.contiguous_bytes() * src.dtype.itemsize // dst.dtype.itemsize)
        written = dst.size * dst.dtype.itemsize if i == 0 else 0
        to_hbm = dst.buffer in HBM
        read = src.size * src.dtype.itemsize
        core.report.add_dma(instruction, read, written, src.buffer in HBM, to_hbm, max(descriptor, 1))


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src between HBM and SBUF; a type change goes through float32."""
    core = begin("dma_copy")
    oob_mode = choose("nisa.dma_copy: oob_mode", oob_modes, oob_mode)
    dge_mode = choose("nisa.dma_copy: dge_mode", dge_modes, dge_mode)
    engine = choose("nisa.dma_copy: engine", engines, engine)
    _operand(core, "dma_copy", "dst", dst)
    _operand(core, "dma_copy", "src", src)
    if dst.size != src.size:
        fail("nisa.dma_copy", f"src {src!r} has {src.size} elements, dst {dst!r} {dst.size}")
    _check_dge("dma_copy", dge_mode, engine, dst, src)
    _check_index("dma_copy", dst=dst, src=src)
    _check_read(core, "dma_copy: src", src)
    _note_write(core, "dma_copy: dst", dst)
    values, inside = gather(src, "nisa.dma_copy: src", oob_mode)
    if src.dtype is not dst.dtype and src.dtype.np != dst.dtype.np:
        if dge_mode.name == "hwdge":
            fail("nisa.dma_copy: dge_mode", f"hwdge cannot convert {src.dtype} to {dst.dtype}")
        values = from_float32(to_float32(values), dst.dtype)
    if inside is None:
        scatter(dst, values.reshape(dst.shape), "nisa.dma_copy: dst", oob_mode)
    elif inside.any():
        if dst.is_indirect() or dst.size // dst.shape[0] * len(inside) != dst.size:
            fail("nisa.dma_copy: src", f"{src!r} skips rows; dst {dst!r} must have the same rows")
        dst.array("nisa.dma_copy: dst").reshape(values.shape)[inside] = values[inside]
    _count(core, "dma_copy", dst, src)
    return ISSUED


def _check_index(instruction: str, **tensors: NkiTensor) -> None:
    """One row index per partition: (P, 1), as many as the view has rows."""
    for name, tensor in tensors.items():
        by = tensor.indirect_by
        if by is not None and by.vector and (by.index.shape[0] != tensor.shape[0] or by.index.per_partition != 1):
            fail(
                f"nisa.{instruction}: {name}",
                f"vector_offset {by.index!r} must have shape ({tensor.shape[0]}, 1), one index per row of {tensor!r}",
            )


def _check_dge(instruction: str, mode: dge_mode, on: engine, *tensors: NkiTensor) -> None:
    where = f"nisa.{instruction}: dge_mode"
    vector = any(t.indirect_by is not None and t.indirect_by.vector for t in tensors)
    if vector and mode.name in ("hwdge", "none"):
        fail(where, f"{mode.name} cannot gather or scatter; only swdge takes a vector_offset")
    if mode.name == "none" and any(t.is_indirect() for t in tensors):
        fail(where, "none needs addresses known before the kernel runs, which a scalar_offset is not")
    if on.name != "unknown" and (mode.name != "hwdge" or on.name not in ("sync", "scalar")):
        fail(f"nisa.{instruction}: engine", f"must be sync or scalar, with dge_mode.hwdge, got {on.name}")


_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src transposed: (1, 0), (2, 1, 0) or (3, 1, 2, 0); with a vector_offset, of gathered rows."""
    core = begin("dma_transpose")
    oob_mode = choose("nisa.dma_transpose: oob_mode", oob_modes, oob_mode)
    dge_mode = choose("nisa.dma_transpose: dge_mode", dge_modes, dge_mode)
    _operand(core, "dma_transpose", "dst", dst)
    _operand(core, "dma_transpose", "src", src)
    where = "nisa.dma_transpose"
    if src.ndim not in _AXES:
        fail(f"{where}: src", f"{src!r} must have 2, 3 or 4 dimensions")
    order = _AXES[src.ndim]
    if axes is not None and tuple(axes) != order:
        fail(f"{where}: axes", f"must be {order} with {src.ndim} dimensions, got {tuple(axes)}")
    if dst.buffer is not MemoryRegion.sbuf:
        fail(f"{where}: dst", f"{dst!r} must be in sbuf")
    if dst.dtype is not src.dtype:
        fail(f"{where}: dst", f"{dst!r} must have src's type {src.dtype}")
    expected = tuple(src.shape[a] for a in order)
    if dst.shape != expected:
        fail(f"{where}: dst", f"shape {dst.shape} must be {expected}, src {src.shape} transposed")
    vector = src.indirect_by is not None and src.indirect_by.vector
    if vector:
        _check_gather_transpose(where, src, dge_mode)
    elif dge_mode.name == "hwdge":
        _check_hwdge_transpose(where, src)
    elif dge_mode.name != "unknown":
        fail(f"{where}: dge_mode", f"must be unknown or hwdge without vector_offset, got {dge_mode.name}")
    _check_read(core, "dma_transpose: src", src)
    values, inside = gather(src, f"{where}: src", oob_mode)
    target = dst.array(f"{where}: dst")
    if inside is None:
        target[...] = values.transpose(order)
    else:
        target[..., inside] = values[inside].transpose(order)
    _count(core, "dma_transpose", dst, src)
    return ISSUED


def _check_gather_transpose(where: str, src: NkiTensor, mode: dge_mode) -> None:
    assert src.indirect_by is not None
    index = src.indirect_by.index
    rules = (
        (mode.name in ("unknown", "swdge"), f"dge_mode must be unknown or swdge with vector_offset, got {mode.name}"),
        (src.ndim != 4 or 1 in src.shape[1:3], f"src shape {src.shape}: dimension 1 or 2 must be 1"),
        (src.shape[-1] <= 128, f"src shape {src.shape}: the last dimension must be at most 128"),
        (src.dtype.itemsize == 2, f"src {src.dtype}: elements must have 2 bytes"),
        (src.buffer in HBM, f"src {src!r} must be in HBM"),
        (src.shape[0] % 16 == 0, f"src shape {src.shape}: dimension 0 must be a multiple of 16"),
        (index.ndim == 2, f"indices {index!r} must have 2 dimensions"),
        (16 <= index.shape[0] <= 128 and index.shape[0] % 16 == 0, f"indices {index!r}: 16 to 128 rows in steps of 16"),
        (index.shape[-1] == 1 or index.shape[0] == 128, f"indices {index!r}: several columns need 128 rows"),
        (str(index.dtype) == "uint32", f"indices {index!r} must be uint32"),
    )
    for holds, message in rules:
        if not holds:
            fail(where, message)


def _check_hwdge_transpose(where: str, src: NkiTensor) -> None:
    first, last = src.shape[0], src.shape[-1]
    if src.ndim == 2:
        if first != 16:
            fail(where, f"hwdge, src shape {src.shape}: dimension 0 must be 16")
    elif first not in (1, 2, 4, 8, 16) or first * src.shape[-2] % 16:
        fail(
            where,
            f"hwdge, src shape {src.shape}: dimension 0 must be 1, 2, 4, 8 or 16, times dimension -2 a multiple of 16",
        )
    if last > 128:
        fail(where, f"hwdge, src shape {src.shape}: the last dimension must be at most 128")
    if src.dtype.itemsize != 2:
        fail(where, f"hwdge, src {src.dtype}: elements must have 2 bytes")


def dma_compute(
    dst: NkiTensor,
    srcs: list[NkiTensor],
    reduce_op: Any = add,
    scales: list[float] | None = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = sum of srcs in float32; with a vector_offset, gather-add or scatter-add."""
    core = begin("dma_compute")
    oob_mode = choose("nisa.dma_compute: oob_mode", oob_modes, oob_mode)
    where = "nisa.dma_compute"
    _operand(core, "dma_compute", "dst", dst)
    for i, src in enumerate(srcs):
        _operand(core, "dma_compute", f"srcs[{i}]", src)
        if src.size != dst.size:
            fail(f"{where}: srcs[{i}]", f"{src!r} has {src.size} elements, dst {dst!r} {dst.size}")
    if not 1 <= len(srcs) <= 16:
        fail(f"{where}: srcs", f"must be 1 to 16 tensors, got {len(srcs)}")
    if as_op(reduce_op, f"{where}: reduce_op") is not add:
        fail(f"{where}: reduce_op", f"must be nl.add, got {reduce_op!r}")
    if scales is not None and any(s != 1.0 for s in scales):
        fail(f"{where}: scales", f"must be 1.0, got {scales}")
    indirect = [t for t in (dst, *srcs) if t.is_indirect()]
    if indirect:
        _check_index("dma_compute", dst=dst, **{f"srcs[{i}]": t for i, t in enumerate(srcs)})
        if len(srcs) != 2:
            fail(f"{where}: srcs", f"read-modify-write with a vector_offset takes exactly 2 tensors, got {len(srcs)}")
        if not unique_indices:
            fail(f"{where}: unique_indices", "must be True")
        if any(not t.indirect_by.vector for t in indirect if t.indirect_by):
            fail(where, "must not have a scalar_offset; addresses must be static or a vector_offset")
        if dst.is_indirect() and not any(s.is_indirect() and s.storage is dst.storage for s in srcs):
            fail(f"{where}: srcs", "must include dst with the same vector_offset, because scatter adds to it")
    total: np.ndarray | None = None
    mask: np.ndarray | None = None
    for i, src in enumerate(srcs):
        _check_read(core, f"dma_compute: srcs[{i}]", src)
        values, inside = gather(src, f"{where}: srcs[{i}]", oob_mode)
        if inside is not None:
            mask = inside
        part = to_float32(values).reshape(dst.shape)
        total = part if total is None else total + part
    assert total is not None
    _note_write(core, "dma_compute: dst", dst)
    result = from_float32(np.ascontiguousarray(total), dst.dtype)
    if mask is not None and not dst.is_indirect():
        dst.array(f"{where}: dst")[mask] = result[mask]
    else:
        scatter(dst, result, f"{where}: dst", oob_mode, unique=True)
    _count(core, "dma_compute", dst, *srcs)
    return ISSUED
