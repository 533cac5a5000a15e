"""Reading a job file: TOML, the keys of torchtitan 0.3, one profile laid over it."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_qwen3_trn.errors import JobError, Problem, show
from torchtitan_qwen3_trn.job.legacy import Table, translate

PROFILE_DEVICES = ("cpu", "cuda", "neuron")


@dataclass
class JobFile:
    """The content of a job file, in the keys of torchtitan 0.3.

    Attributes:
        path: where it was read from.
        table: everything outside ``[profile]``.
        profiles: the ``[profile.<device>]`` overlays by device.
        warnings: translated and ignored keys.
        problems: what is wrong before values are looked at.
    """

    path: Path
    table: Table
    profiles: dict[str, Table] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_job_file(path: Path) -> JobFile:
    """Read and translate a job file.

    Raises:
        JobError: the file does not exist, is a directory, cannot be read, or is not TOML in UTF-8.
    """
    raw = _parse(path)
    profiles = raw.pop("profile", {})
    job = JobFile(path=path, table={})
    job.table = _translated(raw, "", job)
    if "config_file" in (job.table.get("job") or {}):
        what, fix = "is this file, which cannot name another one", "remove it"
        job.problems.append(Problem("job.config_file", what, fix))
    if not isinstance(profiles, dict):
        job.problems.append(Problem("profile", f"expected tables [profile.<device>], found {show(profiles)}"))
        return job
    for device, overlay in profiles.items():
        where = f"profile.{device}"
        if device not in PROFILE_DEVICES:
            known = ", ".join(f"[profile.{name}]" for name in PROFILE_DEVICES)
            job.problems.append(Problem(where, "no such device", f"profiles are {known}"))
        elif not isinstance(overlay, dict):
            job.problems.append(Problem(where, f"expected a table, found {show(overlay)}"))
        else:
            job.profiles[device] = _translated(overlay, f"{where}.", job)
    return job


def lay_over(table: Table, overlay: Table) -> tuple[Table, list[str]]:
    """``table`` with the values of ``overlay``, and a line ``key: old -> new`` for each key it changes or adds."""
    merged, changes = copy.deepcopy(table), []

    def merge(below: Table, above: Table, where: str) -> None:
        for key, value in above.items():
            path = f"{where}{key}"
            if isinstance(value, dict) and isinstance(below.get(key, {}), dict):
                merge(below.setdefault(key, {}), value, f"{path}.")
            elif below.get(key) != value or key not in below:
                before = _short(below[key]) if key in below else "unset"
                changes.append(f"{path}: {before} -> {_short(value)}")
                below[key] = copy.deepcopy(value)

    merge(merged, overlay, "")
    return merged, changes


def _parse(path: Path) -> Table:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise _unreadable(path, "is not a regular file", "name the TOML file itself")
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors put a byte-order mark in front
    except FileNotFoundError:
        raise _unreadable(path, "does not exist", f"looked in {path.absolute().parent}") from None
    except IsADirectoryError:
        raise _unreadable(path, "is a directory", "name the TOML file in it") from None
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from None
    try:
        return _with_underscores(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, f"is not TOML: {error}") from None
    except RecursionError:
        raise _unreadable(path, "is not a job file: it is nested too deeply") from None


def _with_underscores(value: Any) -> Any:
    """``value`` with every key spelled with underscores: torchtitan's command line takes hyphens too."""
    if isinstance(value, dict):
        return {key.replace("-", "_"): _with_underscores(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_underscores(item) for item in value]
    return value


def _unreadable(path: Path, what: str, fix: str = "") -> JobError:
    return JobError([Problem("job.config_file", f"{path} {what}", fix)])


def _translated(raw: Table, prefix: str, job: JobFile) -> Table:
    translation = translate(raw)
    job.warnings += [prefix + text for text in translation.warnings]
    job.problems += [Problem(prefix + item.where, item.what, item.fix) for item in translation.problems]
    return translation.table


def _short(value: Any) -> str:
    return show(value).removeprefix("the integer ").removeprefix("the number ").removeprefix("the string ")
