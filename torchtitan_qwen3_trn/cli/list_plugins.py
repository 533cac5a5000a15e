"""``torchtitan-trn plugins``: what is installed, what it does and what can be set."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from torchtitan_qwen3_trn.cli.table import print_table
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.job.values import describe
from torchtitan_qwen3_trn.plugins import (
    Installed,
    LoadedPlugin,
    implemented_hooks,
    installed_plugins,
    installed_routes,
    load,
    plugins_of_route,
)

HELP = "list installed plugins"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print every installed plugin; status 1 when a plugin or a route cannot be loaded."""
    routes, problems = _routes()
    rows = [describe_plugin(plugin, routes) for group in installed_plugins().values() for plugin in group]
    rows.sort(key=lambda row: row["name"])
    if arguments.json:
        print(json.dumps(rows, indent=2, default=str))  # noqa: T201
    else:
        _print_table(rows)
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201
    return int(bool(problems) or any(row["problem"] for row in rows))


def _routes() -> tuple[dict[str, tuple[str, ...]], list[Problem]]:
    """The plugins of every installed route, and why routes cannot be read."""
    routes, problems = {}, []
    for route in (route for same_name in installed_routes().values() for route in same_name):
        try:
            routes[route.name] = plugins_of_route(route)
        except JobError as error:
            problems += error.problems
    return routes, problems


def describe_plugin(plugin: Installed, routes: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Name, distribution, version, routes, hooks, options and, if it cannot be loaded, the problem."""
    active, problems = load([plugin])
    loaded = active.loaded[0] if active.loaded else None
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "routes": [route for route, names in routes.items() if plugin.name in names],
        "hooks": implemented_hooks(loaded.module) if loaded else [],
        "options": _options(loaded) if loaded else [],
        "problem": "; ".join(map(str, problems)),
    }


def _options(plugin: LoadedPlugin) -> list[dict[str, Any]]:
    options_type = plugin.options_type
    if options_type is None:
        return []
    hints, defaults = typing.get_type_hints(options_type), options_type()
    return [
        {"name": option.name, "type": describe(hints[option.name]), "default": getattr(defaults, option.name)}
        for option in dataclasses.fields(options_type)
    ]


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        details = {
            "from": f"{row['distribution']} {row['version']}",
            "routes": ", ".join(row["routes"]) or "none: enable it by name",
            "hooks": ", ".join(row["hooks"]) or "cannot be loaded",
            **{
                f"  {item['name']}": f"{item['type']} = {json.dumps(item['default'], default=str)}"
                for item in row["options"]
            },
        }
        for index, (heading, text) in enumerate(details.items()):
            table.add_row("" if index else row["name"], heading, text, end_section=heading == list(details)[-1])
    print_table(table)
    for row in rows:
        if row["problem"]:
            print(row["problem"])  # noqa: T201
