"""A folder that is either complete or absent: written beside its place, made durable, moved there by one rename."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from torchtitan_qwen3_trn.errors import JobError, Problem

logger = logging.getLogger(__name__)

_LOCK = "lock"
# Reported by Lustre without its mount option flock, and by file systems in user space that do not implement locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


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
    """A new folder inside ``.<name>.partial`` beside ``destination``, to be filled and then moved there.

    One process at a time has a draft for a destination, because it holds the lock on ``.<name>.partial/lock``. The
    lock is the kernel's (``flock``), so it ends with the process, however that ends. It is on a file because shared
    file systems keep a folder's lock to one host, but pass a file's on to the others (Linux' NFS client, Lustre
    mounted with ``flock``).

    What a dead process left is removed. The folder's name is new each time, and leftovers are renamed before they are
    removed: a process without the lock that is still writing, such as a rank that outlives its job, finds its folder
    gone. So it neither writes into this one nor publishes a folder that is being removed.

    Attributes:
        destination: where the folder goes.
        folder: where it is filled.

    Raises:
        JobError: the destination exists, another process is writing it, or the folder cannot be created.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination.absolute()
        if problem := destination_problem(destination):
            clear_leftovers(destination)
            raise JobError([problem])
        self._place = _place(destination)
        self.folder = self._place / secrets.token_hex(4)
        self._lock: FileLock | None = _lock(self._place, destination)
        try:
            if self.destination.exists():
                raise JobError([Problem(str(destination), "has just been written by another process")])
            _empty(self._place)
            self.folder.mkdir()
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise JobError([Problem(str(self._place), f"cannot be used: {error}")]) from error
            raise

    def publish(self) -> None:
        """Make everything in the folder durable and move it to the destination.

        Raises:
            JobError: the destination exists by now, or another job has taken the folder for a leftover.
            OSError: as the file system says.
        """
        try:
            for path in self.folder.rglob("*"):
                _sync(path)
            _sync(self.folder)
            if problem := destination_problem(self.destination):
                raise JobError([problem])
            os.rename(self.folder, self.destination)
        except FileNotFoundError as error:
            what = f"another job has removed {self.folder}, so this one publishes nothing"
            raise JobError([Problem(str(self.destination), what, "let one job at a time write there")]) from error
        self._release()
        _sync(self.destination.parent)

    def discard(self) -> None:
        """Remove the folder with everything in it; nothing happens when it has been published."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            _unlock(self._place, self._lock)
            self._lock = None


def clear_leftovers(destination: Path) -> None:
    """Remove what a dead process has left beside ``destination``; nothing happens while a living one writes there."""
    place = _place(destination)
    if place.is_dir():
        with contextlib.suppress(JobError, OSError):
            lock = _lock(place, destination)
            try:
                _empty(place)
            finally:
                _unlock(place, lock)


def _place(destination: Path) -> Path:
    destination = destination.absolute()
    return destination.with_name(f".{destination.name}.partial")


def _lock(place: Path, destination: Path) -> FileLock:
    """Create ``place`` and lock it for this process.

    Raises:
        JobError: another process holds the lock, or ``place`` cannot be created.
    """
    # Without flock, filelock would fall back to the file's existence, which a dead process on another host leaves
    # behind for good. Drafts are safe without a lock: at worst the first of two jobs fails.
    lock = FileLock(place / _LOCK, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():  # filelock does not follow a link at the lock's own name only
            raise NotADirectoryError(errno.ENOTDIR, "it is a symbolic link", str(place))
        lock.acquire()
    except (Timeout, FileNotFoundError) as error:  # not found: its holder removed it at this very moment
        fix = "wait for it, or choose another folder"
        raise JobError([Problem(str(destination), "is being written by another process", fix)]) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise JobError([Problem(str(place), f"cannot be created or locked: {error.strerror}")]) from error
        logger.warning(
            "The file system of %s has no locks (%s): of two jobs that write there at once, the first one fails",
            destination,
            error.strerror,
        )
    return lock


def _unlock(place: Path, lock: FileLock) -> None:
    """Remove ``place``, which is empty but for the lock, and give up the lock."""
    with contextlib.suppress(OSError):
        (place / _LOCK).unlink(missing_ok=True)
        place.rmdir()
    lock.release()


def _empty(place: Path) -> None:
    for entry in list(os.scandir(place)):
        if entry.name == _LOCK:
            continue
        leftover = place / f"{secrets.token_hex(4)}.old"
        os.rename(entry.path, leftover)
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(leftover)
        else:
            os.unlink(leftover)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
