"""Rotary embedding through AWS's ``rope_hf`` of nki-library, for comparison with `rope`.

``rope_hf`` (nkilib.core.embeddings.rope_hf, April 2026) takes ``[B, N, L, H]``, tables of full width in the dtype of
its inputs, and outputs allocated by the caller, so each call costs four transposes of query and key. It rounds every
product and sum to the dtype of the inputs.

Shape suffixes: as in `rope`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan_qwen3_trn.kernels.operator import Operator
from torchtitan_qwen3_trn.kernels.rope import LIMITS, rope, rope_backward, rope_fake, rope_gradient, save_table

_KERNEL = "nkilib.core.embeddings.rope_hf:rope_hf"


def _launch(
    kernel: Callable[..., Any], q_BLNH: Tensor, k_BLMH: Tensor, cos_sin_bLH: Tensor, *, backward: bool
) -> tuple[Tensor, Tensor]:
    q_BNLH, k_BMLH = q_BLNH.transpose(1, 2).contiguous(), k_BLMH.transpose(1, 2).contiguous()
    cos_bLE, sin_bLE = cos_sin_bLH.expand(len(q_BLNH), -1, -1).to(q_BLNH.dtype).chunk(2, dim=-1)
    tables = [torch.cat((half, half), dim=-1) for half in (cos_bLE, sin_bLE)]
    outputs = kernel(q_BNLH, k_BMLH, torch.empty_like(q_BNLH), torch.empty_like(k_BMLH), *tables, None, backward)
    q_out_BNLH, k_out_BMLH = outputs
    return q_out_BNLH.transpose(1, 2).contiguous(), k_out_BMLH.transpose(1, 2).contiguous()


nkilib_rope_backward = Operator(
    name="torchtitan_qwen3_trn::nkilib_rope_backward",
    reference=rope_backward.reference,
    fake=rope_fake,
    kernel=_KERNEL,
    limits=LIMITS,
    launch=functools.partial(_launch, backward=True),
)

nkilib_rope = Operator(
    name="torchtitan_qwen3_trn::nkilib_rope",
    reference=rope.reference,
    fake=rope_fake,
    kernel=_KERNEL,
    save=save_table,
    gradient=rope_gradient,
    backward=(nkilib_rope_backward,),
    limits=LIMITS,
    launch=functools.partial(_launch, backward=False),
)
