# ruff: noqa: E501  a row of the table is one line
"""Counts: cycles by the documented cost model, DMA bytes, descriptor sizes, memory in use. Worked out by hand."""

import weakref

import ml_dtypes
import numpy as np
import pytest

import nki_emulator
from nki_emulator.testing import emulator_only, load, nisa, nki, nl, run

pytestmark = emulator_only

BF16, F32 = nl.bfloat16, nl.float32


def sb(*shape, dtype=F32):
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(tile, 1)
    return tile


def ps(*shape, dtype=F32):
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.psum)
    nisa.memset(tile, 1)
    return tile


def matmul(k, m, n, dtype, **options):
    nisa.nc_matmul(nl.ndarray((m, n), F32, nl.psum), sb(k, m, dtype=dtype), sb(k, n, dtype=dtype), **options)


CYCLES = {
    "copy float32": (lambda: nisa.tensor_copy(sb(128, 1024), sb(128, 1024)), "vector", "tensor_copy", 1024),
    "copy bf16": (lambda: nisa.tensor_copy(sb(128, 1024, dtype=BF16), sb(128, 1024, dtype=BF16)), "vector", "tensor_copy", 256),
    "copy bf16, every second": (lambda: nisa.tensor_copy(sb(128, 1024, dtype=BF16), sb(128, 2048, dtype=BF16)[:, ::2]), "vector", "tensor_copy", 512),
    "copy bf16 from psum": (lambda: nisa.tensor_copy(sb(128, 1024, dtype=BF16), ps(128, 1024, dtype=BF16)), "vector", "tensor_copy", 512),
    "copy bf16 rows of a wide tile": (lambda: nisa.tensor_copy(sb(128, 8, 128, dtype=BF16), sb(128, 8, 256, dtype=BF16)[:, :, 0:128]), "vector", "tensor_copy", 256),
    "copy float32, stride 32 bytes": (lambda: nisa.tensor_copy(sb(128, 128), sb(128, 1024)[:, ::8]), "vector", "tensor_copy", 256),
    "short copy": (lambda: nisa.tensor_copy(sb(128, 8), sb(128, 8)), "vector", "tensor_copy", 64),
    "copy on scalar": (lambda: nisa.tensor_copy(sb(128, 1024, dtype=BF16), sb(128, 1024, dtype=BF16), engine=nisa.engine.scalar), "scalar", "tensor_copy", 1024),
    "two tiles float32": (lambda: nisa.tensor_tensor(sb(128, 512), sb(128, 512), sb(128, 512), nl.add), "vector", "tensor_tensor", 1024),
    "two tiles bf16": (lambda: nisa.tensor_tensor(sb(128, 512, dtype=BF16), sb(128, 512, dtype=BF16), sb(128, 512, dtype=BF16), nl.add), "vector", "tensor_tensor", 512),
    "one tile in psum": (lambda: nisa.tensor_tensor(sb(128, 512), ps(128, 512), sb(128, 512), nl.add), "vector", "tensor_tensor", 512),
    "integers": (lambda: nisa.tensor_tensor(sb(1, 512, dtype=nl.int32), sb(1, 512, dtype=nl.int32), sb(1, 512, dtype=nl.int32), nl.add), "gpsimd", "tensor_tensor", 1024),
    "tensor_scalar bf16": (lambda: nisa.tensor_scalar(sb(128, 512, dtype=BF16), sb(128, 512, dtype=BF16), nl.add, 1.0), "vector", "tensor_scalar", 128),
    "rsqrt on gpsimd": (lambda: nisa.tensor_scalar(sb(128, 512), sb(128, 512), nl.rsqrt, 0), "gpsimd", "tensor_scalar", 2048),
    "activation": (lambda: nisa.activation(sb(128, 512), nl.exp, sb(128, 512)), "scalar", "activation", 512),
    "reciprocal": (lambda: nisa.reciprocal(sb(128, 100), sb(128, 100)), "vector", "reciprocal", 800),
    "iota": (lambda: nisa.iota(sb(128, 512), [[1, 512]]), "gpsimd", "iota", 662),
    "matmul bf16": (lambda: matmul(128, 128, 512, BF16), "tensor", "nc_matmul", 512),
    "matmul float32": (lambda: matmul(128, 128, 512, F32), "tensor", "nc_matmul", 2048),
    "matmul float32 with ones": (lambda: matmul(128, 128, 512, F32, is_stationary_onezero=True), "tensor", "nc_matmul", 1024),
    "matmul with one column": (lambda: matmul(128, 128, 1, BF16), "tensor", "nc_matmul", 64),
    "transpose bf16": (lambda: nisa.nc_transpose(nl.ndarray((128, 128), BF16, nl.psum), sb(128, 128, dtype=BF16)), "tensor", "nc_transpose", 128),
}  # fmt: skip


