"""Subscripts of tensors: `tensor[0, 4:8, nl.ds(start, size), ...]`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from .errors import fail
from .objects import NKIObject
from .strided_memory import StridedView


@dataclass(frozen=True)
class ds:  # noqa: N801
    """`nl.ds(start, size)`: a slice by start and size."""

    start: Any
    size: int


def static_int(value: Any, where: object) -> int:
    """`value` as an integer; floats such as 3.0 are accepted."""
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        fail(
            where, f"{value!r} is not an integer known while the kernel is built; use scalar_offset for a runtime index"
        )


def expand_keys(key: Any, ndim: int, where: object) -> list[Any]:
    """The subscript as one entry per dimension, with `...` and what is left out filled by full slices."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (ndim - len(keys) + 1)
    keys += [slice(None)] * (ndim - len(keys))
    if len(keys) != ndim:
        fail(where, f"{len(keys)} indices for {ndim} dimensions")
    return keys


def slice_range(key: slice | ds, dim: int, size: int, where: object) -> tuple[int, int, int]:
    """Start, step and number of elements that a slice selects from a dimension of `size` elements."""
    if isinstance(key, ds):
        if isinstance(key.start, NKIObject) and not isinstance(key.start, int):
            fail(where, "a runtime start needs .ap(scalar_offset=...)")
        start, step, count = static_int(key.start, where), 1, static_int(key.size, where)
    else:
        step = 1 if key.step is None else static_int(key.step, where)
        if step < 1:
            fail(where, f"dimension {dim}: step must be at least 1, got {step}")
        start = 0 if key.start is None else static_int(key.start, where)
        stop = size if key.stop is None else static_int(key.stop, where)
        start, stop = (start + size if start < 0 else start), (stop + size if stop < 0 else stop)
        count = max(0, -(-(stop - start) // step))
        if stop > size:
            fail(where, f"slice {start}:{stop} is out of bounds for dimension {dim} with size {size}")
    if count < 1 or start < 0 or start + (count - 1) * step >= size:
        fail(
            where,
            f"{count} elements from {start} with step {step} are out of bounds for dimension {dim} with size {size}",
        )
    return start, step, count


def position(key: Any, dim: int, size: int, where: object) -> int:
    """The element that an integer subscript selects; negative ones count from the end."""
    if isinstance(key, StridedView):
        fail(where, "a runtime index needs select(dim, tensor) or .ap(scalar_offset=...)")
    index = static_int(key, where)
    index += size if index < 0 else 0
    if not 0 <= index < size:
        fail(where, f"index {index} is out of bounds for dimension {dim} with size {size}")
    return index
