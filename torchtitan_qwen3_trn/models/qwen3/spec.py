"""Transformers' configuration of a Qwen3 -> torchtitan's model, built from torchtitan's own parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.models.described_spec import DescribedModelSpec
from torchtitan_qwen3_trn.models.qwen3.balanced import (
    BalancedQwen3Model,
    forget_counts_after_steps,
    parallelize_balanced,
)
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan_qwen3_trn.models.qwen3.unsupported import unsupported
from torchtitan_qwen3_trn.models.qwen3.yarn_rope import YarnCosSinRoPE
from torchtitan_qwen3_trn.models.value_rules import expert_layers, head_dim
from torchtitan_qwen3_trn.overrides.fused_qk_norm import link

_Init = dict[str, Callable[..., Any]]


def model_spec(
    hf_config: PreTrainedConfig,
    *,
    flavor: str,
    load_balance_coeff: float | None = 1e-3,
    balancing_loss: bool = False,
    fuse_qkv: bool = True,
) -> DescribedModelSpec:
    """What torchtitan's trainer needs to build, shard, load and save the model ``hf_config``.

    Args:
        hf_config: a ``Qwen3Config`` or ``Qwen3MoeConfig``.
        flavor: name under which torchtitan logs the model.
        load_balance_coeff: step of the expert bias that balances load (arXiv 2408.15664); ``None`` leaves the
            router alone. A bias that has moved has no place in a Hugging Face checkpoint.
        balancing_loss: balance load by the auxiliary loss of Qwen3's recipe, weighted by ``router_aux_loss_coef``,
            and not by the bias.
        fuse_qkv: keep the three attention projections in one matrix in memory; files do not change.

    Raises:
        JobError: torchtitan's Qwen3 cannot represent the model.
    """
    model = model_config(
        hf_config, load_balance_coeff=None if balancing_loss else load_balance_coeff, fuse_qkv=fuse_qkv
    )
    spread = (register_moe_load_balancing_hook, parallelize_qwen3)
    if balancing_loss:
        model, spread = _balanced(hf_config, model), (forget_counts_after_steps, parallelize_balanced)
    return DescribedModelSpec(
        name="qwen3",
        flavor=flavor,
        model=model,
        parallelize_fn=partial(parallelize, spread[1]),
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=spread[0],
        state_dict_adapter=Qwen3StateDictAdapter,
        hf_config=hf_config,
    )


def parallelize(apply: Callable[..., nn.Module], model: nn.Module, **options: Any) -> nn.Module:
    """``apply`` parallelization to a model whose modules that work together have found each other."""
    link(model)
    return apply(model, **options)


def model_config(
    hf_config: PreTrainedConfig, *, load_balance_coeff: float | None = 1e-3, fuse_qkv: bool = True
) -> Qwen3Model.Config:
    """The model part of `model_spec`, equal to torchtitan's own for the flavors torchtitan has."""
    if problems := unsupported(hf_config.to_dict()):
        raise JobError(replace(each, where=f"config.json: {each.where}") for each in problems)
    linear = _linear_init(hf_config.initializer_range)
    vocab_size, dim, tied = hf_config.vocab_size, hf_config.hidden_size, hf_config.tie_word_embeddings
    embedding: _Init = {"weight": skip_param_init if tied else linear["weight"]}
    experts = expert_layers(hf_config)
    return Qwen3Model.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=_norm(hf_config, dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=embedding),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=linear),
        layers=[
            Qwen3TransformerBlock.Config(
                attention_norm=_norm(hf_config, dim),
                ffn_norm=_norm(hf_config, dim),
                attention=_attention(hf_config, fuse_qkv),
                moe=_moe(hf_config, load_balance_coeff) if layer in experts else None,
                feed_forward=None if layer in experts else _feed_forward(hf_config),
            )
            for layer in range(hf_config.num_hidden_layers)
        ],
    )


