"""Which tensor goes to which file, and sizes of files."""

from __future__ import annotations

import pytest
import torch

from torchtitan_qwen3_trn.hf_files.file_plan import parse_size, plan_files


def test_files_keep_the_limit_and_the_order_of_layers():
    shapes = {f"model.layers.{layer}.w": (10, 10) for layer in (10, 2, 1)} | {"big": (50, 50)}
    plan = plan_files(shapes, torch.float32, 900)
    files = {name: place.file for name, place in plan.places.items()}
    assert files["big"] == "model-00001-of-00003.safetensors"
    assert files["model.layers.1.w"] == files["model.layers.2.w"] == "model-00002-of-00003.safetensors"
    assert files["model.layers.10.w"] == "model-00003-of-00003.safetensors"
    assert plan.index["metadata"]["total_size"] == 4 * (300 + 2500)
    assert set(plan_files(shapes, torch.float32, 10**6).sizes) == {"model.safetensors"}


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), ("500 MiB", 500 * 2**20), ("1kb", 1000)])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0GB", "1.5GB", "5GB or so", "5Gbit", "9" * 400 + "GB"])
def test_a_size_without_number_or_unit_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
