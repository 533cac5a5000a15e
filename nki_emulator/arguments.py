"""The arguments of a kernel as tensors in HBM, and its results as arrays of the arguments' kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .dtypes import as_dtype
from .errors import fail
from .memory import MemoryRegion, Storage
from .strides import contiguous_strides
from .views import NkiTensor


class Arguments:
    """Turns arrays into HBM tensors and remembers what has to be copied back."""

    def __init__(self) -> None:
        self.torch: Any = None
        self.seen: dict[int, NkiTensor] = {}
        self.copy_back: list[tuple[np.ndarray, np.ndarray]] = []

    def convert(self, value: Any, name: str) -> Any:
        if isinstance(value, (tuple, list)):
            items = [self.convert(v, f"{name}[{i}]") for i, v in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {k: self.convert(v, f"{name}.{k}") for k, v in value.items()}
        array = self._array(value)
        if array is None:
            return value
        if id(value) not in self.seen:
            self.seen[id(value)] = self._tensor(array, name)
        return self.seen[id(value)]

    def _array(self, value: Any) -> np.ndarray | None:
        if isinstance(value, np.ndarray):
            return value
        if type(value).__module__.split(".")[0] != "torch" or not hasattr(value, "data_ptr"):
            return None
        import torch

        self.torch = torch
        dtype = as_dtype(value.dtype, "argument")
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
        return value.detach().view(bits).numpy().view(dtype.np)

    def _tensor(self, array: np.ndarray, name: str) -> NkiTensor:
        dtype = as_dtype(array.dtype, f"argument {name}")
        shape = array.shape or (1,)
        flat = np.ascontiguousarray(array).reshape(-1)
        if not array.flags.writeable or not np.shares_memory(flat, array):
            flat = flat.copy()
            if array.flags.writeable:
                self.copy_back.append((array, flat))
        data = flat.view(np.uint8) if flat.size else np.zeros(0, np.uint8)
        storage = Storage(MemoryRegion.shared_hbm, data, data.size, name, itemsize=dtype.itemsize)
        return NkiTensor(shape, dtype, storage, MemoryRegion.shared_hbm, name, strides=contiguous_strides(shape))

    def finish(self) -> None:
        for target, flat in self.copy_back:
            target[...] = flat.reshape(target.shape)

    def result(self, value: Any, where: str) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self.result(v, where) for v in value)
        if isinstance(value, dict):
            return {k: self.result(v, where) for k, v in value.items()}
        if not isinstance(value, NkiTensor):
            return value
        if value.buffer is not MemoryRegion.shared_hbm:
            fail(where, f"returns tensor {value.name!r} in {value.buffer}; a returned tensor must be in shared_hbm")
        array = np.array(value.array(where))
        if self.torch is None:
            return array
        if array.dtype.isbuiltin == 1:
            return self.torch.from_numpy(array)
        bits = array.view(np.uint8 if array.dtype.itemsize == 1 else np.int16)
        return self.torch.from_numpy(bits).view(getattr(self.torch, str(value.dtype)))


def parameter_names(function: Callable[..., Any]) -> dict[int, str]:
    """Names of the positional parameters, for error messages."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return {i: p.name for i, p in enumerate(parameters) if p.kind in kinds}
