"""The memory of one core: SBUF and PSUM (128 partitions, sizes in bytes per partition) and HBM.

Limits: trainium2_arch.rst and trainium3_arch.rst; tile sizes: nki.language.tile_size.rst.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from .dtypes import DType, uninitialised
from .errors import fail

PARTITIONS = 128
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
PSUM_BYTES = PSUM_BANK_BYTES * PSUM_BANKS
# The documentation gives the physical size per partition, 224 KiB (trn2) and 256 KiB (trn3), and says that less is
# usable, but not how much. AWS's own kernels reserve 16 KiB (nki-library, moe/bwd/bwmm_bwd_dropless.py).
SBUF_RESERVED_BYTES = 16 * 1024
SBUF_BYTES = {2: 192 * 1024, 3: 224 * 1024, 4: 256 * 1024}


def sbuf_usable_bytes(generation: int) -> int:
    """Bytes of one SBUF partition that a kernel may use."""
    return SBUF_BYTES[generation] - SBUF_RESERVED_BYTES


class MemoryRegion(Enum):
    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    def __str__(self) -> str:
        return self.value


ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)
HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


class PsumState(Enum):
    """What last wrote a PSUM word. It decides whether a matmul may accumulate onto it."""

    untouched = 0
    matmul = 1
    other = 2


@dataclass(eq=False)
class Lifetime:
    """Size of a tile and the instructions that used it first and last. Kept after the tile's data is freed."""

    buffer: MemoryRegion
    row_bytes: int
    name: str
    first_use: int = -1
    last_use: int = -1
    usable: bool = True  # False after the dynamic loop body that made the tile


@dataclass(eq=False)
class Storage:
    """One allocation.

    `data` is a flat byte array. On chip, partition p starts at byte `base + p * pitch` and holds `row_bytes`; in HBM
    the tensor starts at `base` and is contiguous, `row_bytes` is its size.
    """

    buffer: MemoryRegion
    data: np.ndarray
    row_bytes: int
    name: str
    partitions: int = 1
    pitch: int = 0
    base: int = 0
    start_partition: int = 0
    start_byte: int | None = None  # address inside the partition, where the kernel chose it
    core: int | None = None
    itemsize: int = 1  # of the type the tensor was made with
    lifetime: Lifetime | None = None
    psum_state: np.ndarray | None = field(default=None, repr=False)  # [partitions, row words of 4 bytes]

    @property
    def on_chip(self) -> bool:
        return self.buffer in ON_CHIP


def fill_uninitialised(data: np.ndarray, dtype: DType) -> None:
    data.view(dtype.np)[...] = uninitialised(dtype)


def allocate_hbm(buffer: MemoryRegion, size: int, dtype: DType, name: str) -> Storage:
    data = np.empty(max(size, 1) * dtype.itemsize, np.uint8)
    fill_uninitialised(data, dtype)
    return Storage(buffer, data, size * dtype.itemsize, name, itemsize=dtype.itemsize)


def allocate_on_chip(buffer: MemoryRegion, partitions: int, row_bytes: int, dtype: DType, name: str) -> Storage:
    data = np.empty(partitions * row_bytes, np.uint8)
    fill_uninitialised(data, dtype)
    return Storage(buffer, data, row_bytes, name, partitions=partitions, pitch=row_bytes)


def check_on_chip_size(
    where: str, buffer: MemoryRegion, shape: tuple[int, ...], row_bytes: int, generation: int
) -> None:
    if shape[0] > PARTITIONS:
        fail(where, f"shape {shape} has {shape[0]} partitions in dimension 0; {buffer} has {PARTITIONS}")
    limit = PSUM_BYTES if buffer is MemoryRegion.psum else sbuf_usable_bytes(generation)
    if row_bytes > limit:
        fail(where, f"shape {shape} needs {row_bytes} bytes per partition; {buffer} has {limit}")


class AddressedMemory:
    """One memory of a core as a whole. Used only for tensors whose address the kernel chooses, which may overlap."""

    def __init__(self, buffer: MemoryRegion, bytes_per_partition: int) -> None:
        self.buffer = buffer
        self.pitch = bytes_per_partition
        self.data = np.empty(PARTITIONS * bytes_per_partition, np.uint8)
        self.rows = self.data.reshape(PARTITIONS, bytes_per_partition)
        self.claimed = np.zeros((PARTITIONS, bytes_per_partition), bool)

    def place(
        self, where: str, shape: tuple[int, ...], row_bytes: int, dtype: DType, address: tuple[int, int], name: str
    ) -> Storage:
        """A tensor at (start partition, byte in partition). Cells that are claimed first here become uninitialised."""
        partition, byte = int(address[0]), int(address[1])
        if partition < 0 or partition + shape[0] > PARTITIONS:
            fail(
                where,
                f"address {address} plus {shape[0]} partitions exceeds the {PARTITIONS} partitions of {self.buffer}",
            )
        if byte < 0 or byte + row_bytes > self.pitch:
            fail(where, f"address {address} plus {row_bytes} bytes exceeds the {self.pitch} bytes of {self.buffer}")
        if self.buffer is MemoryRegion.psum and byte % PSUM_BANK_BYTES:
            fail(where, f"address {address}: a PSUM tensor must start on a bank, a multiple of {PSUM_BANK_BYTES} bytes")
        if byte % dtype.itemsize:
            fail(where, f"address {address}: byte offset is not a multiple of the {dtype.itemsize}-byte element")
        area = (slice(partition, partition + shape[0]), slice(byte, byte + row_bytes))
        fresh = ~self.claimed[area]
        if fresh.any():
            values = np.empty(shape[0] * row_bytes, np.uint8)
            fill_uninitialised(values, dtype)
            np.copyto(self.rows[area], values.reshape(shape[0], row_bytes), where=fresh)
            self.claimed[area] = True
        storage = Storage(
            self.buffer,
            self.data,
            row_bytes,
            name,
            partitions=shape[0],
            pitch=self.pitch,
            base=partition * self.pitch + byte,
            start_partition=partition,
            start_byte=byte,
        )
        if self.buffer is MemoryRegion.psum:
            # One state per tensor, not per address: whether the first write overwrites is decided per tensor, also
            # where several tensors use one address in turn.
            storage.psum_state = np.zeros((shape[0], (row_bytes + 3) // 4), np.uint8)
        return storage
