import copy
import json
from dataclasses import fields, replace

import pytest

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.models.qwen3.architecture import Architecture, differences, with_changes
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS, flavor
from torchtitan_qwen3_trn.models.qwen3.hf_config import from_hf_config, read_hf_config
from torchtitan_qwen3_trn.models.qwen3.sizes import expected_first_loss, parameter_counts

# Qwen/Qwen3-4B-Instruct-2507, as published (Transformers v4 spelling).
INSTRUCT_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Qwen/Qwen3-30B-A3B-Instruct-2507.
INSTRUCT_30B = {
    **INSTRUCT_4B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def problems_of(call, *args):
    with pytest.raises(JobError) as caught:
        call(*args)
    return {problem.where: f"{problem.what}; {problem.fix}" for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("config", "name"),
    [(INSTRUCT_4B, "4B-Instruct-2507"), (INSTRUCT_30B, "30B-A3B-Instruct-2507")],
)
def test_a_published_config_gives_the_architecture_of_its_flavor(config, name):
    assert from_hf_config(config) == FLAVORS[name]


@pytest.mark.parametrize(
    "config", [INSTRUCT_4B, {**INSTRUCT_30B, "num_experts": 16}, {**INSTRUCT_4B, "rope_scaling": YARN}]
)
def test_the_spelling_of_transformers_v5_reads_the_same(config):
    from transformers import Qwen3Config, Qwen3MoeConfig

    cls = Qwen3Config if config["model_type"] == "qwen3" else Qwen3MoeConfig
    rewritten = json.loads(cls(**copy.deepcopy(config)).to_json_string(use_diff=False))
    assert "rope_parameters" in rewritten
    assert "rope_theta" not in rewritten
    assert from_hf_config({**rewritten, "architectures": None}) == from_hf_config(config)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_absent_keys_mean_what_transformers_takes_them_to_mean(kind):
    from transformers import Qwen3Config, Qwen3MoeConfig

    written = json.loads((Qwen3Config() if kind == "qwen3" else Qwen3MoeConfig()).to_json_string(use_diff=False))
    assert from_hf_config({"model_type": kind}) == from_hf_config(written)


def test_derived_defaults_follow_transformers():
    assert from_hf_config({"model_type": "qwen3", "num_key_value_heads": None}).n_kv_heads == 32
    assert from_hf_config({"model_type": "qwen3_moe", "hidden_size": 4096}).head_dim == 128
    assert from_hf_config({"model_type": "qwen3_moe", "hidden_size": 1024}).head_dim == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 1e6},
        {"rope_scaling": {**YARN, "attention_factor": 1.5}},
        {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
        {"rope_scaling": {**YARN, "mscale": 2.0}},
        {"rope_scaling": {**YARN, "factor": 1.0}},
        {"rope_scaling": {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
        {"rope_scaling": None, "rope_parameters": {**YARN, "rope_theta": 2e6}},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    ],
    ids=str,
)
def test_rotary_cache_equals_transformers_for_every_spelling_of_yarn(changes):
    """Bit for bit at small positions; 1e-6 relative covers the one division the two order differently."""
    import torch
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from torchtitan_qwen3_trn.models.qwen3.spec import model_config

    config = {**INSTRUCT_4B, "num_hidden_layers": 1, **changes}
    positions = 512
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**copy.deepcopy(config)))  # it writes into the tables it is given
    cos, sin = theirs(torch.zeros(1), torch.arange(positions)[None])
    rope = model_config(from_hf_config(config)).layers[0].attention.rope
    ours = replace(rope, max_seq_len=positions).build().cache
    torch.testing.assert_close(ours, torch.cat([cos[0], sin[0]], dim=-1), rtol=1e-6, atol=3e-5)
    assert theirs.attention_scaling == pytest.approx(getattr(rope, "attention_factor", 1.0), rel=1e-12)


def test_yarn_stretches_the_positions_the_model_is_made_for():
    assert from_hf_config({**INSTRUCT_4B, "max_position_embeddings": 40960, "rope_scaling": YARN}).max_seq_len == 131072


REFUSED = {
    "attention_bias": True,
    "attention_dropout": 0.1,
    "use_sliding_window": True,
    "hidden_act": "gelu",
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 5632,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "quantization_config": {"quant_method": "fp8"},
    "layer_types": ["full_attention", "sliding_attention"],
    "architectures": ["Qwen3ForSequenceClassification"],
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}