def parameter_count(model: Qwen3Model.Config) -> int:
    """Parameters of ``model``; a tied embedding counts once.

    Builds no more than one layer of each kind, because building all of a large model takes seconds.
    """

    def numel(part: Any) -> int:
        return sum(parameter.numel() for parameter in part.build().parameters())

    has_experts = [layer.moe is not None for layer in model.layers]
    with torch.device("meta"):
        of_layer = {kind: numel(model.layers[has_experts.index(kind)]) for kind in set(has_experts)}
        return numel(replace(model, layers=[])) + sum(of_layer[kind] for kind in has_experts)


def _balanced(hf_config: PreTrainedConfig, stock: Qwen3Model.Config) -> BalancedQwen3Model.Config:
    values = {item.name: getattr(stock, item.name) for item in fields(stock) if item.init}
    return BalancedQwen3Model.Config(**values, router_aux_loss_coef=hf_config.router_aux_loss_coef)


def _linear_init(std: float) -> _Init:
    return {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}


def _output_init(hf_config: PreTrainedConfig) -> _Init:
    """Initial values of projections that write to the residual stream.

    In a model with experts, two such projections per layer, so dividing by sqrt(2 layers) keeps the stream's variance
    independent of depth; torchtitan does it for its mixture-of-experts flavors and not for its dense ones.
    """
    std, layers = hf_config.initializer_range, hf_config.num_hidden_layers
    return _linear_init(float(std / (2 * layers) ** 0.5) if expert_layers(hf_config) else std)


def _norm(hf_config: PreTrainedConfig, width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=hf_config.rms_norm_eps, param_init={"weight": nn.init.ones_})


def _rope(hf_config: PreTrainedConfig) -> CosSinRoPE.Config:
    """Rotary settings. With YaRN the model is made for the longer of ``max_position_embeddings`` and the stretched
    context, because Qwen's instructions for YaRN leave the former as it is."""
    settled = copy.deepcopy(hf_config)
    settled.standardize_rope_params()
    rope, positions = settled.rope_parameters, hf_config.max_position_embeddings
    plain = {"dim": head_dim(hf_config), "theta": float(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return CosSinRoPE.Config(**plain, max_seq_len=positions)
    factor, original = float(rope["factor"]), rope["original_max_position_embeddings"]
    return YarnCosSinRoPE.Config(
        **plain,
        max_seq_len=max(positions, int(factor * original)),
        scaling="yarn",
        rope_factor=factor,
        original_seq_len=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
        attention_factor=ROPE_INIT_FUNCTIONS["yarn"](settled, torch.device("cpu"))[1],
    )


def _attention(hf_config: PreTrainedConfig, fuse_qkv: bool) -> Any:
    return make_gqa_config(
        dim=hf_config.hidden_size,
        n_heads=hf_config.num_attention_heads,
        n_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim(hf_config),
        wqkv_param_init=_linear_init(hf_config.initializer_range),
        wo_param_init=_output_init(hf_config),
        inner_attention=get_attention_config("flex"),
        fuse_qkv=fuse_qkv,
        rope=_rope(hf_config),
        qk_norm=_norm(hf_config, head_dim(hf_config)),
    )


def _feed_forward(hf_config: PreTrainedConfig) -> Any:
    linear = _linear_init(hf_config.initializer_range)
    return make_ffn_config(
        dim=hf_config.hidden_size,
        hidden_dim=hf_config.intermediate_size,
        w1_param_init=linear,
        w2w3_param_init=linear,
    )


def _moe(hf_config: PreTrainedConfig, load_balance_coeff: float | None) -> Any:
    linear, output = _linear_init(hf_config.initializer_range), _output_init(hf_config)
    dim, experts, top_k = hf_config.hidden_size, hf_config.num_experts, hf_config.num_experts_per_tok
    return make_moe_config(
        num_experts=experts,
        load_balance_coeff=load_balance_coeff,
        router=make_router_config(
            dim=dim,
            num_experts=experts,
            gate_param_init=linear,
            top_k=top_k,
            score_func="softmax",
            route_norm=hf_config.norm_topk_prob,
        ),
        routed_experts=make_routed_experts_config(
            dim=dim,
            hidden_dim=hf_config.moe_intermediate_size,
            num_experts=experts,
            top_k=top_k,
            param_init={"w1_EFD": linear["weight"], "w2_EDF": output["weight"], "w3_EFD": linear["weight"]},
            comm_backend="standard",
        ),
    )
