"""From a job to the configuration of its Transformers model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.models.qwen3.architecture import (
    LARGEST,
    Architecture,
    Yarn,
    too_large,
    too_many_experts,
    with_changes,
)
from torchtitan_qwen3_trn.models.qwen3.hf_config import read_hf_config
from torchtitan_qwen3_trn.models.qwen3.native_spec import published
from torchtitan_qwen3_trn.models.qwen3.values import nearest

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.config import JobConfig

__all__ = ["LAYERS_AND_EXPERTS", "counts", "from_architecture", "from_folder", "hf_config_for"]

# Fields of [model] and what Transformers calls them. rope_theta is a key inside rope_parameters.
_KEYS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "moe_hidden_dim": "moe_intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "enable_weight_tying": "tie_word_embeddings",
}

# Counts of other architectures' config.json that decide how much work building a model is, even one without memory.
_SPELLINGS = {
    "n_layer": "n_layers",
    "n_layers": "n_layers",
    "num_layers": "n_layers",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
}
_FIELD_OF = {**{key: name for name, key in _KEYS.items()}, **_SPELLINGS}
# Entries of a list in config.json; some lists are searched once for every layer.
_LONGEST = 2**16
LAYERS_AND_EXPERTS = {key for key, name in _FIELD_OF.items() if name in ("n_layers", "num_experts")}


def hf_config_for(config: JobConfig) -> tuple[str, PreTrainedConfig]:
    """Name and Transformers configuration of the model that ``[model]`` describes.

    A flavor is a Qwen3 size, exactly as on the native route; without one, ``config.json`` in ``hf_assets_path`` may
    be of any architecture. Single fields of ``[model]`` replace values of either.

    Raises:
        JobError: unknown flavor or architecture, no config.json, a file that asks for remote code, an
            encoder-decoder, quantized weights, or values that do not fit together.
    """
    changes = config.model.changes()
    if config.model.flavor is not None:
        name, arch = published(config)
        hf_config = from_architecture(with_changes(arch, changes) if changes else arch)
    else:
        folder = Path(config.hf_assets_path)
        if problems := _too_large(changes, "model.", {name: name for name in LARGEST}):
            raise JobError(problems)
        name, hf_config = folder.name, from_folder(folder)
        hf_config = _with_few_experts(_with_changes(hf_config, changes)) if changes else hf_config
    if changes:
        name += " with " + ", ".join(f"{key} {value}" for key, value in changes.items())
    return name, hf_config


def from_folder(folder: Path) -> PreTrainedConfig:
    """The configuration in ``folder/config.json``, which must be of a causal language model Transformers itself has.

    Raises:
        JobError: with every reason why it cannot be used.
    """
    raw = read_hf_config(folder)
    problems = _unusable(raw) + _too_large(raw, "config.json: ", _FIELD_OF)
    if problems:
        raise JobError(problems)
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        what = f"is refused by Transformers: {_first_lines(error)}"
        raise JobError([Problem("config.json", what, "correct the value or download the file again")]) from error
    return _with_few_experts(hf_config)


def counts(raw: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """The numbers of a config.json, also of configurations inside it: key path, key, number."""
    waiting = [("", raw)]
    while waiting:
        prefix, table = waiting.pop()
        for key, value in table.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{key}.", value))
            elif isinstance(value, int | float):
                yield prefix + key, key, value


def from_architecture(arch: Architecture) -> PreTrainedConfig:
    """``Qwen3Config`` or ``Qwen3MoeConfig`` with the numbers of ``arch``."""
    values: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.dim,
        "intermediate_size": arch.hidden_dim,
        "num_hidden_layers": arch.n_layers,
        "num_attention_heads": arch.n_heads,
        "num_key_value_heads": arch.n_kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_seq_len,
        "tie_word_embeddings": arch.enable_weight_tying,
        "initializer_range": arch.init_std,
        "rope_parameters": _rope_parameters(arch.rope_theta, arch.yarn),
    }
    if not arch.num_experts:
        return Qwen3Config(**values)
    return Qwen3MoeConfig(
        **values,
        num_experts=arch.num_experts,
        num_experts_per_tok=arch.top_k,
        moe_intermediate_size=arch.moe_hidden_dim,
        norm_topk_prob=arch.norm_topk_prob,
        mlp_only_layers=list(arch.mlp_only_layers),
        decoder_sparse_step=arch.decoder_sparse_step,
        router_aux_loss_coef=arch.router_aux_loss_coef,
    )


def _rope_parameters(theta: float, yarn: Yarn | None) -> dict[str, Any]:
    if yarn is None:
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "attention_factor": yarn.magnitude,
        "truncate": yarn.truncate,
    }


def _unusable(raw: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the kind of model a config.json describes."""
    problems = []
    if raw.get("auto_map"):
        named = raw["auto_map"]
        classes = ", ".join(map(str, named.values() if isinstance(named, dict) else [named]))[:120]
        what = f"asks to run Python code that comes with the checkpoint ({classes}), which is never done"
        problems.append(Problem("config.json: auto_map", what, "use a checkpoint of an architecture in Transformers"))
    if "configuration_files" in raw:
        what = "asks to read another file in place of this one, which was not checked"
        problems.append(Problem("config.json: configuration_files", what, "remove it"))
    if raw.get("is_encoder_decoder"):
        what = "an encoder-decoder model cannot be trained on plain text as a causal language model"
        problems.append(Problem("config.json: is_encoder_decoder", what, "use a decoder-only checkpoint"))
    if raw.get("quantization_config"):
        what = "the weights are quantized, and training needs them as floating-point numbers"
        problems.append(Problem("config.json: quantization_config", what, "use the unquantized checkpoint"))
    for key, value in raw.items():
        if isinstance(value, list) and len(value) > _LONGEST:
            problems.append(Problem(f"config.json: {key}", f"has {len(value)} entries", f"at most {_LONGEST}"))
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        if kind is None:
            return [*problems, Problem("config.json: model_type", "missing", 'for instance "model_type": "qwen3"')]
        what = f"{json.dumps(kind)} is no architecture of the installed Transformers"
        close = nearest(str(kind), list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))[:3]
        problems.append(Problem("config.json: model_type", what, f"the nearest are {', '.join(close)}"))
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not problems:
        what = f"{json.dumps(kind)} is not a causal language model"
        problems.append(Problem("config.json: model_type", what, "use a decoder-only language model"))
    return problems


