"""torchtitan 0.2.x files and keys of published write-ups."""

from __future__ import annotations

import pytest
from conftest import TINY_MODEL

# In the shape of the Qwen3 files published with torchtitan 0.2.x: every section they have, with their values.
PUBLISHED_SHAPE = """
[job]
dump_folder = "./outputs"
description = "debug model"

[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 1
enable_tensorboard = false
save_tb_folder = "tb"

[model]
name = "qwen3"
flavor = "debugmodel_moe"
hf_assets_path = "./tests/assets/tokenizer"

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 2

[training]
local_batch_size = 4
seq_len = 4096
max_norm = 1.0
steps = 10
dataset = "c4_test"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 10
last_save_model_only = false
export_dtype = "float16"
async_mode = "disabled"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable=false
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
"""


def test_file_of_the_published_shape_loads_unchanged_with_one_warning_per_key(parse_job):
    outcome = parse_job(base=PUBLISHED_SHAPE)
    assert outcome.status is None, outcome.message
    config = outcome.config
    assert (config.profiler.profile_freq, config.profiler.save_traces_folder) == (100, "profile_trace")
    assert config.dataloader.dataset == "c4_test"
    assert config.checkpoint.export_dtype == "float16"
    for key in ("profiling.profile_freq", "training.dataset", "activation_checkpoint.selective_ac_option"):
        assert sum(f" {key} is " in line for line in outcome.log.splitlines()) == 1


MOVED = [
    ('[profiling]\nprofiler_warmup = 2', lambda c: c.profiler.profiler_warmup == 2),
    ('[validation]\nenable = true\nfreq = 5\nsteps = 2\ndataset = "c4_test"', lambda c: c.validator.enable
     and c.validator.freq == 5 and c.validator.dataloader.dataset == "c4_test"),
    ('[training.dataloader]\nnum_workers = 1', lambda c: c.dataloader.num_workers == 1),
    ('[optimizer]\nbeta1 = 0.8', lambda c: c.optimizer.param_groups[0].optimizer_kwargs["betas"] == (0.8, 0.95)),
    ('[optimizer]\nbeta1 = 0.8\nbeta2 = 0.9',
     lambda c: c.optimizer.param_groups[0].optimizer_kwargs["betas"] == (0.8, 0.9)),
    ('[job]\nexperiment_name = "x"', lambda c: c.job.description == "x"),
    ("[optimizer]\nbeta1 = 0.8\nbeta2 = 0.99\n[profile.cpu.optimizer]\nbeta1 = 0.7",
     lambda c: c.optimizer.param_groups[0].optimizer_kwargs["betas"] == (0.7, 0.99)),
    ('[job]\nmodel_parallel_size = 1', lambda c: c.parallelism.data_parallel_shard_degree == 1),
    ('[job]\nenable_checkpoint = true\ncheckpoint_folder = "ck"',
     lambda c: c.checkpoint.enable and c.checkpoint.folder == "ck"),
    ('[job]\nprint_config = true', lambda c: c.debug.print_config),
    ('[parallelism]\nenable_async_tensor_parallel = false', lambda c: not c.compile.enable_async_tensor_parallel),
]  # fmt: skip


@pytest.mark.parametrize(("text", "holds"), MOVED, ids=[text.replace("\n", " ") for text, _ in MOVED])
def test_moved_key_takes_effect_under_its_new_name(parse_job, text, holds):
    outcome = parse_job(text)
    assert outcome.status is None, outcome.message
    assert holds(outcome.config)
    assert "is read as" in outcome.log


def test_training_batch_size_and_accumulation_are_read(parse_job):
    base = TINY_MODEL.replace("local_batch_size = 2", "batch_size = 3\ngradient_accumulation_steps = 4")
    config = parse_job(base=base).config
    assert (config.training.local_batch_size, config.training.global_batch_size) == (3, 12)


