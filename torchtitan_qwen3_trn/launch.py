"""What the whole package needs to know of the launch."""

from __future__ import annotations

import os

__all__ = ["is_rank_zero"]


def is_rank_zero() -> bool:
    """Whether this process speaks for the job: rank 0, or not started by a launcher that counts."""
    rank = os.environ.get("RANK", "0")
    return rank == "0" or not rank.isdecimal()
