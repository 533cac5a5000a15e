"""Stand-in for torch-neuronx: device ``neuron`` over host memory, NKI kernels through the emulator.

Offers what AWS documents and torchtitan or this package uses: autoloading through ``torch.backends``, the device
module ``torch.neuron``, the process-group backend ``neuron``, `nki_op`, and `get_executed_ops`. It says nothing about
speed or about operators the real device computes differently: everything but NKI kernels runs as CPU operators.

``EMULATED_NEURON_OPERATORS=FILE`` writes, when the process ends, the operators that reached the device, with counts,
as JSON to FILE with the rank appended.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import types
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

import nki_emulator
from torch_neuronx._build import extension

_device: types.ModuleType | None = None
_launches: Counter[str] = Counter()


def _autoload() -> None:
    global _device
    if _device is not None:
        return
    nki_emulator.install()
    _device = extension()
    torch.utils.rename_privateuse1_backend("neuron")
    torch._register_device_module("neuron", DeviceModule("torch.neuron"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.distributed.Backend.register_backend("neuron", _process_group, devices=["neuron"])
    report, rank = os.environ.get("EMULATED_NEURON_OPERATORS"), os.environ.get("RANK")
    if report and rank:  # torchrun's own process has no rank
        atexit.register(lambda: Path(f"{report}.{rank}").write_text(json.dumps(get_executed_ops())))


def nki_op(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that launches NKI kernels as an operator of device ``neuron``.

    The function sees the tensors' memory as CPU tensors, which is where emulated kernels work.
    """

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            _launches[name] += 1
            results = function(*_pytree.tree_map_only(torch.Tensor, _device.host_view, args))
            return _pytree.tree_map_only(torch.Tensor, lambda result: result.to("neuron"), results)

        operator = torch.library.custom_op(name, run, mutates_args=tuple(mutates_args), device_types="neuron")
        operator.register_fake(function)
        return operator

    return register


def get_executed_ops() -> dict[str, int]:
    """Operators that reached the device, with overload, and how often; kernels and copies to the host among them."""
    return {**_device.operator_counts(), **_launches}


def clear_op_tracking() -> None:
    """Forget what `get_executed_ops` counted."""
    _device.clear_operator_counts()
    _launches.clear()


class Stream:
    """Work is done when the call returns, so streams and events have nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Stream:
        return event or Stream()

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class DeviceModule(types.ModuleType):
    """``torch.neuron``."""

    Stream = Event = Stream
    _rng_state = torch.zeros(16, dtype=torch.uint8)  # seed and offset, as DTensor's random-number tracker expects

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return _device.device_count

    def current_device(self) -> int:
        return _device.device_index

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._rng_state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._rng_state = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def get_device_name(self, device: Any = None) -> str:
        return f"neuron:{_device.device_index}"

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(name="trn2", total_memory=24 * 2**30)  # one logical core of LNC 2

    def memory_allocated(self, device: Any = None) -> int:
        return _device.bytes_now()

    def max_memory_allocated(self, device: Any = None) -> int:
        return _device.bytes_peak()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        now, peak = _device.bytes_now(), _device.bytes_peak()
        stats = {f"{kind}_bytes.all.{when}": size for kind in ("allocated", "active", "reserved")
                 for when, size in (("current", now), ("peak", peak))}  # fmt: skip
        return {**stats, "num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _device.reset_bytes_peak()

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def default_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Any) -> Any:
        return stream


def _process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _device.process_group(torch.distributed.ProcessGroupGloo(store, rank, size, timeout))
