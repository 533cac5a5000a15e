"""What every instruction shares: operand checks, reading and writing tiles, issuing to an engine."""

# ruff: noqa: N801  AWS's names
from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import numpy as np

from . import cost, launch
from .dtypes import DType, bfloat16, float16, float32, from_float32, tfloat32, to_float32
from .errors import fail
from .launch import Core
from .memory import PARTITIONS, PSUM_BANK_BYTES, MemoryRegion, PsumState
from .objects import NKIObject
from .ops import Op, as_op
from .views import NkiTensor


class engine(Enum):
    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class oob_mode(Enum):
    error = 0
    skip = 1


class dge_mode(Enum):
    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class matmul_perf_mode(Enum):
    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: nc_version) -> bool:
        return self.value < other.value

    def __le__(self, other: nc_version) -> bool:
        return self.value <= other.value

    def __gt__(self, other: nc_version) -> bool:
        return self.value > other.value

    def __ge__(self, other: nc_version) -> bool:
        return self.value >= other.value


class dma_engine(Enum):
    dma = 1
    gpsimd_dma = 2


Choice = TypeVar("Choice", bound=Enum)


def choose(where: str, kind: type[Choice], value: Any) -> Choice:
    """A member of an enumeration. Its number is accepted too, as in NKI 0.3."""
    if isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        fail(where, f"must be one of {', '.join(f'{kind.__name__}.{m.name}' for m in kind)}, got {value!r}")


class NkiInstruction(NKIObject):
    """Handle of an issued instruction. Instructions run in program order, so dependencies always hold."""

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        return self


ISSUED = NkiInstruction()


class VirtualRegister(NKIObject):
    """A 32-bit register. Its value is known at run time only: no arithmetic, no comparison, no int()."""

    def __init__(self, value: int | None = None) -> None:
        self._value = value

    @property
    def value(self) -> int:
        if self._value is None:
            fail("register", "read before it was written")
        return self._value

    @value.setter
    def value(self, value: int) -> None:
        self._value = (int(value) + 2**31) % 2**32 - 2**31

    def __bool__(self) -> bool:
        """`while reg:`, which the parser front end allows."""
        return self.value != 0

    def __repr__(self) -> str:
        return "register"


def begin(instruction: str) -> Core:
    """The core that issues `instruction`; advances its instruction clock."""
    core = launch.current(f"nisa.{instruction}")
    core.clock += 1
    return core


def end(core: Core, on: engine | str, instruction: str, cycles: float, *tiles: NkiTensor) -> NkiInstruction:
    """Count an issued instruction; `tiles` are the operands whose strides decide the memory bandwidth."""
    if any(innermost_stride(t) * t.dtype.itemsize > cost.FULL_BANDWIDTH_STRIDE for t in tiles):
        cycles *= cost.LARGE_STRIDE_FACTOR
    core.report.add(on if isinstance(on, str) else on.name, instruction, cycles)
    return ISSUED


def innermost_stride(tensor: NkiTensor) -> int:
    """Stride in elements of the last free dimension that has more than one element; 1 if there is none."""
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.strides[1:]), strict=True):
        if size != 1:
            return stride
    return 1


def tile(core: Core, instruction: str, operand: str, tensor: Any, *buffers: MemoryRegion) -> NkiTensor:
    """Check that `tensor` is an on-chip tile in one of `buffers` (default SBUF and PSUM) that hardware can address."""
    where = f"nisa.{instruction}: {operand}"
    if not isinstance(tensor, NkiTensor):
        fail(where, f"must be a tensor, got {type(tensor).__name__}")
    allowed = buffers or (MemoryRegion.sbuf, MemoryRegion.psum)
    if tensor.buffer not in allowed:
        fail(where, f"{tensor!r} must be in {' or '.join(map(str, allowed))}")
    if tensor.shape[0] > PARTITIONS:
        fail(where, f"{tensor!r} has {tensor.shape[0]} partitions; the limit is {PARTITIONS}")
    if tensor.storage.core != core.rank:
        fail(where, f"{tensor!r} belongs to core {tensor.storage.core}, not to core {core.rank}")
    check_start_partition(where, tensor)
    core.use(tensor.storage)
    return tensor


def check_start_partition(where: str, tensor: NkiTensor) -> None:
    """More than 64 partitions start at 0, 33 to 64 at 0 or 64, up to 32 at 0, 32, 64 or 96.

    Source: trainium_inferentia2_arch.rst.
    """
    start, count = tensor.start_partition, tensor.shape[0]
    step = 128 if count > 64 else 64 if count > 32 else 32
    if start % step:
        legal = ", ".join(str(p) for p in range(0, PARTITIONS, step))
        fail(where, f"{tensor!r} has {count} partitions and starts at partition {start}; it may start at {legal}")


def same_partitions(instruction: str, dst: NkiTensor, **operands: NkiTensor) -> None:
    for name, tensor in operands.items():
        if tensor.shape[0] != dst.shape[0]:
            fail(
                f"nisa.{instruction}: {name}",
                f"{tensor!r} has {tensor.shape[0]} partitions, dst {dst!r} {dst.shape[0]}",
            )


def same_elements(instruction: str, dst: NkiTensor, **operands: NkiTensor) -> None:
    """Partitions and elements per partition agree with `dst`; the shapes may differ."""
    same_partitions(instruction, dst, **operands)
    for name, tensor in operands.items():
        if tensor.per_partition != dst.per_partition:
            fail(
                f"nisa.{instruction}: {name}",
                f"{tensor!r} has {tensor.per_partition} elements per partition, dst {dst!r} {dst.per_partition}",
            )


