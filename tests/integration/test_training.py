"""Real runs of stock ``torchtitan.train``, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EXAMPLES, TINY_MODEL
from launch import train


def test_moe_example_trains_on_the_cpu_with_a_falling_loss(tmp_path):
    run = train("--job.config_file", EXAMPLES / "qwen3_moe.toml", cwd=tmp_path)
    assert run.status == 0, run.log
    assert len(run.losses) >= 10
    # 64 tokens in each of 4 rows make a step's loss scatter by about 0.1.
    assert sum(run.losses[step] for step in range(16, 21)) / 5 < run.losses[1] - 0.4
    assert run.log.count("[Override]") == 20
    assert "plugins" in run.log
    assert "qwen3, sdpa, nki-rope, nki-moe" in run.log


@pytest.mark.slow
def test_without_autoload_the_module_form_still_trains(tmp_path):
    run = train(
        "--module", "torchtitan_qwen3_trn", "--config", "qwen3_moe", "--training.steps", "2",
        cwd=tmp_path, environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert run.status == 0, run.log
    assert set(run.losses) == {1, 2}


MOE = TINY_MODEL.replace("[model]", "[model]\nnum_experts = 8\ntop_k = 2\nmoe_hidden_dim = 32")
LAYOUTS = {
    "ddp": "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1",
    "fsdp": "data_parallel_shard_degree = 2",
    "tp": "tensor_parallel_degree = 2",
    "pp": "pipeline_parallel_degree = 2",
}


@pytest.mark.parametrize(
    "layout", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "tp", "pp"))]
)
def test_two_ranks_train_on_the_cpu(write_job, tmp_path, layout):
    base = TINY_MODEL.replace("[model]", "[model]\nenable_weight_tying = false") if layout == "pp" else TINY_MODEL
    job = write_job(f"[parallelism]\n{LAYOUTS[layout]}\n", base=base)
    run = train("--job.config_file", job, ranks=2, cwd=tmp_path, environment={"LOG_RANK": "0,1"})
    assert run.status == 0, run.log
    if layout != "pp":  # the loss lives on the last pipeline stage, whose log is not shown here
        assert set(run.losses) == {1, 2, 3}
        assert run.losses[3] < run.losses[1]


@pytest.mark.slow
def test_expert_parallelism_trains_on_the_cpu_and_says_what_it_changed(write_job, tmp_path):
    job = write_job("[parallelism]\nexpert_parallel_degree = 2\n", base=MOE)
    run = train("--job.config_file", job, ranks=2, cwd=tmp_path, show_all_ranks=True)
    assert run.status == 0, run.log
    assert run.losses[3] < run.losses[1]
    assert run.log.count('parallelism.spmd_backend is set to "partial_dtensor"') == 1


@pytest.mark.slow
def test_checkpoint_resumes_with_the_loss_it_would_have_had(write_job, tmp_path):
    checkpoint = "[checkpoint]\nenable = true\ninterval = 2\nlast_save_model_only = false\n"
    job = write_job(checkpoint + "[job]\ndump_folder = 'out'\n[debug]\nseed = 1\n", base=TINY_MODEL)
    straight = train("--job.config_file", job, "--training.steps", "4", "--dump_folder", "a", cwd=tmp_path)
    first = train("--job.config_file", job, "--training.steps", "2", "--lr_scheduler.total_steps", "4", cwd=tmp_path)
    second = train("--job.config_file", job, "--training.steps", "4", cwd=tmp_path)
    assert straight.status == first.status == second.status == 0, second.log
    assert set(second.losses) == {3, 4}
    assert second.losses[4] == straight.losses[4]


@pytest.mark.slow
def test_finished_run_is_not_taken_for_one_to_resume(write_job, tmp_path):
    job = write_job("[checkpoint]\nenable = true\n[job]\ndump_folder = 'out'\n", base=TINY_MODEL)
    first = train("--job.config_file", job, "--training.steps", "1", cwd=tmp_path)
    again = train("--job.config_file", job, "--training.steps", "1", cwd=tmp_path)
    assert first.status == 0, first.log
    assert again.status != 0
    assert "out/checkpoint/step-1 holds a model and no training state" in again.log


@pytest.mark.slow
def test_validation_uses_the_document_mask_too(write_job, tmp_path):
    # Without learning, validation on the training text gives the training loss only if it masks as training does.
    validator = "[validator]\nenable = true\nfreq = 1\nsteps = 1\n[validator.dataloader]\ndataset = 'c4_test'\n"
    still = "[optimizer]\nlr = 1e-30\n"
    run = train(
        "--job.config_file", write_job(validator + still, base=TINY_MODEL), "--training.steps", "1", cwd=tmp_path
    )
    assert run.status == 0, run.log
    validated = float(re.search(r"validate step:\s*1\s+loss:\s*([\d.]+)", run.log)[1])
    # The log shows four decimals of the one and five of the other.
    assert abs(validated - run.losses[1]) < 1e-4


def replaced_attributes(*args: str | Path, cwd: Path, port: int, **environment: str) -> list[tuple[str, str, bool]]:
    """What points into this package after a training run: module, attribute, whether stock copied it itself."""
    scan = Path(__file__).with_name("scan_for_seams.py")
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **environment}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(scan), *map(str, args)]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("SEAMS ")[1])


def test_exactly_two_attributes_of_the_host_libraries_point_here(write_job, tmp_path):
    rows = replaced_attributes("--job.config_file", write_job(base=TINY_MODEL), cwd=tmp_path, port=29617)
    replaced = {(module, name) for module, name, copied in rows if not copied}
    assert replaced == {("torchtitan.config", "ConfigManager"), ("torchtitan.tools.utils", "device_module")}
    assert {name for _, name, copied in rows if copied} <= {"ConfigManager", "device_module"}


@pytest.mark.slow
def test_without_autoload_only_the_device_is_replaced_late(tmp_path):
    module_form = ["--module", "torchtitan_qwen3_trn", "--config", "qwen3_moe", "--training.steps", "1"]
    rows = replaced_attributes(*module_form, cwd=tmp_path, port=29618, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert {name for _, name, _ in rows} == {"device_module"}
    assert ["torchtitan.tools.utils", "device_module", False] in rows


@pytest.mark.slow
def test_a_name_is_registered_with_transformers_only_for_a_job_without_document_mask(write_job, tmp_path):
    base = TINY_MODEL.replace("[model]", '[model]\nbackend = "huggingface_v5"')
    for text, rows in (("", 0), ("[plugins.hf-transformers]\ndocument_mask = false\n", 1)):
        found = replaced_attributes("--job.config_file", write_job(text, base=base), cwd=tmp_path, port=29619)
        assert sum(name == "sdpa_without_document_mask" for _, name, _ in found) == rows


def test_bad_job_under_a_launcher_speaks_once_and_leaves_nothing(write_job, tmp_path):
    job = write_job("[parallelism]\ntensor_parallel_degree = 3\n[metrics2]\nx = 1\n", base=TINY_MODEL)
    run = train("--job.config_file", job, ranks=2, cwd=tmp_path, show_all_ranks=True)
    assert run.status != 0
    assert run.log.count("metrics2: unknown key") == 1
    # The launcher reports its failed workers in its own way; the workers themselves give no traceback.
    assert run.log.count("Traceback") == 1
    assert "ChildFailedError" in run.log.split("Traceback")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]
