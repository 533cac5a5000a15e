"""Draws the rooms of the package and the imports between them, as Mermaid text in ``architecture.md``.

    python docs/make_picture.py            write the picture
    python docs/make_picture.py --check    exit with status 1 when the picture is out of date

A room is a module or folder at the top level of the package. Deferred imports and imports for type checkers count.
Arrows that follow from others are left out, and so are arrows to the ground, which every room may import.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[1]
PACKAGE = "torchtitan_qwen3_trn"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- picture: written by docs/make_picture.py -->", "<!-- end of picture -->"

GROUND = frozenset({"assets", "components", "config", "device", "errors", "hooks", "launch", "plugins", "routes"})
"""Rooms that every other room may import."""


def main() -> int:
    """Write the picture, or with ``--check`` compare it; returns the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    new = replaced(old)
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    if new == old:
        return 0
    print(f"the picture in {PAGE} is out of date; run python docs/make_picture.py")
    return 1


def replaced(page: str) -> str:
    """``page`` with the picture of today's imports."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{picture()}\n{rooms_table()}\n{END}{after}"


def picture() -> str:
    """The rooms and their imports as a Mermaid flow chart."""
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {line}" for line in _arrows(frozenset(rooms()) - GROUND)]
    lines += ['    subgraph ground ["ground: every room may import these"]', "        direction LR"]
    lines += [f"        {line}" for line in _arrows(GROUND)]
    return "\n".join([*lines, "    end", "```", ""])


def _arrows(chosen: frozenset[str]) -> list[str]:
    """The ``chosen`` rooms from top to bottom, then the imports between them that do not follow from others."""
    graph = networkx.DiGraph(pair for pair in imports() if chosen.issuperset(pair))
    graph.add_nodes_from(chosen)
    graph = networkx.transitive_reduction(graph)
    order = list(networkx.lexicographical_topological_sort(graph))
    return order + [f"{source} --> {target}" for source in order for target in sorted(graph.successors(source))]


def rooms_table() -> str:
    """The rooms and what the first sentence of their docstring says of them."""
    lines = ["| room | what it holds |", "|---|---|"]
    for room, files in sorted(rooms().items()):
        home = next((path for path in files if path.name == "__init__.py"), files[0])
        first = (ast.get_docstring(_tree(home)) or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{room}` | {first} |")
    return "\n".join([*lines, ""])


def imports() -> Iterator[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    known = rooms()
    for room, files in known.items():
        for path in files:
            for module in _imported_modules(_tree(path)):
                parts = module.split(".")
                if parts[0] == PACKAGE and len(parts) > 1 and parts[1] != room and parts[1] in known:
                    yield room, parts[1]


def rooms() -> dict[str, list[Path]]:
    """Each room and its files."""
    found: dict[str, list[Path]] = {"entry_points": sorted((ROOT / "entry_points").rglob("*.py"))}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        room = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            found.setdefault(room, []).append(path)
    return found


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
