"""Functions of `nki.language` beyond the operators: reductions, softmax, transpose, matmul. AWS marks all experimental.

Each call makes its own output tile and issues the instructions it needs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import isa, launch, ops
from .dtypes import float32, from_float32
from .errors import fail
from .isa_common import read, read32, write
from .isa_common import tile as check_tile
from .memory import HBM, MemoryRegion
from .views import NkiTensor

__all__ = [
    "all",
    "broadcast_to",
    "ceil",
    "cos",
    "expand_dims",
    "floor",
    "gather_flattened",
    "load_transpose2d",
    "matmul",
    "max",
    "mean",
    "min",
    "negative",
    "prod",
    "rand",
    "random_seed",
    "rms_norm",
    "softmax",
    "sum",
    "tan",
    "transpose",
    "trunc",
    "var",
    "where",
]


def _new(shape: Any, dtype: Any, buffer: MemoryRegion = MemoryRegion.sbuf) -> NkiTensor:
    return launch.current().allocate(tuple(shape), dtype, buffer)


def _reduce(op: ops.Op, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    axes = sorted(a % x.ndim for a in ((axis,) if isinstance(axis, int) else tuple(axis)))
    kept = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    out = _new(kept, dtype or x.dtype)
    isa.tensor_reduce(out, op, x, tuple(axes))
    if keepdims or x.ndim - len(axes) < 2:
        return out
    return out.reshape(tuple(n for d, n in enumerate(x.shape) if d not in axes))


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce(ops.add, x, axis, dtype, keepdims)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce(ops.maximum, x, axis, dtype, keepdims)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce(ops.minimum, x, axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce(ops.multiply, x, axis, dtype, keepdims)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    total = _reduce(ops.add, x, axis, float32, keepdims)
    out = _new(total.shape, dtype or x.dtype)
    isa.tensor_scalar(out, total, ops.multiply, 1 / math.prod(x.shape[a % x.ndim] for a in axes))
    return out


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Mean of squares less the square of the mean, over all elements of the given dimensions."""
    squares = _new(x.shape, float32)
    isa.tensor_tensor(squares, x, x, ops.multiply)
    first, second = mean(x, axis, float32, keepdims), mean(squares, axis, float32, keepdims)
    out = _new(first.shape, dtype or x.dtype)
    isa.tensor_tensor(first, first, first, ops.multiply)
    isa.tensor_tensor(out, second, first, ops.subtract)
    return out


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    return _reduce(ops.logical_and, x, axis, dtype, keepdims=False)


def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    out = _new(x.shape, dtype or x.dtype)
    isa.tensor_scalar(out, x, ops.multiply, -1.0)
    return out


def _rounded(function: Any, x: NkiTensor, dtype: Any) -> NkiTensor:
    core = launch.current()
    check_tile(core, "tensor_scalar", "x", x)
    out = _new(x.shape, dtype or x.dtype)
    isa.tensor_copy(out, x)
    write(out, from_float32(function(read32(x, "nl")), out.dtype), "nl")
    return out


def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _rounded(np.floor, x, dtype)


def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _rounded(np.ceil, x, dtype)


def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _rounded(np.trunc, x, dtype)


def cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _rounded(np.cos, x, dtype)


def tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _rounded(np.tan, x, dtype)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """exp(x - max) / sum over the last dimension."""
    if axis not in (-1, x.ndim - 1) or x.ndim != 2:
        fail("nl.softmax", f"must get a 2-dimensional tile and its last dimension, got {x!r} and axis {axis}")
    peak, total, shifted = (_new((x.shape[0], 1), float32) for _ in range(3))
    isa.tensor_reduce(peak, ops.maximum, x, 1)
    isa.tensor_scalar(shifted, peak, ops.multiply, -1.0)
    powers = _new(x.shape, float32)
    isa.activation_reduce(powers, ops.exp, x, ops.add, total, bias=shifted)
    isa.reciprocal(total, total)
    out = _new(x.shape, dtype or x.dtype)
    isa.tensor_scalar(out, powers, ops.multiply, total)
    return out


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Any, n: int, epsilon: float = 1e-6, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """x * rsqrt(sum(x^2) / n + epsilon) * w over the last dimension."""
    squares, normed = _new(x.shape, float32), _new(x.shape, compute_dtype or x.dtype)
    total = _new((x.shape[0], 1), float32)
    isa.activation_reduce(squares, ops.square, x, ops.add, total)
    isa.activation(total, ops.rsqrt, total, bias=epsilon, scale=1 / n)
    isa.tensor_scalar(normed, x, ops.multiply, total)
    out = _new(x.shape, dtype or x.dtype)
    isa.tensor_tensor(out, normed, w, ops.multiply)
    return out


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    shaped = x if isinstance(x, NkiTensor) else condition
    out = _new(shaped.shape, dtype or (x.dtype if isinstance(x, NkiTensor) else float32))
    flags = _new(condition.shape, "uint8")
    isa.tensor_scalar(flags, condition, ops.not_equal, 0.0)
    if isinstance(y, NkiTensor):
        isa.tensor_copy(out, y)
    else:
        isa.memset(out, y)
    isa.tensor_copy_predicated(out, x, flags)
    return out


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    return x.expand_dim(axis % (x.ndim + 1))


def broadcast_to(x: NkiTensor, shape: Any, dtype: Any = None) -> NkiTensor:
    """A new tile; partitions are broadcast by matmul on hardware, free dimensions by stride 0."""
    core = launch.current()
    check_tile(core, "tensor_copy", "x", x)
    out = _new(shape, dtype or x.dtype)
    core.use(out.storage)
    core.clock += 1
    values = np.broadcast_to(read(x, "nl.broadcast_to"), tuple(shape))
    write(out, from_float32(values.astype(np.float32), out.dtype), "nl.broadcast_to")
    core.report.add("vector", "broadcast_to", math.prod(shape[1:]))
    return out


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Up to 128 x 128, through PSUM."""
    flipped = _new((x.per_partition, x.shape[0]), x.dtype, MemoryRegion.psum)
    isa.nc_transpose(flipped, x)
    out = _new(flipped.shape, dtype or x.dtype)
    isa.tensor_copy(out, flipped)
    return out


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x @ y in PSUM; with transpose_x, x is given as [K, M]."""
    stationary = x if transpose_x else transpose(x)
    out = _new((stationary.per_partition, y.per_partition), float32, MemoryRegion.psum)
    isa.nc_matmul(out, stationary, y)
    return out


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    if src.buffer not in HBM or src.ndim != 2:
        fail("nl.load_transpose2d: src", f"{src!r} must be 2-dimensional in HBM")
    out = _new((src.shape[1], src.shape[0]), src.dtype)
    isa.dma_transpose(out, src)
    return out


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    out = _new(indices.shape, data.dtype)
    isa.nc_n_gather(out, data, indices)
    return out


def rand(shape: Any, dtype: Any, buffer: Any = MemoryRegion.sbuf, name: str = "") -> NkiTensor:
    """Uniform numbers in [0, 1), the same in every run."""
    core = launch.current("nl.rand")
    out = core.allocate(tuple(shape), dtype, buffer, name)
    core.use(out.storage)
    core.clock += 1
    write(out, from_float32(core.random.random(out.shape, np.float32), out.dtype), "nl.rand")
    core.report.add("gpsimd", "rand", out.per_partition)
    return out


def random_seed(seed: int) -> None:
    launch.current("nl.random_seed").random = np.random.default_rng(seed)
