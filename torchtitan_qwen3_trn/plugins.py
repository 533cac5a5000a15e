"""Finding, choosing, loading and calling plugins.

Only plugins that a job enables are imported. What a job enables is its route's set, plus ``plugins.enable``, minus
``plugins.disable``.
"""

from __future__ import annotations

import difflib
import inspect
import keyword
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from torchtitan_qwen3_trn import hooks
from torchtitan_qwen3_trn.config import JobConfig, PluginsConfig
from torchtitan_qwen3_trn.errors import JobError, Problem, error_with_line

PLUGIN_GROUP = "torchtitan.plugins"
ROUTE_GROUP = "torchtitan.routes"

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An entry point of one of the two groups, not imported.

    Attributes:
        kind: ``plugin`` or ``route``, for messages.
        name: the entry point's name.
        entry_point: the entry point itself.
    """

    kind: str
    name: str
    entry_point: EntryPoint

    @property
    def distribution(self) -> str:
        """Name of the distribution that provides it."""
        return self.entry_point.dist.name if self.entry_point.dist else "unknown distribution"

    @property
    def version(self) -> str:
        """Version of that distribution."""
        return self.entry_point.dist.version if self.entry_point.dist else "?"

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.distribution} {self.version})"

    @property
    def field_name(self) -> str:
        """Name of a plugin's options in ``config.plugins``."""
        return self.name.replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class LoadedPlugin:
    """An imported plugin and the type of its options, if it has any."""

    installed: Installed
    module: ModuleType

    @property
    def name(self) -> str:
        """Name by which a job enables it."""
        return self.installed.name

    @property
    def options_type(self) -> type | None:
        """Its ``Options`` dataclass."""
        return getattr(self.module, "Options", None)

    def options(self, config: JobConfig) -> Any:
        """Its options in ``config``; their defaults in a configuration made without it; ``None`` if it has none."""
        if self.options_type is None:
            return None
        given = getattr(config.plugins, self.installed.field_name, None)
        return self.options_type() if given is None else given


class PluginError(RuntimeError):
    """An implementation of a hook has failed; the exception it raised is the cause."""

    def __init__(self, plugin: Installed, hook: str, error: BaseException) -> None:
        super().__init__(f"{plugin} failed in its hook {hook}: {type(error).__name__}: {error}")
        what = f"failed in its hook {hook}: {error_with_line(error)}"
        self.problem = Problem(str(plugin), what, "repair it, or leave it out of this job")


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """The plugins of one job in loading order, registered with pluggy."""

    loaded: list[LoadedPlugin]
    manager: pluggy.PluginManager

    @property
    def names(self) -> list[str]:
        """Names in loading order."""
        return [plugin.name for plugin in self.loaded]

    def call(self, hook: str, config: JobConfig, **arguments: Any) -> None:
        """Call ``hook`` on every plugin, the one enabled last first.

        Each implementation gets those of ``config``, its ``options`` and ``arguments`` that it names.

        Raises:
            JobError: as raised by an implementation.
            PluginError: an implementation fails otherwise.
        """
        for plugin, implementation in self._implementations(hook):
            _called(plugin, implementation, hook, config, arguments)

    def first(self, hook: str, config: JobConfig, of: type[_Item], **arguments: Any) -> _Item | None:
        """As `call`, up to the first result that is not ``None``; returns it.

        Raises:
            JobError: also when that result is not ``of`` the type that the hook returns.
        """
        for plugin, implementation in self._implementations(hook):
            result = _called(plugin, implementation, hook, config, arguments)
            if isinstance(result, of):
                return result
            if result is not None:
                what = f"its hook {hook} must return a {of.__name__} of torchtitan or None, got {result!r:.80}"
                raise JobError([Problem(str(plugin.installed), what, "see torchtitan_qwen3_trn/hooks.py")])
        return None

    def collect(
        self, hook: str, config: JobConfig, of: type[_Item], **arguments: Any
    ) -> tuple[list[tuple[LoadedPlugin, _Item]], list[Problem]]:
        """Call ``hook``, which returns a list ``of`` something, on one plugin after the other in loading order.

        Returns:
            What the plugins returned, each with its plugin, and the problems of those that failed or returned no such
            list.
        """
        results: list[tuple[LoadedPlugin, _Item]] = []
        problems: list[Problem] = []
        for plugin, implementation in reversed(self._implementations(hook)):
            try:
                found = _called(plugin, implementation, hook, config, arguments)
                results += [(plugin, item) for item in _listed(found, of, hook, plugin)]
            except JobError as error:
                problems += error.problems
            except PluginError as error:
                problems.append(error.problem)
        return results, problems

    def _implementations(self, hook: str) -> list[tuple[LoadedPlugin, pluggy.HookImpl]]:
        """In the order of calling: pluggy's, which is the reverse of loading."""
        plugins = {plugin.name: plugin for plugin in self.loaded}
        found = getattr(self.manager.hook, hook).get_hookimpls()
        return [(plugins[implementation.plugin_name], implementation) for implementation in reversed(found)]


