"""Questions about kernels: do they support the job's sizes, and can they be imported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import cast

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3Model

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.kernels.experts import experts
from torchtitan_qwen3_trn.kernels.limits import JobSize, violations
from torchtitan_qwen3_trn.kernels.operator import KernelUnavailableError, Operator, logical_core_size
from torchtitan_qwen3_trn.launch import Machine, is_rank_zero

logger = logging.getLogger(__name__)


def kernel_problems(
    operator: Operator, sizes: dict[str, JobSize], machine: Machine, *, plugin: str, provider: str
) -> list[Problem]:
    """On Neuron: import the kernels and compare the sizes with their limits; elsewhere the reference takes any size.

    Args:
        operator: the operator in use.
        sizes: see `violations`.
        machine: where the job runs.
        plugin: name of the plugin, for messages.
        provider: its option, for messages.
    """
    if machine.device_type != "neuron":
        return []
    try:
        operator.neuron  # noqa: B018  imports the kernels
        return violations(operator.name, operator.limits, sizes, cores=logical_core_size())
    except KernelUnavailableError as error:
        fix = f'install what is missing, set it to "auto", or disable the plugin {plugin}'
        return [Problem(f"plugins.{plugin}.provider", f"{provider!r}: {error}", fix)]


def uses_kernel(operator: Operator, sizes: dict[str, JobSize], machine: Machine, *, plugin: str, provider: str) -> bool:
    """Whether the kernels are to run on Neuron: with provider ``auto`` only where `kernel_problems` finds none.

    Logs on rank 0 where PyTorch operators run instead, and why. Arguments as for `kernel_problems`.
    """
    problems = kernel_problems(operator, sizes, machine, plugin=plugin, provider=provider) if provider == "auto" else []
    if not is_rank_zero():
        return not problems
    if machine.device_type != "neuron":
        text = "plugin %s: on %s PyTorch references run; NKI kernels run on neuron only, and are not looked for here"
        logger.info(text, plugin, machine.device_type)
    if problems:
        reasons = "; ".join(problem.what for problem in problems)
        logger.warning("plugin %s: %s runs as PyTorch operators on Neuron: %s", plugin, operator.name, reasons)
    return not problems


def attention_sizes(config: JobConfig) -> dict[str, JobSize]:
    """Sequence length and head dimension of the job; none if it has no model."""
    if config.model_spec is None:
        return {}
    attention = cast(GQAttention.Config, cast(Qwen3Model.Config, config.model_spec.model).first_attention)
    return {
        "L": JobSize("training.seq_len", config.training.seq_len),
        "H": JobSize("model.head_dim", attention.head_dim or attention.dim // attention.n_heads),
    }


def expert_sizes(config: JobConfig, *, block_rows: int) -> dict[str, JobSize]:
    """Model, expert and block dimensions of the job, and the ranks that share each; none without experts."""
    layers = cast(Qwen3Model.Config, config.model_spec.model).layers if config.model_spec is not None else []
    inner = next((layer.moe.routed_experts.inner_experts for layer in layers if layer.moe is not None), None)
    if inner is None:
        return {}
    degrees = config.parallelism
    shards = degrees.tensor_parallel_degree if degrees.expert_parallel_degree == 1 else 1
    return {
        "D": JobSize("model.dim", inner.dim),
        "F": JobSize("model.moe_hidden_dim", inner.hidden_dim, shards),
        "S": JobSize("plugins.nki-moe.block_rows", block_rows),
    }


def check_experts(
    config: JobConfig, machine: Machine, *, plugin: str, provider: str, block_rows: int
) -> Iterator[Problem]:
    """Options of ``plugin`` and, unless its ``provider`` is ``auto``, the experts' sizes and kernels."""
    if block_rows < 1:
        yield Problem(f"plugins.{plugin}.block_rows", f"{block_rows} is not possible", "it must be positive")
    if config.debug.spmd_typechecking:
        what = f"torchtitan's type checker does not know the operators of the plugin {plugin}"
        yield Problem("debug.spmd_typechecking", what, "set it to false")
    sizes = expert_sizes(config, block_rows=block_rows)
    if sizes and provider != "auto":
        yield from kernel_problems(experts, sizes, machine, plugin=plugin, provider=provider)


def fusion_problems(config: JobConfig, *, provider: str) -> Iterator[Problem]:
    """What keeps ``plugins.nki-rope.fused_qk_norm`` from being computed, or from being right."""
    degree = config.parallelism.tensor_parallel_degree
    without = "or plugins.nki-rope.fused_qk_norm = false"
    if provider == "nkilib":
        what = '"nkilib" has no kernel that normalises too'
        yield Problem("plugins.nki-rope.provider", what, f'choose "ours", {without}')
    if degree > 1:
        what = f"{degree}, but the gradients of the norms' weights would not be summed over the ranks that share heads"
        yield Problem("parallelism.tensor_parallel_degree", what, f"set it to 1, {without}")
    if config.parallelism.spmd_backend == "full_dtensor":
        what = '"full_dtensor" passes the norms\' weights as DTensors, which their operator does not take'
        fix = f'set it to "spmd_types" or "partial_dtensor", {without}'
        yield Problem("parallelism.spmd_backend", what, fix)
