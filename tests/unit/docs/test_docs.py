"""The documentation says what the code says: generated parts, hooks, messages, links."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

from torchtitan_qwen3_trn import hooks
from torchtitan_qwen3_trn.plugins import hook_names

DOCS = ROOT / "docs"
# Sphinx checks the links of the pages in docs/.
PAGES_BESIDE_DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "nki_emulator/README.md",
    "tests/emulated_neuron/README.md",
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_the_reference_of_job_files_is_current():
    module = script("make_reference")
    assert module.PAGE.read_text(encoding="utf-8") == module.reference(), "run python docs/make_reference.py"


def test_the_picture_of_the_package_is_current():
    module = script("make_picture")
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.replaced(page), "run python docs/make_picture.py"


def test_the_reference_has_every_key_with_its_docstring():
    text = script("make_reference").reference()
    assert "## `[training]`" in text
    assert "- **`steps`** (an integer; default `10000`)\n\n  How many train steps to run" in text
    assert "### `[plugins.nki-rope]`" in text
    assert "- **`dataloader.dataset_path`** (a string; unset)" in text


@pytest.mark.parametrize("name", hook_names())
def test_every_hook_has_a_heading_with_its_arguments(name):
    arguments = ", ".join(inspect.signature(getattr(hooks, name)).parameters)
    assert f"`{name}({arguments})`" in headings(DOCS / "plugins.md")


def test_every_heading_of_a_hook_is_a_hook():
    named = [match[1] for heading in headings(DOCS / "plugins.md") if (match := re.match(r"`(\w+)\(", heading))]
    assert sorted(named) == sorted(hook_names())


def test_messages_under_troubleshooting_are_those_of_the_package():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    ours = page.partition("## Messages of this package")[2].partition("\n## ")[0]
    quoted = re.findall(r"^### `(.*)`$", ours, flags=re.MULTILINE)
    sources = [*(ROOT / "torchtitan_qwen3_trn").rglob("*.py"), *(ROOT / "entry_points").rglob("*.py")]
    texts = [
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(quoted) > 20
    assert [each for each in quoted if not any(each in text for text in texts)] == []


@pytest.mark.parametrize("name", PAGES_BESIDE_DOCS)
def test_links_lead_somewhere(name):
    page = ROOT / name
    dead = []
    for target, fragment in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target) if target else page
        if not path.exists() or (fragment and fragment not in map(anchor, headings(path))):
            dead.append(f"{target}#{fragment}")
    assert dead == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
