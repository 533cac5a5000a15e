"""Writes ``job_file_reference.md`` from the configuration classes.

    python docs/make_reference.py            write the page
    python docs/make_reference.py --check    exit with status 1 when the page is out of date

Every key comes with its type, its default and the docstring below its field. The texts of torchtitan's own sections
are torchtitan's docstrings.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HFDataSource, InterleavedHuggingFaceTextDataLoader

from torchtitan_qwen3_trn.config import TOP_LEVEL_HOMES, JobConfig, OptimizerOptions
from torchtitan_qwen3_trn.job.configuration import default_config
from torchtitan_qwen3_trn.job.values import describe, visible_fields
from torchtitan_qwen3_trn.plugins import Plugins, installed_plugins, load

PAGE = Path(__file__).with_name("job_file_reference.md")
DISTRIBUTION = "torchtitan-qwen3-trn"

INTRODUCTION = """\
# Job file reference

<!-- Written by docs/make_reference.py. Do not edit. -->

Every section and key of a job file, with type, default and meaning. This page is generated from the configuration
classes of this package and of torchtitan {torchtitan}; the texts of torchtitan's sections are torchtitan's own
(BSD-3-Clause, Meta Platforms and affiliates). [The job file](job_file.md) explains how the sections work together.

"Unset" means that the key has no value unless the file or a flag gives one. A key is also a flag: `[training] steps`
is `--training.steps`. Tables in double brackets, such as `[[dataloader.sources]]`, have no flags.
"""

SHORT_FORM = "Short form, one parameter group:"
FULL_FORM = "Full form, instead of the keys above but `implementation`:"


def main() -> int:
    """Write the page, or with ``--check`` compare it; returns the exit status."""
    text = reference()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is out of date; run python docs/make_reference.py")
    return 1


def reference() -> str:
    """The page."""
    config = default_config(_own_plugins())
    parts = [INTRODUCTION.format(torchtitan=version("torchtitan"))]
    names = [name for name in visible_fields(JobConfig) if name not in TOP_LEVEL_HOMES]
    first = [name for name in ("job", "model", "plugins") if name in names]
    for name in [*first, *(name for name in names if name not in first)]:
        parts += [f"## `[{name}]`\n", *_SECTIONS.get(name, _plain)(name, getattr(config, name))]
    return "\n".join(parts).rstrip() + "\n"


def _own_plugins() -> Plugins:
    """The plugins of this distribution; others that happen to be installed must not change the page."""
    own = [group[0] for group in installed_plugins().values() if group[0].distribution == DISTRIBUTION]
    plugins, _ = load(sorted(own, key=lambda plugin: plugin.name))
    return plugins


def _plain(name: str, section: Any) -> Iterator[str]:
    keys = [*_top_level(name), *_keys(section)]
    yield "\n".join(keys) + "\n" if keys else "No keys.\n"


def _plugins(name: str, section: Any) -> Iterator[str]:
    yield "\n".join(_keys(section, only=("enable", "disable"))) + "\n"
    for option in dataclasses.fields(section):
        value = getattr(section, option.name)
        if dataclasses.is_dataclass(value):
            yield f"### `[plugins.{option.name.replace('_', '-')}]`\n"
            yield "\n".join(_keys(value)) + "\n"


def _optimizer(name: str, section: Any) -> Iterator[str]:
    yield SHORT_FORM + "\n"
    yield "\n".join(_keys(OptimizerOptions())) + "\n"
    yield FULL_FORM + "\n"
    yield "\n".join(_keys(section, leave_out=("implementation", "param_groups"))) + "\n"
    yield from _list_of_tables("optimizer.param_groups", ParamGroupConfig(pattern=".*", optimizer_name="AdamW"))


def _activation_checkpoint(name: str, section: Any) -> Iterator[str]:
    mode = 'one of "none", "full", "selective", "memory_budget"'
    yield _entry("mode", mode, "selective", "What is recomputed in the backward pass. The other keys depend on it.")
    for label, policy in (("full", FullAC), ("selective", SelectiveAC), ("memory_budget", MemoryBudgetAC)):
        yield f'\nWith `mode = "{label}"`:\n'
        yield "\n".join(_keys(policy.Config())) + "\n"


def _dataloader(name: str, section: Any) -> Iterator[str]:
    yield from _plain(name, section)
    yield from _list_of_tables(f"{name}.sources", HFDataSource())
    rest = _keys(InterleavedHuggingFaceTextDataLoader.Config(sources=[HFDataSource()]), leave_out=("sources",))
    known = {item.name for item in dataclasses.fields(section)}
    new = [entry for entry in rest if not any(entry.startswith(f"- **`{key}`**") for key in known)]
    if new:
        yield "With `sources` also:\n\n" + "\n".join(new) + "\n"


def _list_of_tables(path: str, example: Any) -> Iterator[str]:
    yield f"### `[[{path}]]`\n"
    yield "\n".join(_keys(example)) + "\n"


def _top_level(section: str) -> list[str]:
    """Keys of ``section`` that torchtitan keeps outside of it."""
    hints = visible_fields(JobConfig)
    default = {item.name: item.default for item in dataclasses.fields(JobConfig)}
    return [
        _entry(key, describe(hints[key]), default[key], _field_docs(JobConfig).get(key, ""))
        for key, home in TOP_LEVEL_HOMES.items()
        if home == section
    ]


def _keys(
    section: Any, prefix: str = "", *, only: tuple[str, ...] | None = None, leave_out: tuple[str, ...] = ()
) -> list[str]:
    """One entry per key of a configuration dataclass; those of nested ones under their dotted path."""
    entries = []
    for name, hint in visible_fields(type(section)).items():
        if name in leave_out or (only is not None and name not in only) or (not prefix and name == "config_file"):
            continue
        value, docs = getattr(section, name), _field_docs(type(section)).get(name, "")
        if dataclasses.is_dataclass(value):
            entries += _keys(value, f"{prefix}{name}.")
        else:
            entries.append(_entry(prefix + name, describe(hint), value, docs))
    return entries


def _entry(key: str, kind: str, default: Any, docs: str) -> str:
    first = f"- **`{key}`** ({kind}; {_default(default)})"
    return "\n".join([first, "", textwrap.indent(_markdown(docs), "  "), ""]) if docs else first + "\n"


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    text = json.dumps(value, default=str)
    return f"default `{text}`"


def _markdown(docs: str) -> str:
    """A docstring as Markdown: roles go, and what Markdown would read as markup, outside code, is escaped."""
    docs = re.sub(r":\w+:`", "`", docs)
    pieces = re.split(r"(``.*?``|`[^`]*`)", docs, flags=re.DOTALL)
    return "".join(piece if piece.startswith("`") else re.sub(r"([*<\[\]])", r"\\\1", piece) for piece in pieces)


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """Docstrings below the fields of a dataclass and of those it inherits from."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            docs.update(_docs_in_source(each))
    return docs


def _docs_in_source(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # made at run time: it has no source
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


_SECTIONS = {
    "plugins": _plugins,
    "optimizer": _optimizer,
    "activation_checkpoint": _activation_checkpoint,
    "dataloader": _dataloader,
}


if __name__ == "__main__":
    sys.exit(main())