def test_everything_the_native_model_cannot_represent_is_refused_at_once_and_by_name():
    found = problems_of(from_hf_config, {**INSTRUCT_4B, **REFUSED, "hidden_size": None, "vocab_size": "many"})
    assert set(found) == {f"config.json: {key}" for key in (*REFUSED, "vocab_size")}


@pytest.mark.parametrize("key", REFUSED)
def test_each_refused_key_is_refused_alone(key):
    found = problems_of(from_hf_config, {**INSTRUCT_4B, key: REFUSED[key]})
    assert set(found) == {f"config.json: {key}"}


def test_harmless_values_of_refused_keys_are_accepted():
    harmless = {
        "attention_dropout": 0,
        "sliding_window": 4096,
        "layer_types": ["full_attention"] * 36,
        "shared_expert_intermediate_size": None,
        "quantization_config": None,
        "architectures": None,
        "rope_scaling": {"type": "default"},
    }
    assert from_hf_config({**INSTRUCT_4B, **harmless}) == FLAVORS["4B-Instruct-2507"]


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"model_type": "llama"}, "model_type", "qwen3 and qwen3_moe"),
        ({"model_type": None}, "model_type", "missing"),
        ({"model_type": "qwen3_moe"}, "architectures", "Qwen3MoeForCausalLM"),
        ({"hidden_size": "2560"}, "hidden_size", "'2560' is not a whole number"),
        ({"hidden_size": True}, "hidden_size", "True is not a whole number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "1 is not true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps", "is not a number"),
        ({"rope_theta": "1e6"}, "rope_theta", "is not a number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "not positive"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "divisor of n_heads = 32"),
        ({"head_dim": 127}, "head_dim", "odd"),
        ({"rope_scaling": [4]}, "rope_scaling", "not an object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor", "missing"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "rope_scaling.factor", "'4' is not a number"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor", "below 1"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "rope_scaling.beta_fast", "order"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters", "per layer type"),
    ],
    ids=str,
)
def test_unusable_values_are_named_with_what_would_be_right(changes, where, says):
    found = problems_of(from_hf_config, {**INSTRUCT_4B, **changes})
    assert list(found) == [f"config.json: {where}"]
    assert says in found[f"config.json: {where}"]


def test_expert_keys_are_checked_in_moe_configs():
    found = problems_of(from_hf_config, {**INSTRUCT_30B, "num_experts_per_tok": 200, "moe_intermediate_size": 0})
    assert set(found) == {"config.json: num_experts_per_tok", "config.json: moe_intermediate_size"}
    assert from_hf_config({**INSTRUCT_30B, "mlp_only_layers": [0, 2]}).mlp_only_layers == (0, 2)
    assert set(problems_of(from_hf_config, {**INSTRUCT_30B, "mlp_only_layers": [0.5]})) == {
        "config.json: mlp_only_layers"
    }


def test_config_file_problems_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    assert "No such file" in problems_of(read_hf_config, tmp_path)[str(path)]
    path.write_text("{not json")
    assert "is not JSON" in problems_of(read_hf_config, tmp_path)[str(path)]
    path.write_text("[1, 2]")
    assert "a list where an object" in problems_of(read_hf_config, tmp_path)[str(path)]
    path.write_text(json.dumps(INSTRUCT_4B))
    assert read_hf_config(tmp_path) == INSTRUCT_4B


def test_an_unknown_flavor_names_the_nearest_first():
    found = problems_of(flavor, "30b-a3b-instruct")["model.flavor"]
    assert found.startswith('"30b-a3b-instruct" is not a Qwen3 flavor; choose one of 30B-A3B-Instruct-2507,')
    assert all(name in found for name in FLAVORS)
    assert flavor("4B").dim == 2560


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("0.6B", 0.6e9, 0.6e9),
        ("1.7B", 1.7e9, 1.7e9),
        ("4B-Instruct-2507", 4.0e9, 4.0e9),
        ("8B", 8.2e9, 8.2e9),
        ("14B", 14.8e9, 14.8e9),
        ("32B", 32.8e9, 32.8e9),
        ("30B-A3B-Instruct-2507", 30.5e9, 3.3e9),
        ("235B-A22B-Instruct-2507", 235e9, 22e9),
    ],
)
def test_parameter_counts_round_to_the_published_sizes(name, total, active):
    """2 %: model cards print two or three digits and cut off rather than round (3.35 is "3.3B activated")."""
    assert parameter_counts(FLAVORS[name]) == pytest.approx((total, active), rel=0.02)


def test_expected_first_loss_of_the_4b_model():
    assert expected_first_loss(FLAVORS["4B"]) == pytest.approx(12.443, abs=5e-4)
    assert expected_first_loss(replace(FLAVORS["4B"], init_std=1e-9)) == pytest.approx(11.931, abs=5e-4)