def installed_plugins() -> dict[str, list[Installed]]:
    """Every installed plugin by name; more than one under a name when distributions collide."""
    return _installed(PLUGIN_GROUP, "plugin")


def installed_routes() -> dict[str, list[Installed]]:
    """Every installed route by name, likewise."""
    return _installed(ROUTE_GROUP, "route")


def plugins_of_route(route: Installed) -> tuple[str, ...]:
    """Names of the plugins that ``route`` enables.

    Raises:
        JobError: its entry point cannot be read or does not name a sequence of strings.
    """
    try:
        names = route.entry_point.load()
    except Exception as error:
        what = f"cannot be read from {route.entry_point.value}: {type(error).__name__}: {error}"
        raise JobError([Problem(str(route), what, f"repair or uninstall {route.distribution}")]) from error
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        what = f"{route.entry_point.value} is {names!r:.80}"
        raise JobError([Problem(str(route), what, "it must be a sequence of plugin names")])
    return tuple(names)


def choose(backend: str, enable: list[str], disable: list[str]) -> tuple[list[Installed], list[Problem]]:
    """The plugins of a job in loading order, and what is wrong with the choice."""
    installed, (of_route, problems) = installed_plugins(), _route(backend)
    problems += [
        Problem(f"plugins.{key}", f"no plugin is called {name!r}", _suggest(name, installed))
        for key, names in (("enable", enable), ("disable", disable))
        for name in filter(None, names)
        if name not in installed and not (key == "disable" and name in of_route)
    ]
    problems += [
        Problem("plugins", f"{name!r} is both enabled and disabled", "remove it from one of the lists")
        for name in enable
        if name in disable
    ]
    chosen = []
    for name in filter(None, dict.fromkeys([*of_route, *enable])):
        if name in disable:
            continue
        if name not in installed:
            if name in of_route:
                problems.append(_missing_route_plugin(backend, name))
        elif len(installed[name]) > 1:
            problems.append(_name_collision(installed[name]))
        else:
            chosen.append(installed[name][0])
    return chosen, problems


