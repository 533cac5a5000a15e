"""Checks of ``[optimizer]``: its values, and whether its groups take every parameter of the model once."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem, did_you_mean, show

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer] | None] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "DistMuon": None,  # torchtitan's own, with options of its own
}
_LISTED = 3
_A_NAME = "layers.0.attention_norm.weight"


def check_optimizer(config: JobConfig) -> list[Problem]:
    """Names, patterns and values that torchtitan looks at after the model is built, or ignores silently."""
    problems: list[Problem] = []
    for index, group in enumerate(config.optimizer.param_groups):
        problems += _group_problems(group, _place(index))
        values = "optimizer" if _is_short_form(config) else f"{_place(index)}.optimizer_kwargs"
        problems += _value_problems(group.optimizer_kwargs, values)
    return problems


def check_groups_against_model(config: JobConfig) -> list[Problem]:
    """Groups that get no parameter (the first that matches takes it), and parameters that no group takes."""
    if config.model_spec is None or _is_short_form(config):
        return []
    with torch.device("meta"):
        left = [name for name, _ in config.model_spec.model.build().named_parameters()]
    problems = []
    for index, group in enumerate(config.optimizer.param_groups):
        taken = {name for name in left if re.search(group.pattern, name)}
        left = [name for name in left if name not in taken]
        if not taken:
            what = f"{group.pattern!r} matches no parameter that the groups before it leave"
            fix = f"parameters are named like {(left or [_A_NAME])[0]}"
            problems.append(Problem(f"{_place(index)}.pattern", what, fix))
    if left:
        what = f"no pattern matches {len(left)} parameters, such as {', '.join(left[:_LISTED])}"
        problems.append(Problem("optimizer.param_groups", what, "add a last group with pattern = '.*'"))
    return problems


def _is_short_form(config: JobConfig) -> bool:
    groups = config.optimizer.param_groups
    return len(groups) == 1 and groups[0].pattern == ".*"


def _place(index: int) -> str:
    return f"optimizer.param_groups[{index}]"


def _group_problems(group: Any, where: str) -> Iterator[Problem]:
    try:
        re.compile(group.pattern)
    except re.error as error:
        yield Problem(f"{where}.pattern", f"{group.pattern!r} is not a regular expression: {error}", "'.*' matches all")
    if group.optimizer_name not in _OPTIMIZERS:
        what = f"torchtitan has no optimizer {group.optimizer_name!r}"
        yield Problem(f"{where}.optimizer_name", what, f"choose one of {', '.join(_OPTIMIZERS)}")
    elif (optimizer := _OPTIMIZERS[group.optimizer_name]) is not None:
        yield from _unknown_options(group.optimizer_kwargs, optimizer, f"{where}.optimizer_kwargs")


def _unknown_options(options: dict[str, Any], optimizer: type[torch.optim.Optimizer], where: str) -> Iterator[Problem]:
    """torch keeps options that it does not know, and uses its defaults for those that are absent."""
    known = inspect.signature(optimizer).parameters.keys() - {"params"}
    for key in options.keys() - known:
        yield Problem(f"{where}.{key}", f"{optimizer.__name__} has no such option", did_you_mean(key, known))


def _value_problems(options: dict[str, Any], where: str) -> Iterator[Problem]:
    for key in ("lr", "eps", "weight_decay"):
        value = options.get(key, 1.0)
        if not _is_number(value):
            yield Problem(f"{where}.{key}", f"expected a number, found {show(value)}")
        elif not 0 <= value < math.inf or (key == "lr" and value == 0):
            requirement = "it must be positive" if key == "lr" else "it must not be negative"
            yield Problem(f"{where}.{key}", f"{value} is not possible", requirement)
    betas = options.get("betas", (0.9, 0.95))
    if not (isinstance(betas, (list, tuple)) and len(betas) == 2 and all(map(_is_number, betas))):
        yield Problem(f"{where}.betas", f"expected a list of 2 numbers, found {show(betas)}")
    elif not all(0 <= beta < 1 for beta in betas):
        yield Problem(f"{where}.betas", f"{list(betas)} is not possible", "each must be in [0, 1)")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
