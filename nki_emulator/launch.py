"""Running a kernel: arguments to HBM, one or two cores, results back.

The two cores of LNC 2 are two threads, of which only one runs at a time. They switch only where one waits for the
other, so every run gives the same result (nki_simulator.rst describes AWS's two threads).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import memory
from .arguments import Arguments, parameter_names
from .cost import CoreReport, Report
from .dtypes import DType, as_dtype
from .errors import fail
from .memory import MemoryRegion, Storage
from .strides import contiguous_strides
from .views import NkiTensor

_TARGETS = {"trn1": 2, "inf2": 2, "gen2": 2, "trn2": 3, "gen3": 3, "trn3": 4, "gen4": 4}
_state = threading.local()
_reports: list[Report] = []
_last: Report = Report()


def generation() -> int:
    """The NeuronCore version: 2, 3 or 4.

    If NEURON_PLATFORM_TARGET_OVERRIDE is unset, it is that of trn2. AWS's simulator then takes trn3.
    """
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    if target not in _TARGETS:
        fail("NEURON_PLATFORM_TARGET_OVERRIDE", f"must be one of {', '.join(_TARGETS)}, got {target!r}")
    return _TARGETS[target]


class _AbortedError(Exception):
    """Ends this core after the other one failed; its own message is not shown."""


class Group:
    """The cores of one launch, what they share, and which of them runs."""

    def __init__(self, size: int, first: int) -> None:
        self.size = size
        self.turn = first
        self.condition = threading.Condition()
        self.finished = [False] * size
        self.waiting: list[Callable[[], bool] | None] = [None] * size
        self.waiting_for = [""] * size
        self.failed = False
        self.shared: list[Storage] = []
        self.barriers: list[list[Storage]] = [[] for _ in range(size)]
        self.messages: dict[tuple[int, int, int], list[Any]] = {}
        self.writers: dict[Storage, Storage] = {}

    def writer_marks(self, tensor: NkiTensor, *, make: bool) -> NkiTensor | None:
        """The view of a tensor's marks: for each element the core that wrote it last and between which barriers.

        None where there are none: at LNC 1, in private memory, for views of another type, and, unless `make`, for
        tensors not written so far.
        """
        storage = tensor.storage
        if self.size == 1 or storage.buffer is not MemoryRegion.shared_hbm or tensor.dtype.itemsize != storage.itemsize:
            return None
        marks = self.writers.get(storage)
        if marks is None:
            if not make:
                return None
            elements = storage.row_bytes // storage.itemsize
            marks = Storage(storage.buffer, np.zeros(2 * elements, np.uint8), 2 * elements, storage.name)
            self.writers[storage] = marks
        return NkiTensor(
            tensor.shape, "uint16", marks, tensor.buffer, tensor.name, strides=tensor.strides, offset=tensor.offset,
            indirect=tensor.indirect_by,
        )  # fmt: skip

    def mark(self, core: int, barriers: int | None = None) -> int:
        """What `core` writes into marks after its `barriers`-th barrier, by default the last it reached."""
        passed = len(self.barriers[core]) if barriers is None else barriers
        return (2 * passed + core + 1) % 2**16

    def wait_turn(self, core: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.turn == core or self.failed)
            if self.failed:
                raise _AbortedError

    def wait_until(self, core: int, ready: Callable[[], bool], what: str) -> None:
        """Let the other core run until `ready()`. A deadlock, which hangs on hardware, is an error."""
        while not ready():
            other = 1 - core
            blocked = self.waiting[other]
            if self.finished[other] or (blocked is not None and not blocked()):
                why = "has finished" if self.finished[other] else f"waits at {self.waiting_for[other]}"
                fail(what, f"deadlock: core {core} waits here, and the other core {why}")
            self.waiting[core], self.waiting_for[core] = ready, what
            with self.condition:
                self.turn = other
                self.condition.notify_all()
            self.wait_turn(core)
            self.waiting[core] = None

    def finish(self, core: int) -> None:
        with self.condition:
            self.finished[core] = True
            if self.size == 2:
                self.turn = 1 - core
            self.condition.notify_all()

    def abort(self) -> None:
        with self.condition:
            self.failed = True
            self.condition.notify_all()


class Core:
    """The state of one physical core while a kernel runs on it."""

    def __init__(self, rank: int, group: Group) -> None:
        self.rank = rank
        self.group = group
        self.generation = generation()
        self.report = CoreReport(self.generation)
        self.clock = 0
        self.tiles: list[memory.Lifetime] = []
        self.addressed: dict[MemoryRegion, memory.AddressedMemory] = {}
        self.shared_allocations = 0
        self.scalar_accumulator = np.zeros(memory.PARTITIONS, np.float32)
        self.vector_accumulator = np.zeros(memory.PARTITIONS, np.float32)
        self.random = np.random.default_rng(0)

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: object,
        buffer: object = MemoryRegion.sbuf,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        where = f"nl.ndarray {name!r}" if name else "nl.ndarray"
        dtype = as_dtype(dtype, where)
        region = buffer if isinstance(buffer, MemoryRegion) else MemoryRegion[str(buffer)]
        shape = tuple(int(n) for n in shape)
        if not shape or min(shape) < 1:
            fail(where, f"shape {shape}: every dimension must be at least 1")
        strides = contiguous_strides(shape)
        if region in memory.HBM:
            if address is not None:
                fail(where, "address is only for tensors in SBUF and PSUM")
            storage = self._hbm(region, shape, dtype, name, where)
        else:
            row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
            memory.check_on_chip_size(where, region, shape, row, self.generation)
            if address is None:
                storage = memory.allocate_on_chip(region, shape[0], row, dtype, name)
                if region is MemoryRegion.psum:
                    storage.psum_state = np.zeros((shape[0], (row + 3) // 4), np.uint8)
                storage.lifetime = memory.Lifetime(region, row, name)
                self.tiles.append(storage.lifetime)
            else:
                storage = self._addressed(region).place(where, shape, row, dtype, address, name)
            storage.core = self.rank
        return NkiTensor(shape, dtype, storage, region, name, strides=strides)

    def _addressed(self, region: MemoryRegion) -> memory.AddressedMemory:
        if region not in self.addressed:
            usable = memory.PSUM_BYTES if region is MemoryRegion.psum else memory.SBUF_BYTES[self.generation]
            self.addressed[region] = memory.AddressedMemory(region, usable)
        return self.addressed[region]

    def _hbm(self, region: MemoryRegion, shape: tuple[int, ...], dtype: DType, name: str, where: str) -> Storage:
        size = int(np.prod(shape, dtype=np.int64))
        if region is MemoryRegion.private_hbm:
            storage = memory.allocate_hbm(region, size, dtype, name)
            storage.core = self.rank
            return storage
        # Both cores run the same program: the n-th shared allocation of one is the n-th of the other.
        position = self.shared_allocations
        self.shared_allocations += 1
        if position == len(self.group.shared):
            self.group.shared.append(memory.allocate_hbm(region, size, dtype, name))
        storage = self.group.shared[position]
        if storage.row_bytes != size * dtype.itemsize or storage.name != name:
            fail(
                where,
                f"core {self.rank} allocates {name!r} {shape} {dtype} as shared tensor {position}; the other core "
                f"allocated {storage.name!r} of {storage.row_bytes} bytes; both cores must allocate the same",
            )
        return storage

    def use(self, storage: Storage) -> None:
        life = storage.lifetime
        if life is None:
            return
        if not life.usable:
            fail(f"tensor {storage.name!r}", "was made inside a dynamic loop and is used outside it")
        if life.first_use < 0:
            life.first_use = self.clock
        life.last_use = self.clock

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The body of a dynamic loop: tiles made inside cannot be used after it."""
        before = len(self.tiles)
        yield
        for life in self.tiles[before:]:
            life.usable = False

    def peak(self, region: MemoryRegion) -> tuple[int, str]:
        """Largest bytes per partition in use at one time, and the largest tiles then in use."""
        used = [t for t in self.tiles if t.buffer is region and t.first_use >= 0]
        # Within one instruction, tiles are allocated before others are freed.
        events = sorted([(t.first_use, 0, t.row_bytes) for t in used] + [(t.last_use, 1, -t.row_bytes) for t in used])
        now = peak = at = 0
        for clock, _, change in events:
            now += change
            if now > peak:
                peak, at = now, clock
        largest = sorted((t for t in used if t.first_use <= at <= t.last_use), key=lambda t: -t.row_bytes)[:4]
        return peak, ", ".join(f"{t.name or 'unnamed'} {t.row_bytes} B" for t in largest)

    def close(self, where: str) -> None:
        """Check memory capacity. A tile occupies memory from its first to its last use.

        Tiles whose address the kernel chose are not counted; they were checked when they were placed.
        """
        limits = {MemoryRegion.sbuf: memory.sbuf_usable_bytes(self.generation), MemoryRegion.psum: memory.PSUM_BYTES}
        peaks = {region: self.peak(region) for region in limits}
        self.report.sbuf_peak_bytes, self.report.psum_peak_bytes = (peak for peak, _ in peaks.values())
        for region, (peak, largest) in peaks.items():
            if peak > limits[region]:
                fail(
                    where,
                    f"needs {peak} bytes of {region} per partition at one time; {limits[region]} are usable. "
                    f"Largest: {largest}",
                )


