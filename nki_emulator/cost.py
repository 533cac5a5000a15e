"""Cycles per instruction and DMA accounting, by the documented cost model.

Sources: trainium_inferentia2_arch.rst (ARCH1), trainium2_arch.rst (ARCH2), nki_perf_guide.rst, nki.api.shared.rst,
nki-dma-bandwidth-guide.rst and, for what the current documentation no longer lists, the cost tables of the
nki.isa pages up to SDK 2.26 (OLD). Cycles are of the engine's own clock. N is elements per partition.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Instruction initiation interval: "MIN_II is roughly 64 engine cycles" (nki.api.shared.rst).
MIN_II = 64
# GpSimd's iota and affine_select: about 150 + N (OLD).
GPSIMD_PATTERN_FIXED = 150
# "If the most-minor F dimension stride exceeds 16 bytes, the achievable bandwidth [...] will be cut in half" (ARCH1).
FULL_BANDWIDTH_STRIDE = 16
LARGE_STRIDE_FACTOR = 2
# Clock in GHz (ARCH2, trainium3_arch.rst).
CLOCK_GHZ = {
    2: {"tensor": 2.8, "vector": 0.96, "scalar": 1.4, "gpsimd": 1.4},
    3: {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2},
    4: {"tensor": 2.4, "vector": 1.2, "scalar": 1.2, "gpsimd": 1.2},
}
# Practical DMA rate of one core, 16 engines, in GB/s (nki-dma-bandwidth-guide.rst); fixed cost per transfer in ns.
DMA_GB_PER_S = {2: 272.0, 3: 368.0, 4: 528.0}
DMA_FIXED_NS = 1300.0
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")


@dataclass
class CoreReport:
    """What one core issued.

    Attributes:
        instructions: number of instructions by engine.
        by_name: number of instructions by (engine, instruction).
        cycles: cycles by engine, of that engine's clock; none for the DMA engines.
        cycles_by_name: cycles by (engine, instruction).
        dma_bytes: bytes moved by DMA by direction: "hbm_read", "hbm_write", "on_chip" (neither side in HBM).
        dma_bytes_by_name: the same by (instruction, direction).
        descriptor_bytes: DMA bytes by descriptor size, the contiguous bytes one descriptor moves.
        sbuf_peak_bytes: largest number of bytes per partition that are between first and last use at one time.
        psum_peak_bytes: same for PSUM.
    """

    generation: int = 3
    instructions: Counter[str] = field(default_factory=Counter)
    by_name: Counter[tuple[str, str]] = field(default_factory=Counter)
    cycles: Counter[str] = field(default_factory=Counter)
    cycles_by_name: Counter[tuple[str, str]] = field(default_factory=Counter)
    dma_bytes: Counter[str] = field(default_factory=Counter)
    dma_bytes_by_name: Counter[tuple[str, str]] = field(default_factory=Counter)
    descriptor_bytes: Counter[int] = field(default_factory=Counter)
    sbuf_peak_bytes: int = 0
    psum_peak_bytes: int = 0

    def add(self, engine: str, name: str, cycles: float) -> None:
        self.instructions[engine] += 1
        self.by_name[engine, name] += 1
        self.cycles[engine] += round(cycles)
        self.cycles_by_name[engine, name] += round(cycles)

    def add_dma(self, name: str, read: int, written: int, from_hbm: bool, to_hbm: bool, descriptor: int) -> None:
        """Count a transfer that reads `read` bytes and writes `written`, which differ where it converts."""
        self.instructions["dma"] += 1
        self.by_name["dma", name] += 1
        directions = {"hbm_read": read if from_hbm else 0, "hbm_write": written if to_hbm else 0}
        directions["on_chip"] = 0 if from_hbm or to_hbm else read
        for direction, size in directions.items():
            if size:
                self.dma_bytes[direction] += size
                self.dma_bytes_by_name[name, direction] += size
        self.descriptor_bytes[descriptor] += read

    @property
    def hbm_bytes(self) -> int:
        return self.dma_bytes["hbm_read"] + self.dma_bytes["hbm_write"]

    def engine_us(self, engine: str) -> float:
        """Busy time of one compute engine in microseconds."""
        return self.cycles[engine] / CLOCK_GHZ[self.generation][engine] / 1e3


@dataclass
class Report:
    """What a launch issued, core by core."""

    cores: list[CoreReport] = field(default_factory=list)

    @property
    def hbm_bytes(self) -> int:
        return sum(core.hbm_bytes for core in self.cores)

    def total(self, engine: str) -> int:
        """Cycles of one engine over all cores."""
        return sum(core.cycles[engine] for core in self.cores)

    def extend(self, other: Report) -> None:
        self.cores.extend(other.cores)


def streaming(n: int) -> float:
    """One tensor input, one element per partition and cycle: max(MIN_II, N) (OLD; ARCH1 "about N")."""
    return max(MIN_II, n)


def tensor_tensor(n: int, psum_inputs: int, all_16_bit_sbuf: bool) -> float:
    """Two tensor inputs: 2N; N where one comes from PSUM or all tiles are 16-bit floats in SBUF (OLD, ARCH2)."""
    return max(MIN_II, n if psum_inputs == 1 or all_16_bit_sbuf else 2 * n)


def fast_copy(n: int, *, all_16_bit: bool, all_sbuf: bool, contiguous: bool) -> float:
    """Vector tensor_copy and tensor_scalar. Performance mode (ARCH2, from NeuronCore-v3): a quarter of N where input
    and output are 16-bit floats, contiguous in the innermost dimension and both in SBUF; half where one of the last
    two does not hold."""
    if not all_16_bit or not (all_sbuf or contiguous):
        return max(MIN_II, n)
    return max(MIN_II, n / (4 if all_sbuf and contiguous else 2))


def matmul(n_stationary: int, n_moving: int, fp32: bool, *, double_row: bool = False, onezero: bool = False) -> float:
    """max(min(64, N_stationary), N_moving), float32 four times that (OLD); twice the rate with double_row (nc_matmul)
    and, in float32, when one operand holds only zeros and ones (nc_matmul, "2x better performance")."""
    cycles = max(min(MIN_II, n_stationary), n_moving)
    if fp32:
        cycles *= 2 if onezero else 4
    return cycles / 2 if double_row else cycles


def pe_transpose(partitions: int, free: int, fp32: bool) -> float:
    """max(P, min(64, F)) (OLD); a float32 transpose runs twice as fast as a float32 matmul (ARCH2)."""
    return max(partitions, min(MIN_II, free)) * (2 if fp32 else 1)


def reciprocal(n: int) -> float:
    """Vector Engine: max(MIN_II, 8N) (nki.api.shared.rst)."""
    return max(MIN_II, 8 * n)


def gpsimd_rsqrt(n: int) -> float:
    """Four times the Scalar Engine's max(MIN_II, N) (nki.api.shared.rst)."""
    return 4 * max(MIN_II, n)


def gpsimd_pattern(n: int) -> float:
    """iota and affine_select: 150 + N (OLD)."""
    return GPSIMD_PATTERN_FIXED + n
