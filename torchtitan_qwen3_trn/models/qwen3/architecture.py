"""The numbers that make a Qwen3 model, their consistency, and changes to them; no torch in here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.models.qwen3.values import conversion

__all__ = ["Architecture", "Yarn", "differences", "excesses", "inconsistencies", "with_changes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN scaling of the rotary frequencies (Peng et al. 2023, arXiv 2309.00071).

    Attributes:
        factor: how much longer than the pretrained context the model is to see.
        original_max_position_embeddings: the pretrained context, in positions.
        beta_fast: dimensions turning more often than this within that context are left alone.
        beta_slow: dimensions turning less often than this are slowed down by the whole ``factor``.
        attention_factor: multiplies cos and sin; ``None`` means the paper's value, see `magnitude`.
        truncate: round the two limits outwards to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by.

        ``0.1 ln(factor) + 1``, the paper's value, unless `attention_factor` says otherwise; as in
        Transformers' ``_compute_yarn_parameters``.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A Qwen3 model, dense or mixture-of-experts, in torchtitan's terms.

    Attributes:
        vocab_size: rows of the embedding and of the output projection.
        dim: width of the residual stream.
        n_layers: transformer blocks.
        n_heads: query heads.
        n_kv_heads: key and value heads; divides `n_heads`.
        head_dim: width of one head; even, and independent of ``dim / n_heads``.
        hidden_dim: inner width of a dense feed-forward block; unused when every block has experts.
        num_experts: experts per mixture-of-experts block; 0 makes every block dense.
        top_k: experts each token visits.
        moe_hidden_dim: inner width of one expert.
        norm_topk_prob: scale the chosen experts' probabilities to sum to one.
        mlp_only_layers: blocks that stay dense in a model that has experts.
        decoder_sparse_step: every n-th block has experts.
        norm_eps: epsilon of every RMS norm.
        rope_theta: base of the rotary frequencies.
        max_seq_len: positions the model is made for.
        yarn: scaling of the rotary frequencies, or ``None``.
        enable_weight_tying: the output projection is the embedding.
        init_std: standard deviation of the random initial weights.
        router_aux_loss_coef: weight of the loss that balances experts, where a job asks for one.
        fuse_qkv: keep the three attention projections in one matrix in memory; files do not change.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int = 128
    hidden_dim: int = 0
    num_experts: int = 0
    top_k: int = 0
    moe_hidden_dim: int = 0
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_seq_len: int = 40960
    yarn: Yarn | None = None
    enable_weight_tying: bool = False
    init_std: float = 0.02
    router_aux_loss_coef: float = 0.001
    fuse_qkv: bool = True

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block ``layer`` (from 0) has experts; Transformers' ``Qwen3MoeDecoderLayer`` rule."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def moe_layers(self) -> int:
        """How many blocks have experts."""
        return sum(self.is_moe_layer(layer) for layer in range(self.n_layers))


_POSITIVE = (
    "vocab_size",
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "decoder_sparse_step",
    "norm_eps",
    "max_seq_len",
    "init_std",
)
# Far beyond any decoder there is. A slip of the finger above these would be built, slowly, until memory ends.
_AT_MOST = {"n_layers": 10_000, "num_experts": 100_000}
_EXPERT_FIELDS = {"top_k", "moe_hidden_dim", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}


def inconsistencies(arch: Architecture) -> list[tuple[str, str, str]]:
    """What makes ``arch`` impossible to build: (field, what is wrong, what would be right) for each fault."""
    found = [
        (name, f"{getattr(arch, name)} is not positive", "give a number above 0")
        for name in _POSITIVE
        if getattr(arch, name) <= 0
    ]
    if found:
        return found
    if arch.n_heads % arch.n_kv_heads:
        found.append(
            (
                "n_kv_heads",
                f"{arch.n_kv_heads} key and value heads cannot serve {arch.n_heads} query heads evenly",
                f"choose a divisor of n_heads = {arch.n_heads}",
            )
        )
    if arch.head_dim % 2:
        found.append(("head_dim", f"{arch.head_dim} is odd, and rotary embeddings turn pairs", "choose an even number"))
    if arch.rope_theta <= 1:
        found.append(("rope_theta", f"{arch.rope_theta} is not above 1", "published Qwen3 models use 1e6 to 1e7"))
    return found + _expert_faults(arch) + _yarn_faults(arch)


def _expert_faults(arch: Architecture) -> list[tuple[str, str, str]]:
    found = []
    if arch.num_experts < 0:
        found.append(("num_experts", f"{arch.num_experts} is negative", "0 makes every layer dense"))
    if arch.moe_layers < arch.n_layers and arch.hidden_dim <= 0:
        dense = arch.n_layers - arch.moe_layers
        found.append(
            (
                "hidden_dim",
                f"{arch.hidden_dim} is no width for the feed-forward of the {dense} dense layers",
                "give their inner width",
            )
        )
    if arch.num_experts > 0:
        if arch.moe_hidden_dim <= 0:
            found.append(
                (
                    "moe_hidden_dim",
                    f"{arch.num_experts} experts of inner width {arch.moe_hidden_dim}",
                    "give the inner width of one expert (Qwen3-30B-A3B: 768)",
                )
            )
        if not 1 <= arch.top_k <= arch.num_experts:
            found.append(
                (
                    "top_k",
                    f"a token cannot visit {arch.top_k} of {arch.num_experts} experts",
                    f"choose 1 to {arch.num_experts}",
                )
            )
    return found


def _yarn_faults(arch: Architecture) -> list[tuple[str, str, str]]:
    yarn = arch.yarn
    if yarn is None:
        return []
    found = []
    if yarn.factor < 1:
        found.append(("yarn.factor", f"{yarn.factor} is below 1", "4.0 stretches 32768 positions to 131072"))
    if yarn.original_max_position_embeddings <= 0:
        found.append(
            (
                "yarn.original_max_position_embeddings",
                f"{yarn.original_max_position_embeddings} is not positive",
                "Qwen3 was pretrained on 32768 positions",
            )
        )
    if not yarn.beta_fast >= yarn.beta_slow > 0:
        found.append(
            (
                "yarn.beta_fast",
                f"beta_fast {yarn.beta_fast} and beta_slow {yarn.beta_slow} are not in order",
                "need beta_fast >= beta_slow > 0; the usual pair is 32 and 1",
            )
        )
    if yarn.attention_factor is not None and yarn.attention_factor <= 0:
        found.append(
            (
                "yarn.attention_factor",
                f"{yarn.attention_factor} is not positive",
                "leave it out for 0.1 ln(factor) + 1",
            )
        )
    return found


def with_changes(arch: Architecture, changes: Mapping[str, Any]) -> Architecture:
    """``arch`` with single fields replaced, as a job file's ``[model]`` section names them.

    Args:
        arch: where to start from.
        changes: field name to new value; `Architecture.yarn` comes from ``config.json`` only.

    Raises:
        JobError: unknown fields, wrong types, and combinations that cannot be built, all at once, each with
            ``where="model.<field>"``.
    """
    problems: list[Problem] = excesses(changes)
    converted = conversion(Architecture, changes, "model", problems)
    if not problems:
        arch = replace(arch, **converted)
        problems = [Problem(f"model.{name}", what, fix) for name, what, fix in inconsistencies(arch)]
        problems += _pointless_changes(arch, set(converted))
    if problems:
        raise JobError(problems)
    return arch


def excesses(changes: Mapping[str, Any]) -> list[Problem]:
    """Values of ``[model]`` so large that even a model without weights cannot be made."""
    return [
        Problem(f"model.{name}", f"{value} is no number any model has", f"at most {_AT_MOST[name]}")
        for name, value in changes.items()
        if name in _AT_MOST and isinstance(value, int) and value > _AT_MOST[name]
    ]


def _pointless_changes(arch: Architecture, changed: set[str]) -> list[Problem]:
    if arch.num_experts == 0:
        return [
            Problem(f"model.{name}", "the model has no experts for it to act on", "set model.num_experts too")
            for name in sorted(changed & _EXPERT_FIELDS)
        ]
    beyond = [layer for layer in arch.mlp_only_layers if not 0 <= layer < arch.n_layers]
    if beyond and "mlp_only_layers" in changed:
        what = f"layers {beyond} do not exist in a model of {arch.n_layers}"
        return [Problem("model.mlp_only_layers", what, f"layers count from 0 to {arch.n_layers - 1}")]
    return []


def differences(a: Architecture, b: Architecture) -> list[str]:
    """Fields in which two architectures differ, as ``name: a's value, b's value``.

    `Architecture.fuse_qkv` is left out: it changes where weights lie in memory, not what they compute.
    """
    return [
        f"{field.name}: {getattr(a, field.name)}, {getattr(b, field.name)}"
        for field in fields(Architecture)
        if field.name != "fuse_qkv" and getattr(a, field.name) != getattr(b, field.name)
    ]
