"""The one error a user sees, a list of problems with place and remedy, and how messages show keys and values."""

from __future__ import annotations

import difflib
import json
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LARGEST_INTEGER = 2**63 - 1
"""Integers of a job end up in 64 bits, in tensors, checkpoints and counters of torch."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a job.

    Attributes:
        where: the key path (``training.seq_len``), the plugin (``plugin sdpa``) or the file.
        what: what was found and why it cannot be used.
        fix: what would be right; empty when ``what`` already says it.
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        return f"{text}; {self.fix}" if self.fix else text


class JobError(Exception):
    """A job that cannot run as written; carries every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem], source: str = "") -> None:
        self.problems = list(problems)
        if not all(isinstance(problem, Problem) for problem in self.problems):
            raise TypeError(f"JobError takes a list of Problem, got {problems!r:.80}")
        self.source = source
        super().__init__(self.report())

    def report(self) -> str:
        """The message printed on rank 0: one line per problem under one heading."""
        count = len(self.problems)
        heading = f"{self.source or 'job'}: {count} problem{'s' if count != 1 else ''}"
        return "\n".join([heading, *(f"  {problem}" for problem in self.problems)])


def error_with_line(error: BaseException) -> str:
    """Type, message and origin of an exception that code of others raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def integer_range() -> str:
    """The remedy for an integer that does not fit into 64 bits."""
    return f"integers go from {-LARGEST_INTEGER - 1} to {LARGEST_INTEGER}"


def join(where: str, key: str) -> str:
    """Path of ``key`` in section ``where``; plugins are spelled as their names are, with hyphens."""
    key = key.replace("_", "-") if where.rpartition(".")[2] == "plugins" and key not in ("enable", "disable") else key
    return f"{where}.{key}" if where else key


def show(value: Any) -> str:
    """A TOML value as a message names it: ``the string "8"``, ``the list [1, 2]``."""
    if isinstance(value, dict):
        return "a table"
    kinds = {bool: "", int: "the integer ", float: "the number ", str: "the string ", list: "the list "}
    text = json.dumps(value, default=str)
    return kinds.get(type(value), f"the {type(value).__name__} ") + (text if len(text) <= 60 else text[:57] + "...")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that does not exist: the nearest one that does, or all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}" if names else "there are none"
