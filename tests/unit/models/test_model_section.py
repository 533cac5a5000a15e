"""The section [model]: one table of its keys, changes of single values, a flavor against the checkpoint beside it."""

import json
from dataclasses import fields

import pytest
from hf_checkpoints import write_checkpoint
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from torchtitan_qwen3_trn.config import ModelOptions
from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.models.hf_config import config_differences
from torchtitan_qwen3_trn.models.model_section import MODEL_KEYS, with_changes
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS, flavor
from torchtitan_qwen3_trn.models.value_rules import expert_layers


def problems_of(call, *args):
    with pytest.raises(JobError) as caught:
        call(*args)
    return {problem.where: f"{problem.what}; {problem.fix}" for problem in caught.value.problems}


def test_the_table_has_every_field_that_replaces_a_value():
    choices = {"name", "backend", "flavor", "load_balance"}
    assert set(MODEL_KEYS) == {item.name for item in fields(ModelOptions)} - choices
    moe = flavor("30B-A3B")
    for key in MODEL_KEYS.values():
        outer, _, inner = key.partition(".")
        assert inner in moe.rope_parameters if inner else hasattr(moe, outer)


def test_changes_reach_single_values():
    before = flavor("30B-A3B")
    changed = with_changes(before, {"n_layers": 2, "num_experts": 4, "top_k": 2, "rope_theta": 10_000.0})
    named = [line.partition(":")[0] for line in config_differences(before, changed)]
    assert named == ["num_hidden_layers", "rope_parameters", "num_experts", "num_experts_per_tok"]
    assert before.to_dict() == flavor("30B-A3B").to_dict()
    assert (changed.num_experts, changed.rope_parameters["rope_theta"]) == (4, 10_000.0)
    assert with_changes(flavor("4B"), {}).to_dict() == flavor("4B").to_dict()


