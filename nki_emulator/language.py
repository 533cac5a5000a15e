"""The core of `nki.language`: types, buffers, tensors, loops, and calling an operator on tiles.

`install` adds the operators (`ops`) and the functions of `language_math` to the same module, under AWS's names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import isa, launch, memory
from .dtypes import (
    DType,
    as_dtype,
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    from_float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from .errors import fail
from .indexing import ds
from .isa_common import VirtualRegister, write
from .memory import HBM, ON_CHIP, MemoryRegion
from .objects import NKIObject
from .ops import Op
from .views import NkiTensor

__all__ = [
    "DType",
    "MemoryRegion",
    "NKIObject",
    "NkiTensor",
    "affine_range",
    "bfloat16",
    "bool_",
    "device_print",
    "ds",
    "dynamic_range",
    "empty_like",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "fori_loop",
    "full",
    "hbm",
    "int8",
    "int16",
    "int32",
    "is_hbm",
    "is_on_chip",
    "is_psum",
    "is_sbuf",
    "load",
    "ndarray",
    "no_reorder",
    "num_programs",
    "ones",
    "private_hbm",
    "program_id",
    "program_ndim",
    "psum",
    "sbuf",
    "sequential_range",
    "shared_constant",
    "shared_hbm",
    "shared_identity_matrix",
    "static_range",
    "store",
    "tfloat32",
    "tile_size",
    "uint8",
    "uint16",
    "uint32",
    "while_loop",
    "zeros",
    "zeros_like",
]

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
hbm = private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm


class _TileSize(NKIObject):
    """`nl.tile_size`."""

    pmax = memory.PARTITIONS
    psum_bank_fmax = psum_fmax = memory.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = memory.PSUM_BANK_BYTES
    gemm_stationary_fmax = 128
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1

    @property
    def gemm_moving_fmax(self) -> int:
        return 512 if launch.generation() < 4 else 4096

    @property
    def psum_num_banks(self) -> int:
        return 7 if os.environ.get("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE") == "true" else memory.PSUM_BANKS

    @property
    def sbuf_size_bytes(self) -> int:
        return memory.PARTITIONS * memory.SBUF_BYTES[launch.generation()]

    @property
    def sbuf_fmax_bytes(self) -> int:
        return memory.sbuf_usable_bytes(launch.generation())

    @property
    def sbuf_fmax(self) -> int:
        return self.sbuf_fmax_bytes // 4

    total_available_sbuf_size = sbuf_fmax_bytes


tile_size = _TileSize()


def is_hbm(buffer: Any) -> bool:
    return buffer in HBM


def is_on_chip(buffer: Any) -> bool:
    return buffer in ON_CHIP


def is_psum(buffer: Any) -> bool:
    return buffer is MemoryRegion.psum


def is_sbuf(buffer: Any) -> bool:
    return buffer is MemoryRegion.sbuf


# -- tensors ---------------------------------------------------------------------------------------------------------


def ndarray(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", address: Any = None) -> NkiTensor:
    """A tensor with undefined contents."""
    return launch.current("nl.ndarray").allocate(tuple(shape), dtype, buffer, name, address)


def _filled(shape: Any, value: float, dtype: Any, buffer: Any, name: str) -> NkiTensor:
    tensor = ndarray(shape, dtype, buffer, name)
    if tensor.on_chip:
        isa.memset(tensor, value)
    else:
        tensor.array("nl.full")[...] = from_float32(np.array(value, np.float32), tensor.dtype)
    return tensor


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    return _filled(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    return _filled(shape, 1, dtype, buffer, name)


def full(shape: Any, fill_value: float, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    return _filled(shape, fill_value, dtype, buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """A tensor in shared HBM holding a NumPy array, or the array in a .npy file."""
    values = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    tensor = ndarray(values.shape or (1,), as_dtype(values.dtype, "nl.shared_constant"), shared_hbm)
    tensor.array("nl.shared_constant")[...] = values
    return tensor


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """An n x n identity in SBUF."""
    tensor = ndarray((n, n), dtype) if dst is None else dst
    write(tensor, np.eye(n, dtype=np.float32).astype(tensor.dtype.np), "nl.shared_identity_matrix")
    launch.current().use(tensor.storage)
    return tensor


def assign(target: NkiTensor, value: NkiTensor) -> None:
    """`target[...] = value`: a copy on chip, a DMA otherwise."""
    if target.on_chip and value.on_chip:
        isa.tensor_copy(target, value)
    else:
        isa.dma_copy(target, value)


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile holding an HBM tensor."""
    if src.buffer not in HBM:
        fail("nl.load: src", f"{src!r} must be in HBM")
    tile = ndarray(src.shape if src.ndim > 1 else (src.shape[0], 1), dtype or src.dtype)
    isa.dma_copy(tile, src)
    return tile.reshape(src.shape) if src.ndim > 1 else tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write an SBUF tile to HBM."""
    if dst.buffer not in HBM:
        fail("nl.store: dst", f"{dst!r} must be in HBM")
    if not isinstance(value, NkiTensor) or value.buffer is not sbuf:
        fail("nl.store: value", f"{value!r} must be a tile in sbuf")
    isa.dma_copy(dst, value)


# -- the program and its loops ---------------------------------------------------------------------------------------


def program_id(axis: int = 0) -> int:
    if axis != 0:
        fail("nl.program_id: axis", f"must be 0, got {axis}; the launch grid has one axis")
    return launch.current("nl.program_id").rank


def num_programs(axes: Any = 0) -> Any:
    count = launch.current("nl.num_programs").group.size
    return (count,) * len(axes) if isinstance(axes, (tuple, list)) else count


def program_ndim() -> int:
    return 1 if launch.current("nl.program_ndim").group.size > 1 else 0


def static_range(start: Any, stop: Any = None, step: int = 1) -> range:
    bounds = (0, start) if stop is None else (start, stop)
    if any(isinstance(b, VirtualRegister) for b in bounds):
        fail("nl.static_range", "bounds must be known while the kernel is built; use nl.fori_loop for registers")
    return range(*bounds, step)


affine_range = sequential_range = static_range


def _bound(value: Any) -> int:
    return value.value if isinstance(value, VirtualRegister) else int(value)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Loop with bounds known at run time (deprecated since fori_loop)."""
    first, last = (0, _bound(start)) if stop is None else (_bound(start), _bound(stop))
    for i in range(first, last, _step("nl.dynamic_range", step)):
        with launch.current().scope():
            yield VirtualRegister(i)


