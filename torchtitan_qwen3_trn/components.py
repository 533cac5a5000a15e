"""Stock's checkpoint manager and validator with one callback each, through which the trainer calls plugins."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.validate import Validator

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.launch import end_with


class NotifyingCheckpointManager(CheckpointManager):
    """Stock's checkpoint manager, which reports saved checkpoints, and failures as messages instead of tracebacks."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Stock's options."""

    on_saved: Callable[[int], None] = staticmethod(lambda step: None)
    """Called with the step after a checkpoint was written, or staged with ``async_mode``."""

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = super()._save(curr_step, last_step)
        if saved:
            self.on_saved(curr_step)
        return saved

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """As in stock; a checkpoint that cannot be loaded ends the job with a message."""
        try:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        except CheckpointException as error:
            end_with(JobError([_loading_problem(error, checkpoint_id)], "checkpoint"))

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **options: Any) -> Any:
        """As in stock; a checkpoint that cannot be saved ends the job with a message."""
        try:
            return super().dcp_save(state_dict, checkpoint_id, *args, **options)
        except CheckpointException as error:
            _end_unsaved(error, checkpoint_id)

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except CheckpointException as error:
            _end_unsaved(error, self.folder)


class PluginValidator(Validator):
    """Stock's validator, whose batches pass the ``model_inputs`` hook as training batches do."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Stock's options."""

    add_model_inputs: Callable[[torch.Tensor, dict[str, Any]], None] = staticmethod(lambda inputs, extra_kwargs: None)
    """Called with token ids ``[B, L]`` and the forward arguments, to which it may add."""

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[torch.nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Stock's inputs, labels and forward arguments, plus those of the plugins."""
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels, model_parts)
        self.add_model_inputs(inputs, extra_kwargs)
        return inputs, labels, extra_kwargs


def _end_unsaved(error: CheckpointException, folder: str) -> NoReturn:
    there = next((each for each in (Path(folder), *Path(folder).parents) if each.exists()), Path())
    # torch's zip writer reports a full disk with an error of its own.
    space = "" if "://" in folder else f"; {shutil.disk_usage(there).free / 1e9:.1f} GB are free there"
    what = f"the checkpoint cannot be saved ({_first_cause(error)}){space}"
    fix = "free space or correct the folder, and resume from the checkpoint before it"
    end_with(JobError([Problem(folder, what, fix)], "checkpoint"))


def _loading_problem(error: CheckpointException, folder: str) -> Problem:
    fix = "use the model and optimizer it was saved with; if a file is damaged, copy it again or use an earlier step"
    return Problem(folder, f"cannot be loaded ({_first_cause(error)})", fix)


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda each: each[0])
    return f"{type(cause).__name__} on rank {rank}: {' '.join(str(cause).split())[:300] or 'no reason given'}"