def test_changes_reach_single_fields():
    changed = with_changes(FLAVORS["30B-A3B"], {"n_layers": 2, "num_experts": 4, "top_k": 2, "rope_theta": 10_000})
    assert differences(FLAVORS["30B-A3B"], changed) == [
        "n_layers: 48, 2",
        "num_experts: 128, 4",
        "top_k: 8, 2",
        "rope_theta: 1000000.0, 10000.0",
    ]
    assert isinstance(changed.rope_theta, float)
    assert with_changes(FLAVORS["4B"], {}) is not None
    assert with_changes(FLAVORS["30B-A3B"], {"mlp_only_layers": [0]}).mlp_only_layers == (0,)
    assert with_changes(FLAVORS["30B-A3B"], {"num_experts": 0}).moe_layers == 0


@pytest.mark.parametrize(
    ("name", "changes", "where", "says"),
    [
        ("4B", {"n_layer": 2}, "n_layer", 'did you mean "n_layers"?'),
        ("4B", {"n_layers": "2"}, "n_layers", "'2' is not a whole number"),
        ("4B", {"n_layers": 2.0}, "n_layers", "2.0 is not a whole number"),
        ("4B", {"enable_weight_tying": 1}, "enable_weight_tying", "true or false"),
        ("4B", {"n_kv_heads": 3}, "n_kv_heads", "32 query heads"),
        ("4B", {"head_dim": 33}, "head_dim", "odd"),
        ("4B", {"dim": -1}, "dim", "not positive"),
        ("4B", {"rope_theta": 0.5}, "rope_theta", "not above 1"),
        ("4B", {"num_experts": 8, "top_k": 2}, "moe_hidden_dim", "8 experts of inner width 0"),
        ("4B", {"top_k": 2}, "top_k", "no experts"),
        ("30B-A3B", {"num_experts": 4}, "top_k", "8 of 4 experts"),
        ("30B-A3B", {"top_k": 0}, "top_k", "0 of 128 experts"),
        ("30B-A3B", {"num_experts": -1}, "num_experts", "negative"),
        ("30B-A3B", {"mlp_only_layers": [0], "hidden_dim": 0}, "hidden_dim", "1 dense layers"),
        ("30B-A3B", {"mlp_only_layers": [48]}, "mlp_only_layers", "count from 0 to 47"),
        ("30B-A3B", {"mlp_only_layers": 3}, "mlp_only_layers", "a list of whole numbers"),
    ],
    ids=str,
)
def test_impossible_changes_are_named_with_their_key(name, changes, where, says):
    found = problems_of(with_changes, FLAVORS[name], changes)
    assert list(found) == [f"model.{where}"]
    assert says in found[f"model.{where}"]


def test_all_impossible_changes_are_reported_together():
    found = problems_of(with_changes, FLAVORS["30B-A3B"], {"head_dim": 33, "n_kv_heads": 5, "top_k": 999})
    assert set(found) == {"model.head_dim", "model.n_kv_heads", "model.top_k"}


def test_differences_name_every_field_but_the_memory_layout():
    other = Architecture(vocab_size=1, dim=1, n_layers=1, n_heads=1, n_kv_heads=1)
    named = {line.split(":")[0] for line in differences(FLAVORS["30B-A3B-Instruct-2507"], other)}
    assert named <= {field.name for field in fields(Architecture)}
    assert differences(FLAVORS["debugmodel"], FLAVORS["debugmodel_non_fused_qkv"]) == []
    assert differences(FLAVORS["4B"], FLAVORS["4B-Instruct-2507"]) == [
        "rope_theta: 1000000.0, 5000000.0",
        "max_seq_len: 40960, 262144",
    ]


def test_layers_with_experts_follow_transformers_rule():
    arch = replace(FLAVORS["30B-A3B"], n_layers=6, decoder_sparse_step=2, mlp_only_layers=(3,))
    assert [arch.is_moe_layer(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert arch.moe_layers == 2


@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize("dense", [(), (1,), (0, 1, 1, 5), (-1, 7, 8, 100)])
def test_layers_with_experts_are_those_that_have_experts(step, dense):
    arch = replace(FLAVORS["30B-A3B"], n_layers=8, decoder_sparse_step=step, mlp_only_layers=dense)
    assert arch.moe_layers == sum(arch.is_moe_layer(layer) for layer in range(8))
    assert replace(arch, num_experts=0).moe_layers == 0
