import functools
import operator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.qwen3 import Qwen3StateDictAdapter as StockAdapter
from torchtitan.models.qwen3 import model_registry, qwen3_configs

from torchtitan_qwen3_trn.models.qwen3.architecture import Yarn
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS
from torchtitan_qwen3_trn.models.qwen3.spec import model_config, model_spec, parameter_counts
from torchtitan_qwen3_trn.models.qwen3.yarn_rope import YarnCosSinRoPE

SMALL = replace(FLAVORS["debugmodel_moe"], vocab_size=64, dim=32, n_layers=4, hidden_dim=48, moe_hidden_dim=16)
MIXED = replace(SMALL, decoder_sparse_step=2, mlp_only_layers=(3,))


def comparable(value):
    """A config tree as plain data: partials by function and arguments, closures by what they close over."""
    if is_dataclass(value):
        return (type(value), {field.name: comparable(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if closure := getattr(value, "__closure__", None):
        return (value.__code__, [comparable(cell.cell_contents) for cell in closure])
    return value


@pytest.mark.parametrize("name", qwen3_configs)
def test_a_stock_flavor_gives_the_stock_config(name):
    """Every field of every nested config, and every initialisation rule, torchtitan 0.3.0's own as reference."""
    assert comparable(model_config(FLAVORS[name])) == comparable(qwen3_configs[name]("flex"))


def test_the_comparison_sees_initialisation_and_rotary_differences():
    stock = comparable(qwen3_configs["debugmodel_moe"]("flex"))
    arch = FLAVORS["debugmodel_moe"]
    for changed in (replace(arch, init_std=0.01), replace(arch, rope_theta=1e4), replace(arch, norm_eps=1e-5)):
        assert comparable(model_config(changed)) != stock
    assert comparable(model_config(arch, load_balance_coeff=1e-2)) != stock


def test_the_spec_is_stocks_but_for_the_adapter():
    ours, stock = model_spec(FLAVORS["debugmodel"], flavor="debugmodel"), model_registry("debugmodel")
    assert issubclass(ours.state_dict_adapter, StockAdapter)
    for field in fields(stock):
        if field.name not in ("model", "state_dict_adapter", "parallelize_fn"):
            assert getattr(ours, field.name) == getattr(stock, field.name), field.name
    assert ours.parallelize_fn.args == (stock.parallelize_fn,)


@pytest.mark.parametrize("name", ["debugmodel", "debugmodel_moe", "0.6B", "4B-Instruct-2507", "30B-A3B", "235B-A22B"])
def test_parameter_counts_equal_those_of_the_built_model(name):
    with torch.device("meta"):
        model = model_config(FLAVORS[name]).build()
    total, active = parameter_counts(FLAVORS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    unused = sum(
        parameter.numel() * (layer.moe.router.num_experts - layer.moe.router.top_k) // layer.moe.router.num_experts
        for layer in model.layers.values()
        if layer.moe_enabled
        for parameter in layer.moe.routed_experts.inner_experts.parameters()
    )
    assert total - unused == active


def test_a_mixed_model_has_experts_exactly_where_the_architecture_says():
    config = model_config(MIXED)
    assert [layer.moe is not None for layer in config.layers] == [False, True, False, False]
    assert [layer.feed_forward is not None for layer in config.layers] == [True, False, True, True]
    with torch.device("meta"):
        model = config.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_counts(MIXED)[0]


def test_without_load_balancing_the_router_has_no_bias():
    with torch.device("meta"):
        keys = model_config(SMALL, load_balance_coeff=None).build().state_dict()
    assert not [key for key in keys if "expert_bias" in key]


def test_router_normalisation_follows_norm_topk_prob():
    router = model_config(replace(SMALL, norm_topk_prob=False)).layers[0].moe.router
    assert router.route_norm is False
    assert router.score_func == "softmax"


def test_layers_share_no_config_node():
    """Replacing one layer's attention must not replace another's."""
    config = model_config(SMALL)
    for path in ("attention.inner_attention", "attention.rope", "attention.qk_norm", "attention_norm", "moe.router"):
        assert len({id(operator.attrgetter(path)(layer)) for layer in config.layers}) == len(config.layers), path


def test_yarn_reaches_the_rotary_config_and_survives_a_change_of_length():
    yarn = Yarn(factor=4.0, original_max_position_embeddings=32, truncate=False, beta_fast=16.0)
    rope = model_config(replace(SMALL, yarn=yarn)).layers[0].attention.rope
    assert isinstance(rope, YarnCosSinRoPE.Config)
    assert (rope.scaling, rope.rope_factor, rope.original_seq_len) == ("yarn", 4.0, 32)
    assert (rope.truncate, rope.beta_fast, rope.beta_slow) == (False, 16.0, 1.0)
    shorter = replace(rope, max_seq_len=8)
    assert shorter.attention_factor == pytest.approx(1.1386294)
    unscaled = CosSinRoPE(CosSinRoPE.Config(**{f.name: getattr(shorter, f.name) for f in fields(CosSinRoPE.Config)}))
    assert torch.equal(shorter.build().cache, unscaled.cache * shorter.attention_factor)


def test_yarn_cache_is_rebuilt_with_the_factor_after_meta_initialisation():
    rope = (
        model_config(replace(SMALL, yarn=Yarn(factor=4.0, original_max_position_embeddings=32)))
        .layers[0]
        .attention.rope
    )
    direct = rope.build().cache
    with torch.device("meta"):
        module = rope.build()
    module.to_empty(device="cpu")
    module.init_states(buffer_device=torch.device("cpu"))
    assert torch.equal(module.cache, direct)