def _too_large(raw: Mapping[str, Any], prefix: str, fields: Mapping[str, str]) -> list[Problem]:
    """Numbers beyond `LARGEST`, which building even an empty model would take for ever or all memory."""
    return [
        Problem(prefix + path, *fault)
        for path, key, value in counts(raw)
        if (largest := LARGEST.get(fields.get(key, ""))) and (fault := too_large(value, largest))
    ]


def _with_few_experts(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_config`` itself; raises `JobError` when its layers have too many experts in all."""
    text = hf_config.get_text_config()
    keys = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
    layers, *experts = (value if isinstance(value := getattr(text, key, 0), int) else 0 for key in keys)
    if fault := too_many_experts(layers, max(experts)):
        raise JobError([Problem("config.json: num_experts", *fault)])
    return hf_config


def _with_changes(hf_config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """``hf_config`` with single values replaced, validated as if they had stood in config.json."""
    values, problems = hf_config.to_dict(), []
    for name, value in changes.items():
        key = _KEYS.get(name, "rope_parameters")
        if not hasattr(hf_config, key):
            what = f"{type(hf_config).__name__} has no {key} for it to replace"
            problems.append(Problem(f"model.{name}", what, "leave it out"))
        elif name == "rope_theta":
            values[key] = {**(values[key] or {}), "rope_theta": value}
        else:
            values[hf_config.attribute_map.get(key, key)] = value
    if problems:
        raise JobError(problems)
    if values.get("layer_types") and set(values["layer_types"]) == {"full_attention"}:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    try:
        return type(hf_config).from_dict(values)
    except Exception as error:
        named = ", ".join(f"{name} {value}" for name, value in changes.items())
        what = f"with {named} the configuration is refused by Transformers: {_first_lines(error)}"
        raise JobError([Problem("model", what, "change one of these values")]) from error


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
