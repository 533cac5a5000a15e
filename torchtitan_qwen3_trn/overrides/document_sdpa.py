"""Scaled-dot-product attention that respects packed documents, in place of FlexAttention.

Stock torchtitan keeps its `ScaledDotProductAttention` away from language models because it takes no mask and so
attends across the documents packed into one row. `DocumentSDPA` takes the mask that `document_mask` builds once per
batch, and runs wherever ``torch.nn.functional.scaled_dot_product_attention`` does.

Shape suffixes: B batch, L sequence, N heads (query or key/value), H head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention


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
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
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
        if mask is not None and not isinstance(mask, Tensor):
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
                q_BNLH, k_BNLH, v_BNLH, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
            )
        if spmd.is_type_checking():
            spmd.assert_type(out_BNLH, spmd.get_local_type(q_BNLH), get_partition_spec(q_BNLH))
        return out_BNLH.transpose(1, 2)


def document_mask(positions_BL: Tensor) -> Tensor:
    """Block-causal mask of packed rows: a query sees itself and what precedes it in its own document.

    A document starts wherever the position is 0, which is torchtitan's convention for every attention backend. Built
    from a running sum and comparisons only, without gather or sort, and without reading values on the host. Every query
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
