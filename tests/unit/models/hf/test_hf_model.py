"""The Transformers model behind torchtitan's protocol: same numbers, same names, nothing materialised too early."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import TINY_MODEL
from hf_checkpoints import ARCHITECTURES, packed_batch, small_config, write_checkpoint
from transformers import AutoModelForCausalLM

from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter
from torchtitan_qwen3_trn.models.qwen3.spec import parameter_count
from torchtitan_qwen3_trn.overrides.document_sdpa import document_mask


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: write_checkpoint(folder / kind, kind) for kind in ARCHITECTURES}


def model_config(hf_config, *, mask=True, experts="grouped_mm", router_loss=False):
    skeleton = build_on_meta(hf_config, document_mask=mask, experts=experts)
    return HFModel.Config(
        architecture=hf_config,
        layout=layout_of(skeleton),
        tensor_parallel_plan=dict(skeleton.tp_plan),
        vocab_size=hf_config.vocab_size,
        document_mask=mask,
        experts=experts,
        router_loss=router_loss,
    )


def initialized(config, seed=1):
    """The model as the trainer makes it: on meta, then empty, then initialised."""
    with torch.device("meta"):
        model = config.build()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()
    return model


def loaded(folder, **options):
    """The model of a checkpoint with its weights, loaded as torchtitan's checkpoint manager does."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model_config(type(plain.config).from_pretrained(folder), **options)
    model, adapter = initialized(config), HFStateDictAdapter(config, str(folder))
    tensors = adapter.to_hf(model.state_dict())
    dcp.load(tensors, storage_reader=adapter.get_hf_storage_reader(str(folder)))
    model.load_state_dict(adapter.from_hf(tensors), strict=True)
    return model.eval(), plain.eval()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_are_bit_identical_to_from_pretrained(checkpoints, kind):
    model, plain = loaded(checkpoints[kind])
    tokens, positions = packed_batch()
    with torch.no_grad():
        ours = model(tokens, positions=positions, attention_masks=document_mask(positions))
        # Transformers finds the documents in the positions by itself.
        theirs = plain(input_ids=tokens, position_ids=positions, use_cache=False).logits
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_one_document_without_a_mask_is_bit_identical_too(checkpoints, kind):
    model, plain = loaded(checkpoints[kind], mask=False)
    tokens, _ = packed_batch()
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(input_ids=tokens, use_cache=False).logits)


def test_the_mask_keeps_documents_apart_and_its_absence_does_not(checkpoints):
    tokens, positions = packed_batch()
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 2048  # a token of the first document
    second = slice(17, None)  # positions that lie in the second document in both rows
    masked, _ = loaded(checkpoints["qwen3"])
    open_, _ = loaded(checkpoints["qwen3"], mask=False)
    with torch.no_grad():
        mask = document_mask(positions)
        before, after = (masked(each, positions, mask)[:, second] for each in (tokens, other))
        assert torch.equal(before, after)
        before, after = (open_(each, positions)[:, second] for each in (tokens, other))
        assert not torch.equal(before, after)


def test_attention_uses_the_mask_it_is_given(checkpoints):
    """Not one that Transformers derives from the positions, which says the same for real batches."""
    model, _ = loaded(checkpoints["qwen3"])
    tokens, positions = packed_batch()
    only_itself = torch.eye(tokens.shape[1], dtype=torch.bool).expand(2, 1, -1, -1)
    with torch.no_grad():
        assert not torch.equal(
            model(tokens, positions, only_itself), model(tokens, positions, document_mask(positions))
        )


def test_positions_reach_the_rotary_embedding(checkpoints):
    model, _ = loaded(checkpoints["qwen3"], mask=False)
    tokens, positions = packed_batch()
    with torch.no_grad():
        assert not torch.equal(model(tokens, positions), model(tokens))


