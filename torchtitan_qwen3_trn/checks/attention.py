"""Questions about attention through SDPA: can it run with context parallelism, and does every layer get its mask."""

from __future__ import annotations

from torchtitan.models.common.attention import FlexAttention

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import MODEL_PREFIX, NodeOverride
from torchtitan_qwen3_trn.launch import Machine
from torchtitan_qwen3_trn.overrides.document_sdpa import sdpa


def context_parallel_problem(*, document_mask: bool, spmd_backend: str, device_type: str) -> str | None:
    """Why `DocumentSDPA` cannot run with ``context_parallel_degree > 1``, or ``None`` if it can.

    torchtitan shards only FlexAttention's ``BlockMask``. Without a mask, its multi-axis backends gather keys and
    values but leave the queries split, where plain causal attention would be wrong, and refuse SDPA;
    ``partial_dtensor`` uses PyTorch's ring attention, which knows the SDPA operators of CUDA only.
    """
    if document_mask:
        return "each rank would need its rows of the document mask, and torchtitan can split only FlexAttention's"
    if spmd_backend != "partial_dtensor":
        return f"parallelism.spmd_backend = {spmd_backend!r} splits the sequence for FlexAttention only"
    if device_type != "cuda":
        return f"PyTorch's ring attention has no handler for the attention operator of device {device_type!r}"
    return None


def check_attention(
    config: JobConfig, machine: Machine, *, document_mask: bool, fqns: list[str] | None
) -> list[Problem]:
    """Report context parallelism that cannot work, and layers left on a FlexAttention that would get a wrong mask.

    Args:
        config: the job, with its model but before any override.
        machine: where it runs.
        document_mask: as given to `sdpa`.
        fqns: patterns of the modules to replace; ``None`` replaces all.
    """
    problems, degree = _left_over_problems(config, document_mask, fqns), config.parallelism.context_parallel_degree
    reason = context_parallel_problem(
        document_mask=document_mask, spmd_backend=config.parallelism.spmd_backend, device_type=machine.device_type
    )
    if degree > 1 and reason is not None:
        what = f"plugin sdpa cannot run with {degree}: {reason}"
        fix = 'set it to 1, or keep FlexAttention with plugins.disable = ["sdpa"]'
        problems.append(Problem("parallelism.context_parallel_degree", what, fix))
    return problems


def _left_over_problems(config: JobConfig, document_mask: bool, fqns: list[str] | None) -> list[Problem]:
    """All layers of a stock decoder get the one mask that suits the first layer, or the document mask."""
    every = list(NodeOverride(target=FlexAttention.Config, factory=sdpa).nodes(config))
    replaced = set(NodeOverride(target=FlexAttention.Config, factory=sdpa, fqns=fqns).nodes(config))
    left = [fqn for fqn in every if fqn not in replaced]
    if not left or not replaced or (not document_mask and every[0] == left[0]):
        return []
    what = f"{left[0].removeprefix(MODEL_PREFIX)} stays on FlexAttention, which cannot use this plugin's mask"
    return [Problem("plugins.sdpa.fqns", what, "name every attention layer or none")]
