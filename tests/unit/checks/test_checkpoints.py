"""Training checkpoints that a job resumes from or names: damaged ones end in one message, before or while they load."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import TINY_MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode

from torchtitan_qwen3_trn.trainer import NotifyingCheckpointManager

RESUMED = "[job]\ndump_folder = '{}/out'\n[checkpoint]\nenable = true\n"
NAMED = RESUMED + "initial_load_path = '{}/out/checkpoint/step-3'\n"


@pytest.fixture
def saved(parse_job, tmp_path):
    """Jobs that take a checkpoint of step 3, as the newest of their own and by its name; and its only file."""
    step = tmp_path / "out/checkpoint/step-3"
    jobs = {"checkpoint.folder": RESUMED.format(tmp_path)}
    jobs["checkpoint.initial_load_path"] = NAMED.format(tmp_path / "other", tmp_path)
    with torch.device("meta"):
        model = parse_job(jobs["checkpoint.folder"]).config.model_spec.model.build()
    tensors = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    dcp.save({**tensors, "train_state": torch.zeros(1)}, checkpoint_id=str(step), no_dist=True)
    return jobs, step, step / "__0_0.distcp"


WHERE = ("checkpoint.folder", "checkpoint.initial_load_path")


@pytest.mark.parametrize("where", WHERE)
def test_a_whole_checkpoint_is_taken(parse_job, saved, where):
    assert parse_job(saved[0][where]).status is None


@pytest.mark.parametrize("where", WHERE)
def test_a_file_that_is_cut_off_is_named(parse_job, saved, where):
    jobs, step, file = saved
    size = file.stat().st_size
    os.truncate(file, size - 1)
    outcome = parse_job(jobs[where])
    assert outcome.status == 2
    assert f"{where}: {file} is cut off: it has {size - 1} bytes, and the checkpoint needs {size}" in outcome.message
    assert (f"remove {step}" if where == "checkpoint.folder" else "copy the checkpoint again") in outcome.message


@pytest.mark.parametrize("where", WHERE)
def test_a_file_that_is_missing_is_named(parse_job, saved, where):
    jobs, _, file = saved
    file.unlink()
    outcome = parse_job(jobs[where])
    assert outcome.status == 2
    assert f"{where}: {file}, which holds part of the checkpoint, cannot be read (No such file" in outcome.message


@pytest.mark.parametrize("where", WHERE)
def test_metadata_that_cannot_be_read_are_reported(parse_job, saved, where):
    jobs, step, _ = saved
    (step / ".metadata").write_bytes(b"rubbish")
    outcome = parse_job(jobs[where])
    assert outcome.status == 2
    assert f"{where}: {step / '.metadata'} cannot be read: " in outcome.message


def test_a_named_folder_that_is_no_checkpoint_is_reported(parse_job, saved):
    jobs, step, _ = saved
    (step / ".metadata").unlink()
    outcome = parse_job(jobs["checkpoint.initial_load_path"])
    assert outcome.status == 2
    assert f"{step} is not a training checkpoint" in outcome.message
    assert "checkpoint.initial_load_in_hf" in outcome.message


def test_a_named_checkpoint_of_another_model_is_reported(parse_job, saved):
    job = saved[0]["checkpoint.initial_load_path"]
    outcome = parse_job(job, base=TINY_MODEL.replace("hidden_dim = 128", "hidden_dim = 256"))
    assert outcome.status == 2
    assert f"checkpoint.initial_load_path: {saved[1]} is of another model: layers.0.feed_forward" in outcome.message


def test_a_step_that_was_not_saved_is_reported(parse_job, saved):
    outcome = parse_job(saved[0]["checkpoint.folder"], "--checkpoint.load_step", "2")
    assert outcome.status == 2
    assert "checkpoint.load_step: " in outcome.message
    assert "has no complete checkpoint of step 2; choose one of [3]" in outcome.message


def test_what_shows_only_while_loading_ends_the_job_with_a_message(saved, capsys):
    """Sizes are right, and what is in the file is not."""
    _, step, file = saved
    file.write_bytes(bytes(file.stat().st_size))
    manager = object.__new__(NotifyingCheckpointManager)
    manager.states = {}
    with pytest.raises(SystemExit) as stop:
        manager.dcp_load({"norm.weight": torch.zeros(64)}, str(step), from_hf=False, from_quantized=False)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"{step}: cannot be loaded (" in said
    assert "if a file is damaged, copy it again" in said
    assert "Traceback" not in said


def save(manager, folder, mode):
    manager.save_future = manager.dcp_save({"w": torch.zeros(10**6)}, folder, mode)
    manager._wait_for_saving()


@pytest.mark.parametrize("mode", [AsyncMode.DISABLED, AsyncMode.ASYNC])
def test_a_checkpoint_that_cannot_be_saved_ends_the_job_with_a_message(tmp_path, capsys, mode):
    """The limit on the size of files stands in for a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    manager = object.__new__(NotifyingCheckpointManager)
    manager.async_mode, manager.folder = mode, str(tmp_path / "checkpoint")
    manager.pg = dist.new_group(backend="gloo") if mode is AsyncMode.ASYNC else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(SystemExit) as stop:
            save(manager, str(tmp_path / "checkpoint/step-1"), mode)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/checkpoint" in said
    assert "the checkpoint cannot be saved (" in said
    assert "GB are free there; free space or correct the folder" in said
    assert "Traceback" not in said
    assert not (tmp_path / "checkpoint/step-1/.metadata").exists()


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    """Of one rank; saving in the background needs one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_lacks_a_tensor_is_told_which(saved, capsys):
    manager = object.__new__(NotifyingCheckpointManager)
    manager.states = {}
    with pytest.raises(SystemExit):
        manager.dcp_load({"more.weight": torch.zeros(64)}, str(saved[1]), from_hf=False, from_quantized=False)
    assert "more.weight" in capsys.readouterr().err
