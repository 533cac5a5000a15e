"""config.json -> configuration: what Transformers makes of it, and what is refused by key before it does."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.models.hf_config import config_differences, from_folder
from torchtitan_qwen3_trn.models.qwen3.flavors import flavor
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.unsupported import unsupported
from torchtitan_qwen3_trn.models.value_rules import expert_layers, head_dim

MADE_FOR = ("max_position_embeddings", "initializer_range", "router_aux_loss_coef")

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


@pytest.fixture
def read(tmp_path):
    """The configuration of the native route from these values of a config.json."""

    def run(values):
        (tmp_path / "config.json").write_text(json.dumps(values))
        return from_folder(tmp_path, rule=unsupported)

    return run


def problems_of(call, *args):
    with pytest.raises(JobError) as caught:
        call(*args)
    return {problem.where: f"{problem.what}; {problem.fix}" for problem in caught.value.problems}


def same(one, other):
    return config_differences(one, other, also=MADE_FOR) == []


@pytest.mark.parametrize(
    ("config", "name"),
    [(INSTRUCT_4B, "4B-Instruct-2507"), (INSTRUCT_30B, "30B-A3B-Instruct-2507")],
)
def test_a_published_config_is_that_of_its_flavor(read, config, name):
    assert same(read(config), flavor(name))


@pytest.mark.parametrize(
    "config", [INSTRUCT_4B, {**INSTRUCT_30B, "num_experts": 16}, {**INSTRUCT_4B, "rope_scaling": YARN}]
)
def test_the_spelling_of_transformers_v5_reads_the_same(read, config):
    cls = Qwen3Config if config["model_type"] == "qwen3" else Qwen3MoeConfig
    rewritten = json.loads(cls(**copy.deepcopy(config)).to_json_string(use_diff=False))
    assert "rope_parameters" in rewritten
    assert "rope_theta" not in rewritten
    assert same(read({**rewritten, "architectures": None}), read(config))


@pytest.mark.parametrize("cls", [Qwen3Config, Qwen3MoeConfig])
def test_absent_keys_mean_what_transformers_takes_them_to_mean(read, cls):
    assert same(read({"model_type": cls.model_type}), cls())


def test_derived_defaults_follow_transformers(read):
    assert read({"model_type": "qwen3", "num_key_value_heads": None}).num_key_value_heads == 32
    assert head_dim(read({"model_type": "qwen3_moe", "hidden_size": 4096})) == 128
    assert head_dim(read({"model_type": "qwen3_moe", "hidden_size": 1024})) == 32


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
def test_rotary_cache_equals_transformers_for_every_spelling_of_yarn(read, changes):
    """Bit for bit at small positions; 1e-6 relative covers the one division the two order differently."""
    config = {**INSTRUCT_4B, "num_hidden_layers": 1, **changes}
    positions = 512
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**copy.deepcopy(config)))  # it writes into the tables it is given
    cos, sin = theirs(torch.zeros(1), torch.arange(positions)[None])
    rope = model_config(read(config)).layers[0].attention.rope
    ours = replace(rope, max_seq_len=positions).build().cache
    torch.testing.assert_close(ours, torch.cat([cos[0], sin[0]], dim=-1), rtol=1e-6, atol=3e-5)
    assert theirs.attention_scaling == pytest.approx(getattr(rope, "attention_factor", 1.0), rel=1e-12)


def test_yarn_stretches_the_positions_the_model_is_made_for(read):
    config = read({**INSTRUCT_4B, "max_position_embeddings": 40960, "rope_scaling": YARN})
    assert model_config(config).max_seq_len == 131072


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


def test_everything_the_native_model_cannot_represent_is_refused_at_once_and_by_name(read):
    found = problems_of(read, {**INSTRUCT_4B, **REFUSED, "hidden_size": None, "vocab_size": "many"})
    assert set(found) == {f"config.json: {key}" for key in (*REFUSED, "hidden_size", "vocab_size")}


@pytest.mark.parametrize("key", REFUSED)
def test_each_refused_key_is_refused_alone(read, key):
    found = problems_of(read, {**INSTRUCT_4B, key: REFUSED[key]})
    assert set(found) == {f"config.json: {key}"}


@pytest.mark.parametrize("key", [key for key in REFUSED if key not in ("quantization_config", "layer_types")])
def test_the_native_model_refuses_them_of_any_configuration(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({**INSTRUCT_4B, key: REFUSED[key]}))
    names = {"rope_scaling": "rope_parameters", "partial_rotary_factor": "rope_parameters"}
    assert set(problems_of(model_config, from_folder(tmp_path))) == {f"config.json: {names.get(key, key)}"}


def test_harmless_values_of_refused_keys_are_accepted(read):
    harmless = {
        "attention_dropout": 0,
        "sliding_window": 4096,
        "layer_types": ["full_attention"] * 36,
        "shared_expert_intermediate_size": None,
        "quantization_config": None,
        "architectures": None,
        "rope_scaling": {"type": "default"},
    }
    assert same(read({**INSTRUCT_4B, **harmless}), flavor("4B-Instruct-2507"))


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"model_type": "llama"}, "model_type", "qwen3 and qwen3_moe"),
        ({"model_type": None}, "model_type", "missing"),
        ({"model_type": "qwen3_moe"}, "architectures", "Qwen3MoeForCausalLM"),
        ({"hidden_size": "2560"}, "hidden_size", 'must be an integer, got "2560"'),
        ({"hidden_size": True}, "hidden_size", "must be an integer, got true"),
        ({"hidden_size": 2560.0}, "hidden_size", "must be an integer, got 2560.0"),
        ({"hidden_size": None}, "hidden_size", "must be an integer, got null"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "must be true or false, got 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps", "must be a floating-point number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "must be above 0, got nan"),
        ({"initializer_range": float("inf")}, "initializer_range", "must be above 0, got inf"),
        ({"rope_theta": "1e6"}, "rope_theta", "must be a number above 1"),
        ({"rope_theta": None}, "rope_theta", "must be a number above 1"),
        ({"rope_theta": 0.5}, "rope_theta", "must be a number above 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "must be above 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "divisor of 32"),
        ({"head_dim": 127}, "head_dim", "must be even"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config", "not supported"),
        ({"rope_scaling": [4]}, "rope_scaling", "must be an object"),
        ({"rope_parameters": [4]}, "rope_parameters", "must be an object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor", "missing"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "rope_scaling.factor", 'must be a number of at least 1, got "4"'),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor", "of at least 1"),
        ({"rope_scaling": {**YARN, "factor": 1e9}}, "rope_scaling.factor", "far beyond any published model"),
        ({"rope_scaling": {**YARN, "factor": 10**400}}, "rope_scaling.factor", "far beyond any published model"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate", "true or false"),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, "rope_scaling.attention_factor", "above 0"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}},
            "rope_scaling.original_max_position_embeddings",
            "must be an integer of at least 1",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "rope_scaling.beta_fast", "order"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters", "per layer type"),
    ],
    ids=str,
)
def test_unusable_values_are_named_with_what_would_be_right(read, changes, where, says):
    found = problems_of(read, {**INSTRUCT_4B, **changes})
    assert list(found) == [f"config.json: {where}"]
    assert says in found[f"config.json: {where}"]


def test_expert_keys_are_checked_in_moe_configs(read):
    found = problems_of(read, {**INSTRUCT_30B, "num_experts_per_tok": 200, "moe_intermediate_size": 0})
    assert set(found) == {"config.json: num_experts_per_tok", "config.json: moe_intermediate_size"}
    assert read({**INSTRUCT_30B, "mlp_only_layers": [0, 2]}).mlp_only_layers == [0, 2]
    for key, value, says in [
        ("mlp_only_layers", [0.5], "must be a list of integers, got [0.5]"),
        ("head_dim", "128", 'must be an integer, got "128"'),
        ("head_dim", 33, "must be even"),
        ("num_local_experts", "many", 'must be an integer, got "many"'),
        ("num_experts", -1, "must not be negative"),
    ]:
        found = problems_of(read, {**INSTRUCT_30B, key: value})
        assert list(found) == [f"config.json: {key}"]
        assert says in found[f"config.json: {key}"]
    found = problems_of(read, {**INSTRUCT_30B, "mlp_only_layers": [0], "intermediate_size": 0})
    assert "1 dense layers" in found["config.json: intermediate_size"]


def test_the_keys_of_experts_mean_nothing_in_a_dense_model(read):
    stray = {"num_experts": "many", "decoder_sparse_step": [], "num_experts_per_tok": -1}
    assert expert_layers(read({**INSTRUCT_4B, **stray})) == set()


def test_config_file_problems_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    assert "No such file" in problems_of(from_folder, tmp_path)[str(path)]
    path.write_text("{not json")
    assert "is not JSON" in problems_of(from_folder, tmp_path)[str(path)]
    path.write_text("[1, 2]")
    assert "must hold a JSON object, got a list" in problems_of(from_folder, tmp_path)[str(path)]


def test_differences_are_those_in_what_is_computed():
    assert config_differences(flavor("debugmodel"), flavor("debugmodel_non_fused_qkv")) == []
    one, other = flavor("4B"), flavor("4B-Instruct-2507")
    (line,) = config_differences(one, other)
    assert line.startswith("rope_parameters: ")
    assert config_differences(one, other, also=MADE_FOR) == [
        line,
        "max_position_embeddings: 40960, and not 262144",
    ]
    spelled = flavor("0.6B", rope_parameters={"type": "default", "rope_theta": 1e6})
    assert config_differences(flavor("0.6B"), spelled) == []


def test_layers_with_experts_follow_transformers_rule():
    config = flavor("30B-A3B", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert expert_layers(config) == {1, 5}


@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize("dense", [[], [1], [0, 1, 1, 5], [-1, 7, 8, 100]])
def test_layers_with_experts_are_those_that_transformers_builds(step, dense):
    from transformers import AutoModelForCausalLM

    config = flavor("30B-A3B", num_hidden_layers=8, decoder_sparse_step=step, mlp_only_layers=dense)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    assert expert_layers(config) == {index for index, layer in enumerate(layers) if hasattr(layer.mlp, "experts")}
    assert expert_layers(flavor("30B-A3B", num_experts=0)) == set()
