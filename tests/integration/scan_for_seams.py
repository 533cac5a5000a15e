"""Train, then print as JSON every attribute of the host libraries that points into this package.

Run as a program: it needs a process of its own, with nothing imported but what training imports.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

HOSTS = ("torch", "torchtitan", "transformers", "safetensors")
OURS = "torchtitan_qwen3_trn"


def is_ours(value: object) -> bool:
    owner = value if isinstance(value, ModuleType | type) or callable(value) else type(value)
    name = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", "")
    kind = type(value).__module__ if not isinstance(value, type) else ""
    # A function that poses as another keeps the globals of the module it was written in.
    written_in = value.__globals__.get("__name__", "") if isinstance(value, FunctionType) else ""
    return any(str(text or "").split(".")[0] == OURS for text in (name, kind, written_in))


def attributes() -> Iterator[tuple[str, str, object]]:
    seen: set[int] = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in HOSTS or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            yield module_name, name, value
            if isinstance(value, type) and value.__module__.split(".")[0] in HOSTS and id(value) not in seen:
                seen.add(id(value))
                for member, inner in list(vars(value).items()):
                    yield f"{module_name}.{name}", member, inner


def copied_by_stock_itself(module_name: str, attribute: str, value: object) -> bool:
    """Whether the module's own source says ``from elsewhere import attribute`` and elsewhere holds ``value``."""
    module = sys.modules.get(module_name)
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return False
    sources = (
        importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == attribute for alias in node.names)
    )
    return any(getattr(sys.modules.get(source), attribute, None) is value for source in sources)


def registered_attention() -> list[str]:
    """Names in Transformers' registry of attention functions that it does not have by itself."""
    modeling = sys.modules.get("transformers.modeling_utils")
    names = modeling.ALL_ATTENTION_FUNCTIONS.valid_keys() if modeling else []
    return [name for name in names if "document_mask" in name]


def main() -> None:
    from torchtitan import train

    train.main()
    found = [row for row in attributes() if is_ours(row[2])]
    rows = [(module, name, copied_by_stock_itself(module, name, value)) for module, name, value in found]
    rows += [("transformers", name, False) for name in registered_attention()]
    print("SEAMS", json.dumps(sorted(set(rows))))


if __name__ == "__main__":
    main()
