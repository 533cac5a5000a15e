"""Questions about a job on torchtitan's own Qwen3: degrees, positions, vocabulary, balancing, tying, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3Model

from torchtitan_qwen3_trn.checks.memory import check_memory
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.models.qwen3.spec import parameter_count

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer


def check(config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Sequence length against positions, heads and experts against degrees, vocabulary against tokenizer, memory."""
    if config.model_spec is None:
        return []
    model = cast(Qwen3Model.Config, config.model_spec.model)
    return [
        *_positions(config, model),
        *_heads(config, model),
        *_experts(config, model),
        *_balancing(config),
        *_tying(config, model),
        *_vocabulary(config, model),
        *_export(config, model),
        *check_memory(parameter_count(model), config, machine),
    ]


def _positions(config: PluginTrainer.Config, model: Qwen3Model.Config) -> list[Problem]:
    seq_len, positions = config.training.seq_len, model.max_seq_len
    if seq_len <= positions:
        return []
    what = f"{seq_len} is beyond the {positions} positions of this model"
    return [Problem("training.seq_len", what, f"at most {positions}; a longer one needs YaRN or model.max_seq_len")]


def _heads(config: PluginTrainer.Config, model: Qwen3Model.Config) -> list[Problem]:
    degree = config.parallelism.tensor_parallel_degree
    attention = cast(GQAttention.Config, model.first_attention)
    if degree <= 0:
        return []
    counts = {
        "query heads": attention.n_heads,
        "key and value heads": attention.n_kv_heads or attention.n_heads,
    }
    return [
        Problem(
            "parallelism.tensor_parallel_degree",
            f"{degree} does not divide the {count} {name}",
            divisors(count),
        )
        for name, count in counts.items()
        if count % degree
    ]


def divisors(count: int) -> str:
    """The remedy for a degree that does not divide ``count``."""
    return f"choose one of {[degree for degree in range(1, count + 1) if count % degree == 0]}"


def _experts(config: PluginTrainer.Config, model: Qwen3Model.Config) -> list[Problem]:
    degree, where = config.parallelism.expert_parallel_degree, "parallelism.expert_parallel_degree"
    counts = {layer.moe.num_experts for layer in model.layers if layer.moe is not None}
    if degree > 1 and not counts:
        return [Problem(where, f"{degree}, but this model has no experts", "set it to 1")]
    return [
        Problem(where, f"{degree} does not divide the {count} experts", divisors(count))
        for count in counts
        if degree > 0 and count % degree
    ]


def _balancing(config: PluginTrainer.Config) -> list[Problem]:
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


def _tying(config: PluginTrainer.Config, model: Qwen3Model.Config) -> list[Problem]:
    if not model.enable_weight_tying or config.parallelism.pipeline_parallel_degree <= 1:
        return []
    what = "the output layer shares the embedding's weight, which pipeline stages cannot"
    return [Problem("parallelism.pipeline_parallel_degree", what, "set it to 1, or model.enable_weight_tying = false")]


def _vocabulary(config: PluginTrainer.Config, model: Qwen3Model.Config) -> list[Problem]:
    entries = tokenizer_entries(Path(config.hf_assets_path))
    if entries <= model.vocab_size:
        return []
    what = f"{model.vocab_size} is less than the {entries} entries of the tokenizer in {config.hf_assets_path}"
    return [Problem("model.vocab_size", what, "raise it, or use the tokenizer of this model")]


def tokenizer_entries(folder: Path) -> int:
    """Highest token id plus one, from tokenizer.json; 0 when there is none to read."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = list(tokenizer["model"]["vocab"].values())
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return max(ids, default=-1) + 1


def _export(config: PluginTrainer.Config, model: Qwen3Model.Config) -> list[Problem]:
    biased = any(layer.moe is not None and layer.moe.load_balance_coeff is not None for layer in model.layers)
    if not (config.checkpoint.enable and config.checkpoint.last_save_in_hf and biased):
        return []
    what = 'Hugging Face files have no place for the expert bias that "bias" trains, so routing would change'
    return [
        Problem("model.load_balance", what, 'set it to "aux_loss" or "none", or checkpoint.last_save_in_hf = false')
    ]
