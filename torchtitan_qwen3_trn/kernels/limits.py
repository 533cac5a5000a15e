"""Sizes that a kernel supports, checked against the job before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_qwen3_trn.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Supported values of one size of an operator.

    Attributes:
        size: its letter in the operator's shape legend.
        multiple_of: the value must be divisible by this number.
        per_core: ``multiple_of`` is multiplied by the number of physical cores that work as one device (LNC).
        at_least: smallest allowed value.
        at_most: largest allowed value; ``None`` for no limit.
        reason: the reason for the message, in a few words.
    """

    size: str
    multiple_of: int = 1
    per_core: bool = False
    at_least: int = 1
    at_most: int | None = None
    reason: str

    def nearest(self, value: int, *, cores: int) -> int:
        """The allowed value closest to ``value``; the larger of two equally close ones."""
        step = self.multiple_of * (cores if self.per_core else 1)
        lowest = -(-self.at_least // step) * step
        rounded = max((value + step // 2) // step * step, lowest)
        return rounded if self.at_most is None else min(rounded, self.at_most // step * step)


@dataclass(frozen=True)
class JobSize:
    """A size as set by the job: its key, for messages, the value, and the number of ranks it is divided among."""

    key: str
    value: int
    shards: int = 1


def violations(operator: str, limits: Sequence[Limit], sizes: Mapping[str, JobSize], *, cores: int) -> list[Problem]:
    """One problem per size outside its limits, each with the nearest value that fits.

    Args:
        operator: name to print.
        limits: what the operator's kernel supports; applies to the part of a size that one rank holds.
        sizes: the job's value for each letter; letters without a limit are ignored, and so are absent ones.
        cores: physical cores per logical core (LNC), 1 or 2.
    """
    problems = []
    for limit in limits:
        job = sizes.get(limit.size)
        if job is None:
            continue
        share, remainder = divmod(job.value, job.shards)
        nearest = limit.nearest(share, cores=cores) * job.shards
        if remainder or nearest != job.value:
            given = f"{job.value} over {job.shards} ranks" if job.shards > 1 else f"{job.value}"
            what = f"{given} does not fit the {operator} kernel: {limit.reason}"
            problems.append(Problem(job.key, what, f"the nearest that does is {nearest}"))
    return problems
