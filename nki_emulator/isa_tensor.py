"""Tensor Engine: nc_matmul and nc_transpose."""

from __future__ import annotations

import numpy as np

from . import cost
from .dtypes import FP8, bfloat16, float8_e4m3, float8_e4m3fn, float16, float32, tfloat32
from .errors import fail
from .isa_common import (
    NkiInstruction,
    begin,
    end,
    engine,
    is_fp32,
    matmul_perf_mode,
    psum_banks,
    psum_words,
    read,
    read32,
    tile,
    write,
    write32,
)
from .memory import MemoryRegion, PsumState
from .views import NkiTensor

_INPUTS = FP8 | {bfloat16, float16, tfloat32, float32}
MOVING_MAX = 512
STATIONARY_MAX = 128


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> NkiInstruction:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], in float32; K is the partitions of both."""
    core = begin("nc_matmul")
    where = "nisa.nc_matmul"
    sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
    tile(core, "nc_matmul", "dst", dst, psum)
    tile(core, "nc_matmul", "stationary", stationary, sbuf)
    tile(core, "nc_matmul", "moving", moving, sbuf)
    for operand, t in (("stationary", stationary), ("moving", moving)):
        if t.dtype not in _INPUTS and not is_transpose:
            fail(f"{where}: {operand}", f"{t!r}: the Tensor Engine takes fp8, bfloat16, float16, tfloat32 and float32")
        if t.dtype is float8_e4m3fn and core.generation < 4:
            fail(f"{where}: {operand}", f"{t!r}: float8_e4m3fn needs NeuronCore-v4")
    if is_fp32(stationary.dtype) != is_fp32(moving.dtype):
        fail(
            where,
            f"stationary {stationary.dtype} and moving {moving.dtype}: float32 can only be multiplied with float32",
        )
    if {stationary.dtype, moving.dtype} == {float8_e4m3, float8_e4m3fn}:
        fail(where, "float8_e4m3 and float8_e4m3fn cannot be mixed")
    double = perf_mode.name == "double_row"
    if double and not {stationary.dtype, moving.dtype} <= FP8:
        fail(f"{where}: perf_mode", f"double_row takes fp8, got {stationary.dtype} and {moving.dtype}")
    if double and (stationary.ndim != 3 or moving.ndim != 3 or stationary.shape[1] != 2 or moving.shape[1] != 2):
        fail(
            f"{where}: perf_mode",
            f"double_row: shapes {stationary.shape}, {moving.shape} must be [K, 2, M] and [K, 2, N]",
        )
    if stationary.shape[0] != moving.shape[0]:
        fail(
            where,
            f"stationary {stationary!r} and moving {moving!r} have different partitions, the contracted dimension",
        )
    rows, columns = _tile(where, tile_position, tile_size)
    m = stationary.per_partition // (2 if double else 1)
    n = moving.per_partition // (2 if double else 1)
    if stationary.shape[0] > rows:
        fail(f"{where}: stationary", f"{stationary!r} has {stationary.shape[0]} partitions; the limit is {rows}")
    if m > columns:
        fail(f"{where}: stationary", f"{stationary!r} has {m} columns; the limit is {columns}")
    limit = MOVING_MAX if core.generation < 4 else 8192 if dst.dtype is bfloat16 else 4096
    if n > limit:
        fail(f"{where}: moving", f"{moving!r} has {n} columns; the limit is {limit}")
    if dst.shape[0] != m or dst.per_partition != n:
        fail(f"{where}: dst", f"{dst!r} must hold {m} partitions of {n} elements")
    if core.generation < 4 and len(psum_banks(dst)) > 1:
        fail(f"{where}: dst", f"{dst!r} touches PSUM banks {list(psum_banks(dst))}; a matmul writes into one")
    if is_transpose:
        if dst.dtype is not stationary.dtype:
            fail(f"{where}: dst", f"{dst!r}: with is_transpose it must have stationary's type {stationary.dtype}")
        _require_identity(where, moving)
        write(dst, read(stationary, where).reshape(stationary.shape[0], m).T, f"{where}: dst")
        return end(core, engine.tensor, "nc_matmul", cost.pe_transpose(n, m, is_fp32(stationary.dtype)))
    if dst.dtype is not float32 and not (core.generation >= 4 and dst.dtype is bfloat16):
        fail(f"{where}: dst", f"{dst!r} must be float32")
    adds = _accumulates(core.generation, dst, accumulate, where)
    product = _product(stationary, moving, m, n, double, where)
    if adds:
        product += read32(dst, f"{where}: dst")
    write32(dst, product, f"{where}: dst", PsumState.matmul)
    cycles = cost.matmul(
        m, n, is_fp32(moving.dtype), double_row=double, onezero=is_stationary_onezero or is_moving_onezero
    )
    return end(core, engine.tensor, "nc_matmul", cycles, moving)


def _product(s: NkiTensor, m: NkiTensor, columns: int, n: int, double: bool, where: str) -> np.ndarray:
    """The product in float32, summed in float64.

    A BLAS sums float32 in an order that depends on the shapes and on the CPU. On hardware an element of the result does
    not depend on how many columns are multiplied at once, and kernels at LNC 1 and 2 are compared bit for bit.
    """
    left, right = read32(s, f"{where}: stationary"), read32(m, f"{where}: moving")
    if double:  # the contraction runs over partitions and the pair
        left, right = left.reshape(-1, columns), right.reshape(-1, n)
    with np.errstate(over="ignore"):
        return (left.T.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)


def _tile(where: str, position: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, int]:
    if not position and not size:
        return 128, 128
    if len(position or ()) != 2 or len(size or ()) != 2:
        fail(
            where,
            f"tile_position {position} and tile_size {size}: must both be two numbers or both be omitted",
        )
    for at, n in zip(position, size, strict=True):
        if n not in (32, 64, 128) or at % n or not 0 <= at < 128:
            fail(where, f"tile_position {position}, tile_size {size}: sizes 32, 64 or 128, positions multiples of them")
    return size[0], size[1]


def _require_identity(where: str, moving: NkiTensor) -> None:
    values = read32(moving, where)
    if values.shape[0] != values.shape[1] or not np.array_equal(values, np.eye(len(values), dtype=np.float32)):
        fail(f"{where}: moving", f"{moving!r}: with is_transpose it must be an identity matrix")


def _accumulates(generation: int, dst: NkiTensor, accumulate: bool | None, where: str) -> bool:
    """Whether this matmul adds to what is in PSUM. The first one at a place overwrites (nc_matmul, "Accumulation")."""
    if accumulate is not None and not accumulate:
        return False
    state = psum_words(dst)
    first = state.reshape(-1)[0] if state.size else 0
    if (state != first).any():
        fail(f"{where}: accumulate", f"only a part of {dst!r} was written by a matmul")
    if first == PsumState.matmul.value:
        return True
    if first == PsumState.other.value and generation < 4:
        if accumulate is None:
            return False
        fail(
            f"{where}: accumulate",
            f"{dst!r} was written by something other than a matmul; accumulating onto it is undefined",
        )
    if accumulate and first == PsumState.untouched.value:
        fail(f"{where}: accumulate", f"must be False for the first matmul into {dst!r}")
    return first == PsumState.other.value


def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """dst[F, P] = data[P, F].T: Tensor Engine up to 128x128 SBUF to PSUM, Vector Engine up to 32x32."""
    core = begin("nc_transpose")
    where = "nisa.nc_transpose"
    p, f = data.shape[0], data.per_partition
    small = p <= 32 and f <= 32
    on = engine.name
    if on == "unknown":
        on = "tensor" if dst.buffer is MemoryRegion.psum and data.buffer is MemoryRegion.sbuf else "vector"
    if on not in ("tensor", "vector"):
        fail(f"{where}: engine", f"must be tensor or vector, got {on}")
    if on == "tensor":
        tile(core, "nc_transpose", "dst", dst, MemoryRegion.psum)
        tile(core, "nc_transpose", "data", data, MemoryRegion.sbuf)
        if p > 128 or f > 128:
            fail(f"{where}: data", f"{data!r} is {p} x {f}; the Tensor Engine transposes up to 128 x 128")
    else:
        tile(core, "nc_transpose", "dst", dst)
        tile(core, "nc_transpose", "data", data)
        if not small:
            fail(f"{where}: data", f"{data!r} is {p} x {f}; the Vector Engine transposes up to 32 x 32")
    if dst.dtype is not data.dtype:
        fail(f"{where}: dst", f"{dst!r} must have data's type {data.dtype}")
    if dst.shape[0] != f or dst.per_partition != p:
        fail(f"{where}: dst", f"{dst!r} must hold {f} partitions of {p} elements")
    write(dst, read(data, f"{where}: data").reshape(p, f).T, f"{where}: dst")
    cycles = cost.pe_transpose(p, f, is_fp32(data.dtype)) if on == "tensor" else cost.streaming(f)
    return end(core, on, "nc_transpose", cycles)
