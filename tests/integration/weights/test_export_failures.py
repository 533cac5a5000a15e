"""Exports that cannot finish: killed processes, full disks, places that are taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_MODEL
from launch import train

pytestmark = pytest.mark.slow

# KILLS=20 and more by hand.
TRIALS = int(os.environ.get("KILLS", "8"))


def test_killed_at_random_moments_the_destination_is_absent_or_complete(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("crash.py")), str(tmp_path / "place"), str(TRIALS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["partial"] == 0
    assert result["absent"] + result["complete"] == TRIALS
    # Killed in the middle of things, not only before or after them.
    assert result["drafts"] >= TRIALS // 5
    assert result["last"] == [0, 0]
    assert result["sound"]
    assert result["left"] == ["out"]


def test_a_full_disk_fails_the_job_with_one_message_and_keeps_the_checkpoint(write_job, tmp_path, small_disk):
    options = (
        f"[plugins]\nenable = ['safetensors-export']\n[plugins.safetensors-export]\nfolder = '{small_disk}/export'\n"
    )
    checkpoint = "[checkpoint]\nenable = true\n[job]\ndump_folder = 'out'\n"
    job = write_job(options + checkpoint, base=TINY_MODEL)
    run = train("--job.config_file", job, "--training.steps", "1", cwd=tmp_path, ranks=2)
    assert run.status != 0
    assert run.log.count("the disk is full") == 1, run.log
    assert list(small_disk.rglob("*.*")) == []
    assert (tmp_path / "out/checkpoint/step-1/.metadata").is_file()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
