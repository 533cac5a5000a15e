"""Which values a config.json may hold: types, sizes, rotary settings, and numbers that must fit together.

Keys are those of Transformers' configuration classes. Everything here looks at values before a configuration is made
of them: a wrong number can make even an empty model take forever or all memory.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

from huggingface_hub.dataclasses import type_validator
from transformers import Qwen3Config, Qwen3MoeConfig

from torchtitan_qwen3_trn.errors import Problem

# The largest value of a key that is built: at least six times that of any published model, so that what is larger is
# a mistake or an attack. Published are 262,144 vocabulary entries (Gemma 3), width 16,384 with 126 layers, 128 heads
# and a feed-forward of 53,248 (Llama 3.1 405B), 2,048 experts (Switch-C), 10,485,760 positions (Llama 4 Scout).
LARGEST: Mapping[str, int] = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**22,
    "num_experts": 2**14,
    "moe_intermediate_size": 2**22,
    "max_position_embeddings": 2**26,
}
_POSITIONS = "max_position_embeddings"
# Experts of all layers together: each is three tensors in files with names of their own.
_MOST_EXPERTS = 2**18
# Entries of a list in config.json; some lists are searched once for every layer.
_LONGEST = 2**16
# Counts by other names that decide how much work building a model is, even one without memory.
_SPELLINGS = {
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
}
_LAYERS = {"num_hidden_layers", *(key for key, meant in _SPELLINGS.items() if meant == "num_hidden_layers")}
_EXPERTS = {"num_experts", *(key for key, meant in _SPELLINGS.items() if meant == "num_experts")}
LAYERS_AND_EXPERTS = _LAYERS | _EXPERTS

_KINDS = {
    int: "an integer",
    float: "a floating-point number",
    bool: "true or false",
    str: "a string",
    list[int] | None: "a list of integers",
}
_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "decoder_sparse_step",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
)
# Numbers among the rotary settings: the least, whether that itself is refused, and what would be right.
_ROTARY: Mapping[str, tuple[float, bool, str]] = {
    "rope_theta": (1, True, "published Qwen3 models use 1e6 to 1e7"),
    "factor": (1, False, "4.0 stretches 32768 positions to 131072"),
    "original_max_position_embeddings": (1, False, "Qwen3 was pretrained on 32768 positions"),
    "attention_factor": (0, True, "leave it out for 0.1 ln(factor) + 1"),
    "beta_fast": (0, False, "the usual value is 32"),
    "beta_slow": (0, False, "the usual value is 1"),
    "mscale": (0, False, "leave it out for 1"),
    "mscale_all_dim": (0, False, "leave it out for 1"),
    "partial_rotary_factor": (0, True, "1 is the whole head"),
}
# Of these Transformers takes null for a value. They may stand outside the table of rotary settings too.
_NEVER_NULL = ("rope_theta", "original_max_position_embeddings")


def value_problems(values: Mapping[str, Any], cls: type) -> list[Problem]:
    """What keeps a ``cls`` from being made of the config.json ``values``: at most one problem for each key.

    Types are those of the fields of ``cls``. Numbers that must fit together are looked at for Qwen3 only, and only
    when the values are right one by one. `Problem.where` is the key, with dots between nested ones.
    """
    found = [*_long_lists(values), *_large_numbers(values)]
    if "rope_parameters" in _types(cls):
        found += _rotary_problems(values)
    found += _wrong_types(values, cls)
    if not found:
        merged = _with_defaults(values, cls)
        found = list(_too_many_experts(merged))
        if not found and cls in (Qwen3Config, Qwen3MoeConfig):
            found = list(_qwen3_problems(SimpleNamespace(**merged), _types(cls)))
    return list({problem.where: problem for problem in reversed(found)}.values())[::-1]


def counts(values: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The numbers of a config.json, also of configurations inside it: key path, key, number."""
    waiting = [("", values)]
    while waiting:
        prefix, table = waiting.pop()
        for key, value in table.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{key}.", value))
            elif isinstance(value, int | float):
                yield prefix + key, key, value


