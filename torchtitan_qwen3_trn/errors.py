"""The one error a user of a job file sees: a list of problems, each with its place and its remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
        self.source = source
        super().__init__(self.report())

    def report(self) -> str:
        """The message printed on rank 0: one line per problem under one heading."""
        count = len(self.problems)
        heading = f"{self.source or 'job'}: {count} problem{'s' if count != 1 else ''}"
        return "\n".join([heading, *(f"  {problem}" for problem in self.problems)])
