"""Questions about the folders that a job loads from and resumes from."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.launch import is_rank_zero

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_TRAIN_STATE = "train_state"
_LISTED = 5


def check_checkpoint_folders(config: Any) -> list[Problem]:
    """Report what keeps the run from being continued or from loading the checkpoint it names, as far as files tell.

    torchtitan resumes from the newest checkpoint of ``dump_folder/checkpoint.folder`` if there is one; the last one
    of a run holds, by default, the model only, and Hugging Face exports hold nothing else. That of step 0 is a seed
    (``checkpoint.create_seed_checkpoint``) for a run to start from; torchtitan takes the model only from it.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable or "://" in checkpoint.folder + config.dump_folder:
        return []
    folder = Path(config.dump_folder, checkpoint.folder)
    _warn_of_incomplete(folder)
    if (newest := newest_checkpoint(config)) is not None:
        return _obstacles(newest, folder)
    if checkpoint.load_step != -1:
        return [_no_such_step(checkpoint.load_step, folder)]
    source, where = checkpoint.initial_load_path, "checkpoint.initial_load_path"
    if not source or "://" in source:
        return []
    if not Path(source).is_dir():
        return [Problem(where, f"{source} is not a folder", "name the checkpoint's folder")]
    if checkpoint.initial_load_in_hf:
        return []
    if not (Path(source) / ".metadata").is_file():
        fix = "name a folder step-N, or set checkpoint.initial_load_in_hf for Hugging Face files"
        return [Problem(where, f"{source} is not a training checkpoint: there is no .metadata in it", fix)]
    fix = "copy the checkpoint again, or name another one"
    return [Problem(where, fault, fix) for fault in checkpoint_faults(Path(source))]


def checkpoint_faults(folder: Path) -> list[str]:
    """Files of the training checkpoint ``folder`` that are absent or shorter than its ``.metadata`` says."""
    metadata = _metadata(folder)
    if isinstance(metadata, str):
        return [metadata]
    wanted: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        wanted[info.relative_path] = max(wanted.get(info.relative_path, 0), info.offset + info.length)
    faults = []
    for name, nbytes in sorted(wanted.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            faults.append(f"{folder / name}, which holds part of the checkpoint, cannot be read ({error.strerror})")
            continue
        if size < nbytes:
            faults.append(f"{folder / name} is cut off: it has {size} bytes, and the checkpoint needs {nbytes}")
    more = [f"and so are {len(faults) - _LISTED} more of its files"] if len(faults) > _LISTED else []
    return faults[:_LISTED] + more


def check_loaded_model(config: Any) -> list[Problem]:
    """Report parameters of the job's model that the training checkpoint it loads lacks or has in another shape."""
    checkpoint = config.checkpoint
    if not checkpoint.enable or "://" in checkpoint.folder + config.dump_folder:
        return []
    source, where = newest_checkpoint(config), "checkpoint.folder"
    fix = "restore the model of that run, or choose another job.dump_folder"
    if source is None and checkpoint.initial_load_path and not checkpoint.initial_load_in_hf:
        source, where = Path(checkpoint.initial_load_path), "checkpoint.initial_load_path"
        fix = "describe the model of that checkpoint in [model], or name another checkpoint"
    if source is None or not (source / ".metadata").is_file():
        return []
    metadata = FileSystemReader(source).read_metadata().state_dict_metadata
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
    return [Problem(where, f"{source} is of another model: {', '.join(different[:_LISTED])}{more}", fix)]


def _warn_of_incomplete(folder: Path) -> None:
    """torchtitan ignores a checkpoint whose saving was interrupted, and later overwrites it."""
    incomplete = _steps(folder, complete=False).values() if is_rank_zero() else ()
    for path in incomplete:
        logger.warning("%s is incomplete (no .metadata), so it is not resumed from", path)


def newest_checkpoint(config: Any) -> Path | None:
    """The checkpoint that torchtitan would resume from: that of ``checkpoint.load_step``, or the newest if it is -1."""
    checkpoint = config.checkpoint
    steps = _steps(Path(config.dump_folder, checkpoint.folder)) if checkpoint.enable else {}
    return steps.get(max(steps, default=-1) if checkpoint.load_step == -1 else checkpoint.load_step)


def _steps(folder: Path, *, complete: bool = True) -> dict[int, Path]:
    paths = folder.iterdir() if os.path.isdir(folder) else ()
    found = {int(match[1]): path for path in paths if (match := _STEP.fullmatch(path.name)) and path.is_dir()}
    return {step: path for step, path in found.items() if _is_complete(path) == complete}


def _is_complete(checkpoint: Path) -> bool:
    return any((checkpoint / name).is_file() for name in (".metadata", "model.safetensors.index.json"))


def _obstacles(newest: Path, folder: Path) -> list[Problem]:
    """Why a run cannot be continued from ``newest``."""
    if not (newest / ".metadata").is_file():
        return [_finished(newest, folder)]
    if faults := checkpoint_faults(newest):
        fix = f"remove {newest} to continue from the checkpoint before it"
        return [Problem("checkpoint.folder", fault, fix) for fault in faults]
    keys = FileSystemReader(newest).read_metadata().state_dict_metadata
    is_seed = newest.name == "step-0" and keys
    return [] if is_seed or any(key.startswith(_TRAIN_STATE) for key in keys) else [_finished(newest, folder)]


def _no_such_step(step: int, folder: Path) -> Problem:
    steps = sorted(_steps(folder))
    fix = f"choose one of {steps}" if steps else "that folder holds no checkpoint; leave the key out"
    return Problem("checkpoint.load_step", f"{folder} has no complete checkpoint of step {step}", fix)


def _metadata(folder: Path) -> Metadata | str:
    """The checkpoint's metadata, or why they cannot be read."""
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:
        return f"{folder / '.metadata'} cannot be read: {type(error).__name__}: {error}"


def _finished(newest: Path, folder: Path) -> Problem:
    what = f"{newest} holds a model and no training state, as a finished run leaves it, and cannot be continued"
    fix = f"choose another job.dump_folder, or move {folder} away and start from it with checkpoint.initial_load_path"
    return Problem("checkpoint.folder", what, fix)
