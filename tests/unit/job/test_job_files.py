"""Job files: where values come from and which one wins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import EXAMPLES, TINY_MODEL
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC


def test_every_spelling_of_the_flag_reads_the_file(parse, write_job):
    path = str(write_job(base=TINY_MODEL))
    for args in (["--job.config_file", path], [f"--job.config_file={path}"], ["--job.config-file", path]):
        outcome = parse(*args)
        assert outcome.status is None, outcome.message
        assert outcome.config.training.seq_len == 64


def test_command_line_beats_profile_beats_file_beats_default(parse_job):
    text = """
    [lr_scheduler]
    warmup_steps = 3
    decay_ratio = 0.5
    min_lr_factor = 0.1
    [profile.cpu.lr_scheduler]
    decay_ratio = 0.6
    min_lr_factor = 0.2
    """
    scheduler = parse_job(text, "--lr_scheduler.min_lr_factor", "0.3").config.lr_scheduler
    assert scheduler.decay_type == "linear"
    assert (scheduler.warmup_steps, scheduler.decay_ratio, scheduler.min_lr_factor) == (3, 0.6, 0.3)


def test_profile_keys_are_logged_and_other_profiles_do_nothing(parse_job):
    text = """
    [profile.cpu.lr_scheduler]
    warmup_steps = 7
    [profile.neuron.lr_scheduler]
    warmup_steps = 9
    """
    outcome = parse_job(text)
    assert outcome.config.lr_scheduler.warmup_steps == 7
    assert "Profile cpu changes 1 keys" in outcome.log
    assert "Profile cpu: lr_scheduler.warmup_steps: unset -> 7" in outcome.log


@pytest.mark.parametrize(("profile", "warmup"), [("neuron", 9), ("none", 200), ("cpu", 7)])
def test_profile_can_be_chosen_by_name(parse_job, profile, warmup):
    text = """
    [profile.cpu.lr_scheduler]
    warmup_steps = 7
    [profile.neuron.lr_scheduler]
    warmup_steps = 9
    """
    assert parse_job(text, "--job.profile", profile).config.lr_scheduler.warmup_steps == warmup


def test_job_and_model_sections_hold_stocks_two_top_level_fields(parse_job, tmp_path):
    outcome = parse_job(f'[job]\ndump_folder = "{tmp_path}/out"\n')
    assert outcome.config.dump_folder == f"{tmp_path}/out"
    assert Path(outcome.config.hf_assets_path).name == "tokenizer"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", None),
        ("full", FullAC.Config),
        ("selective", SelectiveAC.Config),
        ("memory_budget", MemoryBudgetAC.Config),
    ],
)
def test_activation_checkpoint_is_chosen_by_mode(parse_job, mode, expected):
    base = TINY_MODEL.replace('mode = "none"', f'mode = "{mode}"')
    config = parse_job("[compile]\nenable = true\n", base=base).config
    chosen = config.activation_checkpoint
    assert chosen is None if expected is None else type(chosen) is expected


def test_optimizer_short_form_makes_one_group(parse_job):
    text = """
    [optimizer]
    name = "Adam"
    lr = 1e-3
    betas = [0.8, 0.99]
    eps = 1e-6
    weight_decay = 0.2
    implementation = "foreach"
    """
    optimizer = parse_job(text).config.optimizer
    (group,) = optimizer.param_groups
    assert (group.pattern, group.optimizer_name, optimizer.implementation) == (".*", "Adam", "foreach")
    assert group.optimizer_kwargs == {"lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2}


def test_optimizer_full_form_keeps_the_groups(parse_job):
    text = """
    [optimizer]
    implementation = "for-loop"
    [[optimizer.param_groups]]
    pattern = "norm"
    optimizer_name = "Adam"
    optimizer_kwargs = { lr = 1e-4 }
    [[optimizer.param_groups]]
    pattern = ".*"
    optimizer_name = "AdamW"
    optimizer_kwargs = { lr = 1e-3, weight_decay = 0.1 }
    """
    groups = parse_job(text).config.optimizer.param_groups
    assert [group.pattern for group in groups] == ["norm", ".*"]
    assert groups[1].optimizer_kwargs == {"lr": 1e-3, "weight_decay": 0.1}


def test_overlay_is_judged_together_with_the_file(parse_job):
    together = """
    [compile]
    enable = true
    [profile.neuron.compile]
    enable_async_tensor_parallel = true
    """
    assert parse_job(together).status is None
    apart = parse_job("[profile.neuron.compile]\nenable_async_tensor_parallel = true\n")
    assert apart.status == 2
    assert "profile.neuron.compile" in apart.message


def test_keys_may_be_spelled_with_hyphens_everywhere(parse_job, tmp_path):
    outcome = parse_job(f"[lr-scheduler]\nwarmup-steps = 3\n[job]\ndump-folder = '{tmp_path}/x'\n")
    assert outcome.status is None, outcome.message
    assert outcome.config.lr_scheduler.warmup_steps == 3
    assert outcome.config.dump_folder == f"{tmp_path}/x"


def test_flags_named_like_the_files_keys_reach_stocks_top_level_fields(parse_job, tmp_path):
    outcome = parse_job("", "--job.dump_folder", f"{tmp_path}/y")
    assert outcome.config.dump_folder == f"{tmp_path}/y"


def test_module_form_reads_the_same_early_flags(parse, monkeypatch):
    flags = ["--module", "torchtitan_qwen3_trn", "--config", "qwen3_moe", "--job.profile", "neuron"]
    monkeypatch.setattr("sys.argv", ["train", *flags])
    outcome = parse(*flags, world_size=64)
    assert outcome.status is None, outcome.message
    assert outcome.config.training.seq_len == 4096


def test_configuration_made_in_python_is_completed_and_checked_too():
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    from torchtitan_qwen3_trn.components import NotifyingCheckpointManager
    from torchtitan_qwen3_trn.config import JobConfig, ModelOptions
    from torchtitan_qwen3_trn.job.prepare import prepare
    from torchtitan_qwen3_trn.models.qwen3.flavors import flavor
    from torchtitan_qwen3_trn.models.qwen3.spec import model_spec
    from torchtitan_qwen3_trn.plugins import load_plugins_of

    config = JobConfig(
        model=ModelOptions(flavor="debugmodel"),
        model_spec=model_spec(flavor("debugmodel"), flavor="mine"),
        dataloader=HuggingFaceTextDataLoader.Config(),
        optimizer=default_adamw(),
    )
    plugins, problems = load_plugins_of(config)
    job = prepare(config, plugins, earlier=problems)
    assert config.model_spec.flavor == "mine"
    assert job.overrides == {"sdpa": 8, "gather-free-rope": 8}
    assert isinstance(config.checkpoint, NotifyingCheckpointManager.Config)


def test_gradient_accumulation_steps_set_the_global_batch(parse_job):
    config = parse_job("[job]\ngradient_accumulation_steps = 3\n", world_size=2).config
    assert config.training.global_batch_size == 3 * 2 * 2


def test_plugin_options_take_hyphens_and_underscores(parse_job):
    for spelling in ("gather-free-rope", "gather_free_rope"):
        outcome = parse_job(f'[plugins.{spelling}]\nfqns = ["layers.0"]\n')
        assert outcome.status is None, outcome.message
        assert outcome.config.plugins.gather_free_rope.fqns == ["layers.0"]


def test_plugin_options_can_be_set_on_the_command_line(parse_job):
    outcome = parse_job("", "--plugins.sdpa.no-document-mask")
    assert outcome.config.plugins.sdpa.document_mask is False


def test_help_with_a_job_file_lists_model_and_plugin_options(parse, write_job):
    outcome = parse("--job.config_file", write_job(base=TINY_MODEL), "--help")
    assert outcome.status == 0
    for flag in ("--model.backend", "--model.n-layers", "--plugins.enable", "--plugins.sdpa.document-mask"):
        assert flag in outcome.message


def test_moe_example_is_the_64_rank_recipe_on_neuron(parse):
    outcome = parse("--job.config_file", EXAMPLES / "qwen3_moe.toml", "--job.profile", "neuron", world_size=64)
    assert outcome.status is None, outcome.message
    config, model = outcome.config, outcome.config.model_spec.model
    moe, attention = model.layers[0].moe, model.layers[0].attention
    experts = moe.routed_experts.inner_experts
    assert (len(model.layers), moe.num_experts, moe.router.top_k) == (4, 64, 4)
    # Qwen3-30B-A3B: hidden_size 2048, 32/4 heads of 128, moe_intermediate_size 768, vocabulary 151,936.
    assert (model.dim, attention.n_heads, attention.n_kv_heads, attention.head_dim) == (2048, 32, 4, 128)
    assert (experts.hidden_dim, model.vocab_size) == (768, 151936)
    assert config.parallelism.data_parallel_shard_degree == 64
    assert config.parallelism.tensor_parallel_degree == config.parallelism.expert_parallel_degree == 1
    assert not config.compile.enable


def test_cpu_profiles_of_the_examples_change_only_sizes(parse):
    sizes = {"model", "training", "parallelism"}
    for example in ("qwen3_moe", "qwen3_4b_native"):
        outcome = parse("--job.config_file", EXAMPLES / f"{example}.toml")
        assert outcome.status is None, outcome.message
        changed = [line.split("Profile cpu: ")[1] for line in outcome.log.splitlines() if "Profile cpu: " in line]
        assert changed
        assert {line.split(".")[0] for line in changed} <= sizes


def test_a_fifo_is_not_opened(parse, tmp_path):
    os.mkfifo(tmp_path / "job.toml")
    outcome = parse("--job.config_file", tmp_path / "job.toml")
    assert outcome.status == 2
    assert "is not a regular file" in outcome.message


def test_a_file_that_is_nested_too_deeply_is_refused(parse_job):
    outcome = parse_job("x = " + "[" * 5000, base="")
    assert outcome.status == 2
    assert "nested too deeply" in outcome.message
