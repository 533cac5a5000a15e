"""Plugins' override requests, planned: conflicts, one trial application, registration with torchtitan.

Selecting, conflict detection and naming happen here, before the trainer exists, so that a mistake is reported with
the plugin's name; replacing the nodes and logging them stays with ``torchtitan.config.override``.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torchtitan.config import Configurable
from torchtitan.config.override import apply_overrides, override

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem, error_with_line
from torchtitan_qwen3_trn.hooks import MODEL_PREFIX, NodeOverride
from torchtitan_qwen3_trn.launch import without_warnings
from torchtitan_qwen3_trn.plugins import LoadedPlugin

Request = tuple[LoadedPlugin, NodeOverride]
"""An override and the plugin that asks for it."""

_registered: dict[str, tuple[Any, ...]] = {}
"""Factory, target and patterns that an import path stands for, in all jobs of this process."""
_owner: dict[str, LoadedPlugin] = {}
"""The plugin of the current job that uses an import path."""
_LINE = re.compile(r"\[Override\] (\S+): (\S+) ")


class _FactoryError(Exception):
    """A factory has failed on ``node``, as ``what`` says."""

    def __init__(self, plugin: LoadedPlugin, node: Configurable.Config, what: str, fix: str) -> None:
        super().__init__(what)
        self.plugin, self.node, self.what, self.fix = plugin, node, what, fix


def plan_overrides(requests: list[Request], config: JobConfig) -> tuple[dict[str, int], JobConfig]:
    """Register ``requests`` with torchtitan, add them to ``config.override.imports`` and try all once on a copy.

    Returns:
        Nodes that each override replaces, by plugin name or, for ``override.imports``, by import path; and the
        configuration after all replacements, a copy.

    Raises:
        JobError: they cannot be applied.
    """
    if problems := list(_conflicts(requests, config)):
        raise JobError(problems)
    plugin_of = {}
    for request in requests:
        plugin, wanted = request
        target = _register(request)
        plugin_of[target] = plugin.name
        entry = (target, wanted.kwargs) if wanted.kwargs else target
        if entry not in config.override.imports:  # it is there when a prepared configuration is prepared again
            config.override.imports = [*config.override.imports, entry]
    trial = copy.deepcopy(config)
    try:
        with without_warnings():
            lines = apply_overrides(trial.override, trial) if trial.override.imports else []
    except _FactoryError as error:
        raise JobError([_factory_problem(error, trial)]) from error
    except Exception as error:
        raise JobError([Problem("override.imports", f"{type(error).__name__}: {error}")]) from error
    applied = [found[1] for line in lines if (found := _LINE.match(line))]
    return dict(Counter(plugin_of.get(target, target) for target in applied)), trial


def _conflicts(requests: list[Request], config: JobConfig) -> Iterator[Problem]:
    """Requests that torchtitan cannot take, requests and patterns that match nothing, nodes that two plugins claim."""
    claimed: dict[str, Request] = {}
    for request in requests:
        plugin, wanted = request
        if (defect := _defect(wanted)) is not None:
            yield Problem(str(plugin.installed), defect, "see NodeOverride in torchtitan_qwen3_trn/hooks.py")
            continue
        yield from _unmatched(plugin, wanted, config)
        nodes = list(wanted.nodes(config))
        rivals = ((fqn, rival) for fqn in nodes if (rival := _overlapping(fqn, claimed)) is not None)
        if (conflict := next(rivals, None)) is not None:
            fqn, rival = conflict
            what = f"{rival[0].installed} and {plugin.installed} both replace {fqn.removeprefix(MODEL_PREFIX)}"
            yield Problem("plugins", what, "disable one of them, or give them disjoint fqns")
        claimed.update((fqn, request) for fqn in nodes)


def _defect(wanted: NodeOverride) -> str | None:
    """Why a request cannot be handed to torchtitan, which looks factories up by their import path."""
    factory, fqns = wanted.factory, wanted.fqns
    module, name = (str(getattr(factory, attribute, "")) for attribute in ("__module__", "__name__"))
    if not (isinstance(wanted.target, type) and issubclass(wanted.target, Configurable.Config)):
        return f"the target of its override must be a Config class of torchtitan, got {wanted.target!r}"
    if getattr(sys.modules.get(module), name, None) is not factory:
        return f"its factory must be a function at the top level of a module, got {factory!r}"
    if fqns is not None and (isinstance(fqns, str) or not all(isinstance(pattern, str) for pattern in fqns)):
        return f"fqns must be a list of strings, got {fqns!r}"
    return None


def _unmatched(plugin: LoadedPlugin, wanted: NodeOverride, config: JobConfig) -> list[Problem]:
    available = [fqn.removeprefix(MODEL_PREFIX) for fqn in replace(wanted, fqns=None).nodes(config)]
    if not available:
        what = f"this model has no {wanted.target.__qualname__} for it to replace"
        return [Problem(str(plugin.installed), what, f"leave {plugin.name} out of this job")]
    fix = f"there are {len(available)}: {', '.join(available[:3])}{', ...' if len(available) > 3 else ''}"
    return [
        Problem(f"plugins.{plugin.name}.fqns", f"{pattern!r} matches no module it could replace", fix)
        for pattern in wanted.fqns or []
        if not any(replace(wanted, fqns=[pattern]).nodes(config))
    ]


def _overlapping(fqn: str, claimed: dict[str, Request]) -> Request | None:
    for other, request in claimed.items():
        if other == fqn or other.startswith(f"{fqn}.") or fqn.startswith(f"{other}."):
            return request
    return None


def _register(request: Request) -> str:
    """Register with torchtitan under the factory's import path; returns the entry for ``override.imports``."""
    plugin, wanted = request
    patterns = wanted.patterns
    selection = (wanted.factory, wanted.target, patterns)
    name = _free_name(wanted.factory, selection)
    target = f"{wanted.factory.__module__}.{name}"
    _owner[target] = plugin
    if target not in _registered:
        try:
            override(target=wanted.target, fqns=patterns)(_attributed(wanted.factory, name))
        except (TypeError, ValueError) as error:
            raise JobError([Problem(str(plugin.installed), str(error), "correct its node_overrides")]) from error
        _registered[target] = selection
    return target


def _free_name(factory: Callable[..., Any], selection: tuple[Any, ...]) -> str:
    """The factory's name, with a number when this process has registered that name for something else before."""
    name, count = factory.__name__, 1
    while _registered.get(f"{factory.__module__}.{name}", selection) != selection:
        count += 1
        name = f"{factory.__name__}_{count}"
    return name


def _attributed(factory: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``factory`` under ``name``, whose failures say which plugin it belongs to."""

    @functools.wraps(factory)
    def made(config: Configurable.Config, **kwargs: Any) -> Any:
        plugin = _owner[f"{factory.__module__}.{name}"]
        try:
            result = factory(config, **kwargs)
        except Exception as error:
            what = f"factory {factory.__name__} raised {error_with_line(error)}"
            raise _FactoryError(plugin, config, what, "repair it, or leave it out of this job") from error
        if not isinstance(result, Configurable.Config):
            what = f"factory {factory.__name__} returned {result!r:.80}"
            raise _FactoryError(plugin, config, what, "it must return a configuration")
        return result

    made.__name__ = name
    return made


def _factory_problem(error: _FactoryError, trial: JobConfig) -> Problem:
    found = (fqn for fqn, node, _, _ in trial.traverse(type(error.node)) if node is error.node)
    fqn = next(found, "a node").removeprefix(MODEL_PREFIX)
    return Problem(str(error.plugin.installed), f"its {error.what}, given {fqn}", error.fix)
