"""What the documentation claims of the kernels' modelled time, as the benchmarks compute it (benchmarks/kernels)."""

import importlib
from pathlib import Path

import pytest
from nki_emulator.testing import emulator_only

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "kernels"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@emulator_only
def test_rope_is_near_its_bound_and_fusing_the_norm_with_it_pays(benchmark):
    rope = benchmark("rope")
    ratios = rope.measure(rope.HEADS["Qwen3-30B-A3B"], 1024)
    assert ratios["RoPE, HBM bytes / least"] == 1
    assert ratios["RoPE forward / bound"] < 1.05
    assert ratios["RoPE backward / bound"] < 1.05
    assert ratios["QK-norm and RoPE apart / fused, forward"] > 1.6
    assert ratios["QK-norm and RoPE apart / fused, backward"] > 1.6


@emulator_only
def test_experts_are_near_their_bound_and_skewed_routing_costs_little_more(benchmark):
    ratios = benchmark("experts").measure()
    assert ratios["forward / bound"] < 1.3
    assert ratios["forward and backward / bound"] < 1.35
    assert ratios["forward, Zipf / balanced"] < 1.15
    assert ratios["forward and backward, Zipf / balanced"] < 1.2
