"""Checks of the folders a job loads from and resumes from, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchtitan_qwen3_trn.errors import Problem

_STEP = re.compile(r"step-(\d+)")
_TRAIN_STATE = "train_state"


def check_checkpoint_folders(config: Any) -> list[Problem]:
    """Report a finished run in the job's own folder, which cannot be continued, and a missing folder to load from.

    torchtitan resumes from the newest checkpoint of ``dump_folder/checkpoint.folder`` if there is one; the last one
    of a run holds, by default, the model only, and Hugging Face exports hold nothing else.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable or "://" in checkpoint.folder + config.dump_folder:
        return []
    folder = Path(config.dump_folder, checkpoint.folder)
    newest = newest_checkpoint(folder, checkpoint.load_step)
    if newest is not None:
        return _obstacles(newest, folder)
    source = checkpoint.initial_load_path
    if source and "://" not in source and not Path(source).is_dir():
        return [Problem("checkpoint.initial_load_path", f"{source} is not a folder", "name the checkpoint's folder")]
    return []


def newest_checkpoint(folder: Path, load_step: int) -> Path | None:
    """The checkpoint in ``folder`` that torchtitan would resume from; ``load_step`` -1 takes the newest."""
    if not folder.is_dir():
        return None
    steps = {int(found[1]): path for path in folder.iterdir() if (found := _STEP.fullmatch(path.name))}
    valid = {
        step: path
        for step, path in steps.items()
        if (path / ".metadata").is_file() or (path / "model.safetensors.index.json").is_file()
    }
    return valid.get(load_step) if load_step != -1 else valid[max(valid)] if valid else None


def _obstacles(newest: Path, folder: Path) -> list[Problem]:
    """Why a run cannot be continued from ``newest``."""
    keys: Iterable[str] = ()
    if (newest / ".metadata").is_file():
        try:
            keys = FileSystemReader(newest).read_metadata().state_dict_metadata
        except Exception as error:
            what = f"{newest / '.metadata'} cannot be read: {type(error).__name__}: {error}"
            return [Problem("checkpoint.folder", what, f"remove {newest} to continue from the checkpoint before it")]
    return [] if any(key.startswith(_TRAIN_STATE) for key in keys) else [_finished(newest, folder)]


def _finished(newest: Path, folder: Path) -> Problem:
    what = f"{newest} holds a model and no training state, as a finished run leaves it, and cannot be continued"
    fix = f"choose another job.dump_folder, or move {folder} away and start from it with checkpoint.initial_load_path"
    return Problem("checkpoint.folder", what, fix)
