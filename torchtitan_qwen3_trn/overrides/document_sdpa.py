"""Scaled-dot-product attention that respects packed documents, in place of FlexAttention.

Stock torchtitan keeps its `ScaledDotProductAttention` away from language models because it takes no mask and so
attends across the documents packed into one row. `DocumentSDPA` takes the mask that `document_mask` builds once per
batch, and runs wherever ``torch.nn.functional.scaled_dot_product_attention`` does.

Shape suffixes: B batch, L sequence, N heads (query or key/value), H head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import NodeOverride
from torchtitan_qwen3_trn.job.override_plan import MODEL_PREFIX, matching_nodes

if TYPE_CHECKING:
    from torchtitan.config import ParallelismConfig

    from torchtitan_qwen3_trn.hooks import Machine
    from torchtitan_qwen3_trn.trainer import PluginTrainer

__all__ = ["DocumentSDPA", "check", "context_parallel_problem", "document_mask", "sdpa"]


class DocumentSDPA(ScaledDotProductAttention):
    """Causal attention inside each packed document, through PyTorch's SDPA.

    A subclass of stock's SDPA module so that torchtitan's own rules for it apply, above all the refusal of context
    parallelism by the multi-axis backends. Unlike stock it leaves the choice of the SDPA backend to PyTorch: a fixed
    list of CUDA backends rules out those of other devices.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        """Options of `DocumentSDPA`."""

        document_mask: bool = True
        """Use the mask that is passed in. False attends causally over the whole row, across documents."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.document_mask = config.document_mask

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend.

        Args:
            q_BLNH: queries; any floating dtype, the same for all three.
            k_BLNH: keys; N may be a divisor of the queries' N if ``enable_gqa``.
            v_BLNH: values, shaped like the keys.
            attention_masks: boolean ``(B or 1, 1, L, L)``, true where a query may attend; ``None`` is plain causal
                attention. Ignored when ``document_mask`` is off.
            scale: factor on the logits; ``None`` means ``H ** -0.5``.
            enable_gqa: let groups of query heads share a key/value head.

        Returns:
            Tensor of the queries' shape and dtype.

        Raises:
            TypeError: if ``attention_masks`` is not a tensor but, for instance, FlexAttention's ``BlockMask``.
        """
        mask = attention_masks if self.document_mask else None
        if mask is not None and not isinstance(mask, torch.Tensor):
            raise TypeError(
                f"DocumentSDPA takes a boolean mask of shape (B, 1, L, L), got {type(mask).__name__}; "
                "all attention layers of a model share one mask, so replace all of them or none"
            )
        q_BNLH, v_BNLH = q_BLNH.transpose(1, 2), v_BLNH.transpose(1, 2)
        # On a CPU without bfloat16 instructions, strided bfloat16 keys make the backward pass up to 3 times slower.
        k_BNLH = k_BLNH.transpose(1, 2).contiguous()
        # The SPMD checker has no rule for an untyped mask next to typed tensors; the output is sharded as the query.
        with spmd.no_typecheck():
            out_BNLH = torch.nn.functional.scaled_dot_product_attention(
                q_BNLH,
                k_BNLH,
                v_BNLH,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if spmd.is_type_checking():
            spmd.assert_type(out_BNLH, spmd.get_local_type(q_BNLH), get_partition_spec(q_BNLH))
        return out_BNLH.transpose(1, 2)


def document_mask(positions_BL: torch.Tensor) -> torch.Tensor:
    """Block-causal mask of packed rows: a query sees itself and what precedes it in its own document.

    A document starts wherever the position is 0, which is torchtitan's convention for every attention backend. Built
    from a running sum and comparisons only, without gather, sort or a look at the values from the host. Every query
    sees at least itself, so no row is empty and the softmax is finite.

    Args:
        positions_BL: integer positions; a DTensor contributes its local shard, as attention runs on local tensors.

    Returns:
        Boolean tensor ``(B, 1, L, L)``, true where the query (dim 2) may attend to the key (dim 3). One byte per
        entry: 64 MiB per row at L = 8192.
    """
    if isinstance(positions_BL, DTensor):
        positions_BL = positions_BL.to_local()
    document_BL = (positions_BL == 0).cumsum(dim=1, dtype=torch.int32)
    index_L = torch.arange(positions_BL.shape[1], dtype=torch.int32, device=positions_BL.device)
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    causal_LL = index_L[:, None] >= index_L[None, :]
    return (same_BLL & causal_LL)[:, None]


def sdpa(config: FlexAttention.Config, *, document_mask: bool = True) -> DocumentSDPA.Config:
    """Override factory: the `DocumentSDPA` that takes the place of ``config``, sharding included."""
    return derive(config, DocumentSDPA.Config, document_mask=document_mask)


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


def check(
    config: PluginTrainer.Config, machine: Machine, *, document_mask: bool, fqns: list[str] | None
) -> list[Problem]:
    """Report context parallelism that cannot work, and layers left on a FlexAttention that would get a wrong mask.

    Args:
        config: the job, with its model but before any override.
        machine: where it runs.
        document_mask: as given to `sdpa`.
        fqns: patterns of the modules to replace; ``None`` replaces all.
    """
    return [
        *_context_parallel_problems(config.parallelism, machine.device_type, document_mask),
        *_left_over_problems(config, document_mask, fqns),
    ]


def _context_parallel_problems(parallelism: ParallelismConfig, device_type: str, document_mask: bool) -> list[Problem]:
    if parallelism.context_parallel_degree == 1:
        return []
    reason = context_parallel_problem(
        document_mask=document_mask, spmd_backend=parallelism.spmd_backend, device_type=device_type
    )
    if reason is None:
        return []
    what = f"plugin sdpa cannot run with {parallelism.context_parallel_degree}: {reason}"
    fix = 'set it to 1, or keep FlexAttention with plugins.disable = ["sdpa"]'
    return [Problem("parallelism.context_parallel_degree", what, fix)]


def _left_over_problems(config: PluginTrainer.Config, document_mask: bool, fqns: list[str] | None) -> list[Problem]:
    """All layers of a stock decoder get the one mask that suits the first layer, or the document mask."""
    every = NodeOverride(target=FlexAttention.Config, factory=sdpa)
    chosen = NodeOverride(target=FlexAttention.Config, factory=sdpa, fqns=fqns)
    replaced = set(matching_nodes(chosen, config))
    left = [fqn for fqn in matching_nodes(every, config) if fqn not in replaced]
    if not left or not replaced:
        return []
    first_is_left = next(matching_nodes(every, config)) == left[0]
    if not document_mask and first_is_left:
        return []
    what = f"{left[0].removeprefix(MODEL_PREFIX)} stays on FlexAttention, which cannot use this plugin's mask"
    return [Problem("plugins.sdpa.fqns", what, "name every attention layer or none")]
