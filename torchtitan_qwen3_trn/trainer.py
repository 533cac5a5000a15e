"""Stock's trainer with the plugins' hooks called at the right moments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn.components import NotifyingCheckpointManager, PluginValidator
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.device.cpu import use_sum_reduction
from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.hooks import StepLog
from torchtitan_qwen3_trn.job.prepare import PreparedJob, prepare
from torchtitan_qwen3_trn.launch import end_with, message_on_command_line
from torchtitan_qwen3_trn.plugins import load_plugins_of
from torchtitan_qwen3_trn.startup_table import log_startup


class PluginTrainer(Trainer):
    """Trains one job with its plugins.

    Args:
        config: the job's configuration.
        job: the same job planned and checked; ``None`` does that first.
    """

    local_loss: torch.Tensor
    """This rank's part of the last step's loss per token, see the hook ``after_step``."""

    Config = JobConfig  # stock's base class makes this class the one that JobConfig.build() returns

    def __init__(self, config: JobConfig, *, job: PreparedJob | None = None) -> None:
        self.job = job or _prepared(config)
        self.local_loss = torch.zeros(())
        super().__init__(self.job.config)
        if self.device.type == "cpu":
            use_sum_reduction(self.model_parts)
        if isinstance(self.checkpointer, NotifyingCheckpointManager):
            self.checkpointer.on_saved = lambda step: self._call("checkpoint_saved", step=step)
        if self.job.config.validator.enable and isinstance(self.validator, PluginValidator):
            self.validator.add_model_inputs = self._add_model_inputs
        log_startup(self.job, self.model_parts, self.parallel_dims, self.device)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Stock's inputs, labels and forward arguments, plus those of the plugins."""
        inputs, labels, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        self._add_model_inputs(inputs, extra_kwargs)
        return inputs, labels, extra_kwargs

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        """As in stock; also adds the microbatch to this step's loss."""
        loss = super().forward_backward_step(**arguments)
        self.local_loss = self.local_loss + loss.detach()
        return loss

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """One optimizer step as in stock, then the ``after_step`` hooks."""
        self.local_loss = torch.zeros((), device=self.device)
        super().train_step(data_iterator)
        metrics = self.metrics_processor
        log = StepLog(step=self.step, due=metrics.should_log(self.step), write=metrics.logger.log)
        self._call("after_step", step=self.step, local_loss=self.local_loss, log=log)

    def train(self) -> None:
        """Stock's training loop, then the ``training_ended`` hooks."""
        super().train()
        self._call("training_ended")

    def _add_model_inputs(self, inputs: torch.Tensor, extra_kwargs: dict[str, Any]) -> None:
        self.job.plugins.call("model_inputs", self.job.config, inputs=inputs, extra_kwargs=extra_kwargs)

    def _call(self, hook: str, **arguments: Any) -> None:
        """Call ``hook``; what a user has to correct ends the job with a message instead of a traceback."""
        try:
            self.job.plugins.call(hook, self.job.config, trainer=self, **arguments)
        except JobError as error:
            end_with(error)


def _prepared(config: JobConfig) -> PreparedJob:
    with message_on_command_line():
        plugins, problems = load_plugins_of(config)
        return prepare(config, plugins, earlier=problems)
