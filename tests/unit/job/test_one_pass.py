"""Loading a job does everything once: read, load plugins, lay the file over the defaults, try the overrides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from conftest import EXAMPLES
from torchtitan.config.override import apply_overrides

from torchtitan_qwen3_trn import launcher, plugins
from torchtitan_qwen3_trn.job import configuration, override_plan, prepare


@pytest.fixture
def counted(monkeypatch) -> Counter:
    """Calls of the functions that each do one part of the work."""
    calls: Counter[str] = Counter()

    def count(module, name: str) -> None:
        original = getattr(module, name)

        def wrapped(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    for module, name in (
        (configuration, "read_job_file"),
        (configuration, "load"),
        (configuration, "apply_sections"),
        (launcher, "prepare"),
        (prepare, "check_settings"),
        (prepare, "plan_overrides"),
        (override_plan, "apply_overrides"),
        (plugins, "plugins_of_route"),
    ):
        count(module, name)
    return calls


def test_each_part_of_loading_an_example_is_done_once(parse, counted):
    outcome = parse("--job.config_file", EXAMPLES / "qwen3_moe.toml")
    assert outcome.status is None, outcome.message
    # The file alone, and the file with its one profile.
    assert counted.pop("apply_sections") == 2
    assert set(counted.values()) == {1}
    assert len(counted) == 7


def test_each_plugin_is_loaded_once_and_each_factory_is_called_once_per_node(parse_job, install_plugin):
    install_plugin("counting", COUNTING)
    outcome = parse_job('[plugins]\nenable = ["counting"]\n')
    assert outcome.status is None, outcome.message
    import counting_module

    assert counting_module.calls == {"adjust_config": 1, "node_overrides": 1, "check_job": 1, "factory": 2}
    apply_overrides(outcome.config.override, outcome.config)
    assert counting_module.calls["factory"] == 4


COUNTING = """
from collections import Counter
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan_qwen3_trn.hooks import NodeOverride, hookimpl

calls = Counter()

def factory(config):
    calls["factory"] += 1
    return config

@hookimpl
def adjust_config():
    calls["adjust_config"] += 1

@hookimpl
def node_overrides():
    calls["node_overrides"] += 1
    return [NodeOverride(target=RMSNorm.Config, factory=factory, fqns=["layers.*.ffn_norm"])]

@hookimpl
def check_job():
    calls["check_job"] += 1
    return []
"""


def test_the_prepared_job_reaches_the_trainer_without_being_made_again(parse_job, monkeypatch):
    outcome = parse_job()
    taken = []
    monkeypatch.setattr(launcher, "PluginTrainer", lambda config, *, job: taken.append((config, job)))
    outcome.config.build()
    assert taken == [(outcome.job.config, outcome.job)]
    assert Path(outcome.job.config.job.config_file).name == "job.toml"


def test_a_prepared_configuration_can_be_prepared_again(parse_job):
    job = parse_job().job
    imports = list(job.config.override.imports)
    again = prepare.prepare(job.config, job.plugins)
    assert again.config.override.imports == imports
    assert again.overrides == job.overrides
