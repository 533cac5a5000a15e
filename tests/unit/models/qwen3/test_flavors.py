import pytest
import torch

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS, flavor
from torchtitan_qwen3_trn.models.qwen3.spec import model_config, parameter_count


def test_an_unknown_flavor_names_the_nearest_first():
    with pytest.raises(JobError) as caught:
        flavor("30b-a3b-instruct")
    (problem,) = caught.value.problems
    assert str(problem).startswith(
        'model.flavor: "30b-a3b-instruct" is not a Qwen3 flavor; choose one of 30B-A3B-Instruct-2507,'
    )
    assert all(name in problem.fix for name in FLAVORS)


def test_a_flavor_is_new_at_every_call():
    one = flavor("4B")
    one.hidden_size = 1
    one.rope_parameters["rope_theta"] = 1.0
    assert (flavor("4B").hidden_size, flavor("4B").rope_parameters["rope_theta"]) == (2560, 1e6)


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
def test_parameters_round_to_the_published_sizes(name, total, active):
    """2 %: model cards print two or three digits and cut off rather than round (3.35 is "3.3B activated")."""
    config = model_config(flavor(name))
    with torch.device("meta"):
        model = config.build()
    counted = sum(parameter.numel() for parameter in model.parameters())
    unused = sum(
        parameter.numel() * (layer.moe.router.num_experts - layer.moe.router.top_k) // layer.moe.router.num_experts
        for layer in model.layers.values()
        if layer.moe_enabled
        for parameter in layer.moe.routed_experts.inner_experts.parameters()
    )
    assert (counted, counted - unused) == pytest.approx((total, active), rel=0.02)
    assert parameter_count(config) == counted
