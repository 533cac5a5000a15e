"""What a config.json may ask for that torchtitan's own Qwen3 cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.models.value_rules import rotary_table, shown

_CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

# Keys that change the computation: allowed values, and what any other value asks for. Absent and null are always
# allowed.
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("attention_bias", (False,), "biases on the attention projections"),
    ("attention_dropout", (0, 0.0), "dropout on attention weights"),
    ("use_sliding_window", (False,), "sliding-window attention"),
    ("hidden_act", ("silu",), "another activation than silu"),
    ("partial_rotary_factor", (1, 1.0), "rotary embeddings on part of a head"),
    ("shared_expert_intermediate_size", (0,), "shared experts"),
    ("n_shared_experts", (0,), "shared experts"),
    ("num_shared_experts", (0,), "shared experts"),
)


def unsupported(values: Mapping[str, Any]) -> list[Problem]:
    """Keys of a config.json that the native model has no counterpart for; `Problem.where` is the key.

    Args:
        values: the file's, or those of a configuration's ``to_dict()``.
    """
    kind, classes = values.get("model_type"), values.get("architectures")
    if kind not in _CLASSES:
        what = f"{shown(kind)} is not a Qwen3 language model"
        return [Problem("model_type", what, f"supported are {' and '.join(_CLASSES)}")]
    problems = [*_forbidden(values), *_rotary(values)]
    if classes and classes != [_CLASSES[kind]]:
        what = f"{shown(classes)} does not go with model_type {shown(kind)}"
        problems.append(Problem("architectures", what, f'supported is ["{_CLASSES[kind]}"]'))
    layer_types = values.get("layer_types") or []
    layer_types = layer_types if isinstance(layer_types, list) else [layer_types]
    if others := sorted({str(each) for each in layer_types} - {"full_attention"}):
        what = f"layers of type {', '.join(others)[:120]} are not supported"
        problems.append(Problem("layer_types", what, 'supported is "full_attention"'))
    return problems


def _forbidden(values: Mapping[str, Any]) -> Iterator[Problem]:
    for key, allowed, feature in _ONLY:
        value = values.get(key)
        if value is not None and (value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool)):
            what = f"{shown(value)} asks for {feature}, which is not supported"
            yield Problem(key, what, f"supported is {shown(allowed[0])}")


def _rotary(values: Mapping[str, Any]) -> Iterator[Problem]:
    where, table = rotary_table(values)
    if not isinstance(table, Mapping):
        return
    if nested := [name for name, value in table.items() if isinstance(value, Mapping)]:
        yield Problem(where, f"different settings per layer type ({', '.join(nested)}) are not supported")
        return
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", "yarn"):
        yield Problem(where, f"rope type {shown(kind)} is not supported", "supported are default and yarn")
    if table.get("partial_rotary_factor") not in (None, 1, 1.0):
        yield Problem(where, "rotary embeddings on part of a head are not supported")
