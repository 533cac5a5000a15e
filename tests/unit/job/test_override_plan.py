"""Override requests become torchtitan overrides under stable names."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from torchtitan.config.override import clear_overrides
from torchtitan.models.common.attention import FlexAttention

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.hooks import NodeOverride
from torchtitan_qwen3_trn.job import override_plan
from torchtitan_qwen3_trn.job.override_plan import plan_overrides
from torchtitan_qwen3_trn.overrides.document_sdpa import sdpa
from torchtitan_qwen3_trn.plugins import Installed, LoadedPlugin

ENTRY_POINT = EntryPoint(name="x", value="x", group="torchtitan.plugins")
PLUGIN = LoadedPlugin(
    installed=Installed(kind="plugin", name="x", entry_point=ENTRY_POINT),
    module=ModuleType("x"),
)


@pytest.fixture(autouse=True)
def _clean_registry():
    clear_overrides()
    override_plan._registered.clear()
    yield
    clear_overrides()
    override_plan._registered.clear()


@pytest.fixture
def planned(parse_job):
    """What a request with the given ``fqns`` adds to ``override.imports`` of a job without overrides."""

    def plan(fqns: list[str] | None) -> tuple[list, dict[str, int]]:
        config = parse_job('[plugins]\ndisable = ["gather-free-rope"]').config
        config.override.imports = []
        wanted = NodeOverride(target=FlexAttention.Config, factory=sdpa, fqns=fqns)
        counts, _ = plan_overrides([(PLUGIN, wanted)], config)
        return config.override.imports, counts

    return plan


def test_a_request_is_named_by_its_factorys_import_path(planned):
    assert planned(None) == ([f"{sdpa.__module__}.sdpa"], {"x": 2})


def test_the_same_request_twice_is_registered_once(planned):
    assert planned(["layers.0"]) == planned(["layers.0"])


def test_another_selection_in_one_process_gets_another_name(planned):
    names = [planned(fqns)[0][0] for fqns in (None, ["layers.0"], ["layers.1"])]
    assert len(set(names)) == 3


def test_a_factory_that_fails_is_charged_to_the_plugin_of_this_job(parse_job):
    config = parse_job('[plugins]\ndisable = ["gather-free-rope"]').config
    wanted = NodeOverride(target=FlexAttention.Config, factory=_broken)
    for name in ("first", "second"):
        config.override.imports = []
        plugin = replace(PLUGIN, installed=replace(PLUGIN.installed, name=name))
        with pytest.raises(JobError, match=rf"plugin {name} .*factory _broken raised ValueError: no"):
            plan_overrides([(plugin, wanted)], config)


def _broken(config):
    raise ValueError("no")


def test_a_module_name_selects_what_is_below_it_and_nothing_else(parse_job):
    config = parse_job().config
    wanted = NodeOverride(target=FlexAttention.Config, factory=sdpa, fqns=["layers.1"])
    assert list(wanted.nodes(config)) == ["model_spec.model.layers.1.attention.inner_attention"]
