"""Random choices that are the same on every Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A seeded source of choices.

    Built on ``random.Random.random`` alone: the ``random`` module's documentation promises that method's
    sequence for a given seed, and promises nothing for ``choice``, ``shuffle``, ``sample`` or ``randrange``.
    """

    def __init__(self, seed: int) -> None:
        self._unit = random.Random(seed).random

    def below(self, bound: int) -> int:
        """An integer in ``0 .. bound - 1``."""
        return int(self._unit() * bound)

    def between(self, low: int, high: int) -> int:
        """An integer in ``low .. high``, both ends included."""
        return low + self.below(high - low + 1)

    def long_tailed(self, low: int, high: int) -> int:
        """An integer in ``low .. high``, each doubling of ``low`` equally likely: mostly small ones.

        Integers only: powers and logarithms of floats may differ in the last bit between C libraries.
        """
        floor = low << self.below((high // low).bit_length())
        return self.between(floor, min(high, 2 * floor - 1))

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._unit() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One element."""
        return options[self.below(len(options))]

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different elements in random order; all of them when there are fewer."""
        pool = list(options)
        return [pool.pop(self.below(len(pool))) for _ in range(min(count, len(pool)))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """All elements in random order."""
        return self.several(options, len(options))

    def weighted(self, options: Sequence[tuple[T, int]]) -> T:
        """One first member of the pairs, in proportion to the second."""
        target = self.below(sum(weight for _, weight in options))
        for option, weight in options:
            target -= weight
            if target < 0:
                return option
        raise ValueError("weighted needs at least one option with a positive weight")
