"""A distribution that is not this package brings a route, its model and every hook, and trains."""

from __future__ import annotations

import json

import pytest
from conftest import TINY_MODEL
from launch import train

from torchtitan_qwen3_trn.plugins import hook_names

pytestmark = pytest.mark.slow

PLUGIN = """
import json
from dataclasses import dataclass
from pathlib import Path

from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan_qwen3_trn.hooks import NodeOverride, hookimpl
from torchtitan_qwen3_trn.models.qwen3 import native_spec

@dataclass(kw_only=True)
class Options:
    out: str = ""

calls = []

def same_norm(config):
    return config

@hookimpl
def adjust_config(config, options, machine):
    calls.append(["adjust_config", machine.world_size])

@hookimpl
def model_spec(config, options, machine):
    calls.append(["model_spec"])
    return native_spec.model_spec_for(config)

@hookimpl
def node_overrides(config, options, machine):
    calls.append(["node_overrides"])
    return [NodeOverride(target=RMSNorm.Config, factory=same_norm, fqns=["norm"])]

@hookimpl
def check_job(config, options, machine):
    calls.append(["check_job"])
    return []

@hookimpl
def model_inputs(config, options, inputs, extra_kwargs):
    calls.append(["model_inputs", list(inputs.shape), sorted(extra_kwargs)])

@hookimpl
def after_step(config, options, trainer, step, local_loss, log):
    calls.append(["after_step", step, float(local_loss)])
    log({"half_loss": local_loss / 2})

@hookimpl
def checkpoint_saved(config, options, trainer, step):
    calls.append(["checkpoint_saved", step, trainer.step])

@hookimpl
def training_ended(config, options, trainer):
    calls.append(["training_ended", trainer.step])
    Path(options.out).write_text(json.dumps(calls))
"""

JOB = """
[checkpoint]
enable = true
interval = 2
[metrics]
enable_tensorboard = true
"""


def test_a_route_of_another_distribution_trains_with_every_hook(install_plugin, write_job, tmp_path):
    site = install_plugin("other-model", PLUGIN, routes={"other": ("other-model", "sdpa")})
    base = TINY_MODEL.replace("[model]", '[model]\nbackend = "other"')
    base = base.replace("[metrics]\nlog_freq = 1\n", "")
    job = write_job(JOB + "log_freq = 1\n", base=base)
    out = tmp_path / "calls.json"
    run = train(
        "--job.config_file", job, "--plugins.other-model.out", out, cwd=tmp_path, environment={"PYTHONPATH": str(site)}
    )
    assert run.status == 0, run.log
    assert "plugins          │ other-model, sdpa" in run.log
    calls = json.loads(out.read_text())
    assert {name for name, *_ in calls} == set(hook_names())
    steps = [(step, loss) for _, step, loss in _named(calls, "after_step")]
    assert [step for step, _ in steps] == [1, 2, 3]
    for step, loss in steps:
        assert loss == pytest.approx(run.losses[step], abs=1e-4)
        assert f"step: {step:2d}  half_loss: {loss / 2:8.5f}" in run.log
    assert [call[1:] for call in _named(calls, "checkpoint_saved")] == [[2, 2], [3, 3]]
    shapes = {(tuple(shape), "positions" in keys) for name, shape, keys in _named(calls, "model_inputs")}
    assert shapes == {((2, 64), True)}
    assert list((tmp_path / "outputs").rglob("events.out.tfevents.*"))


def _named(calls: list[list], hook: str) -> list[list]:
    return [call for call in calls if call[0] == hook]
