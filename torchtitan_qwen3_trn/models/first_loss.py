"""Whether published weights were really loaded: a first loss like that of random weights says they were not."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
from torchtitan.distributed import utils as dist_utils

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

__all__ = ["asks_for_published_weights", "global_loss", "looks_random", "report_random_first_loss"]

logger = logging.getLogger(__name__)

# A published model is several nats below random weights on any text it was made for.
_MARGIN = 0.5


def looks_random(loss: float, expected: float) -> bool:
    """Whether ``loss`` is not clearly below ``expected``, the loss of random weights; both in nats per token."""
    return loss > expected - _MARGIN


def asks_for_published_weights(config: PluginTrainer.Config) -> bool:
    """Whether the job is to start from Hugging Face files."""
    return bool(config.checkpoint.enable and config.checkpoint.initial_load_in_hf)


def global_loss(trainer: PluginTrainer) -> float:
    """The last step's loss per token over all ranks. A collective: call it on every rank."""
    loss = trainer.local_loss
    if loss is None:
        return math.nan
    dims = trainer.parallel_dims
    if dims.dp_cp_enabled:
        loss = dist_utils.dist_sum_tensor(loss, dims.get_mesh("loss"))
    # Only the last stage has a loss; the others hold negative numbers in its place.
    return dist_utils.dist_max(loss, dims.get_mesh("pp")) if dims.pp_enabled else float(loss)


def report_random_first_loss(trainer: PluginTrainer, step: int, expected: float) -> None:
    """After step 1 of a job that asked for published weights, say loudly when its loss is that of random weights.

    Call it on every rank after every step; it acts after the first one only.

    Args:
        trainer: the trainer.
        step: the step just taken, from 1.
        expected: the loss of random weights in nats per token.
    """
    if step != 1 or not asks_for_published_weights(trainer.config):
        return
    loss = global_loss(trainer)
    if not looks_random(loss, expected) or torch.distributed.get_rank() != 0:
        return
    folder = trainer.config.checkpoint.initial_load_path or trainer.config.hf_assets_path
    bar = "!" * 100
    logger.warning(
        "\n%s\nTHE WEIGHTS LOOK RANDOM: this job starts from %s, but its first loss is %.3f, and random weights "
        "would give %.3f.\nCheck that the files hold a trained model, that config.json and tokenizer belong to them, "
        "and that the text is of a kind it knows.\n%s",
        bar,
        folder,
        loss,
        expected,
        bar,
    )
