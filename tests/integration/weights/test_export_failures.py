"""Exports that cannot finish: killed processes, full disks, places that are taken."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_MODEL
from launch import train
from small_disk import small_disk

from torchtitan_qwen3_trn.checks.checkpoints import checkpoint_faults
from torchtitan_qwen3_trn.models.described_spec import hf_config_of
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of

pytestmark = pytest.mark.slow

# KILLS=20 and more by hand.
TRIALS = int(os.environ.get("KILLS", "8"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What ``crash.py`` saw."""
    folder = tmp_path_factory.mktemp("crash")
    command = [sys.executable, str(Path(__file__).with_name("crash.py")), str(folder), str(TRIALS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


def test_killed_at_random_moments_the_destination_is_absent_or_complete(results):
    result = results["killed"]
    assert result["partial"] == 0
    assert result["absent"] + result["complete"] == TRIALS
    # Killed in the middle of things, not only before or after them.
    assert result["drafts"] >= TRIALS // 5
    assert result["last"] == [0, 0]
    assert result["sound"]
    assert result["left"] == ["out"]


def test_a_rank_that_outlives_its_job_does_not_touch_the_next_export(results):
    result = results["outlived"]
    assert 0 not in result["refused"]  # while rank 0 lives
    assert result["left behind"] == [".out.partial"]
    assert result["second"] == [0, 0]
    assert result["alive"]
    assert result["survivor"] != [0]
    assert result["sound"]
    assert result["left"] == ["out"]


def test_a_disk_that_one_rank_fills_up_fails_all_ranks_alike(results):
    result = results["full"]
    assert result["statuses"] == [2, 2]
    assert result["said"][0] == result["said"][1]
    reason = r"the disk is full or the file may not grow \((No space left on device|File too large)\); nothing was"
    assert re.search(reason, result["said"][0])
    assert "/disk/.out.partial/" in result["said"][0]
    assert result["left"] == []


def test_assets_that_rank_0_cannot_keep_fail_all_ranks_alike(results):
    result = results["unkept"]
    assert result["statuses"] == [2, 2]
    assert result["said"][0] == result["said"][1]
    assert "step-1/hf_assets: cannot be written (File exists), and exporting this checkpoint later" in result["said"][0]


def test_a_disk_that_fills_up_fails_the_job_with_one_message_and_keeps_the_checkpoint(write_job, parse, tmp_path):
    job = write_job(
        f"""
        [plugins]
        enable = ["safetensors-export"]
        [plugins.safetensors-export]
        folder = "{tmp_path}/small/export"
        [checkpoint]
        enable = true
        [job]
        dump_folder = "out"
        """,
        base=TINY_MODEL,
    )
    shapes = layout_of(build_on_meta(hf_config_of(parse("--job.config_file", job).config.model_spec))).shapes
    nbytes = 4 * sum(math.prod(shape) for shape in shapes.values())
    # Room for the tensors, but not for the tokenizer that is written before them.
    with small_disk(tmp_path / "small", nbytes + 32768) as disk:
        if disk is None:
            pytest.skip("mounting a small file system is not permitted here")
        run = train("--job.config_file", job, "--training.steps", "1", cwd=tmp_path, ranks=2)
        assert run.status != 0
        assert run.log.count("the disk is full") == 1, run.log
        assert "(No space left on device); nothing was published" in run.log
        # The launcher has a traceback of its own.
        assert "torchtitan_qwen3_trn/" not in run.log.partition("the disk is full")[2]
        assert list(disk.rglob("*.*")) == []
    assert checkpoint_faults(tmp_path / "out/checkpoint/step-1") == []
