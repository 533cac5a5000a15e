"""Scalar Engine: activation and activation_reduce."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cost
from .dtypes import tfloat32
from .errors import fail
from .isa_common import (
    NkiInstruction,
    begin,
    end,
    engine,
    read32,
    reduce_cmd,
    same_elements,
    scalar_operand,
    tile,
    write32,
)
from .ops import add, as_op
from .views import NkiTensor


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op(data * scale + bias), and a row sum kept in the engine's registers."""
    return _activation("activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op(data * scale + bias), reduce_res = row sums of it."""
    return _activation("activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce)


def _activation(
    instruction: str,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    command: reduce_cmd,
) -> NkiInstruction:
    core = begin(instruction)
    where = f"nisa.{instruction}"
    tile(core, instruction, "dst", dst)
    tile(core, instruction, "data", data)
    same_elements(instruction, dst, data=data)
    found = as_op(op, f"{where}: op")
    if found.activation is None:
        fail(f"{where}: op", f"{found!r} is not an activation function")
    p = dst.shape[0]
    factor = scalar_operand(core, instruction, "scale", scale, p, only_float32=True)
    if isinstance(bias, NkiTensor) and bias.dtype is tfloat32:
        fail(f"{where}: bias", f"{bias!r} must not be tfloat32")
    if bias is not None and not isinstance(bias, NkiTensor) and core.generation == 2:
        fail(f"{where}: bias", "must be a (partitions, 1) tile on NeuronCore-v2")
    x = read32(data, f"{where}: data")
    with np.errstate(all="ignore"):
        if isinstance(scale, NkiTensor) or factor != 1:
            x = x * factor
        if bias is not None:
            x = x + scalar_operand(core, instruction, "bias", bias, p)
        result = np.asarray(found.activation(x), np.float32)
    write32(dst, result, f"{where}: dst")
    if command.name == "load_reduce":
        fail(f"{where}: reduce_cmd", "must be idle, reset, reduce or reset_reduce, got load_reduce")
    if command.name != "idle" or reduce_res is not None:
        sums = command.name in ("reduce", "reset_reduce")
        if sums and (reduce_op is None or as_op(reduce_op, f"{where}: reduce_op") is not add):
            fail(f"{where}: reduce_op", f"must be nl.add, got {reduce_op!r}")
        registers = core.scalar_accumulator[:p]
        if command.name in ("reset", "reset_reduce"):
            registers[:] = 0
        if sums:
            registers += result.sum(axis=1, dtype=np.float32)
    end(core, engine.scalar, instruction, cost.streaming(dst.per_partition), dst, data)
    if reduce_res is not None:
        tile(core, instruction, "reduce_res", reduce_res)
        if reduce_res.shape[0] != p or reduce_res.size != p:
            fail(f"{where}: reduce_res", f"{reduce_res!r} must have shape ({p}, 1)")
        write32(reduce_res, core.scalar_accumulator[:p].reshape(p, 1), f"{where}: reduce_res")
        # Reading the accumulator is an instruction of about 64 cycles (cost tables of nki.isa up to SDK 2.26).
        end(core, engine.scalar, f"{instruction} (read accumulator)", cost.MIN_II)
    return NkiInstruction()
