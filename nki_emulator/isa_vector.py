"""Copies and elementwise arithmetic on the Vector, Scalar and GpSimd Engines."""

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
    same_elements,
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
    """dst = src on chip: bit-exact if the types agree, otherwise converted through float32."""
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
    """Fill with a constant."""
    core = begin("memset")
    tile(core, "memset", "dst", dst)
    on = pick_engine("memset", engine, engines.vector, engines.gpsimd)
    if on is engines.gpsimd:
        no_psum("memset", "GpSimd Engine", dst=dst)
    if isinstance(value, NkiTensor) or not isinstance(value, (int, float, np.number)):
        fail("nisa.memset: value", f"must be a number known while the kernel is built, got {value!r}")
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
    half = value == 0 and is_16_bit_float(dst)  # cost tables of nki.isa up to SDK 2.26
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
        write(dst, bit_result(found.bits(a.reshape(dst.shape), b.reshape(dst.shape)), dst), f"{where}: dst")
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


def bit_result(values: np.ndarray, dst: NkiTensor) -> np.ndarray:
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
        fail(f"{where}: operand1", "must not be given without op1")
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
        write(dst, bit_result(bits, dst), f"{where}: dst")
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
        fail(where, f"the Scalar Engine runs multiply then add, multiply, or add, got {pair}")
    if engine is engines.gpsimd and rsqrt not in (first, second):
        fail(where, f"the GpSimd Engine runs tensor_scalar only for nl.rsqrt, got {pair}")
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
            fail(f"nisa.{instruction}: {label}", f"is missing; {op!r} takes two operands")
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


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst = 1 / data."""
    core = begin("reciprocal")
    tile(core, "reciprocal", "dst", dst)
    tile(core, "reciprocal", "data", data)
    same_elements("reciprocal", dst, data=data)
    with np.errstate(all="ignore"):
        write32(dst, 1 / read32(data, "nisa.reciprocal: data"), "nisa.reciprocal: dst")
    return end(core, engines.vector, "reciprocal", cost.reciprocal(dst.per_partition), dst, data)