def test_a_dense_model_gets_experts_and_one_with_experts_loses_them():
    changes = {"num_experts": 8, "top_k": 2, "moe_hidden_dim": 32, "n_layers": 2}
    sparse = with_changes(flavor("0.6B"), changes)
    assert type(sparse) is Qwen3MoeConfig
    assert sparse.to_dict() == Qwen3MoeConfig(**{
        **FLAVORS["0.6B"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "norm_topk_prob": True,
    }).to_dict()  # fmt: skip
    assert len(expert_layers(sparse)) == 2
    dense = with_changes(flavor("30B-A3B"), {"num_experts": 0})
    assert type(dense) is Qwen3Config
    kept = {key: value for key, value in FLAVORS["30B-A3B"].items() if "expert" not in key}
    kept = {key: value for key, value in kept.items() if key not in ("moe_intermediate_size", "norm_topk_prob")}
    assert dense.to_dict() == Qwen3Config(**kept).to_dict()
    assert with_changes(flavor("4B"), {"num_experts": 0}).to_dict() == flavor("4B").to_dict()


@pytest.mark.parametrize(
    ("name", "changes", "where", "says"),
    [
        ("4B", {"n_layers": "2"}, "n_layers", 'must be an integer, got "2"'),
        ("4B", {"n_layers": 2.0}, "n_layers", "must be an integer, got 2.0"),
        ("4B", {"enable_weight_tying": 1}, "enable_weight_tying", "true or false"),
        ("4B", {"n_kv_heads": 3}, "n_kv_heads", "32 query heads"),
        ("4B", {"head_dim": 33}, "head_dim", "must be even"),
        ("4B", {"dim": -1}, "dim", "must be above 0"),
        ("4B", {"rope_theta": 0.5}, "rope_theta", "above 1"),
        ("4B", {"num_experts": 8, "top_k": 2}, "moe_hidden_dim", "with 8 experts, got 0"),
        ("4B", {"top_k": 2}, "top_k", "no experts"),
        ("30B-A3B", {"num_experts": 0, "top_k": 2}, "top_k", "no experts"),
        ("30B-A3B", {"num_experts": 4}, "top_k", "8 of 4 experts"),
        ("30B-A3B", {"top_k": 0}, "top_k", "0 of 128 experts"),
        ("30B-A3B", {"num_experts": -1}, "num_experts", "negative"),
        ("30B-A3B", {"num_experts": 0, "hidden_dim": 0}, "hidden_dim", "48 dense layers"),
        ("30B-A3B", {"head_dim": 33}, "head_dim", "must be even"),
    ],
    ids=str,
)
def test_impossible_changes_are_named_with_their_key(name, changes, where, says):
    found = problems_of(with_changes, flavor(name), changes)
    assert list(found) == [f"model.{where}"]
    assert says in found[f"model.{where}"]


def test_all_impossible_changes_are_reported_together():
    found = problems_of(with_changes, flavor("30B-A3B"), {"dim": -1, "n_kv_heads": 0, "max_seq_len": 0})
    assert set(found) == {"model.dim", "model.n_kv_heads", "model.max_seq_len"}
    found = problems_of(with_changes, flavor("30B-A3B"), {"head_dim": 33, "n_kv_heads": 5, "top_k": 999})
    assert set(found) == {"model.head_dim", "model.n_kv_heads", "model.top_k"}


def test_a_value_another_architecture_does_not_have_is_refused():
    found = problems_of(with_changes, LlamaConfig(), {"top_k": 2, "num_experts": 4})
    assert found["model.top_k"] == "LlamaConfig has no num_experts_per_tok for it to replace; leave it out"
    assert set(found) == {"model.top_k", "model.num_experts"}


def test_a_wrong_field_or_type_in_a_job_is_refused(parse_job):
    for line, says in [
        ("n_layer = 2", "did you mean 'n_layers'"),
        ('top_k = "2"', "model.top_k"),
        ("top_k = 2.5", "model.top_k"),
    ]:
        outcome = parse_job(base=f"[model]\nflavor = '30B-A3B'\n{line}\n")
        assert outcome.status == 2
        assert says in outcome.message


@pytest.mark.parametrize("backend", ["native", "huggingface_v5"])
def test_a_flavor_that_contradicts_the_checkpoint_is_refused_by_the_keys_that_differ(parse_job, tmp_path, backend):
    folder = write_checkpoint(tmp_path / "weights", "qwen3")
    job = f"""
        [model]
        backend = "{backend}"
        flavor = "debugmodel"
        hf_assets_path = "{folder}"
        [checkpoint]
        enable = true
        initial_load_in_hf = true
        """
    outcome = parse_job(job, base="")
    assert outcome.status == 2
    assert "model.flavor: 'debugmodel' is not the checkpoint" in outcome.message
    for text in ("hidden_size: 256, and not 64", "max_position_embeddings: 4096, and not 512", "leave flavor out"):
        assert text in outcome.message
    assert "vocab_size" not in outcome.message


@pytest.mark.parametrize("backend", ["native", "huggingface_v5"])
def test_the_description_of_the_model_stays_when_its_folder_goes(parse_job, tmp_path, backend):
    from torchtitan_qwen3_trn.models.described_spec import hf_config_of
    from torchtitan_qwen3_trn.models.first_loss import expected_first_loss, expected_random_loss

    folder = write_checkpoint(tmp_path / "weights", "qwen3")
    job = f"[model]\nbackend = '{backend}'\nhf_assets_path = '{folder}'\nn_layers = 1\n[training]\nseq_len = 64\n"
    outcome = parse_job(job, base="")
    assert outcome.status is None, outcome.message
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    spec = outcome.config.model_spec
    assert spec.flavor == "weights with n_layers 1"
    assert hf_config_of(spec).num_hidden_layers == 1
    assert hf_config_of(spec).hidden_size == stored["hidden_size"]
    assert expected_random_loss(spec) == expected_first_loss(stored["vocab_size"], stored["hidden_size"], 0.02)


def test_a_model_without_a_description_is_refused_where_one_is_needed():
    from torchtitan.models.qwen3 import model_registry

    from torchtitan_qwen3_trn.models.described_spec import hf_config_of

    found = problems_of(hf_config_of, model_registry("debugmodel"))
    assert "comes without a Transformers configuration" in found["model"]
    assert "the job has no model" in problems_of(hf_config_of, None)["model"]