def current(where: str = "nki") -> Core:
    core = getattr(_state, "core", None)
    if core is None:
        fail(where, "called outside a kernel; run the kernel with nki.simulate(kernel)(...)")
    return core


class Kernel:
    """What `@nki.jit` returns. `kernel[lnc]` sets the number of cores, 1 or 2."""

    def __init__(self, function: Callable[..., Any], lnc: int = 1) -> None:
        functools.update_wrapper(self, function)
        self.func = function
        self.lnc = lnc

    def __getitem__(self, lnc: Any) -> Kernel:
        if isinstance(lnc, tuple):
            lnc = (
                lnc[0]
                if len(lnc) == 1
                else fail(self.__name__, f"the launch grid must be one number, the LNC degree, got {lnc}")
            )
        if lnc not in (1, 2):
            fail(self.__name__, f"LNC must be 1 or 2, got {lnc!r}")
        return Kernel(self.func, int(lnc))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_state, "core", None) is not None:  # one kernel calling another is inlined
            return self.func(*args, **kwargs)
        return run(self, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`@nki.jit`, with or without arguments."""
    if fn is None:
        return lambda f: jit(f)
    return fn if isinstance(fn, Kernel) else Kernel(fn)


def simulate(kernel: Any, *, first_core: int = 0) -> Callable[..., Any]:
    """`nki.simulate`: a callable that runs the kernel on NumPy arrays or torch tensors.

    Args:
        kernel: an `@nki.jit` kernel, `kernel[lnc]`, or a plain function.
        first_core: at LNC 2, the core that runs first. A kernel that gives another result with 1 than with 0 lacks a
            barrier. Not part of AWS's interface.
    """
    launched = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    return lambda *args, **kwargs: run(launched, args, kwargs, first_core)


@contextlib.contextmanager
def counting() -> Iterator[Report]:
    """Collects the counts of every launch made inside."""
    report = Report()
    _reports.append(report)
    try:
        yield report
    finally:
        _reports.remove(report)


def last_report() -> Report:
    """The counts of the last launch that ended."""
    return _last


def run(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], first_core: int = 0) -> Any:
    """Run on `kernel.lnc` cores and return what core 0 returns, as arrays of the arguments' kind."""
    global _last
    where = f"kernel {kernel.__name__}"
    arguments = Arguments()
    names = parameter_names(kernel.func)
    args = tuple(arguments.convert(v, names.get(i, f"argument {i}")) for i, v in enumerate(args))
    kwargs = {k: arguments.convert(v, k) for k, v in kwargs.items()}
    group = Group(kernel.lnc, first_core if kernel.lnc == 2 else 0)
    cores = [Core(rank, group) for rank in range(kernel.lnc)]
    results: list[Any] = [None] * kernel.lnc
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        _state.core = cores[rank]
        try:
            group.wait_turn(rank)
            results[rank] = kernel.func(*args, **kwargs)
            cores[rank].close(where)
            group.finish(rank)
        except _AbortedError:
            pass
        except BaseException as error:  # re-raised by the caller's thread below
            errors.append(error)
            group.abort()
        finally:
            _state.core = None

    if kernel.lnc == 1:
        body(0)
    else:
        threads = [
            threading.Thread(target=body, args=(rank,), name=f"{where} core {rank}", daemon=True) for rank in range(2)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # an interrupt; the cores stop at their next wait
            group.abort()
            raise
    if errors:
        raise errors[0]
    if kernel.lnc == 2 and len(group.barriers[0]) != len(group.barriers[1]):
        fail(where, f"core 0 passes {len(group.barriers[0])} barriers, but core 1 {len(group.barriers[1])}")
    arguments.finish()
    _last = Report([core.report for core in cores])
    for report in _reports:
        report.extend(_last)
    return arguments.result(results[0], where)
