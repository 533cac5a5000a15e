"""The loss of random weights, and the report when loaded weights look like them."""

import logging
from types import SimpleNamespace

import pytest
import torch

from torchtitan_qwen3_trn.models import first_loss


def test_expected_first_loss_of_the_4b_model():
    assert first_loss.expected_first_loss(151_936, 2560, 0.02) == pytest.approx(12.443, abs=5e-4)
    assert first_loss.expected_first_loss(151_936, 2560, 1e-9) == pytest.approx(11.931, abs=5e-4)


def test_only_a_loss_clearly_below_that_of_random_weights_passes():
    assert first_loss.looks_random(12.44, 12.44)
    assert first_loss.looks_random(13.9, 12.44)
    assert not first_loss.looks_random(2.3, 12.44)
    assert not first_loss.looks_random(11.9, 12.44)


@pytest.mark.parametrize(("loss", "speaks"), [(7.6, True), (5.0, False)])
def test_random_looking_weights_are_reported_loudly(monkeypatch, caplog, loss, speaks):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    config = SimpleNamespace(checkpoint=SimpleNamespace(initial_load_path=None), hf_assets_path="weights")
    dims = SimpleNamespace(dp_cp_enabled=False, pp_enabled=False)
    with caplog.at_level(logging.WARNING):
        first_loss.report_random_first_loss(config, torch.tensor(loss), dims, 7.65)
    assert ("THE WEIGHTS LOOK RANDOM" in caplog.text) is speaks


@pytest.mark.parametrize(("step", "in_hf", "asked"), [(1, True, 1), (2, True, 0), (1, False, 0)])
@pytest.mark.parametrize("backend", ["native", "huggingface_v5"])
def test_only_the_first_step_from_published_weights_is_judged(parse_job, monkeypatch, backend, step, in_hf, asked):
    job = parse_job("", "--model.backend", backend).job
    job.config.checkpoint.enable, job.config.checkpoint.initial_load_in_hf = True, in_hf
    reports = []
    monkeypatch.setattr(first_loss, "report_random_first_loss", lambda *args: reports.append(args[-1]))
    trainer = SimpleNamespace(model_parts=[], parallel_dims=None, device=None)
    job.plugins.call("after_step", job.config, trainer=trainer, step=step, local_loss=torch.tensor(1.0), log=None)
    assert len(reports) == asked
    assert all(7 < expected < 9 for expected in reports)
