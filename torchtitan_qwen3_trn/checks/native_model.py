"""Questions about a job on torchtitan's own Qwen3: degrees, positions, vocabulary, balancing, tying, memory."""

from __future__ import annotations

from typing import cast

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3Model

from torchtitan_qwen3_trn.checks.model_limits import check_memory, check_positions, check_vocabulary, divisors
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
        *_export(config, model),
        *check_memory(parameter_count(model), config, machine),
    ]


def _heads(config: JobConfig, model: Qwen3Model.Config) -> list[Problem]:
    degree = config.parallelism.tensor_parallel_degree
    attention = cast(GQAttention.Config, model.first_attention)
    if degree <= 0:
        return []
    counts = {"query heads": attention.n_heads, "key and value heads": attention.n_kv_heads or attention.n_heads}
    return [
        Problem("parallelism.tensor_parallel_degree", f"{degree} does not divide the {count} {name}", divisors(count))
        for name, count in counts.items()
        if count % degree
    ]


def _experts(config: JobConfig, model: Qwen3Model.Config) -> list[Problem]:
    degree, where = config.parallelism.expert_parallel_degree, "parallelism.expert_parallel_degree"
    counts = {layer.moe.num_experts for layer in model.layers if layer.moe is not None}
    if degree > 1 and not counts:
        return [Problem(where, f"{degree}, but this model has no experts", "set it to 1")]
    return [
        Problem(where, f"{degree} does not divide the {count} experts", divisors(count))
        for count in counts
        if degree > 0 and count % degree
    ]


def _balancing(config: JobConfig) -> list[Problem]:
    if config.model.load_balance != "aux_loss":
        return []
    problems = []
    if min(config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree) > 1:
        # The ranks of a tensor-parallel group then route different tokens, which are not counted together.
        what = '"aux_loss" does not work with tensor and expert parallelism at once on this route'
        problems.append(Problem("model.load_balance", what, "set one of the two degrees to 1"))
    if config.compile.enable and "model" in config.compile.components:
        what = '"aux_loss" looks at routers inside the blocks that compilation would fuse'
        problems.append(Problem("model.load_balance", what, 'take "model" out of compile.components'))
    return problems


def _tying(config: JobConfig, model: Qwen3Model.Config) -> list[Problem]:
    if not model.enable_weight_tying or config.parallelism.pipeline_parallel_degree <= 1:
        return []
    what = "the output layer shares the embedding's weight, which pipeline stages cannot"
    return [Problem("parallelism.pipeline_parallel_degree", what, "set it to 1, or model.enable_weight_tying = false")]


def _export(config: JobConfig, model: Qwen3Model.Config) -> list[Problem]:
    biased = any(layer.moe is not None and layer.moe.load_balance_coeff is not None for layer in model.layers)
    if not (config.checkpoint.enable and config.checkpoint.last_save_in_hf and biased):
        return []
    what = 'Hugging Face files have no place for the expert bias that "bias" trains, so routing would change'
    return [
        Problem("model.load_balance", what, 'set it to "aux_loss" or "none", or checkpoint.last_save_in_hf = false')
    ]