def load(chosen: list[Installed]) -> tuple[Plugins, list[Problem]]:
    """Import and register ``chosen``; a plugin that cannot be used is left out and reported."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    loaded, problems = [], []
    for plugin in chosen:
        try:
            if EntryPoint.pattern.match(plugin.entry_point.value) is None:
                raise ImportError("this is not an import path")
            candidate = LoadedPlugin(installed=plugin, module=plugin.entry_point.load())
            defects = _defects(candidate)
            if not defects:
                manager.register(candidate.module, name=plugin.name)
                loaded.append(candidate)
        except (Exception, SystemExit) as error:
            if manager.has_plugin(plugin.name):  # pluggy keeps a plugin that it has refused
                manager.unregister(name=plugin.name)
            what = f"cannot be loaded from {plugin.entry_point.value}: {type(error).__name__}: {error}"
            defects = [Problem(str(plugin), what, "repair it, or leave it out of this job")]
        problems += defects
    return Plugins(loaded=loaded, manager=manager), problems


def load_plugins_of(config: JobConfig) -> tuple[Plugins, list[Problem]]:
    """Choose and load the plugins that ``config`` enables."""
    chosen, problems = choose(config.model.backend, config.plugins.enable, config.plugins.disable)
    plugins, load_problems = load(chosen)
    return plugins, problems + load_problems


def plugins_config_type(loaded: list[LoadedPlugin]) -> type[PluginsConfig]:
    """`PluginsConfig` with one more field per plugin that has options."""
    additions = [
        (plugin.installed.field_name, plugin.options_type, field(default_factory=plugin.options_type))
        for plugin in loaded
        if plugin.options_type is not None
    ]
    return make_dataclass("PluginsConfig", additions, bases=(PluginsConfig,), kw_only=True, slots=True)


def hook_names() -> list[str]:
    """Names of all hooks of the contract."""
    return _marked(hooks, "spec")


def implemented_hooks(module: ModuleType) -> list[str]:
    """Names of the hooks that a plugin module implements."""
    return _marked(module, "impl")


def _installed(group: str, kind: str) -> dict[str, list[Installed]]:
    found: dict[str, list[Installed]] = {}
    for entry_point in entry_points(group=group):
        item = Installed(kind=kind, name=entry_point.name, entry_point=entry_point)
        found.setdefault(item.name, []).append(item)
    return found


def _route(backend: str) -> tuple[tuple[str, ...], list[Problem]]:
    """The plugins that ``model.backend`` enables; none, and why, when it cannot be used."""
    routes = installed_routes()
    if backend not in routes:
        return (), [Problem("model.backend", f"no route is called {backend!r}", _suggest(backend, routes))]
    if len(routes[backend]) > 1:
        return (), [_name_collision(routes[backend])]
    try:
        return plugins_of_route(routes[backend][0]), []
    except JobError as error:
        return (), error.problems


def _called(
    plugin: LoadedPlugin, implementation: pluggy.HookImpl, hook: str, config: JobConfig, arguments: Mapping[str, Any]
) -> Any:
    given = {**arguments, "config": config, "options": plugin.options(config)}
    try:
        return implementation.function(*(given[name] for name in implementation.argnames))
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(plugin.installed, hook, error) from error


def _listed(result: Any, of: type[_Item], hook: str, plugin: LoadedPlugin) -> list[_Item]:
    if isinstance(result, (list, tuple)) and all(isinstance(item, of) for item in result):
        return list(result)
    found = f"a list with {result!r:.80}" if isinstance(result, (list, tuple)) else f"{result!r:.80}"
    what = f"its hook {hook} must return a list of {of.__name__}, got {found}"
    raise JobError([Problem(str(plugin.installed), what, "see torchtitan_qwen3_trn/hooks.py")])


def _marked(module: ModuleType, kind: str) -> list[str]:
    return sorted(name for name, value in vars(module).items() if hasattr(value, f"{hooks.PROJECT}_{kind}"))


def _defects(plugin: LoadedPlugin) -> list[Problem]:
    """The first reason why ``plugin`` cannot be used."""
    checks = (_bad_name, _not_a_module, _bad_hooks, _bad_options)
    return [found for check in checks if (found := check(plugin)) is not None][:1]


def _bad_name(plugin: LoadedPlugin) -> Problem | None:
    where, field_name = str(plugin.installed), plugin.installed.field_name
    if not field_name.isidentifier() or keyword.iskeyword(field_name):
        return Problem(where, "its name must consist of letters, digits and hyphens, and be usable as a Python name")
    if field_name in {item.name for item in fields(PluginsConfig)}:
        return Problem(where, f"its name is taken: [plugins] has a key {field_name}")
    return None


def _not_a_module(plugin: LoadedPlugin) -> Problem | None:
    if isinstance(plugin.module, ModuleType):
        return None
    what = f"its entry point {plugin.installed.entry_point.value} names {plugin.module!r:.80}, not a module"
    return Problem(str(plugin.installed), what, "name the module that holds its hooks")


def _bad_hooks(plugin: LoadedPlugin) -> Problem | None:
    where, module = str(plugin.installed), plugin.module
    implemented = implemented_hooks(module)
    if not implemented:
        fix = "mark its functions with @torchtitan_qwen3_trn.hooks.hookimpl"
        return Problem(where, f"{module.__name__} implements no hook", fix)
    if unknown := sorted(set(implemented) - set(hook_names())):
        what = f"{module.__name__} implements a hook that does not exist: {', '.join(unknown)}"
        return Problem(where, what, f"hooks are {', '.join(hook_names())}")
    for name in implemented:
        known = list(inspect.signature(getattr(hooks, name)).parameters)
        if foreign := [each for each in inspect.signature(getattr(module, name)).parameters if each not in known]:
            what = f"its hook {name} takes arguments that do not exist: {', '.join(foreign)}"
            return Problem(where, what, f"there are {', '.join(known)}")
    options = (getattr(getattr(module, name), f"{hooks.PROJECT}_impl") for name in implemented)
    if any(each.get("wrapper") or each.get("hookwrapper") for each in options):
        return Problem(where, "hook wrappers are not supported", "implement the hook itself")
    return None


def _bad_options(plugin: LoadedPlugin) -> Problem | None:
    where, options = str(plugin.installed), plugin.options_type
    if options is None:
        return None
    if not is_dataclass(options):
        return Problem(where, "its Options is not a dataclass", "decorate it with @dataclass(kw_only=True)")
    try:
        typing.get_type_hints(options)
    except Exception as error:
        return Problem(where, f"a type in its Options cannot be resolved: {type(error).__name__}: {error}")
    try:
        options()
    except Exception as error:
        return Problem(where, f"its Options cannot be made without arguments: {error}", "give every field a default")
    return None


def _missing_route_plugin(backend: str, name: str) -> Problem:
    what = f"{backend!r} needs the plugin {name!r}, which no distribution installed here provides"
    available, plugins = [], installed_plugins()
    for route, (found, *_) in installed_routes().items():
        try:
            available += [route] if all(plugin in plugins for plugin in plugins_of_route(found)) else []
        except JobError:
            continue
    return Problem("model.backend", what, f"choose one of {available}")


def _name_collision(same_name: list[Installed]) -> Problem:
    owners = " and ".join(f"{each.distribution} {each.version}" for each in same_name)
    first = same_name[0]
    return Problem(f"{first.kind} {first.name}", f"is provided by {owners}", "uninstall one of them")


def _suggest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    listing = f"installed are {sorted(known)}"
    return f"did you mean {close[0]!r}? {listing}" if close else listing
