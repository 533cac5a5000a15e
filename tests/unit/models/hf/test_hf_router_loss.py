"""The router's auxiliary loss: the gradient Transformers gives it, once per microbatch."""

from __future__ import annotations

import pytest
import torch
from hf_checkpoints import packed_batch, small_config
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel


def pair(*, router_loss):
    """Our model and Transformers' with the same random weights; a coefficient large enough to see."""
    hf_config = small_config("qwen3_moe", router_aux_loss_coef=0.5)
    plain = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    config = HFModel.Config(
        architecture=hf_config,
        layout=layout_of(build_on_meta(hf_config, document_mask=False, experts="grouped_mm")),
        tensor_parallel_plan={},
        vocab_size=2048,
        document_mask=False,
        router_loss=router_loss,
    )
    model = config.build()
    model.load_state_dict(plain.state_dict(), strict=True)
    return model.train(), plain.train()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_are_those_of_transformers_loss():
    model, plain = pair(router_loss=True)
    tokens, _ = packed_batch()
    cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    output = plain(input_ids=tokens, use_cache=False, output_router_logits=True)
    (cross_entropy(output.logits.flatten(0, 1), tokens.flatten()) + 0.5 * output.aux_loss).backward()
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        # The same float32 operations; only the order in which two gradients of the router are added may differ.
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-8, msg=name)
    assert model.router_loss.take().item() == pytest.approx(output.aux_loss.item(), rel=1e-6)


def test_without_it_gradients_are_those_of_cross_entropy_alone():
    model, plain = pair(router_loss=False)
    tokens, _ = packed_batch()
    cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    cross_entropy(plain(input_ids=tokens, use_cache=False).logits.flatten(0, 1), tokens.flatten()).backward()
    expected = gradients(plain)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())
    assert model.router_loss is None


def test_a_microbatch_counts_by_its_share():
    tokens, _ = packed_batch()
    norms = []
    for share in (1.0, 0.5):
        torch.manual_seed(4)
        model, _ = pair(router_loss=True)
        model.router_loss.share = share
        model._skip_lm_head = True
        (model(tokens) * 0.0).sum().backward()  # the router loss is all there is
        norms.append(model.model.layers[0].mlp.gate.weight.grad.norm())
    assert norms[1] == pytest.approx(float(norms[0]) / 2, rel=1e-5)


def test_validation_collects_nothing():
    model, _ = pair(router_loss=True)
    tokens, _ = packed_batch()
    with torch.no_grad():
        model(tokens)
    assert model.router_loss.take() is None


def test_recomputation_does_not_count_twice():
    from torchtitan.distributed.activation_checkpoint import FullAC

    model, _ = pair(router_loss=True)
    FullAC.Config().build(dump_folder="").apply(model)
    tokens, _ = packed_batch()
    model(tokens).sum().backward()
    assert len(model.router_loss.values) == 1
