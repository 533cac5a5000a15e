"""Kernel tests run for Trainium2, where AWS's own simulator would otherwise choose the newest device."""

import pytest


@pytest.fixture(autouse=True)
def trainium2(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
