"""The CPU device module answers everything torchtitan asks of an accelerator."""

from __future__ import annotations

import mmap

import torch

from torchtitan_qwen3_trn.device.cpu import CpuDeviceModule, cpu_device_module


def test_torchtitans_memory_monitor_reads_this_process():
    from torchtitan.components.metrics import build_device_memory_monitor

    monitor = build_device_memory_monitor()
    stats = monitor.get_peak_stats()
    assert monitor.device_capacity_gib > 1
    assert 0 < stats.max_active_gib <= stats.max_reserved_gib < monitor.device_capacity_gib
    assert (stats.num_alloc_retries, stats.num_ooms) == (0, 0)


def test_peak_grows_with_memory_and_falls_after_a_reset():
    size = 256 * 2**20
    cpu_device_module.reset_peak_memory_stats()
    before = cpu_device_module.memory_allocated()
    with mmap.mmap(-1, size) as block:  # goes back to the system at once, which a tensor's memory need not
        block.write(bytes(size))
    assert cpu_device_module.max_memory_allocated() > before + 0.9 * size
    cpu_device_module.reset_peak_memory_stats()
    assert cpu_device_module.max_memory_allocated() < before + 0.5 * size


def test_every_rank_uses_device_zero(monkeypatch):
    from torchtitan.tools.utils import get_local_device

    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_local_device() == torch.device("cpu", 0)
    assert cpu_device_module.current_device() == 0


def test_random_state_round_trip():
    state = cpu_device_module.get_rng_state()
    first = torch.rand(4)
    cpu_device_module.set_rng_state(state)
    assert torch.equal(first, torch.rand(4))
    cpu_device_module.manual_seed_all(1)
    seeded = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(seeded, torch.rand(4))


def test_what_it_does_not_define_comes_from_torch_cpu():
    assert cpu_device_module.Stream is torch.cpu.Stream
    assert cpu_device_module.synchronize() is None


def test_running_on_the_cpu_is_logged_once(caplog):
    caplog.set_level("INFO")
    module = CpuDeviceModule()
    module.set_device("cpu:0")
    module.set_device("cpu:0")
    assert caplog.text.count("No accelerator found") == 1
