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

from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.models.value_rules import nearest

_LONG = 262_144


def _dense(width: int, layers: int, heads: int, feed_forward: int, **others: Any) -> dict[str, Any]:
    return {
        "vocab_size": 151_936,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": feed_forward,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
        **others,
    }


def _experts(dense: dict[str, Any], experts: int, width: int, key_value_heads: int, **others: Any) -> dict[str, Any]:
    return {
        **dense,
        "num_key_value_heads": key_value_heads,
        "tie_word_embeddings": False,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        **others,
    }


_TIED = {"tie_word_embeddings": True}
_DEBUG = _dense(256, 8, 16, 3072, vocab_size=2048, max_position_embeddings=4096, **_TIED)
_4B = _dense(2560, 36, 32, 9728, **_TIED)
_30B = _experts(_dense(2048, 48, 32, 6144), 128, 768, 4)
_235B = _experts(_dense(4096, 94, 64, 12288), 128, 1536, 4, rope_theta=5e6)
_4B_2507 = {**_4B, "rope_theta": 5e6, "max_position_embeddings": _LONG}
_30B_2507 = {**_30B, "rope_theta": 1e7, "max_position_embeddings": _LONG}
_235B_2507 = {**_235B, "max_position_embeddings": _LONG}

# Values of Transformers' configuration classes, which spell them as config.json does.
FLAVORS: dict[str, dict[str, Any]] = {
    "debugmodel": _DEBUG,
    "debugmodel_non_fused_qkv": _DEBUG,
    "debugmodel_moe": _experts(_DEBUG, 64, 768, 8),
    "0.6B": _dense(1024, 28, 16, 3072, **_TIED),
    "1.7B": _dense(2048, 28, 16, 6144, **_TIED),
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
# Flavors whose query, key and value projections torchtitan keeps in three matrices. Files are the same.
SEPARATE_QKV = frozenset({"debugmodel_non_fused_qkv"})


def flavor(name: str, **changes: Any) -> Qwen3Config | Qwen3MoeConfig:
    """The configuration called ``name`` in `FLAVORS`, new at every call, with ``changes`` of single values.

    Raises:
        JobError: there is none; the message lists all names, the nearest first.
    """
    if name not in FLAVORS:
        names = ", ".join(nearest(name, list(FLAVORS)))
        raise JobError([Problem("model.flavor", f'"{name}" is not a Qwen3 flavor', f"choose one of {names}")])
    values = FLAVORS[name] | changes
    return Qwen3MoeConfig(**values) if "num_experts" in values else Qwen3Config(**values)