IGNORED = [
    '[experimental]\ncustom_import = ""',
    "[optimizer]\nearly_step_in_backward = false",
    "[parallelism]\nenable_compiled_autograd = false",
    "[parallelism]\npipeline_parallel_expert_parallel_overlap = false",
    '[job]\nexperiment_name = "x"\ndescription = "y"',
    "[parallelism]\ndisable_loss_parallel = false",
    '[parallelism]\ncontext_parallel_rotate_method = "allgather"',
    "[memory_estimation]\nenable = false\ndisable_fake_mode = false",
    '[fault_tolerance]\nenable = false\nprocess_group = "gloo"\nreplica_id = 3',
    "[validation]\nlocal_batch_size = 8\nseq_len = 2048",
    '[quantize.linear.mx]\nrecipe_name = "mxfp8_cublas"',
]


@pytest.mark.parametrize("text", IGNORED)
def test_key_that_asks_for_nothing_is_ignored_with_a_warning(parse_job, text):
    outcome = parse_job(text)
    assert outcome.status is None, outcome.message
    assert "is ignored" in outcome.log


def test_norm_type_accepts_rmsnorm_only(parse_job):
    ignored = parse_job(base=TINY_MODEL.replace("[model]", '[model]\nnorm_type = "RMSNorm"'))
    refused = parse_job(base=TINY_MODEL.replace("[model]", '[model]\nnorm_type = "layernorm"'))
    assert ignored.status is None
    assert refused.status == 2
    assert "model.norm_type" in refused.message


REFUSED = [
    ('[experimental]\ncustom_import = "my.module"', "experimental.custom_import"),
    ("[optimizer]\nearly_step_in_backward = true", "optimizer.early_step_in_backward"),
    ("[parallelism]\ndisable_loss_parallel = true", "parallelism.disable_loss_parallel"),
    ('[parallelism]\nexpert_parallel_comm_backend = "deepep"', "parallelism.expert_parallel_comm_backend"),
    ("[fault_tolerance]\nenable = true", "fault_tolerance.enable"),
    ("[validation]\nseq_len = 128", "validation.seq_len"),
    ("[optimizer]\nbeta1 = 0.8\nbetas = [0.9, 0.9]", "optimizer.betas"),
    ("[job]\nenable_checkpoint = true\n[checkpoint]\nenable_checkpoint = false", "checkpoint.enable_checkpoint"),
]


@pytest.mark.parametrize(("text", "key"), REFUSED, ids=[key for _, key in REFUSED])
def test_key_that_asks_for_what_is_gone_is_an_error(parse_job, text, key):
    outcome = parse_job(text)
    assert outcome.status == 2
    assert key in outcome.message


def test_layer_count_selective_checkpointing_is_refused_only_in_selective_mode(parse_job):
    option = 'selective_ac_option = "3"'
    assert parse_job(base=TINY_MODEL + option).status is None
    refused = parse_job(base=TINY_MODEL.replace('mode = "none"', f'mode = "selective"\n{option}'))
    assert refused.status == 2


def test_converters_are_refused_and_so_is_their_section(parse_job):
    base = TINY_MODEL.replace("[model]", '[model]\nconverters = ["float8"]')
    outcome = parse_job('[quantize.linear.float8]\nrecipe_name = "rowwise"\n', base=base)
    assert outcome.status == 2
    assert "model.converters" in outcome.message
    assert "quantize.linear.float8.recipe_name" in outcome.message


def test_old_and_new_name_may_agree_but_not_contradict(parse_job):
    agree = parse_job('[training]\ndataset = "c4_test"\n[dataloader]\ndataset = "c4_test"\n', base=TINY_MODEL.replace(
        "[training]\nlocal_batch_size = 2\nseq_len = 64\nsteps = 3\n", ""))  # fmt: skip
    contradict = parse_job("[profiling]\nprofile_freq = 3\n[profiler]\nprofile_freq = 4\n")
    assert agree.status is None, agree.message
    assert contradict.status == 2
    assert "profiling.profile_freq" in contradict.message
