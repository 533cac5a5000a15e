"""`Architecture` -> torchtitan `ModelSpec`, built from torchtitan's own parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

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
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.models.qwen3.architecture import Architecture
from torchtitan_qwen3_trn.models.qwen3.balanced import (
    BalancedQwen3Model,
    forget_counts_after_steps,
    parallelize_balanced,
)
from torchtitan_qwen3_trn.models.qwen3.sizes import expected_first_loss, parameter_counts
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan_qwen3_trn.models.qwen3.yarn_rope import YarnCosSinRoPE
from torchtitan_qwen3_trn.overrides.fused_qk_norm import link

__all__ = ["expected_first_loss", "model_config", "model_spec", "parameter_counts"]

_Init = dict[str, Callable[..., Any]]


def model_spec(
    arch: Architecture, *, flavor: str, load_balance_coeff: float | None = 1e-3, balancing_loss: bool = False
) -> ModelSpec:
    """What torchtitan's trainer needs to build, shard, load and save the model ``arch``.

    Args:
        arch: the numbers.
        flavor: name under which torchtitan logs the model.
        load_balance_coeff: step of the expert bias that balances load (arXiv 2408.15664); ``None`` leaves the
            router alone. A bias that has moved has no place in a Hugging Face checkpoint.
        balancing_loss: balance load by the auxiliary loss of Qwen3's recipe, weighted by ``router_aux_loss_coef``.
    """
    if balancing_loss:
        return ModelSpec(
            name="qwen3",
            flavor=flavor,
            model=_balanced(arch, model_config(arch, load_balance_coeff=None)),
            parallelize_fn=partial(parallelize, parallelize_balanced),
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=forget_counts_after_steps,
            state_dict_adapter=Qwen3StateDictAdapter,
        )
    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        model=model_config(arch, load_balance_coeff=load_balance_coeff),
        parallelize_fn=partial(parallelize, parallelize_qwen3),
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def parallelize(apply: Callable[..., nn.Module], model: nn.Module, **options: Any) -> nn.Module:
    """``apply`` parallelization to a model whose modules that work together have found each other."""
    link(model)
    return apply(model, **options)


def model_config(arch: Architecture, *, load_balance_coeff: float | None = 1e-3) -> Qwen3Model.Config:
    """The model part of `model_spec`, equal to torchtitan's own for the flavors torchtitan has."""
    linear = _linear_init(arch.init_std)
    embedding: _Init = {"weight": skip_param_init if arch.enable_weight_tying else linear["weight"]}
    return Qwen3Model.Config(
        vocab_size=arch.vocab_size,
        dim=arch.dim,
        norm=_norm(arch, arch.dim),
        enable_weight_tying=arch.enable_weight_tying,
        tok_embeddings=Embedding.Config(num_embeddings=arch.vocab_size, embedding_dim=arch.dim, param_init=embedding),
        lm_head=Linear.Config(in_features=arch.dim, out_features=arch.vocab_size, param_init=linear),
        layers=[_layer(arch, index, load_balance_coeff) for index in range(arch.n_layers)],
    )


def _balanced(arch: Architecture, stock: Qwen3Model.Config) -> BalancedQwen3Model.Config:
    values = {item.name: getattr(stock, item.name) for item in fields(stock) if item.init}
    return BalancedQwen3Model.Config(**values, router_aux_loss_coef=arch.router_aux_loss_coef)


def _linear_init(std: float) -> _Init:
    return {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}


def _residual_std(arch: Architecture) -> float:
    """Standard deviation of projections that write to the residual stream of a model with experts.

    Two such projections per layer, so dividing by sqrt(2 n_layers) keeps the stream's variance independent of
    depth; torchtitan does it for its mixture-of-experts flavors and not for its dense ones.
    """
    return float(arch.init_std / (2 * arch.n_layers) ** 0.5)


def _norm(arch: Architecture, width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=arch.norm_eps, param_init={"weight": nn.init.ones_})


def _rope(arch: Architecture) -> CosSinRoPE.Config:
    plain = {"dim": arch.head_dim, "max_seq_len": arch.max_seq_len, "theta": arch.rope_theta}
    if arch.yarn is None:
        return CosSinRoPE.Config(**plain)
    return YarnCosSinRoPE.Config(
        **plain,
        scaling="yarn",
        rope_factor=arch.yarn.factor,
        original_seq_len=arch.yarn.original_max_position_embeddings,
        beta_fast=arch.yarn.beta_fast,
        beta_slow=arch.yarn.beta_slow,
        truncate=arch.yarn.truncate,
        attention_factor=arch.yarn.magnitude,
    )


def _layer(arch: Architecture, index: int, load_balance_coeff: float | None) -> Qwen3TransformerBlock.Config:
    linear = _linear_init(arch.init_std)
    output = _linear_init(_residual_std(arch)) if arch.moe_layers else linear
    experts = arch.is_moe_layer(index)
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(arch, arch.dim),
        ffn_norm=_norm(arch, arch.dim),
        attention=make_gqa_config(
            dim=arch.dim,
            n_heads=arch.n_heads,
            n_kv_heads=arch.n_kv_heads,
            head_dim=arch.head_dim,
            wqkv_param_init=linear,
            wo_param_init=output,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=arch.fuse_qkv,
            rope=_rope(arch),
            qk_norm=_norm(arch, arch.head_dim),
        ),
        moe=_moe(arch, load_balance_coeff) if experts else None,
        feed_forward=None
        if experts
        else make_ffn_config(dim=arch.dim, hidden_dim=arch.hidden_dim, w1_param_init=linear, w2w3_param_init=linear),
    )


def _moe(arch: Architecture, load_balance_coeff: float | None) -> Any:
    linear = _linear_init(arch.init_std)
    output = _linear_init(_residual_std(arch))["weight"]
    return make_moe_config(
        num_experts=arch.num_experts,
        load_balance_coeff=load_balance_coeff,
        router=make_router_config(
            dim=arch.dim,
            num_experts=arch.num_experts,
            gate_param_init=linear,
            top_k=arch.top_k,
            score_func="softmax",
            route_norm=arch.norm_topk_prob,
        ),
        routed_experts=make_routed_experts_config(
            dim=arch.dim,
            hidden_dim=arch.moe_hidden_dim,
            num_experts=arch.num_experts,
            top_k=arch.top_k,
            param_init={"w1_EFD": linear["weight"], "w2_EDF": output, "w3_EFD": linear["weight"]},
            comm_backend="standard",
        ),
    )
