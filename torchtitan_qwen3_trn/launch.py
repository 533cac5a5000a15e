"""The launch of a job: its rank and machine, and ending the process with a message."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from torchtitan.tools import utils

from torchtitan_qwen3_trn.errors import JobError, Problem

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

EXIT_STATUS = 2
# A launcher ends all ranks as soon as one has failed; rank 0 must have printed its message by then.
_SILENT_RANK_DELAY_S = 2.0
_SIMULATED = ("fake_backend", "local_tensor")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the job is about to run.

    Attributes:
        device_type: ``cpu``, ``cuda`` or ``neuron``, as torchtitan detected it.
        world_size: ranks of the job; the simulated number under ``comm.mode = "fake_backend"``.
    """

    device_type: str
    world_size: int


def is_rank_zero() -> bool:
    """Whether this process prints for the job: rank 0, or not started by a launcher that numbers its processes."""
    rank = os.environ.get("RANK", "0")
    return rank == "0" or not rank.isdecimal()


def is_simulated(config: Trainer.Config) -> bool:
    """Whether one process stands for all ranks, so that the other ranks' weights do not exist."""
    return config.comm.mode in _SIMULATED


def this_machine(config: Trainer.Config) -> Machine:
    """Device and number of ranks, from the launcher's environment (``NGPU`` when the ranks are simulated)."""
    return Machine(device_type=utils.device_type, world_size=ranks_in(_ranks_variable(config)))


def ranks_in(variable: str) -> int:
    """A number of ranks from the environment; 1 where it is not set, or not a number, see `launch_problems`."""
    ranks = os.environ.get(variable, "1")
    return max(int(ranks), 1) if ranks.isdecimal() else 1


def launch_problems(config: Trainer.Config) -> list[Problem]:
    """Numbers of ranks in the environment that cannot be used; torchtitan reads them after it has created folders."""
    least_values = {_ranks_variable(config): 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    problems = [
        Problem(
            name,
            f"{value!r} is not {'a number of ranks' if least else 'a rank'}",
            f"set this environment variable to {least} or more, or use torchrun",
        )
        for name, least in least_values.items()
        if not ((value := os.environ.get(name, "1")).isdecimal() and int(value) >= least)
    ]
    if is_simulated(config) and "NGPU" not in os.environ:
        what = f"is not set, and comm.mode = {config.comm.mode!r} simulates that many ranks"
        problems.append(Problem("NGPU", what, "set this environment variable, for instance NGPU=64"))
    return problems


def launcher_problems() -> list[Problem]:
    """A process that no launcher has started: torchtitan would fail later without saying so."""
    if "LOCAL_RANK" in os.environ:
        return []
    what = "LOCAL_RANK is not set: no launcher started this process"
    return [Problem("launch", what, "start it with torchrun -m torchtitan.train ...")]


def end_with(error: JobError) -> NoReturn:
    """End the process with status 2 after rank 0 has printed ``error`` on standard error."""
    if is_rank_zero():
        print(error.report(), file=sys.stderr, flush=True)  # noqa: T201
    else:
        time.sleep(_SILENT_RANK_DELAY_S)
    raise SystemExit(EXIT_STATUS) from None


@contextlib.contextmanager
def message_on_command_line() -> Iterator[None]:
    """Let a `JobError` end ``python -m torchtitan.train``, whose user wants a message; other callers get it raised."""
    try:
        yield
    except JobError as error:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name == "torchtitan.train":
            end_with(error)
        raise


@contextlib.contextmanager
def output_of_rank_zero_only() -> Iterator[None]:
    """Discard what other ranks print, such as usage errors; logging goes on, its handlers hold their streams."""
    if is_rank_zero():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            yield
        except SystemExit:
            time.sleep(_SILENT_RANK_DELAY_S)
            raise


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress log records up to warnings while a configuration is only tried; they come when it is used."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection while modules and configurations are made, all of which stay: it would find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _ranks_variable(config: Trainer.Config) -> str:
    return "NGPU" if is_simulated(config) else "WORLD_SIZE"
