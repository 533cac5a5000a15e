"""Helpers for tests of kernels: a kernel around one instruction, and marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .install import install

nki = install()

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

EMULATED = getattr(nki, "__emulated__", False)
emulator_only = pytest.mark.skipif(not EMULATED, reason="a rule or a count of the emulator; AWS's simulator has none")

Instruction = Callable[..., None]


def load(array: Any) -> Any:
    """An SBUF tile holding an HBM tensor."""
    tile = nl.ndarray(array.shape, dtype=array.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=array)
    return tile


def to_psum(tile: Any) -> Any:
    copy = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.psum)
    nisa.tensor_copy(dst=copy, src=tile)
    return copy


def store(tile: Any) -> Any:
    """A returned HBM tensor holding an on-chip tile."""
    if tile.buffer == nl.psum:
        copy = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copy, src=tile)
        tile = copy
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def run(kernel: Callable[..., Any], *arrays: Any, lnc: int = 1, **options: Any) -> Any:
    """`nki.simulate` of a plain function."""
    return nki.simulate(nki.jit(kernel)[lnc], **options)(*arrays)


def apply(instruction: Instruction, shape: tuple[int, ...], dtype: Any, *arrays: np.ndarray) -> np.ndarray:
    """Load `arrays` into SBUF, call `instruction(dst, *tiles)` with a new tile, return what is in it."""

    def kernel(*tensors: Any) -> Any:
        dst = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        instruction(dst, *(load(t) for t in tensors))
        return store(dst)

    return run(kernel, *arrays)


def rows(*values: Any, dtype: Any = np.float32) -> np.ndarray:
    """A 2-D array of the given rows."""
    return np.array(values, dtype=dtype)
