"""Every benchmark says what it measures and how to make it short."""

from __future__ import annotations

import importlib

import pytest

QUICK = ("experts_reference", "first_loss", "hf_route", "import_time", "route_overhead", "weights")
MODELLED = ("kernels.experts", "kernels.rope")


@pytest.mark.parametrize("name", [*QUICK, *MODELLED])
def test_help_of_a_benchmark_prints_its_description_and_options(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert module.__doc__.splitlines()[0] in printed
    assert ("--quick" in printed) == (name in QUICK)
