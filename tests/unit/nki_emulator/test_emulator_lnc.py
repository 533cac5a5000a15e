"""Two cores: the program id, shared and private memory, barriers, exchange."""

import numpy as np
import pytest

from nki_emulator import NkiValidationError
from nki_emulator.testing import EMULATED, emulator_only, load, nisa, nl, run, store

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def halves(x):
    """Each core adds 100 times its number to its half."""
    core, cores = nl.program_id(0), nl.num_programs()
    rows = x.shape[0] // cores
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = load(x[core * rows : (core + 1) * rows])
    nisa.tensor_scalar(tile, tile, nl.add, 100.0 * core)
    nisa.dma_copy(out[core * rows : (core + 1) * rows], tile)
    return out


def test_one_core_sees_one_program():
    np.testing.assert_array_equal(run(halves, X), X)


def test_two_cores_write_one_output():
    np.testing.assert_array_equal(run(halves, X, lnc=2), X + np.array([[0], [0], [100], [100]]))


def swap_through_hbm(x):
    core = nl.program_id(0)
    mine = nl.ndarray((2, 4, 2), dtype=x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray((2, 4, 2), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = load(x)
    nisa.tensor_scalar(tile, tile, nl.add, 100.0 * core)
    nisa.dma_copy(mine[core], tile)
    nisa.core_barrier(mine, (0, 1))
    nisa.dma_copy(out[core], mine[1 - core])
    return out


@pytest.mark.parametrize("first_core", [0, pytest.param(1, marks=emulator_only)])
def test_a_barrier_orders_shared_memory_whichever_core_is_faster(first_core):
    options = {"first_core": first_core} if EMULATED else {}
    out = run(swap_through_hbm, X, lnc=2, **options)
    np.testing.assert_array_equal(out, [X + 100, X])


@emulator_only
@pytest.mark.parametrize("writer", [0, 1])
def test_reading_what_the_other_core_writes_needs_a_barrier(writer):
    def racy(x):
        shared = nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == writer:
            nisa.dma_copy(shared, load(x))
        else:
            nisa.dma_copy(out, shared)
        return out

    one = np.ones((1, 1), np.float32)
    with pytest.raises(
        NkiValidationError, match=f"core {1 - writer} reads .* where core {writer} wrote since the last"
    ):
        run(racy, one, lnc=2, first_core=writer)
    # In the other order the reader is early; nothing is wrong yet, and it sees unwritten memory.
    assert np.isnan(run(racy, one, lnc=2, first_core=1 - writer).item())


def test_sendrecv_swaps_tiles():
    def kernel(x):
        core = nl.program_id(0)
        out = nl.ndarray((2, 4, 2), dtype=x.dtype, buffer=nl.shared_hbm)
        tile = load(x)
        nisa.tensor_scalar(tile, tile, nl.add, 100.0 * core)
        received = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        nisa.sendrecv(tile, received, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        nisa.dma_copy(out[core], received)
        return out

    np.testing.assert_array_equal(run(kernel, X, lnc=2), [X + 100, X])


def test_private_memory_is_per_core():
    def kernel(x):
        core = nl.program_id(0)
        own = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.private_hbm)
        out = nl.ndarray((2, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(own, nl.full((1, 1), float(core), dtype=nl.float32))
        nisa.core_barrier(out, (0, 1))
        nisa.dma_copy(out[core], own[0])
        return out

    np.testing.assert_array_equal(run(kernel, X, lnc=2), [[0], [1]])


@emulator_only
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda x: nisa.core_barrier(x, (0, 1)) if nl.program_id() == 0 else None, "deadlock.*has finished"),
        (
            lambda x: nisa.sendrecv(load(x), load(x), 1 - nl.program_id(), 1 - nl.program_id(), nl.program_id()),
            "deadlock",
        ),
        (
            lambda x: nl.ndarray((1 + nl.program_id(), 1), dtype=nl.float32, buffer=nl.shared_hbm),
            "both cores must allocate the same",
        ),
    ],
    ids=["barrier on one core", "different pipes", "different allocations"],
)
def test_cores_that_part_are_an_error(kernel, message):
    with pytest.raises(NkiValidationError, match=message):
        run(kernel, X, lnc=2)


@emulator_only
def test_an_error_on_one_core_ends_both():
    def kernel(x):
        if nl.program_id() == 1:
            raise ValueError("core 1 fails")
        nisa.core_barrier(x, (0, 1))

    with pytest.raises(ValueError, match="core 1 fails"):
        run(kernel, X, lnc=2)


def test_store_returns_hbm():
    assert run(lambda x: store(load(x)), X).shape == (4, 2)
