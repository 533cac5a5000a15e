"""A folder that is either complete or absent: written beside its destination, flushed, moved there by one rename."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.weights.writer import flush_and_close

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
        return Problem(str(destination), f"cannot be created: {parent} is not a writable folder")
    return None


class Draft:
    """A new folder inside ``.<name>.partial`` beside ``destination``, to be filled and then published.

    A context manager: at its end the folder is discarded, unless it has been published.

    One process at a time has a draft for a destination, because it holds the lock on ``.<name>.partial/lock``. The
    lock is the kernel's (``flock``), so it ends with the process, however that ends. It is on a file because shared
    file systems apply a folder's lock on one host only, but a file's lock on all of them (the NFS client of Linux,
    Lustre mounted with ``flock``).

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
        with contextlib.ExitStack() as cleanup:
            place = cleanup.enter_context(_locked(_place(destination), destination))
            if self.destination.exists():
                raise JobError([Problem(str(destination), "has just been written by another process")])
            self.folder = place / secrets.token_hex(4)
            try:
                _empty(place)
                self.folder.mkdir()
            except OSError as error:
                raise JobError([Problem(str(place), f"cannot be used: {error}")]) from error
            cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._cleanup = cleanup.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def publish(self) -> None:
        """Flush everything in the folder to disk and move it to the destination.

        Raises:
            JobError: the destination exists by now, or another job has removed the folder as a leftover.
            OSError: as the file system says.
        """
        try:
            for path in (*self.folder.rglob("*"), self.folder):
                _flush(path)
            if problem := destination_problem(self.destination):
                raise JobError([problem])
            os.rename(self.folder, self.destination)
        except FileNotFoundError as error:
            what = f"another job has removed {self.folder}, so this one publishes nothing"
            raise JobError([Problem(str(self.destination), what, "let one job at a time write there")]) from error
        self.discard()
        _flush(self.destination.parent)

    def discard(self) -> None:
        """Remove the folder with everything in it; after `publish` this does nothing."""
        self._cleanup.close()


def clear_leftovers(destination: Path) -> None:
    """Remove what a dead process has left beside ``destination``; does nothing while a running one writes there."""
    place = _place(destination)
    if place.is_dir():
        with contextlib.suppress(JobError, OSError), _locked(place, destination):
            _empty(place)


def _place(destination: Path) -> Path:
    return destination.absolute().with_name(f".{destination.absolute().name}.partial")


@contextlib.contextmanager
def _locked(place: Path, destination: Path) -> Iterator[Path]:
    """Create ``place`` and lock it for this process; at the end, when only the lock is left in it, remove it.

    Raises:
        JobError: another process holds the lock, or ``place`` cannot be created.
    """
    # Without flock, filelock would fall back to the file's existence, which a dead process on another host leaves
    # behind for good. Drafts are safe without a lock: at worst the first of two jobs fails.
    lock = FileLock(place / _LOCK, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():  # filelock refuses a link only at the lock file itself
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
    try:
        yield place
    finally:
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


def _flush(path: Path) -> None:
    flush_and_close(os.open(path, os.O_RDONLY))
