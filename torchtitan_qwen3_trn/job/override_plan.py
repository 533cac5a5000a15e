"""From plugins' override requests to torchtitan's own override mechanism.

Selecting, conflict detection and naming happen here, before the trainer exists, so that a mistake is reported with
the plugin's name; replacing the nodes and logging them stays with ``torchtitan.config.override``.
"""

from __future__ import annotations

import copy
import functools
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torchtitan.config import Configurable
from torchtitan.config.override import OverrideImport, apply_overrides, override

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hooks import NodeOverride
from torchtitan_qwen3_trn.job.trial import silenced

MODEL_PREFIX = "model_spec.model."

_Config = TypeVar("_Config", bound=Any)

_registered: dict[str, tuple[type, tuple[str, ...] | None]] = {}


@dataclass(frozen=True)
class Request:
    """A plugin's override request.

    Attributes:
        owner: the plugin's name and distribution, for messages.
        name: the plugin's name.
        override: what it asked for.
    """

    owner: str
    name: str
    override: NodeOverride


def check_requests(requests: list[Request], config: Configurable.Config) -> list[Problem]:
    """Report nodes that two plugins claim, requests and patterns that match nothing, and factories that fail."""
    problems: list[Problem] = []
    claimed: dict[str, Request] = {}
    for request in requests:
        if (defect := _defect(request.override)) is not None:
            problems.append(Problem(request.owner, defect, "see NodeOverride in torchtitan_qwen3_trn/hooks.py"))
            continue
        nodes = list(matching_nodes(request.override, config))
        problems += _unmatched(request, config)
        for fqn in nodes:
            rival = _overlapping(fqn, claimed)
            if rival is not None and rival is not request:
                problems.append(_conflict(fqn, rival, request))
                break
        claimed.update((fqn, request) for fqn in nodes)
        problems += _factory_problems(request, config)
    return problems


def matching_nodes(request: NodeOverride, config: Configurable.Config) -> Iterator[str]:
    """Fully qualified names of the nodes of ``config`` that ``request`` replaces."""
    patterns = _node_patterns(request.fqns)
    for fqn, _, _, _ in config.traverse(request.target):
        if patterns is None or any(fnmatchcase(fqn, pattern) for pattern in patterns):
            yield fqn


def register(requests: list[Request]) -> list[tuple[OverrideImport, str]]:
    """Register every request with torchtitan: its entry for ``override.imports``, and the plugin's name.

    Raises:
        JobError: torchtitan refuses one.
    """
    entries: list[tuple[OverrideImport, str]] = []
    for request in requests:
        try:
            target = _register(request.override)
        except (TypeError, ValueError) as error:
            raise JobError([Problem(request.owner, str(error), "correct its node_overrides")]) from error
        entry = (target, request.override.kwargs) if request.override.kwargs else target
        entries.append((entry, request.name))
    return entries


def target_of(entry: OverrideImport) -> str:
    """Import path of the factory that an entry of ``override.imports`` names."""
    return entry if isinstance(entry, str) else entry[0]


def try_out(config: _Config) -> tuple[_Config, dict[str, int], list[Problem]]:
    """Apply ``override.imports`` to a copy of ``config``.

    Returns:
        The copy, nodes replaced by import path of the override, and what torchtitan objects to.
    """
    trial, counts, problems = copy.deepcopy(config), Counter[str](), []
    try:
        with silenced():
            lines = apply_overrides(trial.override, trial) if trial.override.imports else []
        counts.update(line.split()[1].rstrip(":") for line in lines)
    except Exception as error:
        problems.append(Problem("override.imports", f"{type(error).__name__}: {error}"))
    return trial, dict(counts), problems


def _register(request: NodeOverride) -> str:
    """Register with torchtitan under the factory's import path, as ``override.imports`` names it."""
    patterns = _node_patterns(request.fqns)
    selection = (request.target, tuple(patterns) if patterns is not None else None)
    factory = _with_free_name(request.factory, selection)
    target = f"{factory.__module__}.{factory.__name__}"
    if target not in _registered:
        override(target=request.target, fqns=patterns)(factory)
        _registered[target] = selection
    return target


