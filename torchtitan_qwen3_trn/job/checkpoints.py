"""Checks of the folders a job loads from and resumes from, before anything is built."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.job.load import is_rank_zero

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_TRAIN_STATE = "train_state"
_LISTED = 5


def check_checkpoint_folders(config: Any) -> list[Problem]:
    """Report a finished run in the job's own folder, which cannot be continued, and a missing folder to load from.

    torchtitan resumes from the newest checkpoint of ``dump_folder/checkpoint.folder`` if there is one; the last one
    of a run holds, by default, the model only, and Hugging Face exports hold nothing else. That of step 0 is a seed
    (``checkpoint.create_seed_checkpoint``) for a run to start from; torchtitan takes the model only from it.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable or "://" in checkpoint.folder + config.dump_folder:
        return []
    folder = Path(config.dump_folder, checkpoint.folder)
    newest = newest_checkpoint(folder, checkpoint.load_step)
    _say_what_is_ignored(folder)
    if newest is not None:
        return _obstacles(newest, folder)
    if checkpoint.load_step != -1:
        return [_no_such_step(checkpoint.load_step, folder)]
    source = checkpoint.initial_load_path
    if source and "://" not in source and not Path(source).is_dir():
        return [Problem("checkpoint.initial_load_path", f"{source} is not a folder", "name the checkpoint's folder")]
    return []


def check_resumed_model(config: Any) -> list[Problem]:
    """Report parameters of the job's model that the checkpoint it resumes from lacks or holds in another shape."""
    checkpoint = config.checkpoint
    if not checkpoint.enable or "://" in checkpoint.folder + config.dump_folder:
        return []
    folder = Path(config.dump_folder, checkpoint.folder)
    newest = newest_checkpoint(folder, checkpoint.load_step)
    if newest is None or not (newest / ".metadata").is_file():
        return []
    metadata = FileSystemReader(newest).read_metadata().state_dict_metadata
    saved = {name: list(entry.size) for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    with torch.device("meta"):
        state = config.model_spec.model.build().state_dict(keep_vars=True)
    tied = {id(state[name]) for name in saved if name in state}
    different = [
        f"{name} ({saved.get(name, 'absent')}, the job wants {list(value.shape)})"
        for name, value in state.items()
        if (saved[name] != list(value.shape) if name in saved else id(value) not in tied)
    ]
    if not different:
        return []
    more = f" and {len(different) - _LISTED} more" if len(different) > _LISTED else ""
    what = f"{newest} is of another model: {', '.join(different[:_LISTED])}{more}"
    return [Problem("checkpoint.folder", what, "restore the model of that run, or choose another job.dump_folder")]


def _say_what_is_ignored(folder: Path) -> None:
    """torchtitan passes over a checkpoint whose saving was interrupted, and later writes over it."""
    incomplete = [path for path in _steps(folder).values() if not _is_complete(path)]
    for path in incomplete if is_rank_zero() else ():
        logger.warning("%s is incomplete (no .metadata), so it is not resumed from", path)


def newest_checkpoint(folder: Path, load_step: int) -> Path | None:
    """The checkpoint in ``folder`` that torchtitan would resume from; ``load_step`` -1 takes the newest."""
    valid = {step: path for step, path in _steps(folder).items() if _is_complete(path)}
    return valid.get(load_step) if load_step != -1 else valid[max(valid)] if valid else None


def _steps(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(found[1]): path for path in paths if (found := _STEP.fullmatch(path.name)) and path.is_dir()}


def _is_complete(checkpoint: Path) -> bool:
    return any((checkpoint / name).is_file() for name in (".metadata", "model.safetensors.index.json"))


def _obstacles(newest: Path, folder: Path) -> list[Problem]:
    """Why a run cannot be continued from ``newest``."""
    keys: Iterable[str] = ()
    if (newest / ".metadata").is_file():
        try:
            keys = FileSystemReader(newest).read_metadata().state_dict_metadata
        except Exception as error:
            what = f"{newest / '.metadata'} cannot be read: {type(error).__name__}: {error}"
            return [Problem("checkpoint.folder", what, f"remove {newest} to continue from the checkpoint before it")]
    is_seed = newest.name == "step-0" and keys
    return [] if is_seed or any(key.startswith(_TRAIN_STATE) for key in keys) else [_finished(newest, folder)]


def _no_such_step(step: int, folder: Path) -> Problem:
    steps = sorted(number for number, path in _steps(folder).items() if _is_complete(path))
    fix = f"choose one of {steps}" if steps else "that folder holds no checkpoint; leave the key out"
    return Problem("checkpoint.load_step", f"{folder} has no complete checkpoint of step {step}", fix)


def _finished(newest: Path, folder: Path) -> Problem:
    what = f"{newest} holds a model and no training state, as a finished run leaves it, and cannot be continued"
    fix = f"choose another job.dump_folder, or move {folder} away and start from it with checkpoint.initial_load_path"
    return Problem("checkpoint.folder", what, fix)