def _step(where: str, step: Any) -> int:
    if not isinstance(step, int) or step < 1:
        fail(f"{where}: step", f"must be a positive integer known while the kernel is built, got {step!r}")
    return step


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """body_fun(i) for each i of the range; i is a register."""
    for i in range(_bound(lower), _bound(upper), _step("nl.fori_loop", step)):
        with launch.current("nl.fori_loop").scope():
            if body_fun(VirtualRegister(i)) is not None:
                fail("nl.fori_loop: body_fun", "must return None; carry state through SBUF or HBM")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """Run the body while the register is not 0; it is tested before the first iteration too."""
    if not isinstance(init, VirtualRegister):
        fail("nl.while_loop: init", f"must be a register, got {init!r}")
    register = init
    while register.value != 0:
        with launch.current("nl.while_loop").scope():
            register = body_fun(VirtualRegister(register.value))
        if not isinstance(register, VirtualRegister):
            fail("nl.while_loop: body_fun", f"must return the next register, got {register!r}")


@contextlib.contextmanager
def no_reorder() -> Iterator[None]:
    """No effect: the emulator always runs instructions in program order."""
    yield


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    print(print_prefix, tensor.array("nl.device_print"))


# -- operators called on tiles ---------------------------------------------------------------------------------------


def apply(op: Op, *args: Any, dtype: Any = None) -> NkiTensor:
    """`nl.add(x, y)`, `nl.exp(x)`, ...: a new tile holding the result."""
    tiles = [a for a in args if isinstance(a, NkiTensor)]
    if len(args) != (1 if op.unary else 2) or not tiles:
        fail(f"nl.{op.name}", f"takes {1 if op.unary else 2} operands, at least one of them a tile")
    shape = max((t.shape for t in tiles), key=lambda s: int(np.prod(s)))
    out = ndarray(shape, dtype or tiles[0].dtype)
    if op.unary:
        if op.activation is not None:
            isa.activation(out, op, args[0])
        else:
            isa.tensor_scalar(out, args[0], op, None)
        return out
    x, y = args
    if len(tiles) == 2 and x.shape == y.shape:
        isa.tensor_tensor(out, x, y, op)
    elif isinstance(x, NkiTensor) and x.shape == shape:
        isa.tensor_scalar(out, x, op, y)
    else:
        isa.tensor_scalar(out, y, op, x, reverse0=True)
    return out