def expert_count(config: Any) -> int:
    """Experts in a block that has them; 0 for a dense Qwen3."""
    return config.num_experts if config.model_type == Qwen3MoeConfig.model_type else 0


def expert_layers(config: Any) -> set[int]:
    """Numbers, from 0, of the blocks with experts in a Qwen3 model; Transformers' ``Qwen3MoeDecoderLayer`` rule."""
    if expert_count(config) <= 0:
        return set()
    dense, step = set(config.mlp_only_layers or ()), config.decoder_sparse_step
    return {layer for layer in range(config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0}


def head_dim(config: Any) -> int:
    """Width of one attention head; ``Qwen3MoeConfig`` has no field for it and its model then divides the width."""
    stated = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if stated is None else stated


def rotary_table(values: Mapping[str, Any]) -> tuple[str, Any]:
    """Key and value of the rotary settings of a config.json. Transformers prefers the older name."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    return key, values.get(key) or {}


def shown(value: object) -> str:
    """``value`` as it stands in a JSON file, cut to a readable length."""
    return json.dumps(value, default=str)[:60]


def nearest(name: str, names: list[str]) -> list[str]:
    """All of ``names``, the most similar to ``name`` first."""
    by_lower = {each.lower(): each for each in names}
    return [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=len(names), cutoff=0.0)]


def _types(cls: type) -> dict[str, Any]:
    types = {item.name: item.type for item in fields(cls)}
    # Not a field, but the model reads it.
    return types | {"head_dim": int} if cls is Qwen3MoeConfig else types


def _with_defaults(values: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    defaults = {item.name: item.default for item in fields(cls) if item.default is not MISSING}
    # Transformers reads the field first and lets the other name replace it.
    renamed = {old: values[new] for old, new in getattr(cls, "attribute_map", {}).items() if new in values}
    return defaults | dict(values) | renamed | {"model_type": cls.model_type}


def _long_lists(values: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in values.items():
        if isinstance(value, list) and len(value) > _LONGEST:
            yield Problem(key, f"has {len(value)} entries", f"at most {_LONGEST}")


def _large_numbers(values: Mapping[str, Any]) -> Iterator[Problem]:
    for path, key, value in counts(values):
        largest = LARGEST.get(_SPELLINGS.get(key, key))
        if largest is not None and value > largest:
            what = f"{ascii(value)[:40]} is far beyond any published model"
            yield Problem(path, what, f"at most {largest}")


def _too_many_experts(values: Mapping[str, Any]) -> Iterator[Problem]:
    found = [(key, value) for _, key, value in counts(values) if key in LAYERS_AND_EXPERTS]
    layers = max((value for key, value in found if key in _LAYERS), default=0)
    experts = max((value for key, value in found if key in _EXPERTS), default=0)
    if layers * experts > _MOST_EXPERTS:
        what = f"{experts} in each of {layers} layers are far beyond any published model"
        yield Problem("num_experts", what, f"at most {_MOST_EXPERTS} in all layers together")


def _wrong_types(values: Mapping[str, Any], cls: type) -> Iterator[Problem]:
    types, fields_by_name = _types(cls), {new: old for old, new in getattr(cls, "attribute_map", {}).items()}
    for key, value in values.items():
        expected = types.get(fields_by_name.get(key, key), Any)
        try:
            type_validator(key, value, expected)
        except (TypeError, ValueError) as error:
            refusal = f"is refused by Transformers: {' '.join(str(error).split())[:300]}"
            kind = _KINDS.get(expected)
            yield Problem(key, f"must be {kind}, got {shown(value)}" if kind else refusal)


def _rotary_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    where, table = rotary_table(values)
    if not isinstance(table, Mapping):
        yield Problem(where, f"must be an object, got {shown(table)}", "null means plain rotary embeddings")
        return
    if any(isinstance(value, Mapping) for value in table.values()):
        return
    numbers = {f"{where}.{name}": (name, value) for name, value in table.items() if name in _ROTARY}
    numbers |= {name: (name, values[name]) for name in _NEVER_NULL if name in values and name not in table}
    for path, (name, value) in numbers.items():
        if value is not None or name in _NEVER_NULL:
            yield from _rotary_number(path, name, value)
    if table.get("rope_type", table.get("type")) == "yarn":
        positions = values.get(_POSITIONS)
        original = table.get("original_max_position_embeddings", positions)
        original = values.get("original_max_position_embeddings", original)
        yield from _yarn_problems(where, {**table, "original_max_position_embeddings": original})


def _rotary_number(path: str, name: str, value: Any) -> Iterator[Problem]:
    least, beyond, fix = _ROTARY[name]
    kind = int if name == "original_max_position_embeddings" else int | float
    right = isinstance(value, kind) and not isinstance(value, bool) and value < math.inf
    if not right or not value >= least or (beyond and value == least):
        noun = "an integer" if kind is int else "a number"
        yield Problem(path, f"must be {noun} {'above' if beyond else 'of at least'} {least}, got {shown(value)}", fix)


def _yarn_problems(where: str, table: Mapping[str, Any]) -> Iterator[Problem]:
    """Null and 0 mean the default of the two limits, as in Transformers' ``_compute_yarn_parameters``."""
    if table.get("factor") is None:
        yield Problem(f"{where}.factor", "missing", _ROTARY["factor"][2])
    numbers = [table.get("factor"), table["original_max_position_embeddings"]]
    if all(isinstance(number, int | float) for number in numbers) and math.prod(numbers) > LARGEST[_POSITIONS]:
        what = f"{numbers[0]} times {numbers[1]} positions are far beyond any published model"
        yield Problem(f"{where}.factor", what, f"at most {LARGEST[_POSITIONS]} in all")
    if not isinstance(table.get("truncate", True), bool):
        yield Problem(f"{where}.truncate", f"must be true or false, got {shown(table['truncate'])}")
    fast, slow = table.get("beta_fast") or 32, table.get("beta_slow") or 1
    if isinstance(fast, int | float) and isinstance(slow, int | float) and fast < slow:
        what = f"beta_fast {fast} and beta_slow {slow} are not in order"
        yield Problem(f"{where}.beta_fast", what, "beta_fast must not be below beta_slow; the usual pair is 32 and 1")


def _qwen3_problems(config: Any, known: Collection[str]) -> Iterator[Problem]:
    """Numbers of a Qwen3 model that cannot be built, by the attributes of its configuration that it reads."""
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    wrong = [name for name in _POSITIVE if name in known and not 0 < getattr(config, name, 1) < math.inf]
    for name in wrong:
        yield Problem(name, f"must be above 0, got {getattr(config, name)}")
    if wrong:
        return
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % key_value_heads:
        what = f"{key_value_heads} key and value heads cannot serve {heads} query heads evenly"
        yield Problem("num_key_value_heads", what, f"choose a divisor of {heads}")
    if (width := head_dim(config)) < 2 or width % 2:
        yield Problem("head_dim", f"must be even, got {width}", "rotary embeddings turn pairs")
    yield from _expert_problems(config)


def _expert_problems(config: Any) -> Iterator[Problem]:
    experts = expert_count(config)
    if experts < 0:
        yield Problem("num_experts", f"must not be negative, got {experts}", "0 makes every layer dense")
    dense = config.num_hidden_layers - len(expert_layers(config))
    if dense and config.intermediate_size <= 0:
        what = f"must be above 0, got {config.intermediate_size}: it is the feed-forward width of {dense} dense layers"
        yield Problem("intermediate_size", what)
    if experts > 0 and config.moe_intermediate_size <= 0:
        what = f"must be above 0 with {experts} experts, got {config.moe_intermediate_size}"
        yield Problem("moe_intermediate_size", what, "give the inner width of one expert (Qwen3-30B-A3B: 768)")
    if experts > 0 and not 1 <= config.num_experts_per_tok <= experts:
        what = f"a token cannot visit {config.num_experts_per_tok} of {experts} experts"
        yield Problem("num_experts_per_tok", what, f"choose 1 to {experts}")
