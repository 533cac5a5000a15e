"""The balancing loss of the native route: Transformers' formula, counted over the whole step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import TINY_MODEL
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from torchtitan_qwen3_trn.hooks import StepLog
from torchtitan_qwen3_trn.models import balancing
from torchtitan_qwen3_trn.models.balancing import balancing_loss
from torchtitan_qwen3_trn.models.qwen3.balanced import GlobalBatchLoss
from torchtitan_qwen3_trn.models.qwen3.spec import model_spec
from torchtitan_qwen3_trn.overrides.document_sdpa import document_mask, sdpa

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "max_position_embeddings": 64, "norm_topk_prob": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
ROWS, LENGTH = 2, 24


def build(rows=ROWS, **changes):
    torch.manual_seed(0)
    config = model_spec(
        Qwen3MoeConfig(**SIZES | changes), flavor="test", load_balance_coeff=None, balancing_loss=True
    ).model
    for layer in config.layers:
        layer.attention.inner_attention = sdpa(layer.attention.inner_attention)
    model = config.build()
    model.init_states()
    model.router_loss.rows = rows
    return model.train()


def batch(rows=ROWS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(LENGTH).expand(rows, -1)
    return torch.randint(128, (rows, LENGTH), generator=generator), positions, document_mask(positions)


def logits_of(model):
    """A list that fills with the router logits of every forward pass, ``[tokens, experts]``."""
    seen = []
    for layer in model.layers.values():
        layer.moe.router.gate.register_forward_hook(lambda _module, _args, out: seen.append(out.flatten(0, 1)))
    return seen


def router_gradient(model):
    return model.layers["0"].moe.router.gate.weight.grad


def test_value_and_gradient_are_those_of_transformers():
    model, other = build(), build()
    (model(*batch()) * 0).sum().backward()  # the balancing loss is all there is
    seen = logits_of(other)
    other.eval()(*batch())
    expected = load_balancing_loss_func(tuple(seen), 8, 2)
    (0.5 * expected).backward()
    assert model.router_loss.take().item() == pytest.approx(expected.item(), rel=1e-6)
    # The same float32 sums in another order.
    torch.testing.assert_close(router_gradient(model), router_gradient(other), rtol=1e-4, atol=1e-8)


def test_perfect_balance_is_top_k_and_collapse_is_experts():
    even = torch.full((1, 8), 2 / 8)
    assert balancing_loss(even, torch.full((1, 8), 1 / 8)).item() == pytest.approx(2.0)
    one = torch.tensor([[1.0] + [0.0] * 7])
    assert balancing_loss(one, one).item() == pytest.approx(8.0)


def test_visits_are_counted_over_the_microbatches_of_a_step_and_forgotten_after_it():
    model = build(rows=2 * ROWS)
    for seed in (1, 2):
        model(*batch(seed=seed))
    both = model.router_loss._visits_YE.clone()
    assert both.sum() == 2 * ROWS * LENGTH * 2
    model.router_loss.forget()
    model(*batch(seed=2))
    assert model.router_loss._visits_YE.sum() == ROWS * LENGTH * 2
    whole = build(rows=2 * ROWS)
    rows = [batch(seed=seed)[0] for seed in (1, 2)]
    positions = torch.arange(LENGTH).expand(2 * ROWS, -1)
    whole(torch.cat(rows), positions, document_mask(positions))
    assert torch.equal(whole.router_loss._visits_YE, both)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_recomputation_neither_counts_twice_nor_changes_the_gradient(mode):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    model = build(num_hidden_layers=2)
    if mode != "none":
        {"full": FullAC, "selective": SelectiveAC}[mode].Config().build(dump_folder="").apply(model)
    model(*batch()).sum().backward()
    assert len(model.router_loss.values) == 1
    assert model.router_loss._visits_YE.sum() == 2 * ROWS * LENGTH * 2
    plain = build(num_hidden_layers=2)
    plain(*batch()).sum().backward()
    gradients = [each.grad for name, each in model.named_parameters() if name.endswith("gate.weight")]
    expected = [each.grad for name, each in plain.named_parameters() if name.endswith("gate.weight")]
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_validation_counts_nothing():
    model = build()
    with torch.no_grad():
        model(*batch())
    model.eval()(*batch())
    assert model.router_loss.take() is None
    assert model.router_loss._visits_YE is None


def test_jobs_without_experts_or_with_tensor_and_expert_parallelism_are_refused(parse_job):
    dense = parse_job(base=TINY_MODEL.replace("[model]", '[model]\nload_balance = "aux_loss"'))
    assert 'model.load_balance: "aux_loss", but this model has no experts' in dense.message
    experts = "[model]\nload_balance = 'aux_loss'\nnum_experts = 8\ntop_k = 2\nmoe_hidden_dim = 32"
    base = TINY_MODEL.replace("[model]", experts)
    assert parse_job(base=base).status is None
    tensor = "[parallelism]\ntensor_parallel_degree = 2\n"
    assert parse_job(tensor, base=base, world_size=2).status is None
    both = parse_job(tensor + "expert_parallel_degree = 2\n", base=base, world_size=2)
    assert "does not work with tensor and expert parallelism at once" in both.message


class _Part:
    def __init__(self, *values):
        self.router_loss = GlobalBatchLoss(0.5, 4)
        self.router_loss.values = [torch.tensor(value) for value in values]


@pytest.mark.parametrize("parts", [[_Part(0.5), _Part(1.5)], [_Part()]], ids=["two_parts", "a_stage_without_experts"])
def test_the_logged_loss_is_the_sum_over_parts_and_stages_and_logged_once(monkeypatch, parts):
    logged, summed = [], []
    dims = SimpleNamespace(dp_enabled=False, pp_enabled=True, get_mesh=lambda name: name)
    log = StepLog(step=1, due=True, write=lambda values, step: logged.append(values))
    here = sum(float(value) for part in parts for value in part.router_loss.values)

    def other_stage(value, mesh):
        summed.append(mesh)
        return value + 0.25

    monkeypatch.setattr(balancing.dist_utils, "dist_sum_tensor", other_stage)
    balancing.log_router_loss(parts, dims, torch.device("cpu"), log)
    assert summed == ["pp"]
    assert logged == [{"router_aux_loss": here + 0.25, "router_aux_loss_coef": parts[0].router_loss.coefficient}]
