"""Everything of a Hugging Face folder that is not weights: config.json, generation settings, tokenizer."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.folder import file_problem

logger = logging.getLogger(__name__)

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_GENERATION = "generation_config.json"


def assets_problems(source: Path) -> list[Problem]:
    """Files of ``source`` that `write_assets` must not copy, such as links out of the folder or to nothing."""
    return [problem for name in (*_TOKENIZER, _GENERATION) if (problem := file_problem(source / name))]


def write_assets(folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype, source: Path) -> None:
    """Write config.json of the model ``config`` to ``folder``, and what else ``source`` has beside its weights.

    Rotary settings and experts are written under the keys of Transformers 5 and of Transformers 4, which would
    otherwise take its defaults silently.

    Raises:
        JobError: files of ``source`` must not be copied; all of them.
        OSError: a file cannot be copied or written.
    """
    if problems := assets_problems(source):
        raise JobError(problems)
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(config)
    architectures, kind = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]], str(dtype).removeprefix("torch.")
    config.architectures, config.dtype, config.use_cache = architectures, dtype, True
    values = config.to_diff_dict() | {"architectures": architectures, "dtype": kind, "torch_dtype": kind}
    values |= _older_rotary_keys(config)
    # Transformers 5 writes the count of experts under another name than published files and Transformers 4 have.
    values |= {old: values[new] for old, new in config.attribute_map.items() if new in values and old not in values}
    _write_json(folder / "config.json", values)
    for file in (source / name for name in (*_TOKENIZER, _GENERATION)):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    if not (source / _GENERATION).is_file():
        _write_json(folder / _GENERATION, _generation(config, source).to_diff_dict())


def has_tokenizer(folder: Path) -> bool:
    """Whether Transformers finds a tokenizer in ``folder``."""
    return (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file()


def _older_rotary_keys(config: PreTrainedConfig) -> dict[str, Any]:
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict) or "rope_theta" not in rotary:
        return {}
    scaling = {key: value for key, value in rotary.items() if key != "rope_theta"}
    older: dict[str, Any] = {"rope_theta": rotary["rope_theta"]}
    return older if scaling.get("rope_type", "default") == "default" else older | {"rope_scaling": scaling}


def _generation(config: PreTrainedConfig, source: Path) -> GenerationConfig:
    """Greedy, until the end token of the configuration or of the tokenizer."""
    generation = GenerationConfig.from_model_config(config)
    if generation.eos_token_id is None and has_tokenizer(source):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
            generation.eos_token_id = tokenizer.eos_token_id
        except Exception as error:  # a damaged tokenizer is no reason to lose an export
            logger.warning("%s will name no end token: the tokenizer cannot be loaded (%s)", _GENERATION, error)
    return generation


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
