import functools
import operator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.qwen3 import Qwen3StateDictAdapter as StockAdapter
from torchtitan.models.qwen3 import model_registry, qwen3_configs
from transformers import AutoModelForCausalLM

from torchtitan_qwen3_trn.models.qwen3.flavors import SEPARATE_QKV, flavor
from torchtitan_qwen3_trn.models.qwen3.spec import model_config, model_spec, parameter_count
from torchtitan_qwen3_trn.models.qwen3.yarn_rope import YarnCosSinRoPE


def small(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
    return flavor("debugmodel_moe", **{**sizes, "moe_intermediate_size": 16, **changes})


def yarn_config(**changes):
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
    return small(rope_parameters=yarn | changes)


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
    ours = model_config(flavor(name), fuse_qkv=name not in SEPARATE_QKV)
    assert comparable(ours) == comparable(qwen3_configs[name]("flex"))


def test_the_comparison_sees_initialisation_and_rotary_differences():
    stock = comparable(qwen3_configs["debugmodel_moe"]("flex"))
    for changes in ({"initializer_range": 0.01}, {"rope_theta": 1e4}, {"rms_norm_eps": 1e-5}):
        assert comparable(model_config(flavor("debugmodel_moe", **changes))) != stock
    assert comparable(model_config(flavor("debugmodel_moe"), fuse_qkv=False)) != stock
    assert comparable(model_config(flavor("debugmodel_moe"), load_balance_coeff=1e-2)) != stock


def test_the_spec_is_stocks_but_for_the_adapter():
    ours, stock = model_spec(flavor("debugmodel"), flavor="debugmodel"), model_registry("debugmodel")
    assert issubclass(ours.state_dict_adapter, StockAdapter)
    for field in fields(stock):
        if field.name not in ("model", "state_dict_adapter", "parallelize_fn"):
            assert getattr(ours, field.name) == getattr(stock, field.name), field.name
    assert ours.parallelize_fn.args == (stock.parallelize_fn,)


@pytest.mark.parametrize("name", ["debugmodel", "debugmodel_moe", "0.6B", "4B-Instruct-2507", "30B-A3B", "235B-A22B"])
def test_parameters_are_as_many_as_in_transformers_model(name):
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(flavor(name))
    assert parameter_count(model_config(flavor(name))) == sum(each.numel() for each in theirs.parameters())


def test_a_mixed_model_has_experts_exactly_where_the_architecture_says():
    config = model_config(small(decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [layer.moe is not None for layer in config.layers] == [False, True, False, False]
    assert [layer.feed_forward is not None for layer in config.layers] == [True, False, True, True]
    with torch.device("meta"):
        model = config.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config)


def test_without_load_balancing_the_router_has_no_bias():
    with torch.device("meta"):
        keys = model_config(small(), load_balance_coeff=None).build().state_dict()
    assert not [key for key in keys if "expert_bias" in key]


def test_router_normalisation_follows_norm_topk_prob():
    router = model_config(small(norm_topk_prob=False)).layers[0].moe.router
    assert router.route_norm is False
    assert router.score_func == "softmax"


def test_layers_share_no_config_node():
    """Replacing one layer's attention must not replace another's."""
    config = model_config(small())
    for path in ("attention.inner_attention", "attention.rope", "attention.qk_norm", "attention_norm", "moe.router"):
        assert len({id(operator.attrgetter(path)(layer)) for layer in config.layers}) == len(config.layers), path


def test_yarn_reaches_the_rotary_config_and_survives_a_change_of_length():
    rope = model_config(yarn_config(truncate=False, beta_fast=16.0)).layers[0].attention.rope
    assert isinstance(rope, YarnCosSinRoPE.Config)
    assert (rope.scaling, rope.rope_factor, rope.original_seq_len) == ("yarn", 4.0, 32)
    assert (rope.truncate, rope.beta_fast, rope.beta_slow) == (False, 16.0, 1.0)
    shorter = replace(rope, max_seq_len=8)
    assert shorter.attention_factor == pytest.approx(1.1386294)
    unscaled = CosSinRoPE(CosSinRoPE.Config(**{f.name: getattr(shorter, f.name) for f in fields(CosSinRoPE.Config)}))
    assert torch.equal(shorter.build().cache, unscaled.cache * shorter.attention_factor)


def test_yarn_cache_is_rebuilt_with_the_factor_after_meta_initialisation():
    rope = model_config(yarn_config()).layers[0].attention.rope
    direct = rope.build().cache
    with torch.device("meta"):
        module = rope.build()
    module.to_empty(device="cpu")
    module.init_states(buffer_device=torch.device("cpu"))
    assert torch.equal(module.cache, direct)
