"""Flags with the short keys of job files."""

from __future__ import annotations

import pytest
from conftest import TINY_MODEL

from torchtitan_qwen3_trn.job.command_line import parse_flags


def test_flags_of_this_package_are_taken_and_the_rest_stays_in_order():
    args = ["--training.steps", "5", "--plugins.enable=a,b", "--job.config-file", "x.toml", "--debug.seed=1"]
    flags = parse_flags(args)
    assert flags.job_file == "x.toml"
    assert flags.table == {"plugins": {"enable": ["a", "b"]}}
    assert flags.rest == ["--training.steps", "5", "--debug.seed=1"]


def test_without_a_job_file_stock_gets_every_argument():
    args = ["--module", "qwen3", "--config", "qwen3_debugmodel", "--optimizer.implementation", "foreach"]
    assert parse_flags(args).rest == args


def group(outcome) -> dict:
    assert outcome.status is None, outcome.message
    return outcome.config.optimizer.param_groups[0].optimizer_kwargs


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--optimizer.lr", "1e-4"], "lr", 1e-4),
        (["--optimizer.lr=0.5"], "lr", 0.5),
        (["--optimizer.betas", "0.8,0.9"], "betas", (0.8, 0.9)),
        (["--optimizer.betas", "[0.8, 0.9]"], "betas", (0.8, 0.9)),
        (["--optimizer.weight-decay", "0"], "weight_decay", 0.0),
        (["--optimizer.weight_decay", "0.2", "--optimizer.weight_decay", "0.3"], "weight_decay", 0.3),
    ],
)
def test_short_keys_of_the_optimizer_are_flags_too(parse_job, flags, key, value):
    assert group(parse_job("[optimizer]\nlr = 1e-3\n", *flags))[key] == value


def test_a_flag_wins_over_the_profile(parse_job):
    text = "[optimizer]\nlr = 1e-3\n[profile.cpu.optimizer]\nlr = 2e-3\n"
    assert group(parse_job(text))["lr"] == 2e-3
    assert group(parse_job(text, "--optimizer.lr", "3e-3"))["lr"] == 3e-3


def test_activation_checkpoint_mode_and_top_level_keys_are_flags_under_their_file_names(parse_job, tmp_path):
    outcome = parse_job("", "--activation_checkpoint.mode", "full", "--job.dump_folder", str(tmp_path / "here"))
    assert type(outcome.config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert outcome.config.dump_folder == str(tmp_path / "here")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optimizer.lr", "fast"], ["optimizer.lr: expected a number", '"fast"']),
        (["--optimizer.lr"], ["optimizer.lr: expected a number"]),
        (["--optimizer.name", "SGD"], ["optimizer.name", "Adam"]),
        (["--activation_checkpoint.mode", "some"], ["activation_checkpoint.mode", "selective"]),
        (["--job.profile", "gpu"], ["job.profile", "cuda"]),
    ],
)
def test_a_wrong_value_in_a_flag_is_reported_by_its_key(parse_job, flags, words):
    outcome = parse_job("[profile.cpu.training]\nsteps = 4\n", *flags, base=TINY_MODEL)
    assert outcome.status == 2
    assert "profile.cpu" not in outcome.message
    for word in words:
        assert word in outcome.message
