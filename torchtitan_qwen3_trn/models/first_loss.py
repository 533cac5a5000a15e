"""Whether published weights were really loaded: a first loss like that of random weights says they were not."""

from __future__ import annotations

import logging
import math

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.models.described_spec import hf_config_of

logger = logging.getLogger(__name__)

# A published model is several nats below random weights on any text it was made for.
_MARGIN = 0.5


def expected_first_loss(vocab_size: int, hidden_size: int, initializer_range: float) -> float:
    """Cross-entropy per token, in nats, that a freshly initialised model has to show: ``ln V + s^2 D / 2``.

    With V = vocab_size, D = hidden_size and s = initializer_range. The final RMS norm leaves every hidden vector h
    with ``|h|^2 = D``, whatever the layers before it did. The output projection has independent rows
    ``w_v ~ N(0, s^2 I)``, so given h the V logits ``w_v . h`` are independent draws from N(0, s^2 D). For V
    this large the average of their exponentials is its expectation, ``exp(s^2 D / 2)``, hence
    ``logsumexp = ln V + s^2 D / 2``; and the target's own logit has mean 0, because nothing in the hidden
    vector knows about the target. Their difference is the loss.

    A batch scatters around it: the target logits have variance s^2 D (1.02 for the 4B model), and positions with
    the same target share most of theirs, so what counts is the number of distinct targets. 256 tokens of text
    give about +-0.14 nats, 256 random ones +-0.06.

    Holds for tied weights too: there the rows are also the embeddings, so the logit of the *input* token is
    above 0, but that is one logit of V and rarely the target.
    """
    return math.log(vocab_size) + initializer_range**2 * hidden_size / 2


def expected_random_loss(spec: ModelSpec | None) -> float:
    """First loss of the job's model if its weights were random, in nats per token (see `expected_first_loss`).

    Raises:
        JobError: the model comes without a description.
    """
    text = hf_config_of(spec)
    return expected_first_loss(text.vocab_size, text.hidden_size, getattr(text, "initializer_range", 0.02))


def looks_random(loss: float, expected: float) -> bool:
    """Whether ``loss`` is not clearly below ``expected``, the loss of random weights; both in nats per token."""
    return loss > expected - _MARGIN


def asks_for_published_weights(config: JobConfig) -> bool:
    """Whether the job is to start from Hugging Face files."""
    return bool(config.checkpoint.enable and config.checkpoint.initial_load_in_hf)


def global_loss(local_loss: torch.Tensor, dims: ParallelDims) -> float:
    """A step's loss per token over all ranks, from each rank's part. A collective: call it on every rank."""
    if dims.dp_cp_enabled:
        local_loss = dist_utils.dist_sum_tensor(local_loss, dims.get_mesh("loss"))
    # Only the last stage has a loss; the others hold negative numbers in its place.
    return dist_utils.dist_max(local_loss, dims.get_mesh("pp")) if dims.pp_enabled else float(local_loss)


def report_random_first_loss(config: JobConfig, local_loss: torch.Tensor, dims: ParallelDims, expected: float) -> None:
    """Warn on rank 0 when the first loss of a job that asked for published weights is that of random weights.

    Call it on every rank after the first step.

    Args:
        config: the job.
        local_loss: this rank's part of the first step's loss per token.
        dims: the job's parallel dimensions.
        expected: the loss of random weights in nats per token.
    """
    loss = global_loss(local_loss, dims)
    if not looks_random(loss, expected) or torch.distributed.get_rank() != 0:
        return
    folder = config.checkpoint.initial_load_path or config.hf_assets_path
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
