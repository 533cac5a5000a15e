"""Finding, choosing and loading plugins.

Only plugins that a job enables are imported. What a job enables is its route's set in :data:`ROUTES`, plus
``plugins.enable``, minus ``plugins.disable``.
"""

from __future__ import annotations

import contextlib
import difflib
import keyword
import traceback
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar, get_args

import pluggy

from torchtitan_qwen3_trn import hooks
from torchtitan_qwen3_trn.config import Backend
from torchtitan_qwen3_trn.errors import JobError, Problem

ENTRY_POINT_GROUP = "torchtitan.plugins"

ROUTES: dict[str, tuple[str, ...]] = {
    "native": ("qwen3", "sdpa", "gather-free-rope"),
    "huggingface_v5": ("hf-transformers",),
    "nki_moe": ("qwen3", "sdpa", "nki-rope", "nki-moe"),
}

_Options = TypeVar("_Options")
_Item = TypeVar("_Item")


@dataclass(kw_only=True, slots=True)
class PluginsConfig:
    """Section ``[plugins]``; a job's own type adds one field per enabled plugin that has options."""

    enable: list[str] = field(default_factory=list)
    """Plugins to add to those of the route."""

    disable: list[str] = field(default_factory=list)
    """Plugins to leave out."""

    def options(self, options_type: type[_Options]) -> _Options:
        """The options of the plugin that declares ``options_type``; its defaults when the job sets none."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, options_type):
                return value
        return options_type()


@dataclass(frozen=True, kw_only=True)
class InstalledPlugin:
    """One entry point of the group ``torchtitan.plugins``, not imported."""

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.distribution} {self.version})"

    @property
    def field_name(self) -> str:
        """Name of its options in ``config.plugins``."""
        return self.name.replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class LoadedPlugin:
    """An imported plugin and the type of its options, if it has any."""

    installed: InstalledPlugin
    module: ModuleType

    @property
    def options_type(self) -> type | None:
        """Its ``Options`` dataclass."""
        return getattr(self.module, "Options", None)


@dataclass(frozen=True, kw_only=True)
class ActivePlugins:
    """The plugins of one job, and pluggy's callers for their hooks."""

    loaded: list[LoadedPlugin]
    manager: pluggy.PluginManager

    @property
    def names(self) -> list[str]:
        """Names in loading order."""
        return [plugin.installed.name for plugin in self.loaded]

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call ``hook`` on every plugin, the one enabled last first.

        Raises:
            JobError: as raised by an implementation.
            PluginError: an implementation fails otherwise.
        """
        with self._named_failures(hook):
            return getattr(self.manager.hook, hook)(**arguments)

    def call_each(
        self, hook: str, of: type[_Item], **arguments: Any
    ) -> tuple[list[tuple[LoadedPlugin, list[_Item]]], list[Problem]]:
        """Call ``hook``, which returns a list ``of`` something, on one plugin after the other in loading order.

        Returns:
            Which plugin returned what, and the problems of those that raised or returned no such list.
        """
        results: list[tuple[LoadedPlugin, list[_Item]]] = []
        problems: list[Problem] = []
        for plugin in self.loaded:
            others = [other.module for other in self.loaded if other is not plugin]
            try:
                with self._named_failures(hook):
                    found = self.manager.subset_hook_caller(hook, others)(**arguments)
                results += [(plugin, _listed(result, of, hook, plugin)) for result in found]
            except JobError as error:
                problems += error.problems
            except PluginError as error:
                problems.append(error.problem)
        return results, problems

    @contextlib.contextmanager
    def _named_failures(self, hook: str) -> Iterator[None]:
        try:
            yield
        except JobError:
            raise
        except Exception as error:
            culprit = self._owner_of(error)
            if culprit is None:
                raise
            raise PluginError(culprit.installed, hook, error) from error

    def _owner_of(self, error: BaseException) -> LoadedPlugin | None:
        """The plugin in whose module, or a module inside it, the call that failed began."""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = str(frame.f_globals.get("__name__"))
            for plugin in self.loaded:
                if name == plugin.module.__name__ or name.startswith(f"{plugin.module.__name__}."):
                    return plugin
        return None


class PluginError(RuntimeError):
    """An implementation of a hook has failed; the exception it raised is the cause."""

    def __init__(self, plugin: InstalledPlugin, hook: str, error: Exception) -> None:
        super().__init__(f"{plugin} failed in its hook {hook}: {type(error).__name__}: {error}")
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"failed in its hook {hook}: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        self.problem = Problem(str(plugin), what, "repair it, or leave it out of this job")


def _listed(result: Any, of: type[_Item], hook: str, plugin: LoadedPlugin) -> list[_Item]:
    if isinstance(result, (list, tuple)) and all(isinstance(item, of) for item in result):
        return list(result)
    found = f"a list with {result!r:.80}" if isinstance(result, (list, tuple)) else f"{result!r:.80}"
    what = f"its hook {hook} returned {found} where a list of {of.__name__} is wanted"
    raise JobError([Problem(str(plugin.installed), what, "see torchtitan_qwen3_trn/hooks.py")])


def installed_plugins() -> dict[str, list[InstalledPlugin]]:
    """Every installed plugin by name; more than one under a name when distributions collide."""
    found: dict[str, list[InstalledPlugin]] = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        distribution = entry_point.dist
        plugin = InstalledPlugin(
            name=entry_point.name,
            distribution=distribution.name if distribution else "unknown distribution",
            version=distribution.version if distribution else "?",
            entry_point=entry_point,
        )
        found.setdefault(plugin.name, []).append(plugin)
    return found


def choose(backend: str, enable: list[str], disable: list[str]) -> tuple[list[InstalledPlugin], list[Problem]]:
    """The plugins of a job in loading order, and what is wrong with the choice."""
    installed = installed_plugins()
    problems = [
        Problem(f"plugins.{key}", f"no plugin is called {name!r}", _suggest(name, installed))
        for key, names in (("enable", enable), ("disable", disable))
        for name in filter(None, names)
        if name not in installed and not (key == "disable" and name in ROUTES[backend])
    ]
    problems += [
        Problem("plugins", f"{name!r} is both enabled and disabled", "remove it from one of the lists")
        for name in enable
        if name in disable
    ]
    chosen = []
    for name in filter(None, dict.fromkeys([*ROUTES[backend], *enable])):
        if name in disable:
            continue
        if name not in installed:
            if name in ROUTES[backend]:
                problems.append(_missing_route_plugin(backend, name))
        elif len(installed[name]) > 1:
            problems.append(_name_collision(installed[name]))
        else:
            chosen.append(installed[name][0])
    return chosen, problems


def load(chosen: list[InstalledPlugin]) -> tuple[ActivePlugins, list[Problem]]:
    """Import and register ``chosen``; a plugin that cannot be used is left out and reported."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    loaded, problems = [], []
    for plugin in chosen:
        try:
            if EntryPoint.pattern.match(plugin.entry_point.value) is None:
                raise ImportError("that is no import path")
            module = plugin.entry_point.load()
            manager.register(module, name=plugin.name)
        except (Exception, SystemExit) as error:
            what = f"cannot be loaded from {plugin.entry_point.value}: {type(error).__name__}: {error}"
            problems.append(Problem(str(plugin), what, "repair it, or leave it out of this job"))
            continue
        candidate = LoadedPlugin(installed=plugin, module=module)
        defects = _defects(candidate)
        problems += defects
        if defects:
            manager.unregister(module)
        else:
            loaded.append(candidate)
    return ActivePlugins(loaded=loaded, manager=manager), problems