def _with_free_name(factory: Callable[..., Any], selection: tuple[type, Any]) -> Callable[..., Any]:
    """``factory``, or a renamed copy when this process registered it before with another selection."""
    name, count = factory.__name__, 1
    while _registered.get(f"{factory.__module__}.{name}", selection) != selection:
        count += 1
        name = f"{factory.__name__}_{count}"
    if count == 1:
        return factory

    @functools.wraps(factory)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    renamed.__name__ = name
    return renamed


def _node_patterns(fqns: list[str] | None) -> list[str] | None:
    """Module names as a user writes them (``layers.0``) to patterns over the trainer's configuration tree."""
    if fqns is None:
        return None
    return [MODEL_PREFIX + pattern + suffix for pattern in fqns for suffix in ("", ".*")]


def _defect(wanted: NodeOverride) -> str | None:
    """What keeps a request from being handed to torchtitan, which looks factories up by their import path."""
    factory, fqns = wanted.factory, wanted.fqns
    module, name = (str(getattr(factory, attribute, "")) for attribute in ("__module__", "__name__"))
    if not (isinstance(wanted.target, type) and issubclass(wanted.target, Configurable.Config)):
        return f"it wants to replace {wanted.target!r}, which is no class of configurations"
    if getattr(sys.modules.get(module), name, None) is not factory:
        return f"its factory {factory!r} is no function at the top level of a module"
    if fqns is not None and (isinstance(fqns, str) or not all(isinstance(pattern, str) for pattern in fqns)):
        return f"fqns is {fqns!r} and not a list of strings"
    return None


def _factory_problems(request: Request, config: Configurable.Config) -> list[Problem]:
    """The first node that the factory cannot replace."""
    factory, chosen = request.override.factory, set(matching_nodes(request.override, config))
    for fqn, node, _, _ in config.traverse(request.override.target):
        if fqn not in chosen:
            continue
        where = f"its factory {factory.__name__}, given {fqn.removeprefix(MODEL_PREFIX)},"
        try:
            with silenced():
                made = factory(copy.deepcopy(node), **request.override.kwargs)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{where} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
            return [Problem(request.owner, what, "repair it, or leave it out of this job")]
        if not isinstance(made, Configurable.Config):
            return [Problem(request.owner, f"{where} returned {made!r:.80}", "it must return a configuration")]
    return []


def _unmatched(request: Request, config: Configurable.Config) -> list[Problem]:
    wanted = request.override
    available = [fqn.removeprefix(MODEL_PREFIX) for fqn, _, _, _ in config.traverse(wanted.target)]
    if not available:
        what = f"this model has no {wanted.target.__qualname__} for it to replace"
        return [Problem(request.owner, what, f"leave {request.name} out of this job")]
    return [
        Problem(
            f"plugins.{request.name}.fqns",
            f"{pattern!r} matches no module it could replace",
            _hint(available),
        )
        for pattern in wanted.fqns or []
        if not any(matching_nodes(replace(wanted, fqns=[pattern]), config))
    ]


def _hint(available: list[str]) -> str:
    shown = ", ".join(available[:3]) + (", ..." if len(available) > 3 else "")
    return f"there are {len(available)}: {shown}"


def _overlapping(fqn: str, claimed: dict[str, Request]) -> Request | None:
    for other, request in claimed.items():
        if other == fqn or other.startswith(f"{fqn}.") or fqn.startswith(f"{other}."):
            return request
    return None


def _conflict(fqn: str, first: Request, second: Request) -> Problem:
    what = f"{first.owner} and {second.owner} both replace {fqn.removeprefix(MODEL_PREFIX)}"
    return Problem("plugins", what, "disable one of them, or give them disjoint fqns")
