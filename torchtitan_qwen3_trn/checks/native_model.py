"""Questions about a job on torchtitan's own Qwen3: degrees, positions, vocabulary, balancing, tying, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3Model

from torchtitan_qwen3_trn.checks.model_limits import (
    check_memory,
    check_positions,
    check_vocabulary,
    expert_bias_problems,
    indivisible,
)
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.models.qwen3.spec import parameter_count


def check(config: JobConfig, machine: Machine) -> list[Problem]:
    """Sequence length against positions, heads and experts against degrees, vocabulary against tokenizer, memory."""
    if config.model_spec is None:
        return []
    model = cast(Qwen3Model.Config, config.model_spec.model)
    return [
        *check_positions(config, model.max_seq_len),
        *_heads(config, model),
        *_experts(config, model),
        *_balancing(config),
        *_tying(config, model),
        *check_vocabulary(config, model.vocab_size),
        *_export(config),
        *check_memory(parameter_count(model), config, machine),
    ]


def _heads(config: JobConfig, model: Qwen3Model.Config) -> list[Problem]:
    attention = cast(GQAttention.Config, model.first_attention)
    counts = {"query heads": attention.n_heads, "key and value heads": attention.n_kv_heads or attention.n_heads}
    return indivisible("parallelism.tensor_parallel_degree", config.parallelism.tensor_parallel_degree, counts)


def _experts(config: JobConfig, model: Qwen3Model.Config) -> list[Problem]:
    degree, where = config.parallelism.expert_parallel_degree, "parallelism.expert_parallel_degree"
    counts = {layer.moe.num_experts for layer in model.layers if layer.moe is not None}
    if degree > 1 and not counts:
        return [Problem(where, f"{degree}, but this model has no experts", "set it to 1")]
    return [problem for count in counts for problem in indivisible(where, degree, {"experts": count})]


def _balancing(config: JobConfig) -> Iterator[Problem]:
    if config.model.load_balance != "aux_loss":
        return
    if min(config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree) > 1:
        # The ranks of a tensor-parallel group then route different tokens, which are not counted together.
        what = '"aux_loss" does not work with tensor and expert parallelism at once on this route'
        yield Problem("model.load_balance", what, "set one of the two degrees to 1")
    if config.compile.enable and "model" in config.compile.components:
        what = '"aux_loss" looks at routers inside the blocks that compilation would fuse'
        yield Problem("model.load_balance", what, 'take "model" out of compile.components')


def _tying(config: JobConfig, model: Qwen3Model.Config) -> list[Problem]:
    if not model.enable_weight_tying or config.parallelism.pipeline_parallel_degree <= 1:
        return []
    what = "the output layer shares the embedding's weight, which pipeline stages cannot"
    return [Problem("parallelism.pipeline_parallel_degree", what, "set it to 1, or model.enable_weight_tying = false")]


def _export(config: JobConfig) -> list[Problem]:
    if not (config.checkpoint.enable and config.checkpoint.last_save_in_hf):
        return []
    return expert_bias_problems(config, "checkpoint.last_save_in_hf = false")
