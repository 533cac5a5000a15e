"""Checking values that come from a file (JSON or TOML) against the fields of a dataclass."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchtitan_qwen3_trn.errors import Problem

__all__ = ["WRONG", "as_kind", "conversion", "nearest", "said"]

WRONG = object()
"""What `as_kind` returns for a value of another kind."""

_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "ints": "a list of whole numbers",
}


def as_kind(value: Any, kind: str) -> Any:
    """``value`` as a member of ``kind``, or `WRONG`.

    A kind is one of ``int``, ``float``, ``bool``, ``str`` and ``ints`` (a list of int, returned as a
    tuple). A whole number is a float too; a truth value is neither, and 2.0 is no int.
    """
    if kind == "bool":
        return value if isinstance(value, bool) else WRONG
    if kind == "str":
        return value if isinstance(value, str) else WRONG
    if kind == "ints":
        if not isinstance(value, (list, tuple)):
            return WRONG
        items = tuple(as_kind(item, "int") for item in value)
        return WRONG if WRONG in items else items
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return WRONG
    if kind == "int":
        return value if isinstance(value, int) else WRONG
    return float(value)


def said(kind: str) -> str:
    """How a message names a kind: "a whole number"."""
    return _NAMES[kind]


def nearest(name: str, names: list[str]) -> list[str]:
    """All of ``names``, the most similar to ``name`` first."""
    close = difflib.get_close_matches(name.lower(), [each.lower() for each in names], n=len(names), cutoff=0.0)
    by_lower = {each.lower(): each for each in names}
    return [by_lower[each] for each in close]


def conversion(cls: type, values: Mapping[str, Any], where: str, problems: list[Problem]) -> dict[str, Any]:
    """The entries of ``values`` that name a field of dataclass ``cls`` and have its type.

    Every other entry becomes one `Problem` at ``<where>.<name>``.
    """
    kinds = {field.name: _kind(str(field.type)) for field in fields(cls)}
    kinds = {name: kind for name, kind in kinds.items() if kind}
    converted = {}
    for name, value in values.items():
        if name not in kinds:
            best = nearest(name, list(kinds))[0]
            problems.append(Problem(f"{where}.{name}", "no such field", f'did you mean "{best}"?'))
        elif (new := as_kind(value, kinds[name])) is WRONG:
            problems.append(Problem(f"{where}.{name}", f"{value!r} is not {said(kinds[name])}"))
        else:
            converted[name] = new
    return converted


def _kind(annotation: str) -> str:
    """The kind of a field from its annotation; empty for a field that is itself a table."""
    first = annotation.split("|")[0].strip()
    return "ints" if first.startswith("tuple") else first if first in _NAMES else ""
