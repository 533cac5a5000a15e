"""Reductions along the free dimensions and across partitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cost
from .dtypes import to_float32
from .errors import fail
from .isa_common import (
    NkiInstruction,
    arithmetic,
    begin,
    check_integers,
    end,
    is_16_bit_float,
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
from .isa_common import engine as engines
from .isa_vector import bit_result, scalar_step
from .launch import Core
from .memory import MemoryRegion
from .ops import Op, as_op
from .views import NkiTensor


def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | tuple[int, ...] | list[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Reduce the last free dimensions."""
    core = begin("tensor_reduce")
    where = "nisa.tensor_reduce"
    tile(core, "tensor_reduce", "dst", dst)
    tile(core, "tensor_reduce", "data", data)
    axes = sorted(a % data.ndim for a in ((axis,) if isinstance(axis, int) else tuple(axis)))
    if not axes or axes[0] == 0 or axes != list(range(axes[0], data.ndim)):
        fail(f"{where}: axis", f"must be the last free dimensions of {data!r}, without gaps and without 0, got {axis}")
    found = as_op(op, f"{where}: op")
    if found.reduce is None:
        fail(f"{where}: op", f"must be a reduction, got {found!r}")
    same_partitions("tensor_reduce", dst, data=data)
    kept = int(np.prod(data.shape[1 : axes[0]], dtype=np.int64))
    if dst.per_partition != kept:
        fail(f"{where}: dst", f"{dst!r} has {dst.per_partition} elements per partition; the result has {kept}")
    values = read(data, f"{where}: data").reshape(data.shape[0], kept, -1)
    if found.bits is not None:
        check_integers("tensor_reduce", dst=dst, data=data)
        if negate:
            fail(f"{where}: negate", "needs an arithmetic operator")
        write(dst, bit_result(found.reduce(values, axis=2), dst), f"{where}: dst")
    else:
        with np.errstate(all="ignore"):
            result = np.asarray(found.reduce(to_float32(values), axis=2), np.float32)
        write32(dst, -result if negate else result, f"{where}: dst")
    n = data.per_partition
    fast = is_16_bit_float(dst, data) and found.name in ("add", "maximum")
    return end(core, engines.vector, "tensor_reduce", cost.streaming(n // 2 if fast else n), data)


def vector_accumulate(
    core: Core,
    instruction: str,
    op: Op,
    rows: np.ndarray,
    command: reduce_cmd,
    initial: Any,
    result: NkiTensor | None,
    negate: bool = False,
) -> None:
    """Reduce rows into the Vector Engine's accumulator registers, one per partition, and read the registers."""
    where = f"nisa.{instruction}: reduce_res"
    p = rows.shape[0]
    registers = core.vector_accumulator[:p]
    run = op.arithmetic
    assert run is not None
    assert op.identity is not None
    if command.name in ("reset", "reset_reduce"):
        registers[:] = op.identity
    elif command.name == "load_reduce":
        if initial is None:
            fail(f"nisa.{instruction}: reduce_cmd", "load_reduce needs an initial value")
        registers[:] = np.broadcast_to(scalar_operand(core, instruction, "initial", initial, p), (p, 1))[:, 0]
    if command.name in ("reduce", "reset_reduce", "load_reduce"):
        assert op.reduce is not None
        registers[:] = run(registers, op.reduce(rows, axis=1))
    if result is not None:
        tile(core, instruction, "reduce_res", result)
        if result.shape[0] != p or result.size != p:
            fail(where, f"{result!r} must have shape ({p}, 1)")
        write32(result, (-registers if negate else registers).reshape(p, 1), where)
        core.report.add("vector", f"{instruction} (read accumulator)", cost.MIN_II)


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data op0 operand0, and a reduction of each row of it."""
    core = begin("tensor_scalar_reduce")
    where = "nisa.tensor_scalar_reduce"
    tile(core, "tensor_scalar_reduce", "dst", dst)
    tile(core, "tensor_scalar_reduce", "data", data)
    same_elements("tensor_scalar_reduce", dst, data=data)
    reducer = arithmetic(reduce_op, f"{where}: reduce_op")
    if reducer.name not in ("add", "multiply", "maximum", "minimum"):
        fail(f"{where}: reduce_op", f"must be add, multiply, maximum or minimum, got {reducer!r}")
    x = scalar_step(
        core,
        "tensor_scalar_reduce",
        arithmetic(op0, f"{where}: op0"),
        read32(data, f"{where}: data"),
        operand0,
        reverse0,
        "operand0",
    )
    write32(dst, x, f"{where}: dst")
    vector_accumulate(core, "tensor_scalar_reduce", reducer, x, reduce_cmd, reduce_init, reduce_res, reduce_res_negate)
    return end(core, engines.vector, "tensor_scalar_reduce", cost.streaming(dst.per_partition), dst, data)


def tensor_partition_reduce(dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Reduce over partitions into one row."""
    core = begin("tensor_partition_reduce")
    where = "nisa.tensor_partition_reduce"
    tile(core, "tensor_partition_reduce", "dst", dst, MemoryRegion.sbuf)
    tile(core, "tensor_partition_reduce", "data", data, MemoryRegion.sbuf)
    if dst.shape[0] != 1 or dst.per_partition != data.per_partition:
        fail(f"{where}: dst", f"{dst!r} must be one partition of {data.per_partition} elements")
    found = as_op(op, f"{where}: op")
    if found.name not in ("add", "maximum", "bitwise_or", "bitwise_and"):
        fail(f"{where}: op", f"must be add, maximum, bitwise_or or bitwise_and, got {found!r}")
    assert found.reduce is not None
    if found.bits is not None:
        check_integers("tensor_partition_reduce", dst=dst, data=data)
        write(dst, bit_result(found.reduce(read(data, where), axis=0), dst), f"{where}: dst")
    else:
        write32(dst, np.asarray(found.reduce(read32(data, where), axis=0), np.float32), f"{where}: dst")
    return end(core, engines.gpsimd, "tensor_partition_reduce", cost.streaming(data.per_partition))
