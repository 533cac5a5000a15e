"""Building a Transformers model without weights, and checking its structure."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.models.hf_config import first_lines

# Transformers detects packed documents by their positions and builds a mask for them, but not for an attention function
# without a mask function of its own: then attention is causal over the whole row.
_MASK_FREE = "sdpa_without_document_mask"


def build(hf_config: PreTrainedConfig, *, document_mask: bool, experts: str) -> PreTrainedModel:
    """``AutoModelForCausalLM`` of ``hf_config`` on the current default device, in the default dtype, not modified.

    Args:
        hf_config: left as it is; the model gets a copy.
        document_mask: whether attention will be given a mask. Without one it is causal over the whole row.
        experts: how Transformers computes experts: ``eager``, ``grouped_mm`` or ``batched_mm``.
    """
    options: dict[str, Any] = {"attn_implementation": "sdpa" if document_mask else _mask_free_attention()}
    if getattr(hf_config, "num_experts_per_tok", None):
        options["experts_implementation"] = experts
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(hf_config), dtype=torch.get_default_dtype(), trust_remote_code=False, **options
    )


def _mask_free_attention() -> str:
    """Transformers' own attention under a second name, in its public registry: the only way to ask for no mask."""
    AttentionInterface.register(_MASK_FREE, sdpa_attention_forward)
    return _MASK_FREE


def build_on_meta(
    hf_config: PreTrainedConfig, *, document_mask: bool = True, experts: str = "eager"
) -> PreTrainedModel:
    """The model on the meta device, its structure checked; nothing is allocated. Arguments are those of `build`.

    Raises:
        JobError: Transformers cannot build it, or it is not a decoder this route can train.
    """
    try:
        with torch.device("meta"):
            model = build(hf_config, document_mask=document_mask, experts=experts)
        reason = _unsupported_structure(model)
    except Exception as error:
        what = f"Transformers cannot build {type(hf_config).__name__}: {first_lines(error)}"
        raise JobError([Problem("model", what, "correct config.json or the values of [model]")]) from error
    if reason:
        fix = "supported are decoders like Llama, Qwen2, Qwen3 and Qwen3-MoE"
        raise JobError([Problem("config.json: model_type", f"{type(model).__name__} {reason}", fix)])
    return model


def attention_kinds(hf_config: PreTrainedConfig) -> set[str]:
    """Kinds of attention layers in Transformers' words, such as ``full_attention`` and ``sliding_attention``."""
    kinds = getattr(hf_config, "layer_types", None)
    if kinds:
        return set(kinds)
    return {"sliding_attention" if getattr(hf_config, "sliding_window", None) else "full_attention"}


def _unsupported_structure(model: PreTrainedModel) -> str:
    """Why ``model`` cannot be trained by this route; empty when it can."""
    decoder, head = getattr(model, "model", None), model.get_output_embeddings()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return "has no decoder at model.layers"
    if not isinstance(head, nn.Linear) or head is not getattr(model, "lm_head", None):
        return "has no linear output layer at lm_head"
    elsewhere = [name for name, _ in model.named_parameters() if not name.startswith(("model.", "lm_head."))]
    if elsewhere:
        return f"has parameters outside model and lm_head ({', '.join(elsewhere[:3])})"
    if not _head_is_last(model):
        return "changes its logits after lm_head (scaling or capping), which the chunked loss would leave out"
    return ""


def _head_is_last(model: PreTrainedModel) -> bool:
    """Whether logits are exactly ``lm_head`` of the decoder's output: one forward pass on meta without layers."""
    seen: dict[str, torch.Tensor] = {}
    decoder, layers = model.model, model.model.layers
    hooks = [
        model.lm_head.register_forward_hook(lambda _, args, output: seen.update(input=args[0], output=output)),
        decoder.register_forward_hook(lambda _, args, output: seen.update(hidden=output[0])),
    ]
    decoder.layers = nn.ModuleList()
    # Without layers there are no routers either, whatever the configuration asks for.
    no_router = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    try:
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
            mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta")
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **no_router).logits
    finally:
        decoder.layers = layers
        for hook in hooks:
            hook.remove()
    source, hidden = seen["input"], seen["hidden"]
    whole = source.shape == hidden.shape and (source is hidden or source._base is hidden)
    return logits is seen["output"] and whole
