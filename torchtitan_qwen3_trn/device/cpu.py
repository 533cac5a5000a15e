"""A CPU device module with what torchtitan asks of an accelerator's, and FSDP's needs on gloo.

``torch.cpu`` lacks device names and properties, memory statistics and random-number states, and its
``current_device()`` is the string ``"cpu"`` where ``torch.distributed.barrier(device_ids=...)`` wants an integer.
"""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import FSDPModule

logger = logging.getLogger(__name__)

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # resets the peak resident set size, proc_pid_clear_refs(5)


@dataclass(frozen=True)
class CpuProperties:
    """What ``get_device_properties`` returns.

    Attributes:
        name: processor name.
        total_memory: bytes this process may use: physical memory, or the cgroup's limit when lower.
    """

    name: str
    total_memory: int


class CpuDeviceModule(ModuleType):
    """Takes the place of ``torch.cuda`` in torchtitan: one device, index 0, memory figures of this process.

    Attributes that it does not define come from ``torch.cpu``.
    """

    def __init__(self) -> None:
        super().__init__("torchtitan_qwen3_trn.device.cpu.device_module")
        self._announced = False
        self._highest_seen = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """Always true."""
        return True

    def is_initialized(self) -> bool:
        """Always true."""
        return True

    def device_count(self) -> int:
        """One: all ranks of a host share it, so each uses ``cpu:0`` whatever its ``LOCAL_RANK``."""
        return 1

    def current_device(self) -> int:
        """Index 0, as ``torch.distributed.barrier(device_ids=...)`` wants it."""
        return 0

    def set_device(self, device: Any) -> None:
        """Nothing to select; says once that this run is on the CPU."""
        if not self._announced:
            self._announced = True
            logger.info("No accelerator found: torchtitan runs on the CPU (%s)", self.get_device_name())

    def synchronize(self, device: Any = None) -> None:
        """CPU operators have finished when they return."""

    def get_device_name(self, device: Any = None) -> str:
        """Processor name, such as ``AMD EPYC 7763 64-Core Processor``."""
        return _processor_name()

    def get_device_properties(self, device: Any = None) -> CpuProperties:
        """Name and usable memory in bytes."""
        return CpuProperties(name=_processor_name(), total_memory=_total_memory())

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Resident memory of this process in bytes, under the keys CUDA's allocator uses.

        Active and reserved are the same: the CPU allocator keeps no reserve of its own.
        """
        current, peak = self.memory_allocated(), self.max_memory_allocated()
        return {
            "active_bytes.all.current": current,
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.current": current,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def memory_allocated(self, device: Any = None) -> int:
        """Resident bytes now."""
        resident = psutil.Process().memory_info().rss
        self._highest_seen = max(self._highest_seen, resident)
        return resident

    def max_memory_allocated(self, device: Any = None) -> int:
        """Highest resident bytes since the last reset; where Linux's ``/proc`` is missing, the highest seen here."""
        current = self.memory_allocated()
        return max(_peak_resident() or self._highest_seen, current)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start a new peak at what is resident now."""
        self._highest_seen = 0
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text(_RESET_PEAK)

    def empty_cache(self) -> None:
        """The CPU allocator caches nothing."""

    def manual_seed(self, seed: int) -> None:
        """Seed the default CPU generator."""
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """State of the default CPU generator, uint8."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Restore what :meth:`get_rng_state` returned."""
        torch.set_rng_state(state)


cpu_device_module = CpuDeviceModule()


def use_sum_reduction(model_parts: Iterable[torch.nn.Module]) -> None:
    """Make FSDP2 reduce gradients with SUM on every wrapped module.

    gloo has no PREMUL_SUM, which FSDP2 otherwise picks for its reduce-scatter when a divide factor is set.
    """
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _lines(path: Path) -> list[str]:
    """The lines of a file of the kernel; none where it does not exist."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _processor_name() -> str:
    lines = _lines(Path("/proc/cpuinfo"))
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "cpu")


def _total_memory() -> int:
    limits = (int(line) for line in _lines(_CGROUP_LIMIT) if line.isdigit())  # or the word max
    return min([psutil.virtual_memory().total, *limits])


def _peak_resident() -> int | None:
    return next((int(line.split()[1]) * 1024 for line in _lines(_STATUS) if line.startswith("VmHWM:")), None)
