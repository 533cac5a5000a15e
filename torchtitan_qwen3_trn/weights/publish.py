"""A folder that is either complete or absent: written beside its place, made durable, moved there by one rename."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from torchtitan_qwen3_trn.errors import JobError, Problem

__all__ = ["Draft", "destination_problem"]


def destination_problem(destination: Path) -> Problem | None:
    """Why nothing can be published at ``destination``; ``None`` when it is free."""
    if destination.exists() or destination.is_symlink():
        what = "exists already and is not overwritten"
        return Problem(str(destination), what, "choose another folder, or move this one away")
    parent = next(each for each in destination.absolute().parents if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return Problem(str(destination), f"cannot be created: {parent} is not a folder one can write to")
    return None


class Draft:
    """The folder ``.<name>.partial`` beside ``destination``, locked for this process.

    The lock is the kernel's (``flock`` on the folder itself), so that it ends with the process however that ends, and
    leaves no file. What a dead process left in the folder is removed.

    Raises:
        JobError: the destination exists, another process is writing it, or the folder cannot be created.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination.absolute()
        self.folder = draft_folder(destination)
        if problem := destination_problem(destination):
            raise JobError([problem])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise JobError([Problem(str(self.folder), f"cannot be created: {error.strerror}")]) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            what = "is being written by another process" if isinstance(error, BlockingIOError) else str(error)
            raise JobError([Problem(str(destination), what, "wait for it, or choose another folder")]) from error
        if not self._still_there(descriptor):
            os.close(descriptor)
            raise JobError([Problem(str(destination), "has just been written by another process")])
        self._descriptor: int | None = descriptor
        try:
            _empty(self.folder)
        except OSError as error:
            self.discard()
            raise JobError([Problem(str(self.folder), f"cannot be emptied: {error}")]) from error

    def publish(self) -> None:
        """Make everything in the folder durable and move it to the destination.

        Raises:
            JobError: the destination exists by now.
            OSError: as the file system says.
        """
        for path in self.folder.rglob("*"):
            _sync(path)
        _sync(self.folder)
        if problem := destination_problem(self.destination):
            raise JobError([problem])
        os.rename(self.folder, self.destination)
        self._unlock()
        _sync(self.destination.parent)

    def discard(self) -> None:
        """Remove the folder with everything in it; nothing happens when it has been published."""
        if self._descriptor is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _still_there(self, descriptor: int) -> bool:
        """Whether the locked folder is the one at the path: another process may have moved or removed it before."""
        mine = os.fstat(descriptor)
        try:
            there = os.stat(self.folder)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino) and not self.destination.exists()


def draft_folder(destination: Path) -> Path:
    """Where a folder is written before it is moved to ``destination``."""
    destination = destination.absolute()
    return destination.with_name(f".{destination.name}.partial")


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
