"""The change of layout around AWS's ``rope_hf``, with a stand-in that follows its documented interface."""

from __future__ import annotations

import torch

from torchtitan_qwen3_trn.kernels.nkilib_rope import nkilib_rope, nkilib_rope_backward
from torchtitan_qwen3_trn.kernels.rope import rope, rope_backward


def rope_hf(q, k, q_out, k_out, cos=None, sin=None, rope_cache=None, backward=False):
    """What nki-library says: ``[B, N, L, H]``, tables ``[B, L, H]``, outputs written and returned."""
    assert rope_cache is None
    assert all(x.is_contiguous() for x in (q, k, q_out, k_out, cos, sin))
    assert cos.shape == sin.shape == (q.shape[0], q.shape[2], q.shape[3])
    for x, out in ((q, q_out), (k, k_out)):
        c, s = cos[:, None], sin[:, None]
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        out.copy_(x * c - turned * s if backward else x * c + turned * s)
    return q_out, k_out


def test_layout_tables_and_direction_are_what_rope_hf_takes():
    torch.manual_seed(0)
    q, k, table = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(1, 5, 8)
    for wrapped, ours in ((nkilib_rope, rope), (nkilib_rope_backward, rope_backward)):
        for actual, expected in zip(wrapped.launch(rope_hf, q, k, table), ours(q, k, table), strict=True):
            assert actual.is_contiguous()
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
