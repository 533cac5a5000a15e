"""The kernels stay within what both of NKI's front ends, the parser up to 0.6 and the tracer of 0.7, understand.

The emulator runs them as Python, so it would not notice. Sources: nki-language-guide.rst and the release notes of NKI;
what is forbidden here without being named there does not occur in AWS's own kernels.
"""

import ast
from pathlib import Path

import pytest

import torchtitan_qwen3_trn.kernels

FILES = sorted(Path(torchtitan_qwen3_trn.kernels.__path__[0]).glob("*_nki.py"))
FORBIDDEN = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Yield,
    ast.YieldFrom,
    ast.Try,
    ast.Raise,
    ast.With,
    ast.ClassDef,
    ast.NamedExpr,
    ast.Starred,
    ast.Global,
    ast.Nonlocal,
    ast.JoinedStr,
    ast.Match,
    ast.Delete,
)


def problems(source: str) -> list[str]:
    """What a kernel module contains that is outside the subset, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        where = f"line {getattr(node, 'lineno', '?')}: "
        if isinstance(node, FORBIDDEN):
            found.append(where + type(node).__name__)
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            found.append(where + "is")
        elif isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
            found.append(where + "unpacking in for")
        elif isinstance(node, ast.arguments) and (node.kwonlyargs or node.posonlyargs or node.vararg or node.kwarg):
            found.append("arguments beyond plain ones")
        elif isinstance(node, ast.FunctionDef) and [ast.unparse(d) for d in node.decorator_list] not in (
            [],
            ["nki.jit"],
        ):
            found.append(where + "decorator")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernel_keeps_to_the_subset(path):
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = [i for i in y]",
        "if x is None: pass",
        "for a, b in pairs: pass",
        "def f(*, x): pass",
        "f(*x)",
        "@cache\ndef f(): pass",
        "try:\n    x\nfinally:\n    pass",
    ],
)
def test_what_is_outside_the_subset_is_found(source):
    assert problems(source)


def test_every_kernel_module_is_checked():
    assert {path.stem for path in FILES} == {
        "expert_tiles_nki",
        "experts_nki",
        "qk_norm_rope_backward_nki",
        "qk_norm_rope_nki",
        "rope_nki",
    }
