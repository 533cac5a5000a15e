"""Checks of a job on the Hugging Face route that need its model but no process group, no folder and no memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.checks.model_limits import check_memory, check_positions, check_vocabulary, indivisible
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.models.hf.build import attention_kinds
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.tensor_parallel import unknown_styles


def check(config: JobConfig, machine: Machine) -> list[Problem]:
    """Degrees, sequence length, attention, vocabulary, memory."""
    model = cast(HFModel.Config, cast(ModelSpec, config.model_spec).model)
    return [
        *_parallelism(config),
        *_tensor_parallel(config, model),
        *_sequence(config, model),
        *check_vocabulary(config, model.vocab_size),
        *check_memory(sum(map(math.prod, model.layout.shapes.values())), config, machine),
    ]


def _parallelism(config: JobConfig) -> Iterator[Problem]:
    degrees = config.parallelism
    for kind in ("pipeline", "context", "expert"):
        key = f"{kind}_parallel_degree"
        if getattr(degrees, key) > 1:
            what = f"{getattr(degrees, key)}, but {kind} parallelism does not exist on the huggingface_v5 route"
            yield Problem(f"parallelism.{key}", what, 'set it to 1, or model.backend = "native"')
    if degrees.spmd_backend != "spmd_types":
        what = f'"{degrees.spmd_backend}" does not exist on the huggingface_v5 route'
        yield Problem("parallelism.spmd_backend", what, 'the only one is "spmd_types"')
    if config.debug.spmd_typechecking:
        what = "Transformers' modules carry no types to check"
        yield Problem("debug.spmd_typechecking", what, "switch it off")


def _tensor_parallel(config: JobConfig, model: HFModel.Config) -> Iterator[Problem]:
    degree, where = config.parallelism.tensor_parallel_degree, "parallelism.tensor_parallel_degree"
    if degree <= 1:
        return
    if not model.tensor_parallel_plan:
        yield Problem(where, "this architecture has no tensor parallel plan in Transformers", "set it to 1")
    if unknown := unknown_styles(model.tensor_parallel_plan):
        what = f"this architecture's plan uses styles that are not known here: {', '.join(sorted(unknown))}"
        yield Problem(where, what, "set it to 1")
    text = model.architecture
    dense = (shape[0] for name, shape in model.layout.shapes.items() if name.endswith(".mlp.gate_proj.weight"))
    counts = {
        "query heads": text.num_attention_heads,
        "key and value heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "columns of the feed-forward layer": next(dense, degree),
        "experts": getattr(text, "num_experts", None) or degree,
        "vocabulary entries": model.vocab_size,
    }
    yield from indivisible(where, degree, counts)
    if model.layout.tied and getattr(text, "pad_token_id", None) is not None:
        what = "a padding token in an embedding that is tied to the output layer cannot be split"
        yield Problem(where, what, "set it to 1, or remove pad_token_id from config.json")


def _sequence(config: JobConfig, model: HFModel.Config) -> Iterator[Problem]:
    text, seq_len = model.architecture, config.training.seq_len
    positions = getattr(text, "max_position_embeddings", None) or seq_len
    yield from check_positions(config, positions)
    kinds = attention_kinds(text)
    window = getattr(text, "sliding_window", None) or 0
    if "sliding_attention" in kinds and seq_len > window:
        what = f"{seq_len} is beyond the sliding window of {window} positions, which is not supported"
        yield Problem("training.seq_len", what, f"at most {window}, where the window makes no difference")
    if others := kinds - {"full_attention", "sliding_attention"}:
        what = f"layers of type {', '.join(sorted(others))} cannot take a document mask"
        yield Problem("config.json: layer_types", what, "use a model with full attention")
