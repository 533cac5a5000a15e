"""Run nki-library's own integration tests, kernels and references unmodified, on the emulator.

    python -m nki_emulator.public_kernels.library_tests PATH_TO_NKI_LIBRARY [pytest arguments]

AWS's tests build inputs, name a kernel and a reference, and hand both to a `test_manager` that compiles and runs on a
Trainium host. Here the `test_manager` runs the emulator and compares by AWS's rule: the difference of each element is
at most atol + rtol * the largest absolute reference. Packages that only serve hosts, metrics and uploads are replaced
by empty ones. A test that takes longer than SECONDS_PER_TEST (default 20) is skipped; MX tests need trn3 and fail.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import nki_emulator
from nki_emulator import dtypes

SECONDS = int(os.environ.get("SECONDS_PER_TEST", "20"))
UNUSED_PACKAGES = (
    "aws_embedded_metrics",
    "boto3",
    "botocore",
    "fabric2",
    "filelock",
    "invoke",
    "paramiko",
    "plotext",
    "pytest_html",
)


class _Empty(ModuleType):
    """A module in which every name is a class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {"__init__": lambda self, *args, **kwargs: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        wanted = name.split(".")[0] in UNUSED_PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def neuron_dtypes() -> ModuleType:
    """Stand-in for AWS's private package of type names, casts and a query."""
    module = ModuleType("neuron_dtypes")
    vars(module).update(
        {name: d if d.kind == "p" else d.np for name, d in dtypes.ALL.items()},
        static_cast=lambda x, dtype: np.asarray(x).astype(np.dtype(dtype)),
        is_float_type=lambda dtype: dtypes.as_dtype(dtype).is_float,
        sizeinbytes=lambda dtype: dtypes.as_dtype(dtype).itemsize,
        finfo=lambda dtype: ml_dtypes.finfo(dtypes.as_dtype(dtype).np),
    )
    return module


def prepare(library: Path) -> None:
    """Everything AWS's test modules import."""
    nki_emulator.install(force=True)
    sys.path[:0] = [str(library / "src"), str(library)]
    sys.meta_path.append(_Finder())
    sys.modules["test.utils.test_orchestrator"] = _Empty("test.utils.test_orchestrator")
    sys.modules["neuron_dtypes"] = neuron_dtypes()
    if importlib.util.find_spec("attr") is None:
        sys.modules["attr"] = ModuleType("attr")
        sys.modules["attr"].dataclass = dataclasses.dataclass  # type: ignore[attr-defined]
    if importlib.util.find_spec("allpairspy") is None:
        sys.modules["allpairspy"] = ModuleType("allpairspy")
        sys.modules["allpairspy"].AllPairs = _pairs  # type: ignore[attr-defined]


def _pairs(values: Any, filter_func: Any = None, **_: Any) -> Iterator[list[Any]]:
    """A few combinations in place of a pairwise cover: the first value of all, then each other value once."""
    base = [v[0] for v in values]
    rows = [base] + [[*base[:i], x, *base[i + 1 :]] for i, v in enumerate(values) for x in v[1:]]
    return iter([row for row in rows if filter_func is None or filter_func(row)])


class Manager:
    """AWS's `Orchestrator`, reduced to simulate and compare."""

    def execute(self, kernel_args: Any) -> None:
        import nki

        arguments = {k.removesuffix(".must_alias_input"): v for k, v in (kernel_args.kernel_input or {}).items()}
        compiler = kernel_args.compiler_input
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = str(compiler.platform_target).split("_")[0]
        result = nki.simulate(nki.jit(kernel_args.kernel_func)[compiler.logical_nc_config or 1])(**arguments)
        got = list(result) if isinstance(result, (list, tuple)) else [result]
        golden = kernel_args.validation_args.golden_output
        if not hasattr(golden, "golden"):
            pytest.skip("validated by a program of AWS's host")
        expected = golden.golden
        if expected is None:
            return
        names = list(golden.output_ndarray)
        assert len(got) == len(names), f"{len(got)} outputs, {names} expected"
        for name, array in zip(names, got, strict=True):
            self.compare(name, array, np.asarray(expected[name]), kernel_args.validation_args)

    def compare(self, name: str, got: np.ndarray, want: np.ndarray, tolerance: Any) -> None:
        got, want = got.astype(np.float64).reshape(-1), want.astype(np.float64).reshape(-1)
        assert got.size == want.size, f"{name}: {got.size} elements, {want.size} expected"
        largest = np.nanmax(np.abs(want[np.isfinite(want)]), initial=0.0)
        limit = tolerance.absolute_accuracy + tolerance.relative_accuracy * largest
        same = (got == want) | (np.abs(got - want) <= limit)
        nan = int((np.isnan(got) & ~np.isnan(want)).sum())
        wrong = int((~same).sum())
        assert not wrong, (
            f"{name}: {wrong} of {same.size} differ by more than {limit:.3g}; {nan} are NaN, unwritten memory"
        )


class Plugin:
    """Fixtures and the two hooks of AWS's conftest that decide which tests there are."""

    @pytest.fixture
    def test_manager(self) -> Manager:
        return Manager()

    @pytest.fixture
    def collector(self) -> Any:
        return _Empty("collector").Collector()

    @pytest.fixture
    def platform_target(self) -> Any:
        from test.utils.common_dataclasses import Platforms

        return Platforms.TRN2

    def pytest_generate_tests(self, metafunc: Any) -> None:
        from test.utils import coverage_parametrized_tests as coverage

        marker = metafunc.definition.get_closest_marker("coverage_parametrize")
        if not marker:
            return
        options = ("coverage", "filter", "enable_automatic_boundary_tests", "enable_invalid_combination_tests",
                   "n_tests_per_boundary_value", "max_invalid_tests")  # fmt: skip
        values = {k: v for k, v in marker.kwargs.items() if k not in options}
        cases = coverage.generate_parametrized_test_case(
            params=values,
            coverage="singles",
            filter_func=marker.kwargs.get("filter"),
            enable_automatic_boundary_tests=False,
            enable_invalid_combination_tests=False,
            n_tests_per_boundary_value=0,
            max_invalid_tests=0,
        )
        names, rows, ids = coverage.extract_parametrize_args(values, cases)
        metafunc.parametrize(names, rows, ids=ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        def late(*_: Any) -> None:
            pytest.skip(f"longer than {SECONDS} s")

        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    library = Path(sys.argv[1]).resolve()
    prepare(library)
    where = [a for a in sys.argv[2:] if not a.startswith("-") and (library / a.split("::")[0]).exists()]
    rest = [a for a in sys.argv[2:] if a not in where]
    targets = [str(library / a) for a in where] or [str(library / "test" / "integration" / "nkilib")]
    options = [
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "--rootdir",
        str(library),
        "-c",
        os.devnull,
        "-W",
        "ignore",
        "-p",
        "no:xdist",
    ]
    return int(pytest.main([*options, *itertools.chain(rest, targets)], plugins=[Plugin()]))


if __name__ == "__main__":
    sys.exit(main())
