"""A folder's config.json -> Transformers' configuration of its model, which is what describes a model everywhere here.

Whatever is wrong is reported by its key before Transformers builds anything of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.models.value_rules import head_dim, nearest, shown, value_problems

# What a caller has against the values of a config.json; `Problem.where` is the key.
Rule = Callable[[Mapping[str, Any]], list[Problem]]

# Keys that decide what the weights compute, in any architecture.
_MEANING = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "rope_parameters",
    "tie_word_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
)
# Keys that must be absent, null, false or empty.
_REFUSED = {
    "configuration_files": ("asks to read another file in place of this one, which was not checked", "remove it"),
    "is_encoder_decoder": (
        "an encoder-decoder model cannot be trained on plain text as a causal language model",
        "use a decoder-only checkpoint",
    ),
    "quantization_config": (
        "the weights are quantized, and training needs them as floating-point numbers",
        "use the unquantized checkpoint",
    ),
    "per_layer_config": ("layers of different sizes are not supported", "remove it"),
}


def from_folder(folder: Path, *, rule: Rule | None = None) -> PreTrainedConfig:
    """The configuration in ``folder/config.json``, which must be of a causal language model Transformers itself has.

    Args:
        folder: a folder as published on Hugging Face.
        rule: what else must hold of the values.

    Raises:
        JobError: no such file, a link out of the folder, not JSON, or every key that cannot be used, each with
            ``where="config.json: <key>"``.
    """
    values = read_json(Path(folder) / "config.json")
    problems = _unusable(values)
    if not any(problem.where == "model_type" for problem in problems):
        problems += value_problems(values, CONFIG_MAPPING[values["model_type"]])
        problems += rule(values) if rule is not None else []
    if problems:
        by_key = {problem.where: problem for problem in reversed(problems)}
        raise JobError(replace(each, where=f"config.json: {key}") for key, each in reversed(by_key.items()))
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        what = f"is refused by Transformers: {first_lines(error)}"
        raise JobError([Problem("config.json", what, "correct the value or download the file again")]) from error


def config_differences(one: PreTrainedConfig, other: PreTrainedConfig, *, also: tuple[str, ...] = ()) -> list[str]:
    """Keys in which two configurations describe different computations, as ``key: one's, and not other's``.

    ``also`` names further keys to compare, which change what a model is made for and not what it computes.
    """
    pairs = {key: (_meaning(one, key), _meaning(other, key)) for key in (*_MEANING, *also)}
    return [f"{key}: {a!r}, and not {b!r}" for key, (a, b) in pairs.items() if a != b]


def first_lines(error: Exception) -> str:
    """The message of ``error`` in one line."""
    return " ".join(str(error).split())[:300]


def _meaning(config: PreTrainedConfig, key: str) -> Any:
    if key == "head_dim" and isinstance(getattr(config, "num_attention_heads", None), int):
        return head_dim(config)
    value = getattr(config, key, None)
    if key == "rope_parameters" and isinstance(value, dict):
        return {name: each for name, each in value.items() if name != "type" and each is not None}
    return value


def _unusable(values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the kind of model a config.json describes; a problem with ``model_type`` ends the search."""
    problems = []
    if named := values.get("auto_map"):
        classes = ", ".join(map(str, named.values() if isinstance(named, dict) else [named]))[:120]
        what = f"asks to run Python code that comes with the checkpoint ({classes}), which is never done"
        problems.append(Problem("auto_map", what, "use a checkpoint of an architecture in Transformers"))
    problems += [Problem(key, what, fix) for key, (what, fix) in _REFUSED.items() if values.get(key)]
    return [*problems, *_unknown_type(values.get("model_type"), others=bool(problems))]


def _unknown_type(kind: object, *, others: bool) -> list[Problem]:
    if kind is None:
        return [Problem("model_type", "missing", 'for instance "model_type": "qwen3"')]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        close = ", ".join(nearest(str(kind), list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))[:3])
        what = f"{shown(kind)} is no architecture of the installed Transformers"
        return [Problem("model_type", what, f"the nearest are {close}")]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not others:
        return [Problem("model_type", f"{shown(kind)} is not a causal language model", "use a decoder-only model")]
    return []
