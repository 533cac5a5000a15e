"""Values of a job file laid over configuration dataclasses; every mistake is collected."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro
from pydantic import TypeAdapter, ValidationError

from torchtitan_qwen3_trn.errors import LARGEST_INTEGER, Problem, did_you_mean, integer_range, join, show
from torchtitan_qwen3_trn.launch import without_warnings

_T = TypeVar("_T")


class Problems(list[Problem]):
    """What is wrong with single values; ``combinations`` holds what is wrong with values that do not fit together."""

    def __init__(self) -> None:
        super().__init__()
        self.combinations: list[Problem] = []


_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a table",
    list: "a list",
}


def apply_table(instance: _T, table: Mapping[str, Any], where: str, problems: Problems) -> _T:
    """A copy of the dataclass ``instance`` with the values of ``table``; nested tables reach nested dataclasses.

    Keys may be spelled with hyphens. Types must match exactly (TOML's integers also serve as numbers). Mistakes are
    appended to ``problems`` under ``where.key``; the fields concerned keep their value.
    """
    settable = visible_fields(type(instance))
    values: dict[str, Any] = {}
    for key, raw in table.items():
        name, path = key.replace("-", "_"), join(where, key)
        if name not in settable:
            problems.append(unknown_key(path, key, settable))
            continue
        current = getattr(instance, name)
        if is_dataclass(current) and not isinstance(current, type):
            if isinstance(raw, dict):
                values[name] = apply_table(current, raw, path, problems)
            else:
                problems.append(Problem(path, f"expected a table, found {show(raw)}"))
        else:
            checked = check_value(settable[name], raw, path, problems)
            if checked is not _REJECTED:
                values[name] = checked
    if not values:
        return instance
    if (objection := refusal(instance, values)) is None:
        return replace(instance, **values)  # type: ignore[type-var]
    guilty = [name for name in values if refusal(instance, {name: values[name]}) == objection]
    if len(guilty) == 1:
        problem = Problem(join(where, guilty[0]), f"{show(values[guilty[0]])} is refused: {objection}")
    else:
        problem = Problem(where, objection)
    problems.combinations.append(problem)
    return instance


_REJECTED: Any = object()


def check_value(hint: Any, raw: Any, path: str, problems: Problems) -> Any:
    """``raw`` as a value of the type ``hint``; on a mismatch append a problem and return a rejection mark."""
    if (large := next(_large_integers(raw), None)) is not None:
        problems.append(Problem(path, f"{large} is out of range", integer_range()))
        return _REJECTED
    try:
        # JSON mode is the one in which a strict check still takes a list for a tuple: TOML has no tuples either.
        return TypeAdapter(hint).validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        given = fault["loc"] if fault["type"] != "missing" else ()
        inside = "".join(f"[{part}]" for part in given if isinstance(part, int))
        what = f"expected {describe(hint)}, found {show(raw)}"
        problems.append(Problem(path + inside, what, _suggest_value(hint, raw)))
        return _REJECTED


def _large_integers(value: Any) -> typing.Iterator[int]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not -LARGEST_INTEGER - 1 <= item <= LARGEST_INTEGER:
            yield item


def unknown_key(path: str, key: str, known: typing.Iterable[str]) -> Problem:
    """Problem for a key that does not exist, with the nearest one that does."""
    return Problem(path, "unknown key", did_you_mean(key.replace("-", "_"), known))


def describe(hint: Any) -> str:
    """A type as a message names it: ``an integer``, ``one of "a", "b"``, ``a list of strings``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return describe(args[0])
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(arg) for arg in args if arg is not type(None)))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(json.dumps(member.value, default=str) for member in hint)
    if origin in (list, tuple):
        element = describe(args[0]) if args else "anything"
        count = f"{len(args)} " if origin is tuple and len(set(args)) == 1 else ""
        return f"a list of {count}{_plural(element)}" if " or " not in element else "a list"
    return _TYPE_NAMES.get(origin or hint, "a table" if is_dataclass(hint) else getattr(hint, "__name__", str(hint)))


def _plural(description: str) -> str:
    """``an integer`` as ``integers``, ``a list of strings`` as ``lists of strings``."""
    noun, of, rest = description.removeprefix("an ").removeprefix("a ").partition(" of ")
    return f"{noun}s{of}{rest}"


def visible_fields(cls: type) -> dict[str, Any]:
    """Names and types of the fields of dataclass ``cls`` that torchtitan does not hide from its command line."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        item.name: hints[item.name]
        for item in dataclasses.fields(cls)
        if item.init and tyro.conf.Suppress not in getattr(hints[item.name], "__metadata__", ())
    }


def _suggest_value(hint: Any, raw: Any) -> str:
    if get_origin(hint) is Literal and isinstance(raw, str):
        close = difflib.get_close_matches(raw, [str(value) for value in get_args(hint)], n=1)
        return f"did you mean {close[0]!r}?" if close else ""
    if isinstance(raw, str) and hint is bool:
        truth = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
        return f"write {truth[raw.lower()]} without quotes" if raw.lower() in truth else ""
    if isinstance(raw, str) and hint in (int, float):
        return f"write {raw} without quotes" if re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", raw.strip()) else ""
    return ""


def refusal(instance: Any, values: Mapping[str, Any]) -> str | None:
    """Why the dataclass of ``instance`` refuses these ``values``; ``None`` if it accepts them."""
    try:
        with without_warnings():
            replace(instance, **values)
    except (ValueError, AssertionError, NotImplementedError) as error:
        return str(error) or "these values are not possible"
    return None