@pytest.mark.parametrize("name", CYCLES)
def test_cycles(name, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    issue, engine, instruction, cycles = CYCLES[name]

    def kernel():
        issue()

    nki.simulate(kernel)()
    core = nki_emulator.last_report().cores[0]
    assert core.by_name[engine, instruction] == 1
    assert core.cycles_by_name[engine, instruction] == cycles


def test_activation_reads_its_accumulator_with_an_instruction_more():
    def kernel():
        nisa.activation_reduce(sb(128, 512), nl.square, sb(128, 512), nl.add, sb(128, 1))

    run(kernel)
    core = nki_emulator.last_report().cores[0]
    assert core.instructions["scalar"] == 2
    assert core.cycles["scalar"] == 512 + 64


def copy_through_sbuf(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, load(x))
    return out


def test_dma_bytes_and_descriptors():
    run(copy_through_sbuf, np.zeros((128, 2048), ml_dtypes.bfloat16))
    core = nki_emulator.last_report().cores[0]
    size = 128 * 2048 * 2
    assert core.dma_bytes == {"hbm_read": size, "hbm_write": size}
    assert core.descriptor_bytes == {4096: 2 * size}  # one row of a partition each
    assert core.instructions["dma"] == 2


def test_a_conversion_counts_each_side_by_its_own_type():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=BF16, buffer=nl.shared_hbm)
        nisa.dma_copy(out, load(x))

    run(kernel, np.zeros((128, 64), np.float32))
    core = nki_emulator.last_report().cores[0]
    assert core.dma_bytes == {"hbm_read": 128 * 64 * 4, "hbm_write": 128 * 64 * 2}
    assert core.dma_bytes_by_name["dma_copy", "hbm_write"] == 128 * 64 * 2


def test_descriptors_shrink_to_what_is_contiguous_on_both_sides():
    def kernel(x):
        tile = nl.ndarray((128, 8, 64), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile, x.permute((1, 0, 2)))  # 64 elements of 2 bytes are contiguous in HBM

    run(kernel, np.zeros((8, 128, 64), ml_dtypes.bfloat16))
    assert nki_emulator.last_report().cores[0].descriptor_bytes == {128: 128 * 8 * 64 * 2}


def test_gathered_rows_are_descriptors():
    def kernel(x, index):
        tile = nl.ndarray((4, 32), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile, x.ap([[32, 4], [1, 32]], vector_offset=load(index)))

    run(kernel, np.zeros((9, 32), np.float32), np.arange(4, dtype=np.int32).reshape(4, 1))
    assert nki_emulator.last_report().cores[0].descriptor_bytes == {4: 16, 128: 512}


def test_counting_collects_every_launch_core_by_core():
    with nki_emulator.counting() as report:
        run(copy_through_sbuf, np.zeros((2, 2), np.float32))
        run(copy_through_sbuf, np.zeros((2, 2), np.float32), lnc=2)
    assert len(report.cores) == 3
    assert report.hbm_bytes == 3 * 2 * 16


def test_memory_in_use_counts_first_to_last_use():
    def kernel():
        for _ in range(10):  # each tile is dead before the next is written
            sb(128, 1000)
        a, b = sb(128, 100), sb(128, 100)
        nisa.tensor_copy(a, b)

    run(kernel)
    assert nki_emulator.last_report().cores[0].sbuf_peak_bytes == 4000


def test_tiles_are_freed_when_nothing_holds_them():
    def kernel(x):
        seen = []
        nl.fori_loop(0, 3, lambda i: seen.append(weakref.ref(sb(1, 8).storage)))
        assert all(tile() is None for tile in seen)

    run(kernel, np.zeros((1, 1), np.float32))


def test_engine_time_uses_the_clock():
    run(lambda: matmul(128, 128, 480, BF16))
    assert nki_emulator.last_report().cores[0].engine_us("tensor") == pytest.approx(0.2)  # 480 cycles at 2.4 GHz
