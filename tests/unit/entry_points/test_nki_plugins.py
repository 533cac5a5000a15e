"""Plugins `nki-rope` and `nki-moe`: what they replace, what they refuse, and that checkpoints do not notice them."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY_MODEL
from torchtitan.config.override import apply_overrides
from torchtitan.tools import utils

from torchtitan_qwen3_trn.kernels.operator import Operator
from torchtitan_qwen3_trn.overrides.fused_qk_norm import QKNormRoPE, link
from torchtitan_qwen3_trn.overrides.static_moe import RouteKeepingSelectiveAC

MOE = TINY_MODEL.replace("[model]", '[model]\nbackend = "nki_moe"\nnum_experts = 8\ntop_k = 2\nmoe_hidden_dim = 32')
REAL = """
[model]
backend = "nki_moe"
flavor = "30B-A3B"

[training]
seq_len = 4096
"""


@pytest.fixture
def on_neuron(monkeypatch):
    """The job thinks it is on Neuron with two cores per device, and that every kernel can be imported."""
    monkeypatch.setattr(utils, "device_type", "neuron")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    monkeypatch.setattr(Operator, "neuron", property(lambda self: None))


def overridden(config) -> list[str]:
    """Names of the replaced modules with their new types."""
    lines = apply_overrides(config.override, config)
    return [line.split(": ")[1].removeprefix("model_spec.model.").split(" with ")[0] for line in lines]


def test_every_node_of_the_route_is_replaced_with_one_line_each(parse_job):
    lines = overridden(parse_job(base=MOE).config)
    assert sorted(line for line in lines if line.startswith("layers.1.")) == [
        "layers.1.attention.inner_attention FlexAttention.Config -> DocumentSDPA.Config",
        "layers.1.attention.rope CosSinRoPE.Config -> KernelRoPE.Config",
        "layers.1.moe.routed_experts.inner_experts GroupedExperts.Config -> KernelExperts.Config",
        "layers.1.moe.routed_experts.token_dispatcher AllToAllTokenDispatcher.Config -> StaticDispatcher.Config",
        "layers.1.moe.router TokenChoiceTopKRouter.Config -> StaticRouter.Config",
    ]
    assert len(lines) == 2 * 5


def test_a_dense_model_keeps_its_feed_forward(parse_job):
    dense = TINY_MODEL.replace("[model]", '[model]\nbackend = "nki_moe"')
    lines = overridden(parse_job(base=dense).config)
    assert {line.split()[-1] for line in lines} == {"DocumentSDPA.Config", "KernelRoPE.Config"}
    chosen = parse_job('[plugins.nki-moe]\nfqns = ["layers.1"]\n', base=dense)
    assert chosen.status == 2


@pytest.mark.parametrize(("mode", "kept"), [("selective", True), ("full", False)])
def test_selective_checkpointing_is_told_to_keep_routes(parse_job, mode, kept):
    config = parse_job(base=MOE.replace('mode = "none"', f'mode = "{mode}"')).config
    assert isinstance(config.activation_checkpoint, RouteKeepingSelectiveAC.Config) == kept


def test_fqns_choose_layers(parse_job):
    job = '[plugins.nki-rope]\nfqns = ["layers.0"]\n[plugins.nki-moe]\nfqns = ["layers.1.moe"]\n'
    lines = overridden(parse_job(job, base=MOE).config)
    replaced = {line.split()[0] for line in lines if "SDPA" not in line}
    assert replaced == {
        "layers.0.attention.rope",
        "layers.1.moe.router",
        "layers.1.moe.routed_experts.token_dispatcher",
        "layers.1.moe.routed_experts.inner_experts",
    }


def test_fused_norms_follow_the_chosen_rotary_embeddings(parse_job):
    job = '[plugins.nki-rope]\nfused_qk_norm = true\nfqns = ["layers.1"]\n'
    lines = overridden(parse_job(job, base=MOE).config)
    assert "layers.1.attention.rope CosSinRoPE.Config -> QKNormRoPE.Config" in lines
    assert "layers.1.attention.qk_norm RMSNorm.Config -> DeferredNorm.Config" in lines
    assert not any("layers.0.attention.qk_norm" in line for line in lines)


def test_published_sizes_fit_the_kernels(parse_job, on_neuron):
    outcome = parse_job(base=REAL)
    assert outcome.status is None, outcome.message


def test_sizes_that_do_not_fit_are_named_with_the_nearest_that_do(parse_job, on_neuron):
    outcome = parse_job(
        "[plugins.nki-moe]\nblock_rows = 1000\n",
        base=REAL.replace("4096", "4000").replace("[training]", "moe_hidden_dim = 700\n[training]"),
    )
    assert outcome.status == 2
    for expected in (
        "training.seq_len: 4000 does not fit the torchtitan_qwen3_trn::rope kernel",
        "the nearest that does is 4096",
        "model.moe_hidden_dim: 700 does not fit the torchtitan_qwen3_trn::experts kernel",
        "the nearest that does is 640",
        "plugins.nki-moe.block_rows: 1000 does not fit",
        "the nearest that does is 512",
    ):
        assert expected in outcome.message
    assert "Traceback" not in outcome.message


@pytest.mark.parametrize(("size", "nearest"), [(768, 1024), (513, 512)])
def test_nearest_size_under_tensor_parallelism_is_one_that_the_job_can_set(parse_job, on_neuron, size, nearest):
    def outcome(moe_hidden_dim: int):
        base = REAL.replace("[training]", f"moe_hidden_dim = {moe_hidden_dim}\n[training]")
        return parse_job("[parallelism]\ntensor_parallel_degree = 4\n", base=base, world_size=4)

    refused = outcome(size)
    assert refused.status == 2
    assert f"model.moe_hidden_dim: {size} over 4 ranks does not fit" in refused.message
    assert f"the nearest that does is {nearest}" in refused.message
    assert outcome(nearest).status is None


def test_the_reference_takes_any_size(parse_job):
    assert parse_job("[plugins.nki-moe]\nblock_rows = 1000\n", base=MOE).status is None


@pytest.mark.parametrize(("plugin", "module"), [("nki-rope", "rope_nki"), ("nki-moe", "experts_nki")])
def test_chosen_kernels_that_cannot_be_imported_are_an_error(parse_job, monkeypatch, plugin, module):
    monkeypatch.setattr(utils, "device_type", "neuron")
    outcome = parse_job(base=REAL)
    assert outcome.status == 2
    assert f"plugins.{plugin}.provider: 'ours': kernel torchtitan_qwen3_trn.kernels.{module}:" in outcome.message
    assert 'set it to "auto"' in outcome.message


def test_auto_falls_back_once_with_the_reason(parse_job, monkeypatch):
    monkeypatch.setattr(utils, "device_type", "neuron")
    job = '[plugins.nki-rope]\nprovider = "auto"\n[plugins.nki-moe]\nprovider = "auto"\n'
    outcome = parse_job(job, base=REAL)
    assert outcome.status is None
    for operator in ("torchtitan_qwen3_trn::rope", "torchtitan_qwen3_trn::experts"):
        (line,) = (line for line in outcome.log.splitlines() if f"{operator} runs as PyTorch operators" in line)
        assert "No module named" in line
    apply_overrides(outcome.config.override, outcome.config)
    layer = outcome.config.model_spec.model.layers[0]
    assert not layer.attention.rope.kernel
    assert not layer.moe.routed_experts.inner_experts.kernel


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            '[plugins.nki-rope]\nprovider = "nkilib"\nfused_qk_norm = true',
            '"ours", or plugins.nki-rope.fused_qk_norm = false',
        ),
        (
            "[plugins.nki-rope]\nfused_qk_norm = true\n[parallelism]\ntensor_parallel_degree = 2",
            "tensor_parallel_degree",
        ),
        (
            '[plugins.nki-rope]\nfused_qk_norm = true\n[parallelism]\nspmd_backend = "full_dtensor"',
            'parallelism.spmd_backend: "full_dtensor" passes the norms\' weights as DTensors, which their operator '
            'does not take; set it to "spmd_types" or "partial_dtensor", or plugins.nki-rope.fused_qk_norm = false',
        ),
        ("[plugins.nki-moe]\nblock_rows = 0", "plugins.nki-moe.block_rows: 0"),
        ("[debug]\nspmd_typechecking = true", "debug.spmd_typechecking"),
        ('[plugins.nki-rope]\nprovider = "theirs"', 'expected one of "ours", "nkilib", "auto"'),
    ],
)
def test_options_that_do_not_work_are_refused(parse_job, job, message):
    outcome = parse_job(job, base=MOE, world_size=2)
    assert outcome.status == 2
    assert message in outcome.message


def built(parse_job, backend: str, options: str = "") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = parse_job(options, base=MOE.replace("nki_moe", backend)).config
    apply_overrides(config.override, config)
    model = config.model_spec.model.build()
    link(model)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(2 * 64).view(2, 64) % 100
    positions = torch.arange(64).expand(2, -1)
    model(tokens, positions=positions).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", ["", "[plugins.nki-rope]\nfused_qk_norm = true\n"], ids=["plain", "fused norms"])
@pytest.mark.parametrize(("first", "second"), [("native", "nki_moe"), ("nki_moe", "native")])
def test_checkpoints_pass_between_the_routes_bit_for_bit(parse_job, tmp_path, first, second, options):
    torch.manual_seed(0)
    source, destination = (built(parse_job, kind, options if kind == "nki_moe" else "") for kind in (first, second))
    step(*source)
    saved, loaded = (model.state_dict() for model, _ in (source, destination))
    torch.distributed.checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    destination[0].load_state_dict(loaded)
    after = destination[0].state_dict()
    assert list(after) == list(saved)
    assert all(torch.equal(value, after[name]) for name, value in saved.items())

    destination[1].load_state_dict(source[1].state_dict())
    shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model, _ in (source, destination)]
    assert shapes[0] == shapes[1]


def test_fused_norms_are_trained_by_the_rotary_embedding(parse_job):
    torch.manual_seed(0)
    model, _ = built(parse_job, "nki_moe", "[plugins.nki-rope]\nfused_qk_norm = true\n")
    attention = model.layers["0"].attention
    assert isinstance(attention.rope, QKNormRoPE)
    assert not any("norm" in name for name, _ in attention.rope.named_parameters())
    model(torch.arange(64)[None], positions=torch.arange(64)[None]).float().square().mean().backward()
    assert attention.q_norm.weight.grad.abs().max() > 0
    assert attention.k_norm.weight.grad.abs().max() > 0


@pytest.mark.parametrize("balance", ["aux_loss", "bias"])
def test_parallelizing_links_fused_norms_whatever_balances_load(parse_job, balance):
    base = MOE.replace("[model]", f'[model]\nload_balance = "{balance}"')
    config = parse_job("[plugins.nki-rope]\nfused_qk_norm = true\n", base=base).config
    apply_overrides(config.override, config)
    model = config.model_spec.model.build()
    linking = config.model_spec.parallelize_fn
    assert linking.func(lambda model, **options: model, model) is model
    assert all(layer.attention.rope._norms for layer in model.layers.values())


def test_unlinked_fused_norm_says_what_to_call(parse_job):
    model, _ = built(parse_job, "nki_moe", "[plugins.nki-rope]\nfused_qk_norm = true\n")
    model.layers["0"].attention.rope.use_norms()
    with pytest.raises(RuntimeError, match=r"call link\(\)"):
        model(torch.arange(64)[None], positions=torch.arange(64)[None])
