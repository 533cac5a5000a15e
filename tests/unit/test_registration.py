"""Override requests become torchtitan overrides under stable names."""

from __future__ import annotations

import pytest
from torchtitan.config.override import clear_overrides
from torchtitan.models.common.attention import FlexAttention

from torchtitan_qwen3_trn.hooks import NodeOverride
from torchtitan_qwen3_trn.job import override_plan as registration


def keep(config: FlexAttention.Config) -> FlexAttention.Config:
    return config


@pytest.fixture(autouse=True)
def _clean_registry():
    clear_overrides()
    registration._registered.clear()
    yield
    clear_overrides()
    registration._registered.clear()


def request(fqns: list[str] | None) -> registration.Request:
    return registration.Request(
        "plugin x (y 1)", "x", NodeOverride(target=FlexAttention.Config, factory=keep, fqns=fqns)
    )


def test_a_request_is_named_by_its_factorys_import_path():
    assert registration.register([request(None)]) == [(f"{__name__}.keep", "x")]


def test_the_same_request_twice_is_registered_once():
    first = registration.register([request(["layers.0"])])
    assert registration.register([request(["layers.0"])]) == first


def test_another_selection_in_one_process_gets_another_name():
    names = [registration.register([request(fqns)])[0] for fqns in (None, ["layers.0"], ["layers.1"])]
    assert len(set(names)) == 3


def test_a_module_name_selects_what_is_below_it_and_nothing_else(parse_job):
    config = parse_job().config
    wanted = NodeOverride(target=FlexAttention.Config, factory=keep, fqns=["layers.1"])
    assert list(registration.matching_nodes(wanted, config)) == ["model_spec.model.layers.1.attention.inner_attention"]
