"""Published Qwen3 models by name, and torchtitan's small test models.

The names without a date are torchtitan 0.3.0's flavors, number for number. They say 40,960 positions, as
those checkpoints' config.json files do. One does not match its checkpoint: torchtitan's "235B-A22B" has the
rotary base 5e6, Qwen/Qwen3-235B-A22B has 1e6 and only its 2507 successors have 5e6. So a flavor is for
random initial weights; with a checkpoint, take the architecture from its own config.json.

The 2507 models differ from their namesakes in two numbers: 262,144 positions (model cards) and the rotary
base of their config.json files, 5e6 for 4B and 235B-A22B, 1e7 for 30B-A3B (quoted in radixark/miles #327 and
#875 and in THUDM/slime #702).
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.models.qwen3.architecture import Architecture
from torchtitan_qwen3_trn.models.qwen3.values import nearest

__all__ = ["FLAVORS", "flavor"]

_VOCAB = 151_936
_LONG = 262_144


def _dense(
    dim: int, n_layers: int, n_heads: int, hidden_dim: int, *, tied: bool = False, vocab_size: int = _VOCAB
) -> Architecture:
    return Architecture(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        hidden_dim=hidden_dim,
        enable_weight_tying=tied,
    )


def _experts(base: Architecture, num_experts: int, moe_hidden_dim: int, n_kv_heads: int) -> Architecture:
    return replace(
        base,
        num_experts=num_experts,
        top_k=8,
        moe_hidden_dim=moe_hidden_dim,
        n_kv_heads=n_kv_heads,
        enable_weight_tying=False,
    )


_DEBUG = replace(_dense(256, 8, 16, 3072, tied=True, vocab_size=2048), max_seq_len=4096)
_4B = _dense(2560, 36, 32, 9728, tied=True)
_30B = _experts(_dense(2048, 48, 32, 6144), 128, 768, 4)
_235B = replace(_experts(_dense(4096, 94, 64, 12288), 128, 1536, 4), rope_theta=5e6)
_4B_2507 = replace(_4B, rope_theta=5e6, max_seq_len=_LONG)
_30B_2507 = replace(_30B, rope_theta=1e7, max_seq_len=_LONG)
_235B_2507 = replace(_235B, rope_theta=5e6, max_seq_len=_LONG)

FLAVORS: dict[str, Architecture] = {
    "debugmodel": _DEBUG,
    "debugmodel_non_fused_qkv": replace(_DEBUG, fuse_qkv=False),
    "debugmodel_moe": _experts(_DEBUG, 64, 768, 8),
    "0.6B": _dense(1024, 28, 16, 3072, tied=True),
    "1.7B": _dense(2048, 28, 16, 6144, tied=True),
    "4B": _4B,
    "8B": _dense(4096, 36, 32, 12288),
    "14B": _dense(5120, 40, 40, 17408),
    "32B": _dense(5120, 64, 64, 25600),
    "30B-A3B": _30B,
    "235B-A22B": _235B,
    "4B-Instruct-2507": _4B_2507,
    "4B-Thinking-2507": _4B_2507,
    "30B-A3B-Instruct-2507": _30B_2507,
    "30B-A3B-Thinking-2507": _30B_2507,
    "235B-A22B-Instruct-2507": _235B_2507,
    "235B-A22B-Thinking-2507": _235B_2507,
}


def flavor(name: str) -> Architecture:
    """The architecture called ``name`` in `FLAVORS`.

    Raises:
        JobError: there is none; the message lists all names, the nearest first.
    """
    if name not in FLAVORS:
        names = ", ".join(nearest(name, list(FLAVORS)))
        raise JobError([Problem("model.flavor", f'"{name}" is not a Qwen3 flavor', f"choose one of {names}")])
    return FLAVORS[name]
