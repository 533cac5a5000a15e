"""From a job to its Qwen3 model, and the checks that need the architecture."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.job.load import is_rank_zero
from torchtitan_qwen3_trn.models.memory import check_memory
from torchtitan_qwen3_trn.models.qwen3.architecture import Architecture, differences, with_changes
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS, flavor
from torchtitan_qwen3_trn.models.qwen3.hf_config import from_hf_config, read_hf_config
from torchtitan_qwen3_trn.models.qwen3.sizes import expected_first_loss, parameter_counts
from torchtitan_qwen3_trn.models.qwen3.spec import model_spec

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

logger = logging.getLogger(__name__)

# torchtitan's default step of the expert bias (arXiv 2408.15664 uses the same).
_BIAS_STEP = 1e-3


def model_spec_for(config: PluginTrainer.Config) -> ModelSpec:
    """The model that ``[model]`` describes.

    Raises:
        JobError: unknown flavor, no architecture given, a config.json the native model cannot represent, a flavor
            that contradicts the checkpoint to be loaded, or single values that do not fit together.
    """
    name, arch = described(config)
    by_loss = config.model.load_balance == "aux_loss"
    if by_loss and not arch.moe_layers:
        what = '"aux_loss", but this model has no experts'
        raise JobError([Problem("model.load_balance", what, "leave it out")])
    bias_step = _BIAS_STEP if config.model.load_balance == "bias" and arch.num_experts else None
    return model_spec(arch, flavor=name, load_balance_coeff=bias_step, balancing_loss=by_loss)


def expected_random_loss(config: PluginTrainer.Config) -> float:
    """First loss of this job's model if its weights were random, in nats per token (see `expected_first_loss`)."""
    _, arch = published(config)
    return expected_first_loss(with_changes(arch, config.model.changes()))


def use_supported_spmd_backend(config: PluginTrainer.Config, machine: Machine) -> None:
    """Expert parallelism on gloo: torchtitan's default SPMD backend uses an all-to-all that gloo does not have."""
    degrees = config.parallelism
    if machine.device_type == "cpu" and degrees.expert_parallel_degree > 1 and degrees.spmd_backend == "spmd_types":
        degrees.spmd_backend = "partial_dtensor"
        if is_rank_zero():
            logger.info(
                'parallelism.spmd_backend is set to "partial_dtensor": the uneven all-to-all of "spmd_types" '
                "does not exist in gloo"
            )


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
        *check_memory(parameter_counts(described(config)[1])[0], config, machine),
    ]


def described(config: PluginTrainer.Config) -> tuple[str, Architecture]:
    """Name and architecture of the job's model; raises as `model_spec_for`."""
    name, arch = published(config)
    changes = config.model.changes()
    if changes:
        arch = with_changes(arch, changes)
        name += " with " + ", ".join(f"{key} {value}" for key, value in changes.items())
    return name, arch


def published(config: PluginTrainer.Config) -> tuple[str, Architecture]:
    """Name and architecture from the flavor, or from config.json beside the weights; raises as `model_spec_for`."""
    folder = Path(config.hf_assets_path)
    has_config = (folder / "config.json").is_file()
    if config.model.flavor is None:
        if not has_config:
            what = f"no flavor is given and {folder} holds no config.json to take the architecture from"
            raise JobError([Problem("model.flavor", what, f"choose one of {', '.join(FLAVORS)}")])
        return folder.name, from_hf_config(read_hf_config(folder))
    arch = flavor(config.model.flavor)
    if has_config:
        _compare(config, arch, folder)
    return config.model.flavor, arch


def _compare(config: PluginTrainer.Config, arch: Architecture, folder: Path) -> None:
    checkpoint = config.checkpoint
    source = Path(checkpoint.initial_load_path or folder)
    if not checkpoint.initial_load_in_hf or source.resolve() != folder.resolve():
        return
    conflicts = differences(arch, from_hf_config(read_hf_config(folder)))
    if conflicts:
        what = f"{config.model.flavor!r} is not the checkpoint in {folder} (flavor, checkpoint): {'; '.join(conflicts)}"
        raise JobError([Problem("model.flavor", what, "leave flavor out: config.json then decides")])


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
