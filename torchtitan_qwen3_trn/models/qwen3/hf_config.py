"""A published Qwen3 checkpoint's config.json -> `Architecture`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.models.qwen3.architecture import Architecture, Yarn, inconsistencies
from torchtitan_qwen3_trn.models.qwen3.values import WRONG, as_kind, said

__all__ = ["from_hf_config", "read_hf_config"]

_MODEL_CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

# Architecture field, key in config.json, default for qwen3, default for qwen3_moe. The defaults are those of
# Qwen3Config and Qwen3MoeConfig in Transformers 5.24; None: see `_fill_derived`.
_KEYS: tuple[tuple[str, str, Any, Any], ...] = (
    ("vocab_size", "vocab_size", 151_936, 151_936),
    ("dim", "hidden_size", 4096, 2048),
    ("n_layers", "num_hidden_layers", 32, 24),
    ("n_heads", "num_attention_heads", 32, 32),
    ("n_kv_heads", "num_key_value_heads", 32, 4),
    ("head_dim", "head_dim", 128, None),
    ("hidden_dim", "intermediate_size", 22_016, 6144),
    ("norm_eps", "rms_norm_eps", 1e-6, 1e-6),
    ("max_seq_len", "max_position_embeddings", 32_768, 32_768),
    ("enable_weight_tying", "tie_word_embeddings", False, False),
    ("init_std", "initializer_range", 0.02, 0.02),
)
_EXPERT_KEYS: tuple[tuple[str, str, Any, Any], ...] = (
    ("num_experts", "num_experts", 0, 128),
    ("top_k", "num_experts_per_tok", 0, 8),
    ("moe_hidden_dim", "moe_intermediate_size", 0, 768),
    ("norm_topk_prob", "norm_topk_prob", False, False),
    ("mlp_only_layers", "mlp_only_layers", (), ()),
    ("decoder_sparse_step", "decoder_sparse_step", 1, 1),
    ("router_aux_loss_coef", "router_aux_loss_coef", 0.001, 0.001),
)
_FLOATS = {"norm_eps", "init_std", "router_aux_loss_coef"}
_BOOLS = {"enable_weight_tying", "norm_topk_prob"}

# Transformers' own default when no base is given at all (RotaryEmbeddingConfigMixin.default_theta).
_DEFAULT_THETA = 10_000.0

# Keys that change the computation in ways torchtitan's Qwen3 has no counterpart for: allowed values, and what
# any other value asks for. Absent and null are always allowed.
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("attention_bias", (False,), "biases on the attention projections"),
    ("attention_dropout", (0, 0.0), "dropout on attention weights"),
    ("use_sliding_window", (False,), "sliding-window attention"),
    ("hidden_act", ("silu",), "another activation than silu"),
    ("partial_rotary_factor", (1, 1.0), "rotary embeddings on part of a head"),
    ("shared_expert_intermediate_size", (0,), "shared experts"),
    ("n_shared_experts", (0,), "shared experts"),
    ("num_shared_experts", (0,), "shared experts"),
    ("quantization_config", (), "quantized weights"),
)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The object in ``folder/config.json``.

    Raises:
        JobError: no such file, a link out of the folder, not JSON, or JSON that is not an object.
    """
    return read_json(Path(folder) / "config.json")


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json of Qwen3ForCausalLM or Qwen3MoeForCausalLM describes.

    Reads the spelling of Transformers v4 (``rope_theta``, ``rope_scaling``, ``num_experts``) and of v5
    (``rope_parameters``, ``num_local_experts``). An absent key means what Transformers 5.24 takes it to mean.
    ``max_seq_len`` is ``max_position_embeddings``, or with YaRN the longer of that and
    ``factor x original_max_position_embeddings``, because Qwen's instructions for YaRN leave the former as
    it is.

    Raises:
        JobError: every unusable key at once, each with ``where="config.json: <key>"``.
    """
    problems = _unsupported(config)
    values = {} if problems and problems[0].where.endswith("model_type") else _values(config, problems)
    if problems:
        raise JobError(problems)
    arch = Architecture(**values)
    keys = {field: key for field, key, *_ in (*_KEYS, *_EXPERT_KEYS)}
    for name, what, fix in inconsistencies(arch):
        key = keys.get(name, name).replace("yarn.", f"{_rope_key(config)}.")
        problems.append(Problem(f"config.json: {key}", what, fix))
    if problems:
        raise JobError(problems)
    return arch


def _unsupported(config: Mapping[str, Any]) -> list[Problem]:
    """Problems with what kind of model this is; the first is about ``model_type`` if that is unusable."""
    problems = []
    kind, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or kind not in _MODEL_CLASSES:
        what = "missing" if kind is None else f"{kind!r} is not a Qwen3 language model"
        problems.append(Problem("config.json: model_type", what, f"supported are {' and '.join(_MODEL_CLASSES)}"))
    elif classes and classes != [_MODEL_CLASSES[kind]]:
        what = f"{classes!r} does not go with model_type {kind!r}"
        problems.append(Problem("config.json: architectures", what, f"supported is [{_MODEL_CLASSES[kind]!r}]"))
    for key, allowed, feature in _ONLY:
        value = config.get(key)
        if value is not None and (value not in allowed or (isinstance(value, bool) != isinstance(allowed[0], bool))):
            fix = f"supported is {json.dumps(allowed[0])}" if allowed else "use the unquantized checkpoint"
            shown = json.dumps(value)[:60]
            problems.append(Problem(f"config.json: {key}", f"{shown} asks for {feature}, which is not supported", fix))
    layer_types = config.get("layer_types") or []
    layer_types = layer_types if isinstance(layer_types, list) else [layer_types]
    if others := sorted({str(each) for each in layer_types} - {"full_attention"}):
        what = f"layers of type {', '.join(others)} are not supported"
        problems.append(Problem("config.json: layer_types", what, 'supported is "full_attention"'))
    return problems


def _values(config: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    moe = config["model_type"] == "qwen3_moe"
    config = {"num_experts": config.get("num_local_experts"), **config} if "num_local_experts" in config else config
    values: dict[str, Any] = {}
    for field, key, dense_default, moe_default in (*_KEYS, *(_EXPERT_KEYS if moe else ())):
        value = config.get(key)
        kind = "float" if field in _FLOATS else "bool" if field in _BOOLS else "int"
        kind = "ints" if field == "mlp_only_layers" else kind
        if value is None:
            values[field] = moe_default if moe else dense_default
        elif (converted := as_kind(value, kind)) is WRONG:
            problems.append(Problem(f"config.json: {key}", f"{value!r} is not {said(kind)}"))
        else:
            values[field] = converted
    values.update(_rope(config, values.get("max_seq_len", 1), problems))
    if not problems:
        _fill_derived(values, config)
    return values


def _fill_derived(values: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Defaults that depend on other keys: an explicit null means one key and value head per query head, and
    Qwen3MoeConfig has no head_dim of its own, so its model divides hidden_size."""
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        values["n_kv_heads"] = values["n_heads"]
    if values["head_dim"] is None:
        values["head_dim"] = values["dim"] // max(values["n_heads"], 1)