def plugins_config_type(loaded: list[LoadedPlugin]) -> type[PluginsConfig]:
    """:class:`PluginsConfig` with one more field per plugin that has options."""
    additions = [
        (plugin.installed.field_name, plugin.options_type, field(default_factory=plugin.options_type))
        for plugin in loaded
        if plugin.options_type is not None
    ]
    return make_dataclass("PluginsConfig", additions, bases=(PluginsConfig,), kw_only=True, slots=True)


def hook_names() -> list[str]:
    """Names of all hooks of the contract."""
    return sorted(name for name, value in vars(hooks).items() if hasattr(value, f"{hooks.PROJECT}_spec"))


def implemented_hooks(module: ModuleType) -> list[str]:
    """Names of the hooks that a plugin module implements."""
    return sorted(name for name, value in vars(module).items() if hasattr(value, f"{hooks.PROJECT}_impl"))


def routes_of(name: str) -> list[str]:
    """The values of ``model.backend`` that enable a plugin by default."""
    return [backend for backend in get_args(Backend) if name in ROUTES[backend]]


def _defects(plugin: LoadedPlugin) -> list[Problem]:
    options, installed = plugin.options_type, plugin.installed
    reserved = {item.name for item in fields(PluginsConfig)}
    if not installed.field_name.isidentifier() or keyword.iskeyword(installed.field_name):
        return [Problem(str(installed), "its name is not one of letters, digits and hyphens that Python can use")]
    if installed.field_name in reserved:
        return [Problem(str(installed), f"its name is taken: [plugins] has a key {installed.field_name}")]
    if not isinstance(plugin.module, ModuleType):
        what = f"its entry point {installed.entry_point.value} names {plugin.module!r:.80}, not a module"
        return [Problem(str(installed), what, "name the module that holds its hooks")]
    if options is not None and not is_dataclass(options):
        return [Problem(str(installed), "its Options is not a dataclass", "decorate it with @dataclass(kw_only=True)")]
    if not implemented_hooks(plugin.module):
        what = f"{plugin.module.__name__} implements no hook"
        return [Problem(str(installed), what, "mark its functions with @torchtitan_qwen3_trn.hooks.hookimpl")]
    if unknown := sorted(set(implemented_hooks(plugin.module)) - set(hook_names())):
        what = f"{plugin.module.__name__} implements a hook that does not exist: {', '.join(unknown)}"
        return [Problem(str(installed), what, f"hooks are {', '.join(hook_names())}")]
    try:
        if options is not None:
            typing.get_type_hints(options)
    except Exception as error:
        return [Problem(str(installed), f"a type in its Options cannot be resolved: {type(error).__name__}: {error}")]
    try:
        if options is not None:
            options()
    except Exception as error:
        what = f"its Options cannot be made without arguments: {error}"
        return [Problem(str(installed), what, "give every field a default")]
    return []


def _missing_route_plugin(backend: str, name: str) -> Problem:
    what = f"{backend!r} needs the plugin {name!r}, which no distribution installed here provides"
    available = [route for route in ROUTES if all(plugin in installed_plugins() for plugin in ROUTES[route])]
    return Problem("model.backend", what, f"choose one of {available}")


def _name_collision(same_name: list[InstalledPlugin]) -> Problem:
    owners = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in same_name)
    return Problem(f"plugin {same_name[0].name}", f"is provided by {owners}", "uninstall one of them")


def _suggest(name: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    listing = f"installed are {sorted(known)}"
    return f"did you mean {close[0]!r}? {listing}" if close else listing
