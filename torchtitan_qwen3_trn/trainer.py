"""Stock's trainer with the plugins' hooks called at the right moments."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import torch
import tyro
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.validate import Validator
from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn.config import JobOptions, ModelOptions
from torchtitan_qwen3_trn.device.cpu import use_sum_reduction
from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.plugins import ActivePlugins, PluginsConfig

logger = logging.getLogger(__name__)


class NotifyingCheckpointManager(CheckpointManager):
    """Stock's checkpoint manager, which tells the trainer when it has saved, and a user why it cannot save or load."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Stock's options."""

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = super()._save(curr_step, last_step)
        if saved:
            self.states["train_state"].checkpoint_saved(curr_step)
        return saved

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """As in stock; a checkpoint that cannot be loaded ends the job with a message instead of a traceback."""
        from torchtitan_qwen3_trn.checks.checkpoints import loading_problem
        from torchtitan_qwen3_trn.config_manager import end_with

        try:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        except CheckpointException as error:
            end_with(JobError([loading_problem(error, checkpoint_id)], "checkpoint"))

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **options: Any) -> Any:
        """As in stock; a checkpoint that cannot be saved ends the job with a message instead of a traceback."""
        try:
            return super().dcp_save(state_dict, checkpoint_id, *args, **options)
        except CheckpointException as error:
            self._end_unsaved(error, checkpoint_id)

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except CheckpointException as error:
            self._end_unsaved(error, self.folder)

    def _end_unsaved(self, error: CheckpointException, folder: str) -> NoReturn:
        from torchtitan_qwen3_trn.checks.checkpoints import saving_problem
        from torchtitan_qwen3_trn.config_manager import end_with

        end_with(JobError([saving_problem(error, folder)], "checkpoint"))


class PluginValidator(Validator):
    """Stock's validator, whose batches pass the ``model_inputs`` hook as training batches do."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Stock's options."""

    trainer: PluginTrainer | None = None

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[torch.nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Stock's inputs, labels and forward arguments, plus those of the plugins."""
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels, model_parts)
        if self.trainer is not None:
            self.trainer.add_model_inputs(inputs, extra_kwargs)
        return inputs, labels, extra_kwargs


class PluginTrainer(Trainer):
    """Trains one job with its plugins. ``torchtitan.train`` builds it from a job file's configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Stock's configuration and the sections a job file adds to it."""

        job: JobOptions = field(default_factory=JobOptions)
        model: ModelOptions = field(default_factory=ModelOptions)
        plugins: PluginsConfig = field(default_factory=PluginsConfig)
        validator: Validator.Config = field(default_factory=PluginValidator.Config)
        checkpoint: BaseCheckpointManager.Config = field(default_factory=NotifyingCheckpointManager.Config)
        planned_overrides: Annotated[dict[str, int], tyro.conf.Suppress] = field(default_factory=dict)
        """Nodes each override will replace, by plugin name or import path; filled when the job is checked."""
        prepared: Annotated[bool, tyro.conf.Suppress] = False
        """Whether plugins have completed and checked this configuration."""

    plugins: ActivePlugins
    local_loss: torch.Tensor | None = None
    """This rank's part of the last step's loss per token: a scalar whose sum over the ``loss`` mesh is the loss. Under
    pipeline parallelism only the last stage's is one; the others hold -1 per microbatch."""

    def __init__(self, config: Config) -> None:
        from torchtitan_qwen3_trn.config_manager import message_on_command_line
        from torchtitan_qwen3_trn.job.prepare import prepare
        from torchtitan_qwen3_trn.startup_table import log_startup

        with message_on_command_line():
            self.plugins = prepare(config)
        super().__init__(config)
        if self.device.type == "cpu":
            use_sum_reduction(self.model_parts)
        if config.validator.enable and isinstance(self.validator, PluginValidator):
            self.validator.trainer = self
        log_startup(self)

    def add_model_inputs(self, inputs: torch.Tensor, extra_kwargs: dict[str, Any]) -> None:
        """Let the plugins add forward arguments for token ids ``inputs`` ``[B, L]``."""
        self.plugins.call("model_inputs", config=self.config, inputs=inputs, extra_kwargs=extra_kwargs)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Stock's inputs, labels and forward arguments, plus those of the plugins."""
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        self.add_model_inputs(inputs, extra_kwargs)
        return inputs, labels, extra_kwargs

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        """As in stock; also adds the microbatch to ``local_loss``."""
        loss = super().forward_backward_step(**arguments)
        self.local_loss = loss.detach().clone() if self.local_loss is None else self.local_loss + loss.detach()
        return loss

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """One optimizer step as in stock, then the ``after_step`` hooks."""
        self.local_loss = None
        super().train_step(data_iterator)
        self._call_or_end("after_step", step=self.step)

    def checkpoint_saved(self, step: int) -> None:
        """Called by the checkpoint manager."""
        self._call_or_end("checkpoint_saved", step=step)

    def train(self) -> None:
        """Stock's training loop, then the ``training_ended`` hooks."""
        super().train()
        self._call_or_end("training_ended")

    def _call_or_end(self, hook: str, **arguments: Any) -> None:
        """Call ``hook``; what a user has to correct ends the job with a message instead of a traceback."""
        from torchtitan_qwen3_trn.config_manager import end_with

        try:
            self.plugins.call(hook, trainer=self, **arguments)
        except JobError as error:
            end_with(error)
