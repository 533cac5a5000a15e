"""What the benchmarks share: command lines, rounds in which every variant runs once, and ratios within a round."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Figures = Mapping[str, float]
"""What one run measured, by name."""

Round = dict[str, Figures]
"""The figures of each variant."""


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def command_line(doc: str | None, *, rounds: int | None, quick: str) -> argparse.ArgumentParser:
    """A parser that shows the module's docstring.

    Args:
        doc: the docstring.
        rounds: default of ``--rounds``; ``None`` for a benchmark without rounds.
        quick: what ``--quick`` does.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"about a minute: {quick}")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, help=f"how often each variant runs (default {rounds})")
    return parser


def say(text: str) -> None:
    """Print at once, also into a file or a pipe."""
    print(text, flush=True)


def single_rank() -> dict[str, str]:
    """The environment a launcher gives a single rank, with one thread, and with `benchmarks` importable anywhere."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **rank, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def alternate(names: Sequence[str], number: int) -> Sequence[str]:
    """``names``, the other way round in every other round, so that what drifts favours none."""
    return names if number % 2 == 0 else list(reversed(names))


def run_rounds(
    variants: Mapping[str, Callable[[], Figures]],
    rounds: int,
    *,
    order: Callable[[Sequence[str], int], Sequence[str]] = alternate,
    show: Callable[[Figures], str] | None = None,
) -> list[Round]:
    """Run every variant once per round and print each run as it ends.

    Args:
        variants: what to run, by name.
        rounds: how often.
        order: the names in the order of a round, given its number from 0.
        show: the figures of a run as text; by default all of them.
    """
    width = max(map(len, variants))
    results: list[Round] = []
    for number in range(rounds):
        results.append({})
        for name in order(list(variants), number):
            figures = variants[name]()
            results[-1][name] = figures
            text = show(figures) if show else "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
            say(f"round {number + 1} of {rounds}  {name:{width}}  {text}")
    return results


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of fewer than two values, the value itself."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def median(rounds: Sequence[Round], variant: str, figure: str) -> float:
    """Median of a figure over the rounds."""
    return statistics.median(each[variant][figure] for each in rounds)


def ratio(rounds: Sequence[Round], figure: str, over: str, under: str) -> Spread:
    """Ratios of a figure of two variants, each taken within a round."""
    return spread([each[over][figure] / each[under][figure] for each in rounds])


def difference(rounds: Sequence[Round], figure: str, one: str, other: str) -> Spread:
    """Differences of a figure of two variants, each taken within a round."""
    return spread([each[one][figure] - each[other][figure] for each in rounds])
