"""AWS's public kernels: the list of cases, and where their modules and inputs come from.

A case gives what the emulator computed, what the kernel's own reference computed, and the relative and absolute
tolerance between them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

Outputs = Any
Case = Callable[[], tuple[Outputs, Outputs, float, float]]
CASES: list[tuple[str, str, Case]] = []
LIB = "nkilib_src.nkilib"
ROOTS: dict[str, Path] = {}


def case(source: str, name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES.append((source, name, function))
        return function

    return register


def lib(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{LIB}.{module}"), name)


def lib_test(path: str) -> Any:
    """A module of nki-library's tests: input generators and NumPy references that are not in the package."""
    return importlib.import_module(f"test.integration.nkilib.{path}")


def example(source: str, path: str) -> Any:
    """A module by its file: the directories are no packages."""
    file = ROOTS[source] / path
    sys.path.insert(0, str(file.parent))
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    try:
        spec = importlib.util.spec_from_file_location(f"{source}_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = target  # some examples set it when imported
    return module


def simulate(kernel: Any, *args: Any, lnc: int = 1, **kwargs: Any) -> Any:
    import nki

    return nki.simulate(nki.jit(kernel)[lnc])(*args, **kwargs)


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def numpy_inputs(values: dict[str, Any]) -> dict[str, Any]:
    """Torch tensors as arrays, with bfloat16 as ml_dtypes; the kernels' tests pass arrays."""
    import ml_dtypes

    def convert(v: Any) -> Any:
        if not isinstance(v, torch.Tensor):
            return v
        return v.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if v.dtype is torch.bfloat16 else v.numpy()

    return {k: convert(v) for k, v in values.items()}


def plain(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without the marks AWS's test harness puts on names of tensors that are written."""
    return {k.removesuffix(".must_alias_input"): v for k, v in inputs.items()}


def as_torch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a reference: torch tensors, bfloat16 widened to float32 as AWS's harness does."""

    def convert(v: Any) -> Any:
        if not isinstance(v, np.ndarray):
            return v
        return torch.from_numpy(v.astype(np.float32) if v.dtype.name == "bfloat16" else v)

    return {k: convert(v) for k, v in plain(inputs).items()}


def flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    elif value is not None:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.astype(np.float64))
        yield value.detach().double()
