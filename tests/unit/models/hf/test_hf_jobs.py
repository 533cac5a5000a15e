"""Jobs on the Hugging Face route: where the model comes from, and what is refused before anything is built."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import TINY_MODEL
from hf_checkpoints import write_checkpoint

from torchtitan_qwen3_trn.models.described_spec import hf_config_of
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS

BACKEND = "huggingface_v5"
HF = TINY_MODEL.replace("[model]", '[model]\nbackend = "huggingface_v5"')
EXPERTS = HF.replace("[model]", "[model]\nnum_experts = 8\ntop_k = 2\nmoe_hidden_dim = 32")
FOLDER = """
[model]
backend = "huggingface_v5"
hf_assets_path = "{folder}"
[training]
local_batch_size = 2
seq_len = 64
steps = 3
"""


@pytest.fixture
def parse_folder(parse_job, tmp_path):
    """Parse a job that takes its model from a checkpoint folder; ``change`` edits config.json first."""

    def run(*, kind="qwen3", change=None, keep=lambda path: True):
        folder = tmp_path / kind
        if not folder.exists():
            write_checkpoint(folder, kind)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(change or {})}))
        for file in folder.iterdir():
            if not keep(file):
                file.unlink()
        return parse_job(base=FOLDER.format(folder=folder))

    return run


@pytest.mark.parametrize("name", FLAVORS)
def test_a_flavor_is_the_same_model_on_both_routes(parse_job, name):
    lines = "\n[training]\nseq_len = 64\n" + "[model]\nload_balance = 'none'\nn_layers = 2\nvocab_size = 2048\n"
    job = f"{lines}flavor = '{name}'\ndim = 64\nhidden_dim = 64\n"
    specs = [parse_job(f"{job}backend = '{each}'\n", base="").config.model_spec for each in ("native", BACKEND)]
    one, other = map(hf_config_of, specs)
    assert one.to_dict() == other.to_dict()
    with torch.device("meta"):
        shapes = [[tuple(each.shape) for each in spec.model.build().parameters()] for spec in specs]
    assert sum(map(math.prod, shapes[0])) == sum(map(math.prod, shapes[1]))


def test_the_model_comes_from_config_json(parse_folder):
    outcome = parse_folder(kind="llama")
    assert outcome.status is None, outcome.message
    assert outcome.config.model_spec.name == "transformers/llama"
    assert outcome.config.model_spec.model.architecture.hidden_size == 64
    assert outcome.config.loss.loss_fn.global_vocab_size == 2048


def test_values_of_model_replace_those_of_config_json(parse_job, tmp_path):
    folder = write_checkpoint(tmp_path / "qwen3", "qwen3")
    base = FOLDER.format(folder=folder).replace(
        "[training]", "n_layers = 1\nrope_theta = 5e5\nmax_seq_len = 1024\nenable_weight_tying = false\n[training]"
    )
    outcome = parse_job(base=base)
    assert outcome.status is None, outcome.message
    text = outcome.config.model_spec.model.architecture
    assert (text.num_hidden_layers, text.layer_types) == (1, ["full_attention"])
    assert text.rope_parameters["rope_theta"] == 5e5
    assert (text.max_position_embeddings, text.tie_word_embeddings) == (1024, False)


def test_a_value_the_architecture_does_not_have_is_refused(parse_job, tmp_path):
    folder = write_checkpoint(tmp_path / "llama", "llama")
    outcome = parse_job(base=FOLDER.format(folder=folder).replace("[training]", "top_k = 2\n[training]"))
    assert outcome.status == 2
    assert "model.top_k: LlamaConfig has no num_experts_per_tok" in outcome.message


def test_values_that_do_not_fit_are_refused(parse_job):
    outcome = parse_job(base=HF.replace("n_kv_heads = 2", "n_kv_heads = 3"))
    assert outcome.status == 2
    assert "model.n_kv_heads: 3" in outcome.message


def test_no_config_json(parse_folder):
    outcome = parse_folder(keep=lambda path: path.name != "config.json")
    assert outcome.status == 2
    assert "model.flavor: no flavor is given and " in outcome.message
    assert "holds no config.json" in outcome.message


REFUSED = {
    "unknown architecture": ({"model_type": "qwen9"}, 'model_type: "qwen9" is no architecture', "qwen"),
    "no architecture": ({"model_type": None}, "model_type: missing", "qwen3"),
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder", "decoder-only"),
    "not a language model": ({"model_type": "vit"}, '"vit" is not a causal language model', "decoder-only"),
    "remote code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}, "modeling_evil.Evil", "never done",
    ),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantized", "unquantized"),
    "impossible": ({"num_attention_heads": "four"}, 'must be an integer, got "four"', "num_attention_heads"),
    "impossible for Transformers": ({"layer_types": ["full_attention"]}, "refused by Transformers", "layer_types"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_json_that_cannot_be_used_is_refused_with_the_reason(parse_folder, name):
    change, *texts = REFUSED[name]
    outcome = parse_folder(change=change)
    assert outcome.status == 2
    assert all(text in outcome.message for text in texts), outcome.message
    assert "Traceback" not in outcome.message


def test_several_reasons_are_given_together(parse_folder):
    outcome = parse_folder(change={"auto_map": {"AutoConfig": "x.Y"}, "quantization_config": {"bits": 4}})
    assert "auto_map" in outcome.message
    assert "quantization_config" in outcome.message


def test_a_decoder_at_another_place_is_refused(parse_job, tmp_path):
    folder = write_checkpoint(tmp_path / "gpt2", "llama")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 2048, "n_layer": 2}))
    outcome = parse_job(base=FOLDER.format(folder=folder))
    assert outcome.status == 2
    assert "GPT2LMHeadModel has no decoder at model.layers" in outcome.message


def test_logits_that_are_scaled_after_the_head_are_refused(parse_job, tmp_path):
    folder = write_checkpoint(tmp_path / "granite", "llama")
    raw = {**json.loads((folder / "config.json").read_text()), "model_type": "granite", "logits_scaling": 8.0}
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["GraniteForCausalLM"]}))
    outcome = parse_job(base=FOLDER.format(folder=folder))
    assert outcome.status == 2
    assert "changes its logits after lm_head" in outcome.message


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(parse_folder):
    outcome = parse_folder(change={"vocab_size": 1000})
    assert outcome.status == 2
    assert "model.vocab_size: 1000 is less than the 2048 entries of the tokenizer" in outcome.message


def test_a_sliding_window_shorter_than_the_sequence_is_refused(parse_folder):
    change = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0, "layer_types": None}
    outcome = parse_folder(kind="qwen2", change=change)
    assert outcome.status == 2
    assert "training.seq_len: 64 is beyond the sliding window of 32" in outcome.message
    assert parse_folder(kind="qwen2", change={**change, "sliding_window": 64}).status is None


def test_a_sequence_beyond_the_positions_is_refused(parse_folder):
    outcome = parse_folder(change={"max_position_embeddings": 32})
    assert "training.seq_len: 64 is beyond the 32 positions" in outcome.message


@pytest.mark.parametrize("kind", ["pipeline", "context", "expert"])
def test_degrees_that_do_not_exist_on_this_route_are_refused_by_name(parse_job, kind):
    extra = f"[parallelism]\n{kind}_parallel_degree = 2\n"
    outcome = parse_job(extra, base=EXPERTS, world_size=2)
    assert outcome.status == 2
    text = f"parallelism.{kind}_parallel_degree: 2, but {kind} parallelism does not exist on the huggingface_v5 route"
    assert text in outcome.message


def test_other_spmd_backends_are_refused(parse_job):
    outcome = parse_job('[parallelism]\nspmd_backend = "full_dtensor"\n', base=HF)
    assert 'parallelism.spmd_backend: "full_dtensor" does not exist' in outcome.message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("n_kv_heads = 1", "2 does not divide the 1 key and value heads"),
        ("num_experts = 9\ntop_k = 2\nmoe_hidden_dim = 32\nn_kv_heads = 2", "2 does not divide the 9 experts"),
        ("hidden_dim = 129\nn_kv_heads = 2", "2 does not divide the 129 columns"),
    ],
)
def test_tensor_parallel_degrees_must_divide(parse_job, change, text):
    base = HF.replace("hidden_dim = 128\n", "" if "hidden_dim = 129" in change else "hidden_dim = 128\n")
    outcome = parse_job("[parallelism]\ntensor_parallel_degree = 2\n", base=base.replace("n_kv_heads = 2", change),
                        world_size=2)  # fmt: skip
    assert outcome.status == 2
    assert text in outcome.message


def test_the_router_loss_needs_experts(parse_job):
    dense = parse_job(base=HF.replace("[model]", '[model]\nload_balance = "aux_loss"'))
    assert dense.status == 2
    assert "Transformers has no router loss for Qwen3ForCausalLM" in dense.message
    experts = parse_job(base=EXPERTS.replace("[model]", '[model]\nload_balance = "aux_loss"'))
    assert experts.status is None, experts.message
    assert experts.config.model_spec.model.router_loss is True


def test_a_job_that_counts_on_the_bias_is_told(parse_job):
    outcome = parse_job(base=EXPERTS)
    assert outcome.status is None, outcome.message
    assert outcome.log.count("its experts are not balanced") == 1
    assert "not balanced" not in parse_job(base=HF).log


def test_the_same_file_serves_another_route_by_one_word(parse_job):
    native = parse_job("", "--model.backend", "native", base=EXPERTS)
    assert native.status is None, native.message
    assert native.config.model_spec.name == "qwen3"
    other = parse_job("", "--model.backend", "huggingface_v5", base=TINY_MODEL)
    assert other.config.model_spec.name == "transformers/qwen3"


def test_an_override_plugin_of_the_native_route_is_refused(parse_job):
    outcome = parse_job("[plugins]\nenable = ['gather-free-rope']\n", base=HF)
    assert outcome.status == 2
    assert "this model has no CosSinRoPE.Config for it to replace" in outcome.message


def test_the_experts_implementation_is_an_option(parse_job):
    outcome = parse_job("[plugins.hf-transformers]\nexperts = 'eager'\n", base=EXPERTS)
    assert outcome.config.model_spec.model.experts == "eager"
    assert parse_job(base=EXPERTS).config.model_spec.model.experts == "grouped_mm"
    wrong = parse_job("[plugins.hf-transformers]\nexperts = 'fast'\n", base=EXPERTS)
    assert 'experts: expected one of "auto", "eager"' in wrong.message
