"""`NkiTensor`: a strided view of one allocation, and the NumPy array it stands for.

Offsets, strides and counts are elements of the view's own data type. On chip the stride of dimension 0, the
partitions, is the number of free elements of the allocation, whatever its real place in memory.
Rules: docstrings of NkiTensor in nki/language, and nki-aps.rst.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .dtypes import as_dtype
from .errors import fail
from .memory import HBM, MemoryRegion, Storage


class NKIObject:
    """Base class of objects a kernel may make and pass around.

    Any class attribute is a field, annotated or not; a field without a value defaults to None; the initializer is made
    whether `@dataclass` is there or not (nki-language-guide.rst, "Classes").
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotations = dict(inspect.get_annotations(cls))
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__"):
                annotations.setdefault(name, Any)
        cls.__annotations__ = annotations
        for name in annotations:
            if name not in vars(cls):
                setattr(cls, name, None)
        if "__init__" not in vars(cls) and annotations:
            cls.__init__ = _initializer(tuple(annotations))  # type: ignore[misc]


def _initializer(fields: tuple[str, ...]) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) > len(fields) or not set(kwargs) <= set(fields):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(fields)}")
        for name, value in (*zip(fields, args, strict=False), *kwargs.items()):
            object.__setattr__(self, name, value)  # frozen dataclasses too
        if hasattr(self, "__post_init__"):
            self.__post_init__()

    return __init__


@dataclass(frozen=True)
class ds:  # noqa: N801
    """`nl.ds(start, size)`: a slice by start and size."""

    start: Any
    size: int


@dataclass(frozen=True)
class Indirect:
    """A dynamic index: one scalar for the whole view, or one row index per element of dimension 0."""

    index: Any  # NkiTensor or VirtualRegister
    scale: int  # elements of the view's data type per index step
    vector: bool
    limit: int  # exclusive bound of a scalar index


@dataclass(frozen=True)
class _At:
    """Where an error happened, put in words only if there is one."""

    tensor: NkiTensor
    method: str

    def __str__(self) -> str:
        return f"{self.tensor!r}{self.method}"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _int(value: Any, where: object) -> int:
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        fail(
            where, f"{value!r} is not an integer known while the kernel is built; use scalar_offset for a runtime index"
        )


