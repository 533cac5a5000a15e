"""Tensor names and shapes: how messages list them, and how two sets of them are compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

# Old exports contain the rotary frequencies as a tensor; models compute them.
ROTARY_FREQUENCIES = re.compile(r"(.+\.)?rotary_emb\.inv_freq")

_MAX_LISTED = 5
_MAX_NAME_LENGTH = 200


def shape_differences(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> list[str]:
    """How the tensors ``found`` differ from the tensors ``expected`` of a model; both map names to shapes.

    Returns:
        At most one phrase for each kind of difference: missing, unexpected, another shape.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    rows = [
        (missing, f"of the model's {len(expected)} missing"),
        (unexpected, "without a place in the model"),
        (misshapen, "of another shape"),
    ]
    return [f"{listed(names)} {what}" for names, what in rows if names]


def listed(names: Iterable[str]) -> str:
    """Count and first names: ``7 tensors (a, b, c, d, e, ...)``."""
    names = list(names)
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''} ({shortened(names)})"


def shortened(names: Sequence[str]) -> str:
    """The first names, separated by commas."""
    return ", ".join(clipped(name) for name in names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")


def clipped(text: str) -> str:
    """``text`` from a file that may be damaged, made printable and cut to a length that fits into a message."""
    printable = text if text.isprintable() else ascii(text)
    return printable if len(printable) <= _MAX_NAME_LENGTH else printable[:_MAX_NAME_LENGTH] + "..."
