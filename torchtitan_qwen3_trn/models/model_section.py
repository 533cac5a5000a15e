"""The section ``[model]`` of a job -> Transformers' configuration of its model, the same on every route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.models.hf_config import Rule, config_differences, first_lines, from_folder
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS, flavor
from torchtitan_qwen3_trn.models.value_rules import expert_count, value_problems

# Fields of [model] that replace a value, and where Transformers keeps that value.
MODEL_KEYS: Mapping[str, str] = {
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
    "rope_theta": "rope_parameters.rope_theta",
    "max_seq_len": "max_position_embeddings",
    "enable_weight_tying": "tie_word_embeddings",
}
_FIELD_OF = {key: name for name, key in MODEL_KEYS.items()} | {"num_local_experts": "num_experts"}
# Keys in which a flavor and a checkpoint must agree although they do not change what the weights compute.
_MADE_FOR = ("max_position_embeddings", "initializer_range", "router_aux_loss_coef")


def described(config: JobConfig, *, rule: Rule | None = None) -> tuple[str, PreTrainedConfig]:
    """Name and Transformers configuration of the model that ``[model]`` of the job ``config`` describes.

    A flavor is a Qwen3 size; without one, ``config.json`` in ``hf_assets_path`` decides, which may be of any
    architecture. Single fields of ``[model]`` replace values of either.

    Args:
        config: the job, a `Trainer.Config` with a section ``model``.
        rule: what else must hold of the values of a config.json.

    Raises:
        JobError: unknown flavor, neither flavor nor config.json, a config.json that cannot be used, a flavor that
            contradicts the checkpoint to be loaded, or values that do not fit together.
    """
    name, hf_config = _published(config, rule)
    changes = config.model.changes()
    if not changes:
        return name, hf_config
    named = ", ".join(f"{key} {value}" for key, value in changes.items())
    return f"{name} with {named}", with_changes(hf_config, changes)


def with_changes(hf_config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """``hf_config`` with single values replaced, judged as if they had stood in config.json.

    Args:
        hf_config: where to start from; it is not changed.
        changes: names in `MODEL_KEYS` to new values. ``num_experts`` turns a dense Qwen3 into one with experts, and
            with 0 the other way round.

    Raises:
        JobError: values the model has no place for, and combinations that cannot be built, all at once, each with
            ``where="model.<field>"``.
    """
    cls, values = _with_or_without_experts(hf_config, changes)
    if problems := _without_effect(cls, changes):
        raise JobError(problems)
    for name, value in changes.items():
        key, _, inner = MODEL_KEYS[name].partition(".")
        if inner:
            values[key] = {**(values[key] or {}), inner: value}
        else:
            values[cls.attribute_map.get(key, key)] = value
    if cls is Qwen3Config:
        values.pop("num_experts", None)
    if problems := value_problems(values, cls):
        raise JobError(replace(each, where=_place(each.where)) for each in problems)
    if values.get("layer_types") and set(values["layer_types"]) == {"full_attention"}:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    try:
        return cls.from_dict(values)
    except Exception as error:
        named = ", ".join(f"{name} {value}" for name, value in changes.items())
        what = f"with {named} the configuration is refused by Transformers: {first_lines(error)}"
        raise JobError([Problem("model", what, "change one of these values")]) from error


def _published(config: JobConfig, rule: Rule | None) -> tuple[str, PreTrainedConfig]:
    """Name and configuration from the flavor, or from config.json beside the weights."""
    folder, chosen = Path(config.hf_assets_path), config.model.flavor
    has_config = (folder / "config.json").is_file()
    if chosen is None:
        if not has_config:
            what = f"no flavor is given and {folder} holds no config.json to take the architecture from"
            raise JobError([Problem("model.flavor", what, f"choose one of {', '.join(FLAVORS)}")])
        return folder.name, from_folder(folder, rule=rule)
    hf_config, checkpoint = flavor(chosen), config.checkpoint
    loads_from = Path(checkpoint.initial_load_path or folder)
    if not (has_config and checkpoint.initial_load_in_hf and loads_from.resolve() == folder.resolve()):
        return chosen, hf_config
    if conflicts := config_differences(hf_config, from_folder(folder, rule=rule), also=_MADE_FOR):
        what = f"{chosen!r} is not the checkpoint in {folder}, by the keys of its config.json: {'; '.join(conflicts)}"
        raise JobError([Problem("model.flavor", what, "leave flavor out: config.json then decides")])
    return chosen, hf_config


def _place(key: str) -> str:
    return f"model.{_FIELD_OF[key]}" if key in _FIELD_OF else f"config.json: {key}"


def _with_or_without_experts(hf_config: PreTrainedConfig, changes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Class and values of ``hf_config``, of Qwen3's other class where ``changes`` give or take its experts."""
    cls, values = type(hf_config), hf_config.to_dict()
    values.pop("model_type")
    if cls not in (Qwen3Config, Qwen3MoeConfig):
        return cls, values
    other = Qwen3MoeConfig if changes.get("num_experts", expert_count(hf_config)) else Qwen3Config
    if other is cls:
        return cls, values
    of_one_kind = {item.name for item in fields(cls)} - {item.name for item in fields(other)} - {"head_dim"}
    gone = {*of_one_kind, *cls.attribute_map.values(), "architectures"}
    values = {key: value for key, value in values.items() if key not in gone}
    # A dense Qwen3 says nothing of these; its relatives with experts normalise.
    absent = {"num_experts_per_tok": 0, "moe_intermediate_size": 0, "norm_topk_prob": True}
    return other, values | absent if other is Qwen3MoeConfig else values


def _without_effect(cls: Any, changes: Mapping[str, Any]) -> list[Problem]:
    known = {item.name for item in fields(cls)} | set(cls.attribute_map)
    known |= {"num_experts"} if cls is Qwen3Config else {"head_dim"} if cls is Qwen3MoeConfig else set()
    problems = []
    for name in changes:
        key = MODEL_KEYS[name].partition(".")[0]
        if key in known:
            continue
        what, fix = f"{cls.__name__} has no {key} for it to replace", "leave it out"
        if cls is Qwen3Config:
            what, fix = "the model has no experts for it to act on", "set model.num_experts too"
        problems.append(Problem(f"model.{name}", what, fix))
    return problems
