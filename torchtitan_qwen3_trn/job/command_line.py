"""Command-line flags that decide how a job file is read, and those that exist in job files only."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass, fields
from typing import Any

from torchtitan_qwen3_trn.config import TOP_LEVEL_HOMES, OptimizerOptions
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.job.legacy import Table

JOB_FLAG = "job.config_file"

_LISTS = ("plugins.enable", "plugins.disable")
_STRINGS = (
    "job.profile",
    "model.backend",
    "activation_checkpoint.mode",
    *(f"{section}.{key}" for key, section in TOP_LEVEL_HOMES.items()),
)
# torchtitan's own flags know implementation, and no short form of the rest.
_VALUES = tuple(f"optimizer.{item.name}" for item in fields(OptimizerOptions) if item.name != "implementation")


@dataclass(frozen=True)
class Flags:
    """The command line of a job.

    Attributes:
        job_file: value of ``--job.config_file``; ``None`` without that flag.
        table: values given by flags, as a job file would give them.
        rest: arguments for torchtitan: all others, or all where there is no job file.
    """

    job_file: str | None
    table: Table
    rest: list[str]


def parse_flags(args: list[str]) -> Flags:
    """Take the flags of this package out of ``args``; hyphens and underscores are alike, the last value wins.

    Raises:
        JobError: the job file is given twice, without a file, or beside ``--module`` and ``--config``.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (*_LISTS, *_STRINGS, *_VALUES):
        parser.add_argument(*_spellings(name), dest=name, nargs="?", const="")
    parser.add_argument(*_spellings(JOB_FLAG), dest=JOB_FLAG, action="append", nargs="?", const="")
    known, rest = parser.parse_known_args(args)
    given = {name: value for name, value in vars(known).items() if value is not None}
    files = given.pop(JOB_FLAG, None)
    table: Table = {}
    for name, text in given.items():
        section, _, key = name.partition(".")
        table.setdefault(section, {})[key] = _value(name, text)
    if files is None:
        return Flags(None, table, args)
    _refuse_contradictions(files, rest)
    return Flags(files[0], table, rest)


def _spellings(name: str) -> set[str]:
    return {f"--{name}", f"--{name.replace('_', '-')}"}


def _value(name: str, text: str) -> Any:
    if name in _LISTS:
        return [each for each in text.split(",") if each]
    if name in _STRINGS:
        return text
    for written in (text, f"[{text}]"):  # 0.9,0.95 is a list without its brackets
        try:
            return tomllib.loads(f"value = {written}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return text


def _refuse_contradictions(files: list[str], rest: list[str]) -> None:
    problems = []
    if not files[-1]:
        problems.append(Problem("--job.config_file", "needs a file", "for instance examples/qwen3_moe.toml"))
    elif len(files) > 1:
        problems.append(Problem("--job.config_file", "is given more than once", "a run has one job file"))
    problems += [
        Problem(flag, "cannot be combined with --job.config_file", "use one or the other")
        for flag in ("--module", "--config")
        if any(arg.partition("=")[0] == flag for arg in rest)
    ]
    if problems:
        raise JobError(problems, "command line")
