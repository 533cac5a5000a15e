"""What an architecture implies before anything is built: parameter counts and the loss of random weights."""

from __future__ import annotations

import math

from torchtitan_qwen3_trn.models.qwen3.architecture import Architecture

__all__ = ["expected_first_loss", "parameter_counts"]


def parameter_counts(arch: Architecture) -> tuple[int, int]:
    """(all parameters, those one token uses): a token visits ``top_k`` of the experts and everything else.

    A tied embedding counts once. The embedding table counts as used, as in the published "3.3B activated".
    """
    attention = arch.dim * arch.head_dim * 2 * (arch.n_heads + arch.n_kv_heads)
    norms = 2 * arch.dim + 2 * arch.head_dim
    dense = 3 * arch.dim * arch.hidden_dim
    expert = 3 * arch.dim * arch.moe_hidden_dim
    router = arch.dim * arch.num_experts
    tables = arch.vocab_size * arch.dim * (1 if arch.enable_weight_tying else 2)

    moe = arch.moe_layers
    shared = tables + arch.dim + arch.n_layers * (attention + norms) + (arch.n_layers - moe) * dense + moe * router
    return shared + moe * arch.num_experts * expert, shared + moe * arch.top_k * expert


def expected_first_loss(arch: Architecture) -> float:
    """Cross-entropy per token, in nats, that a freshly initialised model has to show: ``ln V + s^2 D / 2``.

    With V = vocab_size, D = dim and s = init_std. The final RMS norm leaves every hidden vector h with
    ``|h|^2 = D``, whatever the layers before it did. The output projection has independent rows
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
    return math.log(arch.vocab_size) + arch.init_std**2 * arch.dim / 2
