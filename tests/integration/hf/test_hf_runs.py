"""Runs of ``torchtitan.train`` as a user starts them, and what loading costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EXAMPLES, ROOT
from hf_checkpoints import write_checkpoint
from launch import train

from torchtitan_qwen3_trn.plugins import installed_plugins, installed_routes, plugins_of_route
from torchtitan_qwen3_trn.weights.verify import verify

pytestmark = pytest.mark.slow

LOG_OF_2048 = 7.62


def test_the_finetune_example_starts_at_the_loss_of_the_checkpoint_and_exports_it(tmp_path):
    command = [sys.executable, ROOT / "tools" / "make_checkpoint.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    trained = float(made.stdout.split("loss ")[1].split()[0])
    assert trained < LOG_OF_2048 - 2

    run = train("--job.config_file", EXAMPLES / "qwen3_4b_finetune.toml", cwd=tmp_path)
    assert run.status == 0, run.log
    assert len(run.losses) == 10
    # Other documents than the last ten batches of the checkpoint's training, so about the same loss, not the same.
    assert run.losses[1] == pytest.approx(trained, abs=0.7)
    assert "THE WEIGHTS LOOK RANDOM" not in run.log

    folder = tmp_path / "outputs/qwen3_4b_finetune/export/step-10"
    findings = verify(folder, checkpoint=tmp_path / "outputs/qwen3_4b_finetune/checkpoint/step-10")
    assert {finding.outcome for finding in findings} == {"ok"}, findings
    assert "BF16" in findings[1].detail


@pytest.mark.parametrize("backend", ["native", "huggingface_v5", "nki_moe"])
def test_the_same_job_file_runs_on_every_route(tmp_path, backend):
    settings = ["--training.mixed_precision_param", "float32"]
    job = EXAMPLES / "qwen3_4b_hf.toml"
    run = train("--job.config_file", job, "--model.backend", backend, *settings, cwd=tmp_path)
    absent = [name for name in plugins_of_route(installed_routes()[backend][0]) if name not in installed_plugins()]
    if absent:
        assert run.status != 0
        assert f"{backend!r} needs the plugin {absent[0]!r}" in run.log
        return
    assert run.status == 0, run.log
    assert len(run.losses) == 10
    # Ten steps at this learning rate; a step's loss scatters by about 0.1.
    assert run.losses[10] < run.losses[1] - 0.25
    assert ("transformers/qwen3 4B-Instruct-2507" in run.log) is (backend == "huggingface_v5")


LOAD_JOB = """
[model]
backend = "huggingface_v5"
load_balance = "none"
hf_assets_path = "{folder}"
[training]
local_batch_size = 1
seq_len = 64
mixed_precision_param = "float32"
[checkpoint]
enable = true
initial_load_in_hf = true
"""
LARGE = {
    "qwen3": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6},
    "qwen3_moe": {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 512, "num_hidden_layers": 6},
}


@pytest.mark.parametrize("kind", LARGE)
def test_loading_many_files_keeps_little_more_resident_than_the_parameters(tmp_path, kind):
    folder = write_checkpoint(tmp_path / "large", kind, file_size="80MB", **LARGE[kind])
    assert len(list(folder.glob("*.safetensors"))) >= 4
    job = tmp_path / "job.toml"
    job.write_text(LOAD_JOB.format(folder=folder))
    script = Path(__file__).with_name("measure_load.py")
    port = str(29500 + os.getpid() % 400)
    done = subprocess.run(
        [sys.executable, str(script), str(job), port], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.split("MEMORY ")[1].splitlines()[0])
    assert measured["parameters"] > 250e6
    assert measured["resident"] <= 1.25 * measured["parameters"], measured
