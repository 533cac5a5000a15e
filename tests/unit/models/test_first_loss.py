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


@pytest.mark.parametrize(("step", "loss", "speaks"), [(1, 7.6, True), (1, 5.0, False), (2, 7.6, False)])
def test_random_looking_weights_are_reported_once_and_loudly(monkeypatch, caplog, step, loss, speaks):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(enable=True, initial_load_in_hf=True, initial_load_path=None),
            hf_assets_path="weights",
        ),
        local_loss=torch.tensor(loss),
        parallel_dims=SimpleNamespace(dp_cp_enabled=False, pp_enabled=False),
    )
    with caplog.at_level(logging.WARNING):
        first_loss.report_random_first_loss(trainer, step, 7.65)
    assert ("THE WEIGHTS LOOK RANDOM" in caplog.text) is speaks
