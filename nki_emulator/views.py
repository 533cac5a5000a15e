"""`NkiTensor`: the tensor of `nki.language`, with AWS's methods that make views of it.

Rules: docstrings of NkiTensor in nki/language, and nki-aps.rst.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from .dtypes import as_dtype
from .errors import fail
from .indexing import ds, expand_keys, position, slice_range, static_int
from .memory import HBM, MemoryRegion
from .strided_memory import Indirect, StridedView
from .strides import contiguous_strides, merged, reshaped


@dataclass(frozen=True)
class _At:
    """Location for an error message, formatted only if there is an error."""

    tensor: NkiTensor
    method: str

    def __str__(self) -> str:
        return f"{self.tensor!r}{self.method}"


class NkiTensor(StridedView):
    """A view. Its methods and their rules are AWS's."""

    def _dim(self, dim: int, method: str, *, free: bool = False) -> int:
        where = _At(self, f".{method}")
        if not -self.ndim <= dim < self.ndim:
            fail(where, f"dimension {dim} does not exist")
        dim %= self.ndim
        if free and dim == 0 and (self.on_chip or self._vector()):
            fail(where, "dimension 0, the partitions, cannot be changed on chip or after vector_select")
        return dim

    def __getitem__(self, key: Any) -> NkiTensor:
        where = _At(self, "[...]")
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        dropped: list[tuple[int, int]] = []
        keys = expand_keys(key, self.ndim, where)
        for dim, (k, size, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            if isinstance(k, (slice, ds)):
                start, step, count = slice_range(k, dim, size, where)
                if dim == 0 and self._vector() and (start or count != size):
                    fail(where, "dimension 0 is indirect and cannot be sliced")
                shape.append(count)
                strides.append(stride * step)
            else:
                start = position(k, dim, size, where)
                if dim == 0 and self._vector():
                    fail(where, "dimension 0 is indirect and cannot be selected")
                if dim == 0 and self.on_chip:
                    shape.append(1)
                    strides.append(stride)
                else:
                    dropped.append((len(shape), stride))
            offset += start * stride
        least = 2 if self.on_chip and self.ndim > 1 else 1
        while len(shape) < least:  # the last selected dimension stays, with size 1
            at, stride = dropped.pop()
            shape.insert(at, 1)
            strides.insert(at, stride)
        return self._view(shape, strides, offset)

    def __setitem__(self, key: Any, value: Any) -> None:
        from . import language  # which imports this module

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
                fail(
                    f"{self!r}.select",
                    f"index {index} is out of bounds for dimension {dim} with size {self.shape[dim]}",
                )
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
        where = _At(self, f".{method}")
        if self.is_indirect():
            fail(where, "the view is already indirect")
        if isinstance(index, NkiTensor):
            if index.buffer is not MemoryRegion.sbuf or not index.dtype.is_int or index.dtype.itemsize != 4:
                fail(where, f"the index must be an int32 or uint32 tensor in sbuf, got {index!r}")
            if not vector and index.size != 1:
                fail(where, f"a scalar index must have one element, got shape {index.shape}")
            if vector and self.buffer not in HBM:
                fail(where, f"vector_offset needs a tensor in HBM, got {self.buffer}")
        elif vector:
            fail(where, "vector_offset must be a tensor")
        elif not hasattr(index, "value"):
            fail(where, f"a scalar index must be a (1, 1) tensor or a register, got {type(index).__name__}")
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
            fail(where, f"{tuple(shape)} must multiply to {self.shape[dim]}, the size of dimension {dim}")
        inner = [s * self.strides[dim] for s in contiguous_strides(tuple(sizes))]
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]), (*self.strides[:dim], *inner, *self.strides[dim + 1 :])
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        where = _At(self, ".flatten_dims")
        start, end = self._dim(start_dim, "flatten_dims"), self._dim(end_dim, "flatten_dims")
        if start == 0 and end > 0 and (self.on_chip or self._vector()):
            fail(where, "dimension 0, the partitions, cannot be merged")
        size, stride = merged(self.shape[start : end + 1], self.strides[start : end + 1], where)
        return self._view(
            (*self.shape[:start], size, *self.shape[end + 1 :]),
            (*self.strides[:start], stride, *self.strides[end + 1 :]),
        )

    def reshape(self, shape: Any, *more: int) -> NkiTensor:
        where = _At(self, ".reshape")
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape, *more)
        sizes = tuple(static_int(n, where) for n in sizes)
        if prod(sizes) != self.size:
            fail(where, f"{sizes} has {prod(sizes)} elements, the tensor {self.size}")
        if self.on_chip or self._vector():
            if sizes[0] != self.shape[0]:
                fail(where, f"{sizes}: dimension 0, the partitions, must stay {self.shape[0]}")
            strides = reshaped(self.shape[1:], self.strides[1:], sizes[1:], where)
            return self._view(sizes, (self.strides[0], *strides))
        return self._view(sizes, reshaped(self.shape, self.strides, sizes, where))

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
                fail(where, f"{group} must multiply to {self.shape[i]}, the size of dimension {i}")
            if len(group) > 1:
                view = view.reshape_dim(i, tuple(sizes[n] for n in group))
            names[:0] = group
        groups = [(g,) if isinstance(g, str) else tuple(g) for g in dst_pattern]
        order = [n for g in groups for n in g]
        if sorted(order) != sorted(names):
            fail(where, f"{dst_pattern} must contain the names of {src_pattern}")
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
        strides = tuple(static_int(s, where) for s, _ in pattern)
        shape = tuple(static_int(n, where) for _, n in pattern)
        if min(shape, default=0) < 1:
            fail(where, f"pattern {pattern}: every count must be at least 1")
        # The docstring says that offset is added to the view's offset, nki-aps.rst that it counts from the tensor's
        # start. Both agree on a whole tensor; on a partial view the call is refused.
        if offset is not None and self.offset:
            fail(where, "the meaning of offset on a view that has an offset itself is ambiguous; use the whole tensor")
        start = self.offset * self.dtype.itemsize // new.itemsize if offset is None else static_int(offset, where)
        if scalar_offset is not None and vector_offset is not None:
            fail(where, "scalar_offset and vector_offset are mutually exclusive")
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
                f"{last} bytes at offset {self.offset * old_size} are not a multiple of {new_size} bytes",
            )
        strides = (*(s // new_size for s in scaled), 1)
        return self._view((*self.shape[:-1], last // new_size), strides, self.offset * old_size // new_size, dtype=new)

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        fail(f"{self!r}.indirect", "tensor indirection needs NeuronCore-v4 and is not emulated")
