"""Native Qwen3 against Transformers' own Qwen3: logits and every parameter's gradient, on the same weights.

The widths are those of published models, the depth is two layers and the vocabulary is cut. Differences are relative
to the largest magnitude in Transformers' tensor: max|a - b| / max|b|.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torchtitan.models.common.moe import GroupedExperts
from transformers import AutoModelForCausalLM

from torchtitan_qwen3_trn.models.qwen3.flavors import flavor
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan_qwen3_trn.overrides.document_sdpa import document_mask, sdpa
from torchtitan_qwen3_trn.overrides.position_rope import gather_free_rope

# float32 against float32, the same products, at most summed in another order. Seen on one thread: logits equal bit
# for bit without experts and within 4e-7 with them, gradients within 2e-6. More threads split more sums.
FLOAT32 = 1e-4
# torchtitan's grouped matmul rounds activations, weights and results to bfloat16, whose 8 significant bits are off by
# up to 2^-9 = 0.2 %; a gradient passes through about ten such roundings. Seen: logits 0.1 %, gradients 1.2 %.
BFLOAT16 = 2e-2

CUT = {"num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 64}
TOKENS = 48


class Float32Experts(GroupedExperts):
    """torchtitan's experts without its rounding to bfloat16, so that everything around them is compared sharply."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD, num_tokens_per_expert_E):
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        experts = zip(parts, self.w1_EFD, self.w2_EDF, self.w3_EFD, strict=True)
        return torch.cat([(torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in experts])


def transformers_model(hf_config):
    options = {"experts_implementation": "eager"} if hf_config.model_type == "qwen3_moe" else {}
    return AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), attn_implementation="sdpa", **options)


def by_published_name(tensors):
    """Transformers' tensors in memory -> as in files, which hold each expert and projection apart."""
    published = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            parts = {"gate_proj": gate, "up_proj": up}
        elif name.endswith("experts.down_proj"):
            parts = {"down_proj": value}
        else:
            published[name] = value
            continue
        stem = name.rpartition(".")[0]
        for projection, stacked in parts.items():
            published.update((f"{stem}.{e}.{projection}.weight", each) for e, each in enumerate(stacked))
    return published


def pair(hf_config, experts=None, rope=None):
    """Transformers' model with random weights, and the native one with the same weights through the adapter."""
    torch.manual_seed(0)
    reference = transformers_model(hf_config)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    config = model_config(hf_config)
    for layer in config.layers:
        layer.attention.inner_attention = sdpa(layer.attention.inner_attention)
        if rope is not None:
            layer.attention.rope = rope(layer.attention.rope)
        if layer.moe is not None and experts is not None:
            stock = layer.moe.routed_experts.inner_experts
            layer.moe.routed_experts.inner_experts = experts.Config(
                dim=stock.dim, hidden_dim=stock.hidden_dim, num_experts=stock.num_experts, param_init=stock.param_init
            )
    native, adapter = config.build(), Qwen3StateDictAdapter(config, None)
    weights = adapter.from_hf(by_published_name(dict(reference.named_parameters())))
    native.load_state_dict({key: value.detach() for key, value in weights.items()}, strict=False)
    return reference, native, adapter


def backward(logits, targets):
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return logits.detach()


def native_gradients(native, adapter):
    """By published name: the state dict with gradients in the weights' places goes through hooks and adapter."""
    for parameter in native.parameters():
        parameter.data = parameter.grad
    return adapter.to_hf(native.state_dict())


def outputs_of(modules):
    """A list that fills with what the modules return."""
    outputs = []
    for module in modules:
        module.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    return outputs


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def compare(hf_config, positions, tolerance=FLOAT32, experts=None, rope=None):
    """Assert that logits and all gradients agree; returns what both routers chose, by layer."""
    reference, native, adapter = pair(hf_config, experts, rope)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(hf_config.vocab_size, (2, *positions.shape), generator=generator)
    routers = [layer for layer, block in enumerate(native.layers.values()) if block.moe_enabled]
    chosen = {
        "reference": outputs_of([reference.model.layers[layer].mlp.gate for layer in routers]),
        "native": outputs_of([native.layers[str(layer)].moe.router for layer in routers]),
    }

    wanted = backward(reference(tokens, position_ids=positions, use_cache=False).logits, targets)
    got = backward(native(tokens, positions, document_mask(positions)), targets)
    assert difference(got, wanted) < tolerance
    gradients = native_gradients(native, adapter)
    expected = by_published_name({name: each.grad for name, each in reference.named_parameters()})
    assert gradients.keys() == expected.keys()
    far = {name: difference(gradients[name], expected[name]) for name in expected if expected[name].abs().max() > 0}
    print("logits", difference(got, wanted), "gradients", max(far.values()), max(far, key=far.get))
    assert max(far.values()) < tolerance, max(far.items(), key=lambda item: item[1])
    return chosen


def same_choices(chosen):
    assert chosen["reference"]
    for reference, native in zip(chosen["reference"], chosen["native"], strict=True):
        wanted = reference[2].sort(-1).values
        assert torch.equal(native[1].flatten(0, 1).sort(-1).values, wanted)


def from_zero(length=TOKENS, batch=2):
    return torch.arange(length).expand(batch, -1)


@pytest.mark.slow
def test_the_4b_widths_tied():
    compare(flavor("4B", **CUT), from_zero(batch=1))


def test_an_untied_model():
    compare(flavor("0.6B", **CUT, tie_word_embeddings=False), from_zero())


def test_documents_packed_into_one_row():
    """Transformers, too, starts a document where the position falls back to 0."""
    compare(flavor("0.6B", **CUT), torch.cat([from_zero(20), from_zero(7), from_zero(21)], dim=1)[:1])


ROPES = pytest.mark.parametrize("rope", [None, gather_free_rope], ids=["table", "gather-free"])


@ROPES
def test_positions_beyond_40960_with_the_base_of_the_2507_models(rope):
    hf_config = flavor("0.6B", **{**CUT, "max_position_embeddings": 262_144}, rope_theta=5e6)
    compare(hf_config, from_zero(batch=1) + 262_144 - TOKENS, rope=rope)


@ROPES
def test_yarn_with_its_attention_factor_at_stretched_positions(rope):
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
    hf_config = flavor("0.6B", **{**CUT, "max_position_embeddings": 131_072}, rope_parameters=yarn)
    compare(hf_config, from_zero(batch=1) + 131_072 - TOKENS, rope=rope)


A3B = {**CUT, "num_experts": 8, "num_experts_per_tok": 4}


@pytest.mark.slow
def test_experts_at_the_30b_a3b_widths():
    same_choices(compare(flavor("30B-A3B", **A3B), from_zero(batch=1), experts=Float32Experts))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_experts_and_dense_layers_mixed(norm_topk_prob):
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 384, "mlp_only_layers": [1]}
    hf_config = flavor("30B-A3B", **A3B | sizes | {"norm_topk_prob": norm_topk_prob})
    same_choices(compare(hf_config, from_zero(), experts=Float32Experts))


def test_stock_experts_in_bfloat16():
    """The layer with experts comes first, so its router sees what Transformers' sees and must choose the same."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "mlp_only_layers": [1]}
    same_choices(compare(flavor("30B-A3B", **A3B | sizes), from_zero(), tolerance=BFLOAT16))
