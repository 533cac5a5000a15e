"""What the documentation claims of the kernels' modelled time, as the benchmarks compute it (benchmarks/kernels)."""

from nki_emulator.testing import emulator_only

from benchmarks.kernels import experts, rope  # isort: skip  (import nki, which the emulator provides)


@emulator_only
def test_rope_is_near_its_bound_and_fusing_the_norm_with_it_pays():
    ratios = rope.measure(rope.HEADS["Qwen3-30B-A3B"], 1024)
    assert ratios["RoPE, HBM bytes / least"] == 1
    assert ratios["RoPE forward / bound"] < 1.05
    assert ratios["RoPE backward / bound"] < 1.05
    assert ratios["QK-norm and RoPE apart / fused, forward"] > 1.6
    assert ratios["QK-norm and RoPE apart / fused, backward"] > 1.6


@emulator_only
def test_experts_are_near_their_bound_and_skewed_routing_costs_little_more():
    ratios = experts.measure()
    assert ratios["forward / bound"] < 1.3
    assert ratios["forward and backward / bound"] < 1.35
    assert ratios["forward, Zipf / balanced"] < 1.15
    assert ratios["forward and backward, Zipf / balanced"] < 1.2
