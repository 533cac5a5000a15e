"""Arithmetic on shapes and strides, both counted in elements."""

from __future__ import annotations

import itertools
from math import prod

from .errors import fail


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor of this shape without gaps, the last dimension innermost."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def merged(shape: tuple[int, ...], strides: tuple[int, ...], where: object) -> tuple[int, int]:
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if not dims:
        return 1, strides[-1] if strides else 1
    for (_, outer), (inner_size, inner) in itertools.pairwise(dims):
        if outer != inner * inner_size:
            fail(where, f"dimensions of sizes {shape} and strides {strides} are not contiguous in memory")
    return prod(n for n, _ in dims), dims[-1][1]


def reshaped(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...], where: object) -> tuple[int, ...]:
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