def not_both_psum(instruction: str, a: str, first: Any, b: str, second: Any) -> None:
    psum = MemoryRegion.psum
    if (
        isinstance(first, NkiTensor)
        and isinstance(second, NkiTensor)
        and first.buffer is psum
        and second.buffer is psum
    ):
        fail(f"nisa.{instruction}: {a}, {b}", f"{first!r} and {second!r} are both in psum; at most one may be")


def no_psum(instruction: str, on: str, **operands: Any) -> None:
    for name, tensor in operands.items():
        if isinstance(tensor, NkiTensor) and tensor.buffer is MemoryRegion.psum:
            fail(f"nisa.{instruction}: {name}", f"{tensor!r} is in psum; the {on} cannot access it")


def pick_engine(instruction: str, chosen: engine, *allowed: engine) -> engine:
    """The requested engine, or the first allowed one when the compiler may choose."""
    chosen = choose(f"nisa.{instruction}: engine", engine, chosen)
    if chosen is engine.unknown:
        return allowed[0]
    if chosen not in allowed:
        fail(f"nisa.{instruction}: engine", f"must be {' or '.join(e.name for e in allowed)}, got {chosen.name}")
    return chosen


def read(tensor: NkiTensor, where: str) -> np.ndarray:
    """Elements as stored."""
    try:
        return tensor.array(where)
    except IndexError as error:
        fail(where, str(error))


def read32(tensor: NkiTensor, where: str) -> np.ndarray:
    """Elements as float32, flattened to [partitions, elements per partition]."""
    if tensor.dtype.kind == "p":
        fail(where, f"{tensor!r} holds packed elements; no engine converts them to float32")
    return to_float32(read(tensor, where)).reshape(tensor.shape[0], -1)


def write(tensor: NkiTensor, values: np.ndarray, where: str, state: PsumState = PsumState.other) -> None:
    """Store elements of the tensor's own type."""
    target = read(tensor, where)
    target[...] = values.reshape(tensor.shape)
    if tensor.storage.psum_state is not None:
        psum_words(tensor)[...] = state.value


def write32(tensor: NkiTensor, values: np.ndarray, where: str, state: PsumState = PsumState.other) -> None:
    """Round float32 results to the tensor's type and store them."""
    write(tensor, from_float32(values, tensor.dtype), where, state)


def psum_words(tensor: NkiTensor) -> np.ndarray:
    """The accumulation state of the words the view covers: its bounding range in each partition."""
    state = tensor.storage.psum_state
    assert state is not None
    size = tensor.dtype.itemsize
    first = tensor.start_byte
    last = first + size * sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.strides[1:], strict=True)) + size
    partition = tensor.start_partition - tensor.storage.start_partition
    return state[partition : partition + tensor.shape[0], first // 4 : -(-last // 4)]


def psum_banks(tensor: NkiTensor) -> range:
    """Banks touched by the view."""
    size = tensor.dtype.itemsize
    first = tensor.start_byte + (tensor.storage.start_byte or 0)
    last = first + size * sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.strides[1:], strict=True)) + size - 1
    return range(first // PSUM_BANK_BYTES, last // PSUM_BANK_BYTES + 1)


def scalar_operand(
    core: Core, instruction: str, name: str, operand: Any, partitions: int, *, only_float32: bool = False
) -> np.ndarray | np.float32:
    """A compile-time number, or one value per partition as a float32 column."""
    where = f"nisa.{instruction}: {name}"
    if not isinstance(operand, NkiTensor):
        if isinstance(operand, VirtualRegister):
            fail(where, "must not be a register; store the register to a tile first")
        try:
            return np.float32(operand)
        except (TypeError, ValueError):
            fail(where, f"must be a number or a ({partitions}, 1) tile, got {operand!r}")
    tile(core, instruction, name, operand)
    if operand.size != partitions or operand.shape[0] != partitions:
        fail(where, f"{operand!r} must have shape ({partitions}, 1)")
    if only_float32 and operand.dtype is not float32:
        fail(where, f"{operand!r} must be float32")
    return read32(operand, where).reshape(partitions, 1)


def is_16_bit_float(*tensors: NkiTensor) -> bool:
    return all(t.dtype in (bfloat16, float16) for t in tensors)


def in_sbuf(*tensors: NkiTensor) -> bool:
    return all(t.buffer is MemoryRegion.sbuf for t in tensors)


def innermost_contiguous(*tensors: NkiTensor) -> bool:
    return all(innermost_stride(t) == 1 for t in tensors)


def arithmetic(op: Any, where: str) -> Op:
    found = as_op(op, where)
    if found.arithmetic is None:
        kind = "a bit operator" if found.bits else "an activation function"
        fail(where, f"must be an arithmetic operator; {found!r} is {kind}")
    return found


def check_integers(instruction: str, **operands: Any) -> None:
    for name, tensor in operands.items():
        if isinstance(tensor, NkiTensor) and not tensor.dtype.is_int:
            fail(f"nisa.{instruction}: {name}", f"{tensor!r}: bit operators need integers, got {tensor.dtype}")


def is_fp32(dtype: DType) -> bool:
    return dtype in (float32, tfloat32)