def test_the_chunked_loss_gets_hidden_states_and_the_head(checkpoints):
    model, _ = loaded(checkpoints["qwen3"])
    tokens, positions = packed_batch()
    with torch.no_grad():
        logits = model(tokens, positions, document_mask(positions))
        model._skip_lm_head = True
        hidden = model(tokens, positions, document_mask(positions))
    assert hidden.shape == (*tokens.shape, 64)
    assert torch.equal(model.lm_head(hidden), logits)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_parameters_have_transformers_names_once(kind):
    config = model_config(small_config(kind))
    with torch.device("meta"):
        names = set(config.build().state_dict())
    assert names == set(build_on_meta(config.architecture, document_mask=True, experts="eager").state_dict())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_random_weights_are_those_transformers_makes_of_the_same_seed(kind):
    model = initialized(model_config(small_config(kind)), seed=3)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(small_config(kind), dtype=torch.float32)
    plain.to_empty(device="cpu")
    torch.manual_seed(3)
    plain.initialize_weights()
    plain.tie_weights()
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_rotary_frequencies_exist_after_meta():
    model = initialized(
        model_config(small_config("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e6}))
    )
    exponents = torch.arange(0, 16, 2, dtype=torch.float32) / 16
    # float32 powers: one unit in the last place
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, 5e6**-exponents, rtol=1e-6, atol=0)


def test_tied_weights_are_one_parameter_after_meta():
    model = initialized(model_config(small_config("qwen3")))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = initialized(model_config(small_config("qwen3", tie_word_embeddings=False)))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_another_seed_gives_other_weights():
    config = model_config(small_config("llama"))
    one, two = initialized(config, seed=1), initialized(config, seed=2)
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)


def test_dtype_is_the_trainers_not_that_of_config_json(checkpoints):
    hf_config = small_config("qwen3")
    hf_config.dtype = torch.bfloat16
    config = model_config(hf_config)
    assert {parameter.dtype for parameter in initialized(config).parameters()} == {torch.float32}


def test_first_loss_of_random_weights_is_the_theoretical_one():
    """``ln V + s^2 D / 2``, averaged over all targets: logsumexp minus the mean logit."""
    from torchtitan_qwen3_trn.models.first_loss import expected_first_loss

    hf_config = small_config("qwen3", hidden_size=1024, num_hidden_layers=1, initializer_range=0.04)
    model = initialized(model_config(hf_config))
    tokens, positions = packed_batch()
    with torch.no_grad():
        logits = model(tokens, positions, document_mask(positions))
    loss = float((logits.logsumexp(-1) - logits.mean(-1)).mean())
    # The mean of 2048 exponentials scatters by exp(1.6)^0.5 / 2048^0.5 = 5 %; over 96 positions by far less.
    assert loss == pytest.approx(expected_first_loss(2048, 1024, 0.04), abs=0.05)


@pytest.mark.parametrize("flags", ["", "num_experts = 8\ntop_k = 2\nmoe_hidden_dim = 32"])
def test_parameters_and_operations_are_those_of_the_architecture(parse_job, flags):
    base = TINY_MODEL.replace("[model]", f'[model]\nbackend = "huggingface_v5"\nload_balance = "none"\n{flags}')
    outcome = parse_job(base=base)
    assert outcome.status is None, outcome.message
    config = outcome.config
    with torch.device("meta"):
        model = config.model_spec.model.build()
    counted = sum(parameter.numel() for parameter in model.parameters())
    native = parse_job(base=base.replace("huggingface_v5", "native"))
    assert counted == parameter_count(native.config.model_spec.model)
    experts = 8 if flags else 0
    assert model.idle_parameters() == 2 * max(experts - 2, 0) * 3 * 64 * 32
    parameters, flops = config.model_spec.model.get_nparams_and_flops(model, 64)
    assert parameters == counted
    assert flops == 6 * (counted - model.idle_parameters()) + 6 * 2 * 4 * 2 * 16 * 64  # tied: the table multiplies
