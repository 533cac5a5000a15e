"""`StridedView`: which elements of an allocation a tensor covers, and the NumPy array over them.

Offsets, strides and counts are elements of the view's own data type. On chip the stride of dimension 0, the
partitions, is the number of free elements of the allocation, wherever it is placed in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np

from .dtypes import as_dtype
from .errors import fail
from .memory import MemoryRegion, Storage
from .objects import NKIObject
from .strides import contiguous_strides


@dataclass(frozen=True)
class Indirect:
    """A dynamic index: one scalar for the whole view, or one row index per element of dimension 0."""

    index: Any  # a tensor or a VirtualRegister
    scale: int  # elements of the view's data type per index step
    vector: bool
    limit: int  # exclusive bound of a scalar index


class StridedView(NKIObject):
    """Elements of one allocation, given by shape, strides and offset, and possibly a runtime index."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        storage: Storage,
        buffer: MemoryRegion = MemoryRegion.sbuf,
        name: str = "",
        *,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        indirect: Indirect | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = as_dtype(dtype)
        self.storage = storage
        self.buffer = buffer
        self.name = name
        self.strides = contiguous_strides(self.shape) if strides is None else strides
        self.offset = offset
        self.indirect_by = indirect

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def on_chip(self) -> bool:
        return self.storage.on_chip

    @property
    def partitions(self) -> int:
        return self.shape[0]

    @property
    def per_partition(self) -> int:
        """Elements per partition."""
        return prod(self.shape[1:])

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'}{list(self.shape)} {self.dtype} in {self.buffer}"

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        fail(repr(self), "a tensor's value is not known while the kernel is built; it has no truth value")

    __hash__ = object.__hash__

    def is_contiguous(self) -> bool:
        dims = list(zip(self.shape, self.strides, strict=True))[1 if self.on_chip else 0 :]
        expected = 1
        for size, stride in reversed(dims):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def get_pattern(self) -> list[list[int]]:
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        return self.indirect_by is not None

    def _view(self, shape: Any, strides: Any, offset: int | None = None, **changes: Any) -> Self:
        return type(self)(
            tuple(shape),
            changes.get("dtype", self.dtype),
            self.storage,
            self.buffer,
            self.name,
            strides=tuple(strides),
            offset=self.offset if offset is None else offset,
            indirect=changes.get("indirect", self.indirect_by),
        )

    def _vector(self) -> bool:
        return self.indirect_by is not None and self.indirect_by.vector

    def array(self, where: str) -> np.ndarray:
        """The elements as a NumPy view of the memory. Only for views without a vector index.

        Raises:
            NkiValidationError: part of the view lies outside the allocation.
        """
        offset = self.offset
        if self.indirect_by is not None:
            value = self.scalar_index()
            if not 0 <= value < self.indirect_by.limit:
                raise IndexError(f"{where}: runtime index {value} is out of bounds for {self!r}")
            offset += value * self.indirect_by.scale
        return self._strided(where, self.shape, self.strides, offset)

    def scalar_index(self) -> int:
        assert self.indirect_by is not None
        index = self.indirect_by.index
        return int(index.array("scalar_offset").reshape(-1)[0]) if isinstance(index, StridedView) else int(index.value)

    def rows(self, where: str) -> tuple[np.ndarray, np.ndarray]:
        """For a view with a vector index: all rows of the tensor, and which of them each row of the view is."""
        assert self.indirect_by is not None
        count, row = self.shape[0], self.indirect_by.scale
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape[1:], self.strides[1:], strict=True))
        size = self.storage.row_bytes // self.dtype.itemsize
        existing = max(0, (size - self.offset - extent) // row + 1)
        table = self._strided(where, (existing, *self.shape[1:]), (row, *self.strides[1:]), self.offset)
        index = self.indirect_by.index.array(where)
        flat = (index.T if index.ndim == 2 else index).reshape(-1)[:count].astype(np.int64)
        return table, flat

    def _strided(self, where: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> np.ndarray:
        store, size = self.storage, self.dtype.itemsize
        if not store.on_chip:
            last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            if offset < 0 or (last + 1) * size > store.row_bytes:
                fail(where, f"{self!r} includes element {last} of a tensor that has {store.row_bytes // size}")
            byte = store.base + offset * size
            return np.ndarray(shape, self.dtype.np, store.data, byte, [s * size for s in strides])
        row = store.row_bytes // size
        partition, free = divmod(offset, row)
        last = free + sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        if last >= row:
            fail(where, f"{self!r} includes element {last} of a partition that has {row}")
        if partition < 0 or partition + shape[0] > store.partitions:
            fail(where, f"{self!r} spans partitions {partition}..{partition + shape[0] - 1} of {store.partitions}")
        if shape[0] > 1 and strides[0] != row:
            fail(where, f"{self!r} has stride {strides[0]} between partitions; it must be {row}")
        byte = store.base + partition * store.pitch + free * size
        return np.ndarray(shape, self.dtype.np, store.data, byte, [store.pitch, *(s * size for s in strides[1:])])

    @property
    def start_partition(self) -> int:
        row = max(1, self.storage.row_bytes // self.dtype.itemsize)
        return self.storage.start_partition + self.offset // row

    @property
    def start_byte(self) -> int:
        """Byte offset of the first element inside its partition, from the start of the allocation."""
        row = max(1, self.storage.row_bytes // self.dtype.itemsize)
        return self.offset % row * self.dtype.itemsize

    def contiguous_bytes(self) -> int:
        """Length of the runs this view reads or writes: what one DMA descriptor can move."""
        run, expected = 1, 1
        dims = list(zip(self.shape, self.strides, strict=True))
        if self.on_chip or self._vector():
            dims = dims[1:]
        for size, stride in reversed(dims):
            if size == 1:
                continue
            if stride != expected:
                break
            run *= size
            expected = stride * size
        return run * self.dtype.itemsize
