"""Vector Engine and its neighbours: copies, elementwise maths, reductions, scans."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cost
from .dtypes import from_float32, int32, to_float32, uint32
from .errors import fail
from .isa_common import (
    NkiInstruction,
    arithmetic,
    begin,
    check_integers,
    end,
    in_sbuf,
    innermost_contiguous,
    is_16_bit_float,
    no_psum,
    not_both_psum,
    pick_engine,
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
from .launch import Core
from .memory import MemoryRegion
from .ops import Op, as_op, rsqrt
from .ops import power as power_op
from .views import NkiTensor

_ANY = (engines.vector, engines.scalar, engines.gpsimd)


def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: engines = engines.unknown, name: str | None = None
) -> NkiInstruction:
    """dst = src on chip: bit-exact in one type, through float32 otherwise."""
    core = begin("tensor_copy")
    tile(core, "tensor_copy", "dst", dst)
    tile(core, "tensor_copy", "src", src)
    same_elements("tensor_copy", dst, src=src)
    on = pick_engine("tensor_copy", engine, *_ANY)
    if on is engines.gpsimd:
        no_psum("tensor_copy", "GpSimd Engine", dst=dst, src=src)
    if on is engines.scalar and core.generation == 2:
        fail("nisa.tensor_copy: engine", "scalar cannot copy on NeuronCore-v2; use nisa.activation with nl.copy")
    if dst.dtype.np == src.dtype.np:
        write(dst, read(src, "nisa.tensor_copy: src").copy(), "nisa.tensor_copy: dst")
    else:
        write32(dst, read32(src, "nisa.tensor_copy: src"), "nisa.tensor_copy: dst")
    return end(core, on, "tensor_copy", _copy_cycles(on, dst.per_partition, dst, src), dst, src)


def _copy_cycles(on: engines, n: int, dst: NkiTensor, src: NkiTensor) -> float:
    if on is not engines.vector:
        return cost.streaming(n)
    return cost.fast_copy(
        n, all_16_bit=is_16_bit_float(dst, src), all_sbuf=in_sbuf(dst, src), contiguous=innermost_contiguous(dst, src)
    )


def memset(dst: NkiTensor, value: float, engine: engines = engines.unknown, name: str | None = None) -> NkiInstruction:
    """Fill with a number known while the kernel is built."""
    core = begin("memset")
    tile(core, "memset", "dst", dst)
    on = pick_engine("memset", engine, engines.vector, engines.gpsimd)
    if on is engines.gpsimd:
        no_psum("memset", "GpSimd Engine", dst=dst)
    if isinstance(value, NkiTensor) or not isinstance(value, (int, float, np.number)):
        fail("nisa.memset: value", f"must be a number known while the kernel is built, not {value!r}")
    if dst.dtype.is_int and float(value).is_integer():
        limits = np.iinfo(dst.dtype.np)
        if not limits.min <= value <= limits.max:
            fail("nisa.memset: value", f"{value} does not fit {dst.dtype}")
        filler = np.array(int(value), dst.dtype.np)
    elif dst.dtype.kind == "p":
        filler = np.array(int(value), dst.dtype.np)
    else:
        filler = from_float32(np.array(value, np.float32), dst.dtype)
    write(dst, np.broadcast_to(filler, dst.shape), "nisa.memset: dst")
    half = value == 0 and is_16_bit_float(dst)  # OLD
    return end(core, on, "memset", cost.streaming(dst.per_partition // 2 if half else dst.per_partition), dst)


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data1 op data2."""
    core = begin("tensor_tensor")
    where = "nisa.tensor_tensor"
    tiles = {"dst": dst, "data1": data1, "data2": data2}
    for operand, t in tiles.items():
        tile(core, "tensor_tensor", operand, t)
    same_elements("tensor_tensor", dst, data1=data1, data2=data2)
    not_both_psum("tensor_tensor", "data1", data1, "data2", data2)
    found = as_op(op, f"{where}: op")
    if found.unary:
        fail(f"{where}: op", f"{found!r} takes one operand")
    integers = all(t.dtype in (int32, uint32) for t in tiles.values())
    on = engine
    if on is engines.unknown:
        exact = integers and found.native is not None and in_sbuf(dst, data1, data2)
        on = engines.gpsimd if exact or found is power_op else engines.vector
    on = pick_engine("tensor_tensor", on, engines.vector, engines.gpsimd)
    if found is power_op and on is not engines.gpsimd:
        fail(f"{where}: engine", "nl.power runs on the GpSimd Engine only")
    if on is engines.gpsimd:
        no_psum("tensor_tensor", "GpSimd Engine", **tiles)
    a, b = read(data1, f"{where}: data1"), read(data2, f"{where}: data2")
    if found.bits is not None:
        check_integers("tensor_tensor", **tiles)
        write(dst, _bit_result(found.bits(a.reshape(dst.shape), b.reshape(dst.shape)), dst), f"{where}: dst")
    elif integers and on is engines.gpsimd and found.native is not None:
        result = found.native(a.reshape(dst.shape), b.reshape(dst.shape))
        write(dst, result.astype(dst.dtype.np), f"{where}: dst")
    else:
        run = arithmetic(found, f"{where}: op").arithmetic
        assert run is not None
        with np.errstate(all="ignore"):
            result = run(to_float32(a).reshape(dst.shape), to_float32(b).reshape(dst.shape))
        write32(dst, result, f"{where}: dst")
    psum_inputs = (data1.buffer is MemoryRegion.psum) + (data2.buffer is MemoryRegion.psum)
    fast = is_16_bit_float(dst, data1, data2) and in_sbuf(data1, data2)
    return end(core, on, "tensor_tensor", cost.tensor_tensor(dst.per_partition, psum_inputs, fast), dst, data1, data2)