class NkiTensor(NKIObject):
    """A view. See the module docstring; methods and their rules are AWS's."""

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

    # -- queries -----------------------------------------------------------------------------------------------------

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

    # -- views -------------------------------------------------------------------------------------------------------

    def _view(self, shape: Any, strides: Any, offset: int | None = None, **changes: Any) -> NkiTensor:
        return NkiTensor(
            tuple(shape),
            changes.get("dtype", self.dtype),
            self.storage,
            self.buffer,
            self.name,
            strides=tuple(strides),
            offset=self.offset if offset is None else offset,
            indirect=changes.get("indirect", self.indirect_by),
        )

    def _dim(self, dim: int, method: str, *, free: bool = False) -> int:
        where = _At(self, ".{method}")
        if not -self.ndim <= dim < self.ndim:
            fail(where, f"dimension {dim} does not exist")
        dim %= self.ndim
        if free and dim == 0 and (self.on_chip or self._vector()):
            fail(where, "dimension 0, the partitions, cannot be changed on chip or after vector_select")
        return dim

    def _vector(self) -> bool:
        return self.indirect_by is not None and self.indirect_by.vector

    def __getitem__(self, key: Any) -> NkiTensor:
        where = _At(self, "[...]")
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(k is Ellipsis for k in keys):
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        keys += [slice(None)] * (self.ndim - len(keys))
        if len(keys) != self.ndim:
            fail(where, f"{len(keys)} indices for {self.ndim} dimensions")
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        indirect = self.indirect_by
        dropped: list[tuple[int, int]] = []
        for dim, (k, size, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            if isinstance(k, ds):
                if isinstance(k.start, NKIObject) and not isinstance(k.start, int):
                    fail(where, "a runtime start needs .ap(scalar_offset=...)")
                start, step, count = _int(k.start, where), 1, _int(k.size, where)
            elif isinstance(k, slice):
                step = 1 if k.step is None else _int(k.step, where)
                if step < 1:
                    fail(where, f"dimension {dim}: step {step}; it must be at least 1")
                start = 0 if k.start is None else _int(k.start, where)
                stop = size if k.stop is None else _int(k.stop, where)
                start, stop = (start + size if start < 0 else start), (stop + size if stop < 0 else stop)
                count = max(0, -(-(stop - start) // step))
                if stop > size:
                    fail(where, f"dimension {dim}: {start}:{stop} leaves the size {size}")
            elif isinstance(k, NkiTensor):
                fail(where, "a runtime index needs select(dim, tensor) or .ap(scalar_offset=...)")
            else:
                start, step, count = _int(k, where), 1, 0
                start += size if start < 0 else 0
                if not 0 <= start < size:
                    fail(where, f"dimension {dim}: index {start} leaves the size {size}")
            if not isinstance(k, (slice, ds)):
                if dim == 0 and self._vector():
                    fail(where, "dimension 0 is indirect and cannot be selected")
                offset += start * stride
                if dim == 0 and self.on_chip:
                    shape.append(1)
                    strides.append(stride)
                else:
                    dropped.append((len(shape), stride))
                continue
            if count < 1 or start < 0 or start + (count - 1) * step >= size:
                fail(where, f"dimension {dim}: start {start}, {count} elements, step {step} leaves the size {size}")
            if dim == 0 and self._vector() and (start or count != size):
                fail(where, "dimension 0 is indirect and cannot be sliced")
            offset += start * stride
            shape.append(count)
            strides.append(stride * step)
        least = 2 if self.on_chip and self.ndim > 1 else 1
        while len(shape) < least:  # the last selected dimension stays, with size 1
            at, stride = dropped.pop()
            shape.insert(at, 1)
            strides.insert(at, stride)
        return self._view(shape, strides, offset, indirect=indirect)

    def __setitem__(self, key: Any, value: Any) -> None:
        from . import language

        target = self[key]
        if isinstance(value, NkiTensor):
            if value is not target and not (value.storage is target.storage and value.offset == target.offset):
                language.assign(target, value)
        else:
            fail(f"{self!r}[...] =", f"{type(value).__name__} cannot be assigned; use nisa.memset")

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        dim = self._dim(dim, "slice")
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        dim = self._dim(dim, "select")
        rest = lambda t: t[:dim] + t[dim + 1 :]  # noqa: E731
        if isinstance(index, int):
            if not 0 <= index < self.shape[dim]:
                fail(f"{self!r}.select", f"dimension {dim}: index {index} leaves the size {self.shape[dim]}")
            return self[(slice(None),) * dim + (index,)]
        if dim == 0 and self.on_chip:
            fail(f"{self!r}.select", "a runtime index cannot select a partition")
        indirect = self._make_indirect("select", index, self.strides[dim], self.shape[dim], vector=False)
        shape, strides = rest(self.shape), rest(self.strides)
        if not shape:
            shape, strides = (1,), (1,)
        return self._view(shape, strides, indirect=indirect)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        where = _At(self, ".vector_select")
        if dim != 0:
            fail(where, f"dimension {dim}: only 0 can be indirect")
        indirect = self._make_indirect("vector_select", vector_offset, self.strides[0], self.shape[0], vector=True)
        return self._view((vector_offset.shape[0], *self.shape[1:]), self.strides, indirect=indirect)

    def _make_indirect(self, method: str, index: Any, scale: int, limit: int, *, vector: bool) -> Indirect:
        where = _At(self, ".{method}")
        if self.is_indirect():
            fail(where, "the view is indirect already")
        if isinstance(index, NkiTensor):
            if index.buffer is not MemoryRegion.sbuf or not index.dtype.is_int or index.dtype.itemsize != 4:
                fail(where, f"the index must be an int32 or uint32 tensor in sbuf, not {index!r}")
            if not vector and index.size != 1:
                fail(where, f"a scalar index has one element, not shape {index.shape}")
            if vector and self.buffer not in HBM:
                fail(where, f"vector_offset needs a tensor in HBM, not {self.buffer}")
        elif vector:
            fail(where, "vector_offset must be a tensor")
        elif not hasattr(index, "value"):
            fail(where, f"a scalar index is a (1, 1) tensor or a register, not {type(index).__name__}")
        return Indirect(index, scale, vector, limit)

    def permute(self, dims: tuple[int, ...]) -> NkiTensor:
        if sorted(dims) != list(range(self.ndim)):
            fail(f"{self!r}.permute", f"{tuple(dims)} is not a permutation of {tuple(range(self.ndim))}")
        if dims[0] != 0 and (self.on_chip or self._vector()):
            fail(f"{self!r}.permute", f"{tuple(dims)}: dimension 0, the partitions, must stay first")
        return self._view([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        dim = self._dim(dim, "broadcast", free=True)
        if self.shape[dim] != 1:
            fail(f"{self!r}.broadcast", f"dimension {dim} has size {self.shape[dim]}; only 1 can be broadcast")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._view(shape, strides)

    def expand_dim(self, dim: int) -> NkiTensor:
        if dim == 0 and (self.on_chip or self._vector()):
            fail(f"{self!r}.expand_dim", "nothing can come before dimension 0, the partitions")
        if not 0 <= dim <= self.ndim:
            fail(f"{self!r}.expand_dim", f"position {dim} does not exist")
        inner = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._view((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], inner, *self.strides[dim:]))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        dim = self._dim(dim, "squeeze_dim", free=True)
        if self.shape[dim] != 1:
            fail(f"{self!r}.squeeze_dim", f"dimension {dim} has size {self.shape[dim]}, not 1")
        return self._view((*self.shape[:dim], *self.shape[dim + 1 :]), (*self.strides[:dim], *self.strides[dim + 1 :]))

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> NkiTensor:
        where = _At(self, ".reshape_dim")
        dim = self._dim(dim, "reshape_dim", free=len(shape) != 1)
        sizes = list(shape)
        if sizes.count(-1) == 1:
            known = prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = self.shape[dim] // known if known else 0
        if prod(sizes) != self.shape[dim]:
            fail(where, f"{tuple(shape)} does not multiply to {self.shape[dim]}, the size of dimension {dim}")
        inner = [s * self.strides[dim] for s in contiguous_strides(tuple(sizes))]
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), (*self.strides[:dim], *inner, *self.strides[dim + 1 :])
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        where = _At(self, ".flatten_dims")
        start, end = self._dim(start_dim, "flatten_dims"), self._dim(end_dim, "flatten_dims")
        if start == 0 and end > 0 and (self.on_chip or self._vector()):
            fail(where, "dimension 0, the partitions, cannot be merged")
        size, stride = _merge(self.shape[start : end + 1], self.strides[start : end + 1], where)
        return self._view(
            (*self.shape[:start], size, *self.shape[end + 1 :]),
            (*self.strides[:start], stride, *self.strides[end + 1 :]),
        )

    def reshape(self, shape: Any, *more: int) -> NkiTensor:
        where = _At(self, ".reshape")
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape, *more)
        sizes = tuple(_int(n, where) for n in sizes)
        if prod(sizes) != self.size:
            fail(where, f"{sizes} has {prod(sizes)} elements, the tensor {self.size}")
        if self.on_chip or self._vector():
            if sizes[0] != self.shape[0]:
                fail(where, f"{sizes}: dimension 0, the partitions, must stay {self.shape[0]}")
            strides = _reshape(self.shape[1:], self.strides[1:], sizes[1:], where)
            return self._view(sizes, (self.strides[0], *strides))
        return self._view(sizes, _reshape(self.shape, self.strides, sizes, where))

    def rearrange(self, src_pattern: Any, dst_pattern: Any, fixed_sizes: dict[str, int] | None = None) -> NkiTensor:
        where = _At(self, ".rearrange")
        sizes = dict(fixed_sizes or {})
        if len(src_pattern) != self.ndim:
            fail(where, f"{src_pattern} names {len(src_pattern)} dimensions of {self.ndim}")
        view = self
        names: list[str] = []
        for i, group in reversed(list(enumerate(src_pattern))):
            group = (group,) if isinstance(group, str) else tuple(group)
            known = prod(sizes[n] for n in group if n in sizes)
            free = [n for n in group if n not in sizes]
            if len(free) > 1:
                fail(where, f"sizes of {free} are unknown; give all but one in fixed_sizes")
            if free:
                sizes[free[0]] = self.shape[i] // known
            if prod(sizes[n] for n in group) != self.shape[i]:
                fail(where, f"{group} does not multiply to {self.shape[i]}, the size of dimension {i}")
            if len(group) > 1:
                view = view.reshape_dim(i, tuple(sizes[n] for n in group))
            names[:0] = group
        groups = [(g,) if isinstance(g, str) else tuple(g) for g in dst_pattern]
        order = [n for g in groups for n in g]
        if sorted(order) != sorted(names):
            fail(where, f"{dst_pattern} does not hold the names of {src_pattern}")
        view = view.permute(tuple(names.index(n) for n in order))
        for at, g in enumerate(groups):
            if len(g) > 1:
                view = view.flatten_dims(at, at + len(g) - 1)
        return view

    def ap(
        self,
        pattern: Any,
        offset: Any = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        where = _At(self, ".ap")
        new = self.dtype if dtype is None else as_dtype(dtype, where)
        strides = tuple(_int(s, where) for s, _ in pattern)
        shape = tuple(_int(n, where) for _, n in pattern)
        if min(shape, default=0) < 1:
            fail(where, f"pattern {pattern}: every count must be at least 1")
        # Documented twice, differently: added to the view's offset (docstring) or counted from the tensor's start
        # (nki-aps.rst). Equal on a whole tensor; on a partial view the call is refused instead of guessed.
        if offset is not None and self.offset:
            fail(where, "offset on a view that has an offset itself is documented in two ways; use the whole tensor")
        start = self.offset * self.dtype.itemsize // new.itemsize if offset is None else _int(offset, where)
        if scalar_offset is not None and vector_offset is not None:
            fail(where, "scalar_offset and vector_offset exclude each other")
        indirect = self.indirect_by
        if scalar_offset is not None or vector_offset is not None:
            vector = vector_offset is not None
            if not 0 <= indirect_dim < self.ndim or (vector and indirect_dim):
                fail(
                    where,
                    f"indirect_dim {indirect_dim}: " + ("only 0 with vector_offset" if vector else "no such dimension"),
                )
            row = prod(self.shape[indirect_dim + 1 :]) * self.dtype.itemsize // new.itemsize
            index = vector_offset if vector else scalar_offset
            indirect = self._make_indirect("ap", index, row, self.shape[indirect_dim], vector=vector)
            if vector and index.size < shape[0]:
                fail(where, f"pattern has {shape[0]} rows, vector_offset only {index.size} indices")
        if self.on_chip and shape[0] > 1:
            row = self.storage.row_bytes // new.itemsize
            if strides[0] != row:
                fail(
                    where,
                    f"pattern {pattern}: the first stride steps partitions and must be {row}",
                )
        return self._view(shape, strides, start, dtype=new, indirect=indirect)

    def view(self, dtype: Any) -> NkiTensor:
        where = _At(self, ".view")
        new = as_dtype(dtype, where)
        old_size, new_size = self.dtype.itemsize, new.itemsize
        if old_size == new_size:
            return self._view(self.shape, self.strides, dtype=new)
        if self.is_indirect():
            fail(where, "an indirect view cannot change its data type")
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            fail(where, "the last dimension must be contiguous")
        last = self.shape[-1] * old_size
        scaled = [s * old_size for s in self.strides[:-1]]
        if last % new_size or self.offset * old_size % new_size or any(s % new_size for s in scaled):
            fail(
                where,
                f"{last} bytes in the last dimension at offset {self.offset * old_size} do not divide by {new_size}",
            )
        strides = (*(s // new_size for s in scaled), 1)
        return self._view((*self.shape[:-1], last // new_size), strides, self.offset * old_size // new_size, dtype=new)

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        fail(f"{self!r}.indirect", "tensor indirection needs NeuronCore-v4 and is not emulated")

    # -- memory ------------------------------------------------------------------------------------------------------

    def array(self, where: str) -> np.ndarray:
        """The elements as a NumPy view of the memory. Only for views without a vector index.

        Raises:
            NkiValidationError: part of the view lies outside the allocation.
        """
        offset = self.offset
        if self.indirect_by is not None:
            value = self.scalar_index()
            if not 0 <= value < self.indirect_by.limit:
                raise IndexError(f"{where}: runtime index {value} of {self!r} leaves 0..{self.indirect_by.limit - 1}")
            offset += value * self.indirect_by.scale
        return self._strided(where, self.shape, self.strides, offset)

    def scalar_index(self) -> int:
        assert self.indirect_by is not None
        index = self.indirect_by.index
        return int(index.array("scalar_offset").reshape(-1)[0]) if isinstance(index, NkiTensor) else int(index.value)

    def rows(self, where: str) -> tuple[np.ndarray, np.ndarray]:
        """For a view with a vector index: every row that exists, and the index of each row of the view."""
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
                fail(where, f"{self!r} reaches element {last}; the tensor has {store.row_bytes // size}")
            byte = store.base + offset * size
            return np.ndarray(shape, self.dtype.np, store.data, byte, [s * size for s in strides])
        row = store.row_bytes // size
        partition, free = divmod(offset, row)
        last = free + sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        if last >= row:
            fail(where, f"{self!r} reaches element {last} of a partition that has {row}")
        if partition < 0 or partition + shape[0] > store.partitions:
            fail(where, f"{self!r} spans partitions {partition}..{partition + shape[0] - 1} of {store.partitions}")
        if shape[0] > 1 and strides[0] != row:
            fail(where, f"{self!r} steps partitions by {strides[0]} elements; they are contiguous, {row}")
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


def _merge(shape: tuple[int, ...], strides: tuple[int, ...], where: object) -> tuple[int, int]:
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if not dims:
        return 1, strides[-1] if strides else 1
    for (_, outer), (inner_size, inner) in itertools.pairwise(dims):
        if outer != inner * inner_size:
            fail(where, f"dimensions of sizes {shape} and strides {strides} are not contiguous in memory")
    return prod(n for n, _ in dims), dims[-1][1]


def _reshape(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...], where: object) -> tuple[int, ...]:
    """Strides of the new shape over the same memory, as `numpy.ndarray.reshape` without a copy would give."""
    dims = [[n, s] for n, s in zip(shape, strides, strict=True) if n != 1]
    merged: list[list[int]] = []
    for n, s in dims:
        if merged and merged[-1][1] == s * n:
            merged[-1] = [merged[-1][0] * n, s]
        else:
            merged.append([n, s])
    out: list[int] = []
    left = merged.pop() if merged else [1, 1]
    step = left[1]
    for n in reversed(new):
        if n == 1:
            out.append(step)
            continue
        if left[0] == 1 and merged:
            left = merged.pop()
            step = left[1]
        if left[0] % n:
            fail(where, f"shape {shape} with strides {strides} cannot become {new} without a copy")
        out.append(step)
        left[0] //= n
        step *= n
    return tuple(reversed(out))
