"""A state dict on any number of ranks -> a Hugging Face folder that is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.weights.folder_assets import write_assets
from torchtitan_qwen3_trn.weights.folder_check import check_export
from torchtitan_qwen3_trn.weights.manifest import MANIFEST, write_manifest
from torchtitan_qwen3_trn.weights.publish import Draft
from torchtitan_qwen3_trn.weights.writer import InPlaceWriter, sha256_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to write, and where.

    Attributes:
        destination: the folder to publish; it must not exist.
        config: Transformers' configuration of the model.
        dtype: type of all tensors in the files.
        limit: bytes of tensors in one file at most.
        assets: folder whose tokenizer and generation settings go along.
        facts: what the manifest says beyond files and versions, such as the step.
    """

    destination: Path
    config: PreTrainedConfig
    dtype: torch.dtype
    limit: int
    assets: Path
    facts: dict[str, Any] = field(default_factory=dict)


def export(state_dict: Mapping[str, Any], wanted: Export, *, planner: DefaultSavePlanner | None = None) -> None:
    """Write ``state_dict``, tensors by their names in files, as the Hugging Face folder ``wanted.destination``.

    A collective if a process group exists: call it on every rank, each with the tensors (or parts of tensors) it
    holds. No tensor moves between ranks. Beyond the state dict a rank needs the memory of a few windows of 32 MiB.

    Args:
        state_dict: plain tensors and DTensors.
        wanted: what to write and where.
        planner: gives the tensors' values, if ``state_dict`` does not hold them itself.

    Raises:
        JobError: on every rank, with what went wrong on any; nothing is published then and nothing is left behind.
    """
    started = time.monotonic()
    layout = in_agreement(lambda: layout_of(build_on_meta(wanted.config)))
    nbytes = sum(math.prod(shape) for shape in layout.shapes.values()) * wanted.dtype.itemsize
    with on_rank_zero(lambda: Draft(wanted.destination)) or contextlib.nullcontext() as draft, _progress_bar() as bar:
        folder = from_rank_zero(draft.folder if draft else Path())
        in_agreement(lambda: _require_visible(folder))
        on_rank_zero(lambda: _prepare(folder, wanted, nbytes))
        task = bar.add_task("export", total=nbytes / _world_size())
        writer = InPlaceWriter(
            folder,
            expected=layout.shapes,
            dtype=wanted.dtype,
            limit=wanted.limit,
            progress=lambda written: bar.advance(task, written),
        )
        try:
            save(dict(state_dict), storage_writer=writer, planner=planner or DefaultSavePlanner())
        except CheckpointException as error:
            # The same fault on several ranks is one problem.
            found = [problem for cause, _ in error.failures.values() for problem in problems_of(cause, folder)]
            raise JobError(dict.fromkeys(found), "export") from error
        checksums = _checksums(folder, writer.checksums)
        in_agreement(lambda: _complete(draft, wanted, checksums) if draft else None)
    if draft:
        seconds = time.monotonic() - started
        logger.info("Exported to %s in %.1f s (%.2f GB)", wanted.destination, seconds, nbytes / 1e9)


def in_agreement(action: Callable[[], _T]) -> _T:
    """The result of ``action``, if it succeeded on every rank. A collective.

    Raises:
        JobError: on every rank, with what failed on any.
    """
    problems: list[Problem] = []
    result: Any = None
    try:
        result = action()
    except Exception as error:
        logger.debug("failed on rank %d", _rank(), exc_info=True)
        problems = problems_of(error)
    if found := dict.fromkeys(problem for each in _from_all_ranks(problems) for problem in each):
        raise JobError(found, "export")
    return result


def on_rank_zero(action: Callable[[], _T]) -> _T | None:
    """`in_agreement` with an action that only rank 0 takes; ``None`` on the others."""
    return in_agreement(lambda: action() if _rank() == 0 else None)


def from_rank_zero(value: _T) -> _T:
    """The ``value`` of rank 0, on every rank. A collective."""
    return _from_all_ranks(value)[0]


def problems_of(error: BaseException, folder: Path | None = None) -> list[Problem]:
    """What ``error`` means for a user who wants ``folder`` written."""
    if isinstance(error, JobError):
        return error.problems
    # torch's zip writer replaces the file system's error by one of its own.
    error = error.__context__ if isinstance(error.__context__, OSError) else error
    where = str(folder or "export")
    if isinstance(error, OSError):
        where = str(error.filename or where)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what = f"the disk is full or the file may not grow ({error.strerror}); nothing was published"
            return [Problem(where, what, "free space, or choose another folder")]
        return [Problem(where, f"cannot be written ({error.strerror or error}); nothing was published")]
    return [Problem(where, f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _from_all_ranks(value: _T) -> list[_T]:
    """The ``value`` of each rank, on every rank."""
    values = [value] * _world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def _require_visible(folder: Path) -> None:
    if not folder.is_dir():
        what = f"rank {_rank()} on {platform.node()} does not see {folder}, which rank 0 has created"
        raise JobError([Problem("export", what, "export to a folder that all hosts share")])


def _prepare(folder: Path, wanted: Export, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        what = f"the disk is full: {nbytes} bytes are to be written and {free} are free"
        raise JobError([Problem(str(folder.parent), what, "free space, or choose another folder")])
    write_assets(folder, wanted.config, dtype=wanted.dtype, source=wanted.assets)


def _checksums(folder: Path, known: dict[str, str]) -> dict[str, str]:
    """SHA-256 of all weight files; files of several ranks are divided among the ranks."""
    found = {file: checksum for each in _from_all_ranks(known) for file, checksum in each.items()}
    rest = sorted(path for path in folder.glob("*.safetensors") if path.name not in found)
    mine = in_agreement(lambda: {path.name: sha256_of(path) for path in rest[_rank() :: _world_size()]})
    return found | {file: checksum for each in _from_all_ranks(mine) for file, checksum in each.items()}


def _complete(draft: Draft, wanted: Export, checksums: dict[str, str]) -> None:
    others = (path for path in draft.folder.iterdir() if path.name not in checksums and path.name != MANIFEST)
    checksums = checksums | {path.name: sha256_of(path) for path in others}
    write_manifest(draft.folder, checksums, wanted.facts | {"dtype": str(wanted.dtype).removeprefix("torch.")})
    if problems := check_export(draft.folder, wanted.config):
        raise JobError(problems, "the export failed its own check and was not published")
    draft.publish()


def _progress_bar() -> Progress:
    """A progress bar on standard error of rank 0, if that is a terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    return Progress("export", *columns, console=console, disable=_rank() != 0 or not console.is_terminal)