def _bit_result(values: np.ndarray, dst: NkiTensor) -> np.ndarray:
    return values if values.dtype == dst.dtype.np else values.astype(dst.dtype.np)


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = (data op0 operand0) op1 operand1; an operand is a number or one value per partition."""
    core = begin("tensor_scalar")
    where = "nisa.tensor_scalar"
    tile(core, "tensor_scalar", "dst", dst)
    tile(core, "tensor_scalar", "data", data)
    same_elements("tensor_scalar", dst, data=data)
    first = as_op(op0, f"{where}: op0")
    second = None if op1 is None else as_op(op1, f"{where}: op1")
    if second is None and operand1 is not None:
        fail(f"{where}: operand1", "given without op1")
    if second is not None and (first.bits is None) != (second.bits is None):
        fail(f"{where}: op0, op1", f"{first!r} and {second!r}: both must be arithmetic or both bit operators")
    on = _tensor_scalar_engine(core, engine, first, second)
    if on is engines.gpsimd:
        no_psum("tensor_scalar", "GpSimd Engine", dst=dst, data=data)
    steps = [(first, operand0, reverse0, "operand0")]
    if second is not None:
        steps.append((second, operand1, reverse1, "operand1"))
    n = dst.per_partition
    if first.bits is not None:
        check_integers("tensor_scalar", dst=dst, data=data)
        bits = read(data, f"{where}: data").reshape(dst.shape[0], -1)
        for op, operand, reverse, label in steps:
            bits = _bit_step(core, op, bits, operand, reverse, label, dst.shape[0])
        write(dst, _bit_result(bits, dst), f"{where}: dst")
    else:
        x = read32(data, f"{where}: data")
        for op, operand, reverse, label in steps:
            x = scalar_step(core, "tensor_scalar", op, x, operand, reverse, label)
        write32(dst, x, f"{where}: dst")
    cycles = cost.gpsimd_rsqrt(n) if on is engines.gpsimd else _copy_cycles(on, n, dst, data)
    return end(core, on, "tensor_scalar", cycles, dst, data)


def _tensor_scalar_engine(core: Core, engine: engines, first: Op, second: Op | None) -> engines:
    where = "nisa.tensor_scalar: engine"
    pair = (first.name, second.name if second else None)
    if engine is engines.unknown:
        return engines.gpsimd if rsqrt in (first, second) or "power" in pair else engines.vector
    if engine is engines.scalar and pair not in (("multiply", "add"), ("multiply", None), ("add", None)):
        fail(where, f"the Scalar Engine runs multiply then add, multiply, or add, not {pair}")
    if engine is engines.gpsimd and rsqrt not in (first, second):
        fail(where, f"the GpSimd Engine runs tensor_scalar only for nl.rsqrt, not {pair}")
    if first.bits is not None and engine is not engines.vector:
        fail(where, "bit operators run on the Vector Engine only")
    return pick_engine("tensor_scalar", engine, *_ANY)


def scalar_step(
    core: Core, instruction: str, op: Op, x: np.ndarray, operand: Any, reverse: bool, label: str
) -> np.ndarray:
    """One operator of a tensor-scalar instruction on float32 [partitions, elements]."""
    run = arithmetic(op, f"nisa.{instruction}: {label}").arithmetic
    assert run is not None
    with np.errstate(all="ignore"):
        if op.unary:
            if isinstance(operand, NkiTensor) or operand not in (None, 0):
                fail(f"nisa.{instruction}: {label}", f"must be None or 0 with {op!r}, which takes one operand")
            return run(x)
        if operand is None:
            fail(f"nisa.{instruction}: {label}", f"missing; {op!r} takes two operands")
        # The documentation says float32; AWS's own kernels also pass bfloat16. Integers are refused.
        if isinstance(operand, NkiTensor) and not operand.dtype.is_float:
            fail(
                f"nisa.{instruction}: {label}",
                f"{operand!r}: the operand of an arithmetic operator must be a float type",
            )
        value = scalar_operand(core, instruction, label, operand, x.shape[0])
        return np.asarray(run(value, x) if reverse else run(x, value), np.float32)


def _bit_step(
    core: Core, op: Op, x: np.ndarray, operand: Any, reverse: bool, label: str, partitions: int
) -> np.ndarray:
    assert op.bits is not None
    if op.unary:
        return op.bits(x)
    if isinstance(operand, NkiTensor):
        tile(core, "tensor_scalar", label, operand)
        check_integers("tensor_scalar", **{label: operand})
        if operand.size != partitions or operand.shape[0] != partitions:
            fail(f"nisa.tensor_scalar: {label}", f"{operand!r} must have shape ({partitions}, 1)")
        value = read(operand, label).reshape(partitions, 1).astype(x.dtype)
    else:
        value = np.array(int(operand) & (2 ** (8 * x.dtype.itemsize) - 1), f"u{x.dtype.itemsize}").view(x.dtype)
    return op.bits(np.broadcast_to(value, x.shape), x) if reverse else op.bits(x, value)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = (data op0 operand0) op1 operand1, operand1 a whole tile."""
    core = begin("scalar_tensor_tensor")
    where = "nisa.scalar_tensor_tensor"
    for operand, t in (("dst", dst), ("data", data), ("operand1", operand1)):
        tile(core, "scalar_tensor_tensor", operand, t)
    same_elements("scalar_tensor_tensor", dst, data=data, operand1=operand1)
    not_both_psum("scalar_tensor_tensor", "data", data, "operand1", operand1)
    first, second = arithmetic(op0, f"{where}: op0"), arithmetic(op1, f"{where}: op1")
    x = scalar_step(core, "scalar_tensor_tensor", first, read32(data, f"{where}: data"), operand0, reverse0, "operand0")
    y = read32(operand1, f"{where}: operand1")
    assert second.arithmetic is not None
    with np.errstate(all="ignore"):
        result = second.arithmetic(y, x) if reverse1 else second.arithmetic(x, y)
    write32(dst, result, f"{where}: dst")
    psum_inputs = (data.buffer is MemoryRegion.psum) + (operand1.buffer is MemoryRegion.psum)
    # The performance mode lists tensor_tensor, not this instruction.
    cycles = cost.tensor_tensor(dst.per_partition, psum_inputs, all_16_bit_sbuf=False)
    return end(core, engines.vector, "scalar_tensor_tensor", cycles, dst, data, operand1)


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
        fail(f"{where}: axis", f"{axis} of {data!r}: must be the last free dimensions, without gaps and without 0")
    found = as_op(op, f"{where}: op")
    if found.reduce is None:
        fail(f"{where}: op", f"{found!r} is not a legal reduction")
    same_partitions("tensor_reduce", dst, data=data)
    kept = int(np.prod(data.shape[1 : axes[0]], dtype=np.int64))
    if dst.per_partition != kept:
        fail(f"{where}: dst", f"{dst!r} has {dst.per_partition} elements per partition; the result has {kept}")
    values = read(data, f"{where}: data").reshape(data.shape[0], kept, -1)
    if found.bits is not None:
        check_integers("tensor_reduce", dst=dst, data=data)
        if negate:
            fail(f"{where}: negate", "only with arithmetic operators")
        write(dst, _bit_result(found.reduce(values, axis=2), dst), f"{where}: dst")
    else:
        with np.errstate(all="ignore"):
            result = np.asarray(found.reduce(to_float32(values), axis=2), np.float32)
        write32(dst, -result if negate else result, f"{where}: dst")
    n = data.per_partition
    fast = is_16_bit_float(dst, data) and found.name in ("add", "maximum")
    return end(core, engines.vector, "tensor_reduce", cost.streaming(n // 2 if fast else n), data)


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst = 1 / data."""
    core = begin("reciprocal")
    tile(core, "reciprocal", "dst", dst)
    tile(core, "reciprocal", "data", data)
    same_elements("reciprocal", dst, data=data)
    with np.errstate(all="ignore"):
        write32(dst, 1 / read32(data, "nisa.reciprocal: data"), "nisa.reciprocal: dst")
    return end(core, engines.vector, "reciprocal", cost.reciprocal(dst.per_partition), dst, data)


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
    """Row reductions into the Vector Engine's accumulator registers, one per partition, and reading them out."""
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
        fail(f"{where}: reduce_op", f"{reducer!r}; add, multiply, maximum and minimum are possible")
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
        fail(f"{where}: op", f"{found!r}; add, maximum, bitwise_or and bitwise_and are possible")
    assert found.reduce is not None
    if found.bits is not None:
        check_integers("tensor_partition_reduce", dst=dst, data=data)
        write(dst, _bit_result(found.reduce(read(data, where), axis=0), dst), f"{where}: dst")
    else:
        write32(dst, np.asarray(found.reduce(read32(data, where), axis=0), np.float32), f"{where}: dst")
    return end(core, engines.gpsimd, "tensor_partition_reduce", cost.streaming(data.per_partition))
