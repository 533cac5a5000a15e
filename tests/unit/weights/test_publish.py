"""The draft folder: one process at a time, complete or absent, nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.weights.publish import Draft, clear_leftovers


def test_two_at_one_place_the_second_is_refused(tmp_path):
    first = Draft(tmp_path / "out")
    with pytest.raises(JobError, match="is being written by another process"):
        Draft(tmp_path / "out")
    (first.folder / "file").write_text("x")
    first.publish()
    with pytest.raises(JobError, match="exists already"):
        Draft(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/file").read_text() == "x"


HOLD = """
import sys, time
from pathlib import Path
from torchtitan_qwen3_trn.weights.publish import Draft
draft = Draft(Path(sys.argv[1]))
(draft.folder / "rubbish").write_text("x")
print("held", flush=True)
time.sleep(60)
"""


def test_a_destination_that_appears_meanwhile_is_left_alone(tmp_path):
    draft = Draft(tmp_path / "out")
    (draft.folder / "file").write_text("ours")
    (tmp_path / "out").mkdir()
    with pytest.raises(JobError, match="exists already"):
        draft.publish()
    assert list((tmp_path / "out").iterdir()) == []
    draft.discard()


def test_a_folder_whose_lock_was_lost_is_not_published(tmp_path, monkeypatch, caplog):
    """Where a file system has no locks, the second of two jobs takes the first one's folder for a leftover."""

    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    first = Draft(tmp_path / "out")
    (first.folder / "file").write_text("first")
    second = Draft(tmp_path / "out")
    assert caplog.text.count("has no locks (Function not implemented)") == 2
    (second.folder / "file").write_text("second")
    with pytest.raises(FileNotFoundError):
        (first.folder / "more").write_text("x")
    with pytest.raises(JobError, match="another job has removed"):
        first.publish()
    first.discard()
    second.publish()
    assert (tmp_path / "out/file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("left", ["lock", "lock and folder"])
def test_what_is_left_beside_a_finished_export_is_cleared(tmp_path, left):
    """A process that dies right after publishing leaves its lock; one that finds its place taken, its folder too."""
    (tmp_path / "out").mkdir()
    place = tmp_path / ".out.partial"
    place.mkdir()
    (place / "lock").write_text("")
    if left == "lock and folder":
        (place / "0123").mkdir()
    clear_leftovers(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_is_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (tmp_path / ".out.partial").symlink_to(elsewhere)
    with pytest.raises(JobError, match="cannot be created"):
        Draft(tmp_path / "out")
    assert (elsewhere / "precious").exists()


@pytest.mark.parametrize("kind", ["fifo", "link to a file", "link to nothing", "folder"])
def test_a_lock_that_is_not_a_file_neither_blocks_nor_leads_elsewhere(tmp_path, kind):
    place, precious = tmp_path / ".out.partial", tmp_path / "precious"
    place.mkdir()
    precious.write_text("x")
    make = {
        "fifo": os.mkfifo,
        "link to a file": lambda lock: lock.symlink_to(precious),
        "link to nothing": lambda lock: lock.symlink_to(tmp_path / "nothing"),
        "folder": lambda lock: lock.mkdir(),
    }[kind]
    make(place / "lock")
    if kind == "fifo":
        draft = Draft(tmp_path / "out")
        (draft.folder / "file").write_text("x")
        draft.publish()
        assert (tmp_path / "out/file").read_text() == "x"
    else:
        with pytest.raises(JobError, match="cannot be created or locked"):
            Draft(tmp_path / "out")
    assert precious.read_text() == "x"
    assert not (tmp_path / "nothing").exists()


def test_what_a_killed_process_left_is_cleared(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/model.safetensors").write_text("from an earlier version of this package")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(JobError, match="is being written by another process"):
            Draft(tmp_path / "out")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    draft = Draft(tmp_path / "out")
    assert list(draft.folder.iterdir()) == []
    draft.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_draft_is_discarded_at_the_end_of_its_block_unless_it_is_published(tmp_path):
    with pytest.raises(IsADirectoryError), Draft(tmp_path / "out") as draft:
        draft.folder.write_text("x")
    assert list(tmp_path.iterdir()) == []
    with Draft(tmp_path / "out") as draft:
        (draft.folder / "file").write_text("x")
        draft.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
