"""A job's sizes against what the kernels demand, and whether the kernels are there at all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3Model

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.job.configuration import is_rank_zero
from torchtitan_qwen3_trn.kernels.limits import JobSize, violations
from torchtitan_qwen3_trn.kernels.operator import KernelUnavailableError, Operator, logical_core_size

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.hooks import Machine
    from torchtitan_qwen3_trn.trainer import PluginTrainer

__all__ = ["attention_sizes", "check_kernel", "expert_sizes"]

logger = logging.getLogger(__name__)


def check_kernel(
    operator: Operator, sizes: dict[str, JobSize], machine: Machine, *, plugin: str, provider: str
) -> list[Problem]:
    """On Neuron: import the kernels and compare the sizes with their limits; elsewhere the reference takes any size.

    Args:
        operator: the operator in use.
        sizes: see `violations`.
        machine: where the job runs.
        plugin: name of the plugin, for messages.
        provider: its option; with ``auto`` whatever would be a problem makes the operator fall back instead.
    """
    if machine.device_type != "neuron":
        if is_rank_zero():
            text = (
                "plugin %s: on %s PyTorch references run; NKI kernels run on neuron only, and are not looked for here"
            )
            logger.info(text, plugin, machine.device_type)
        return []
    try:
        operator.prepare()
        problems = violations(operator.name, operator.limits, sizes, cores=logical_core_size())
    except KernelUnavailableError as error:
        fix = f'install what is missing, set it to "auto", or disable the plugin {plugin}'
        problems = [Problem(f"plugins.{plugin}.provider", f"{provider!r}: {error}", fix)]
    if provider == "auto" and problems:
        operator.fall_back("; ".join(problem.what for problem in problems))
        return []
    return problems


def attention_sizes(config: PluginTrainer.Config) -> dict[str, JobSize]:
    """Sequence length and head dimension of the job; none if it has no model."""
    if config.model_spec is None:
        return {}
    attention = cast(GQAttention.Config, cast(Qwen3Model.Config, config.model_spec.model).first_attention)
    return {
        "L": JobSize("training.seq_len", config.training.seq_len),
        "H": JobSize("model.head_dim", attention.head_dim or attention.dim // attention.n_heads),
    }


def expert_sizes(config: PluginTrainer.Config, *, block_rows: int) -> dict[str, JobSize]:
    """Model, expert and block dimensions of the job, and the ranks that share each; none without experts."""
    layers = cast(Qwen3Model.Config, config.model_spec.model).layers if config.model_spec is not None else []
    experts = next((layer.moe.routed_experts.inner_experts for layer in layers if layer.moe is not None), None)
    if experts is None:
        return {}
    degrees = config.parallelism
    shards = degrees.tensor_parallel_degree if degrees.expert_parallel_degree == 1 else 1
    return {
        "D": JobSize("model.dim", experts.dim),
        "F": JobSize("model.moe_hidden_dim", experts.hidden_dim, shards),
        "S": JobSize("plugins.nki-moe.block_rows", block_rows),
    }