def _rope_key(config: Mapping[str, Any]) -> str:
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _rope(config: Mapping[str, Any], positions: int, problems: list[Problem]) -> dict[str, Any]:
    """``rope_theta``, ``max_seq_len`` and ``yarn``, with the precedence of Transformers'
    ``convert_rope_params_to_dict`` and ``standardize_rope_params``: rope_scaling before rope_parameters, a base
    inside before one outside, but a pretrained context outside before one inside."""
    key = _rope_key(config)
    table = config.get(key) or {}
    where = f"config.json: {key}"
    if not isinstance(table, Mapping):
        problems.append(Problem(where, f"{table!r} is not an object", "null means plain rotary embeddings"))
        return {}
    if nested := [name for name, value in table.items() if isinstance(value, Mapping)]:
        problems.append(Problem(where, f"different settings per layer type ({', '.join(nested)}) are not supported"))
        return {}
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in ("default", "yarn"):
        problems.append(Problem(where, f"rope type {kind!r} is not supported", "supported are default and yarn"))
    if table.get("partial_rotary_factor") not in (None, 1, 1.0):
        problems.append(Problem(where, "rotary embeddings on part of a head are not supported"))
    theta = table.get("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    theta_where = f"{where}.rope_theta" if "rope_theta" in table else "config.json: rope_theta"
    if (base := as_kind(theta, "float")) is WRONG:
        problems.append(Problem(theta_where, f"{theta!r} is not a number"))
    pretrained = config.get("original_max_position_embeddings", table.get("original_max_position_embeddings"))
    table = {**table, "original_max_position_embeddings": pretrained}
    yarn = _yarn(table, positions, where, problems) if kind == "yarn" else None
    if yarn is not None:
        positions = max(positions, int(yarn.factor * yarn.original_max_position_embeddings))
    return {"rope_theta": base, "max_seq_len": positions, "yarn": yarn}


def _yarn(table: Mapping[str, Any], positions: int, where: str, problems: list[Problem]) -> Yarn | None:
    """Defaults and the meaning of ``mscale`` are those of Transformers' ``_compute_yarn_parameters``."""
    before = len(problems)

    def read(key: str, kind: str, default: Any) -> Any:
        value = table.get(key)
        if value is None:
            return default
        if (converted := as_kind(value, kind)) is WRONG:
            problems.append(Problem(f"{where}.{key}", f"{value!r} is not {said(kind)}"))
        return converted

    factor = read("factor", "float", None)
    if factor is None:
        problems.append(Problem(f"{where}.factor", "missing", "4.0 stretches 32768 positions to 131072"))
    original = read("original_max_position_embeddings", "int", positions)
    beta_fast, beta_slow = read("beta_fast", "float", 32.0), read("beta_slow", "float", 1.0)
    truncate = read("truncate", "bool", True)
    attention_factor = read("attention_factor", "float", None)
    mscale, mscale_all_dim = read("mscale", "float", None), read("mscale_all_dim", "float", None)
    if len(problems) > before:
        return None
    if attention_factor is None and mscale and mscale_all_dim:
        stretch = 0.1 * math.log(max(factor, 1.0))
        attention_factor = (mscale * stretch + 1.0) / (mscale_all_dim * stretch + 1.0)
    return Yarn(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast or 32.0,
        beta_slow=beta_slow or 1.0,
        attention_factor=attention_factor,
        truncate=truncate,
    )
