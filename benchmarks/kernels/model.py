"""Modelled time of an NKI kernel: the emulator's counts priced by AWS's documentation. No figure here was measured.

Assumed: engines and DMA run side by side, each busy all the time (their work overlaps perfectly); instructions take
the documented cycles, and their start-up and synchronisation are hidden; a launch takes as long as its busiest
resource, from one barrier between cores to the next. HBM is 46.4 TB/s over the 128 physical cores of a trn2.48xlarge
(trn2-arch.rst), DMA 368 GB/s per core (nki-dma-bandwidth-guide.rst), a transposing DMA 90 % of that
(trainium2_arch.rst, "up to"). Runs shorter than the 2 KiB AWS recommends are priced like long ones, since no rate is
documented for them, and reported apart.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import nki_emulator
from nki_emulator import cost, launch

nki = nki_emulator.install(force=True)

GENERATION = 3
ENGINES = ("tensor", "vector", "scalar", "gpsimd")
HBM_GB_PER_S = 46.4e3 / 128
DMA_GB_PER_S = cost.DMA_GB_PER_S[GENERATION]
TRANSPOSING_DMA_GB_PER_S = 0.9 * DMA_GB_PER_S
LONG_RUN = 2048


@dataclass
class Work:
    """What one core does between two barriers.

    Attributes:
        cycles: by engine.
        hbm_bytes: read and written.
        dma_us: time of the DMA engines.
        runs: DMA bytes by bytes of a contiguous run.
    """

    cycles: Counter[str]
    hbm_bytes: int
    dma_us: float
    runs: Counter[int]

    def times(self) -> dict[str, float]:
        """Busy microseconds of each resource."""
        times = {engine: self.cycles[engine] / cost.CLOCK_GHZ[GENERATION][engine] / 1e3 for engine in ENGINES}
        return times | {"hbm": self.hbm_bytes / HBM_GB_PER_S / 1e3, "dma": self.dma_us}


def work(report: Any, before: Any = None) -> Work:
    """What a core's report counts more than an earlier copy of it."""
    transposed = payload = hbm = 0
    for (name, direction), size in report.dma_bytes_by_name.items():
        size -= before.dma_bytes_by_name[name, direction] if before else 0
        hbm += size if direction.startswith("hbm") else 0
        transposed += size if name == "dma_transpose" else 0
    runs = report.descriptor_bytes - (before.descriptor_bytes if before else Counter())
    payload = runs.total()
    dma_us = ((payload - transposed) / DMA_GB_PER_S + transposed / TRANSPOSING_DMA_GB_PER_S) / 1e3
    return Work(report.cycles - (before.cycles if before else Counter()), hbm, dma_us, runs)


def run(kernel: Callable[..., Any], *args: Any, cores: int = 2, **options: Any) -> tuple[Any, list[Work]]:
    """Launch on emulated cores.

    Returns:
        The kernel's results, and the work of core 0 from barrier to barrier; the other core's is the same.
    """
    with _copies_at_barriers() as copies, nki_emulator.counting() as report:
        results = nki.simulate(kernel[cores])(*args, **options)
    assert all(core.hbm_bytes == report.cores[0].hbm_bytes for core in report.cores)
    assert all(core.cycles == report.cores[0].cycles for core in report.cores)
    marks = [None, *copies, report.cores[0]]
    return results, [work(after, before) for before, after in itertools.pairwise(marks)]


@contextlib.contextmanager
def _copies_at_barriers() -> Iterator[list[Any]]:
    copies: list[Any] = []
    barrier = nki.isa.core_barrier

    def noting_barrier(*args: Any, **options: Any) -> Any:
        core = launch.current()
        if core.rank == 0:
            copies.append(copy.deepcopy(core.report))
        return barrier(*args, **options)

    nki.isa.core_barrier = noting_barrier
    try:
        yield copies
    finally:
        nki.isa.core_barrier = barrier


def microseconds(phases: list[Work]) -> float:
    """Modelled time: the busiest resource of each phase."""
    return sum(max(phase.times().values()) for phase in phases)


def busiest(phases: list[Work]) -> str:
    """All resources' busy time as a share of the modelled time, largest first."""
    total = microseconds(phases)
    shares = {name: sum(phase.times()[name] for phase in phases) / total for name in (*ENGINES, "hbm", "dma")}
    return ", ".join(
        f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda s: -s[1]) if share > 0.005
    )


def hbm_bytes(phases: list[Work]) -> int:
    """Bytes one core reads from and writes to HBM."""
    return sum(phase.hbm_bytes for phase in phases)


def long_runs(phases: list[Work]) -> float:
    """Share of DMA bytes that move in contiguous runs of at least 2 KiB."""
    runs = sum((phase.runs for phase in phases), Counter())
    return sum(size for run_bytes, size in runs.items() if run_bytes >= LONG_RUN) / runs.total()
