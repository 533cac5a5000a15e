"""Arrows between modules point down, deferred and typing imports counted."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from conftest import ROOT

PACKAGE = "torchtitan_qwen3_trn"
# From top to bottom. A module imports from its own room and from rooms below it.
LAYERS = (
    {"config_registry"},
    {"autoload", "cli", "entry_points"},
    {"config_manager"},
    {"launcher"},
    {"trainer"},
    {"startup_table"},
    {"job"},
    {"checks"},
    {"weights"},
    {"models"},
    {"overrides"},
    {"kernels"},
    {"hf_files"},
    {"plugins"},
    {"hooks"},
    {"config"},
    {"components"},
    {"launch"},
    {"assets", "device", "errors", "routes"},
)
# Both adapt the state dict of one kind of model, as torchtitan's files of that name do.
SAME_NAME = {"state_dict_adapter"}


def modules() -> dict[str, Path]:
    """Source files of the package by module name without the package's; ``entry_points`` installs inside it."""
    found = {}
    for folder in (ROOT / PACKAGE, ROOT / "entry_points"):
        base = folder if folder.name == PACKAGE else ROOT
        for path in folder.rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return {name: path for name, path in found.items() if name}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that the file names in any import statement."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    targets = (name.removeprefix(f"{PACKAGE}.") for name in named if name.startswith(f"{PACKAGE}."))
    return {nearest for name in targets if (nearest := _known_prefix(name, known))}


def _known_prefix(name: str, known: dict[str, Path]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def test_every_room_imports_only_from_rooms_below_it():
    known = modules()
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    assert {name.split(".")[0] for name in known} == set(level)
    upward = [
        f"{name} imports {target}"
        for name, path in known.items()
        for target in imports(path, known)
        if (room := name.split(".")[0]) != (other := target.split(".")[0]) and level[room] >= level[other]
    ]
    assert not upward


def test_no_modules_import_one_another_in_a_circle():
    known = modules()
    edges = {name: imports(path, known) - {name} for name, path in known.items()}
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in leaves:
            del edges[name]
    assert not edges


def test_no_two_modules_share_a_name():
    names = Counter(name.rpartition(".")[2] for name in modules() if not name.startswith("entry_points."))
    assert {name for name, count in names.items() if count > 1} == SAME_NAME


def test_functions_stay_short_except_kernels():
    long = [
        f"{name}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for name, path in modules().items()
        if not name.endswith("_nki")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    ]
    assert not long
