"""A job that cannot run gives one message that names the place, the fault and the remedy."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import TINY_MODEL

from torchtitan_qwen3_trn.assets import tokenizer_path

TOKENIZER = tokenizer_path() / "tokenizer.json"

GROUP = """
[[optimizer.param_groups]]
pattern = "{}"
optimizer_name = "{}"
optimizer_kwargs = {{{}}}
"""

# (lines put in, words the message must contain)
BAD_KEYS = [
    ("[trainning]\nsteps = 1", ["trainning: unknown key", "did you mean 'training'"]),
    ("[metrics2]\nx = 1", ["metrics2: unknown key"]),
    ("[profiler]\nprofile_frequency = 1", ["profiler.profile_frequency: unknown key", "'profile_freq'"]),
    ('[profiler]\nprofile_freq = "8"', ["profiler.profile_freq: expected an integer", 'the string "8"', "quotes"]),
    ("[profiler]\nprofile_freq = true", ["profiler.profile_freq: expected an integer, found true"]),
    ("[profiler]\nprofile_freq = 2.0", ["profiler.profile_freq: expected an integer, found the number 2.0"]),
    ("[profiler]\nenable_profiling = 1", ["profiler.enable_profiling: expected true or false, found the integer 1"]),
    ('[debug]\nseed = ["a"]', ["debug.seed: expected an integer"]),
    ('[checkpoint]\nexport_dtype = "bfloat61"', ["checkpoint.export_dtype", '"bfloat16"', "did you mean"]),
    ("[checkpoint]\ninterval = 0", ["checkpoint.interval: the integer 0 is refused", "at least 1 step"]),
    ("[checkpoint]\nkeep_latest_k = 1", ["checkpoint.keep_latest_k: the integer 1 is refused", "at least 2"]),
    ("[checkpoint]\ninitial_load_path = 'here'", ["checkpoint.initial_load_path:", "must be an absolute path"]),
    ("[checkpoint]\ninitial_load_in_hf = true\ninitial_load_model_only = false", ["checkpoint: ", "requires"]),
    ("[checkpoint]\nenable = true\nload_step = 5", ["checkpoint.load_step:", "no complete checkpoint of step 5"]),
    ("[profile.neuron.checkpoint]\ninterval = 0", ["profile.neuron.checkpoint.interval: the integer 0"]),
    ("[validator]\nsteps = 0", ["1 problem\n", "validator.steps: the integer 0 is refused"]),
    ("[debug]\nbatch_invariant = true", ["1 problem\n", "debug.batch_invariant: ", "pre-training"]),
    ("[debug]\nseed = 9223372036854775808", ["debug.seed: 9223372036854775808 is out of range", "9223372036854775807"]),
    ("[plugins]\nenable = ['safetensors-export']\n[plugins.safetensors-export]\nsteps = [1, 18446744073709551616]",
     ["plugins.safetensors-export.steps: 18446744073709551616 is out of range"]),
    ("[compile]\nenable = true\ncomponents = ['modell']", ["compile.components: 'modell'", "model and loss"]),
    ("[compile]\nenable = true\nbackend = 'inductr'", ["compile.backend", "'inductr'", "inductor"]),
    ("[profiler]\nenable_profiling = true\nprofile_freq = 2", ["profiler.profile_freq: 2 is less than", "at least 4"]),
    ("[dataloader]\nnum_workers = 1\nprefetch_factor = 0", ["dataloader.prefetch_factor: 0"]),
    ("[optimizer]\nweight_decay = nan", ["optimizer.weight_decay: nan"]),
    ("[optimizer]\nlr = inf", ["optimizer.lr: inf"]),
    ("[tokenizer]\nx = 1", ["tokenizer.x: unknown key; there are none"]),
    ("[job]\nconfig_file = 'other.toml'", ["job.config_file: is this file"]),
    ("[lr_scheduler]\nwarmup_steps = -1", ["lr_scheduler.warmup_steps: -1"]),
    ("[lr_scheduler]\ndecay_ratio = 7.0", ["lr_scheduler.decay_ratio: 7.0", "from 0 to 1"]),
    ("[optimizer]\nlr = -1.0", ["optimizer.lr: -1.0"]),
    ("[optimizer]\nbetas = [0.9, 1.5]", ["optimizer.betas"]),
    ("[optimizer]\nbetas = [0.9]", ["optimizer.betas: expected a list of 2 numbers, found the list [0.9]"]),
    (GROUP.format("(", "AdamW", ""), ["optimizer.param_groups[0].pattern: '(' is not a regular expression"]),
    (GROUP.format(".*", "SGD", ""),
     ["optimizer.param_groups[0].optimizer_name: torchtitan has no optimizer 'SGD'", "AdamW"]),
    (GROUP.format(".*", "AdamW", "lrr = 1.0"),
     ["optimizer.param_groups[0].optimizer_kwargs.lrr: AdamW has no such option", "'lr'"]),
    (GROUP.format(".*", "AdamW", "lr = 'x'"), ["optimizer.lr: expected a number, found the string \"x\""]),
    (GROUP.format(".*", "AdamW", "betas = 0.9"), ["optimizer.betas: expected a list of 2 numbers"]),
    (GROUP.format("norm", "AdamW", ""), ["optimizer.param_groups: no pattern matches", "tok_embeddings.weight"]),
    (GROUP.format("nor", "AdamW", "") + GROUP.format("norm", "AdamW", "") + GROUP.format(".*", "Adam", ""),
     ["1 problem\n", "optimizer.param_groups[1].pattern: 'norm' matches no parameter"]),
    ('[optimizer]\nname = "SGD"', ["optimizer.name", '"AdamW"']),
    ("[parallelism]\ntensor_parallel_degree = 0", ["parallelism.tensor_parallel_degree: 0"]),
    ("[parallelism]\ndata_parallel_shard_degree = -2", ["parallelism.data_parallel_shard_degree: -2"]),
    ("[parallelism]\ndata_parallel_shard_degree = 8", ["= 8 ranks, but the job was started with 1"]),
    ("[parallelism]\nexpert_parallel_degree = 2", ["parallelism.expert_parallel_degree"]),
    ("[loss]\nnum_chunks = 7", ["training.seq_len", "loss.num_chunks = 7"]),
    ("[profile.tpu.training]\nsteps = 1", ["profile.tpu: no such device", "[profile.neuron]"]),
    ('[profile.neuron.training]\nsteps = "1"', ["profile.neuron.training.steps: expected an integer"]),
    ('[plugins]\nenable = ["sdqa"]', ["no plugin is called 'sdqa'", "did you mean 'sdpa'"]),
    ("[plugins.sdpa]\nmask = true", ["plugins.sdpa.mask: unknown key", "document_mask"]),
    ("[plugins.sdqa]\nmask = true", ["plugins.sdqa: unknown key", "'sdpa'"]),
    ('[plugins.sdpa]\ndocument_mask = "yes"', ["plugins.sdpa.document_mask: expected true or false"]),
    ('[plugins.sdpa]\nfqns = ["layers.7"]', ["plugins.sdpa.fqns: 'layers.7' matches no module"]),
    ('[plugins]\nenable = ["sdpa"]\ndisable = ["sdpa"]', ["'sdpa' is both enabled and disabled"]),
    ('[plugins]\ndisable = ["qwen3"]', ["model.backend = 'native'", "offers a model"]),
    ('[dataloader]\ndataset = "c5_test"', ["dataloader.dataset: no dataset is called 'c5_test'", "'c4_test'"]),
    ('[dataloader]\ndataset_path = "/nowhere"', ["dataloader.dataset_path: /nowhere does not exist"]),
    ('[override]\nimports = ["json.nothing"]', ["override.imports", "json.nothing"]),
    ('training = "fast"', ["training: expected a table"]),
    ("[planned_overrides]\nx = 1", ["planned_overrides: unknown key"]),
    ("[checkpoint]\nenable = true\nasync_mode = 'async_with_pinned_mem'", ["checkpoint.async_mode", "CPU"]),
    ("[checkpoint]\nenable = true\ninitial_load_path = '/nowhere'", ["checkpoint.initial_load_path: /nowhere"]),
    ('[plugins]\ndisable = ["sdpa"]', ["2 attention layers stay on FlexAttention", "enable sdpa"]),
    ("[profiler]\nenable_memory_snapshot = true", ["profiler.enable_memory_snapshot", "CPU"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD_KEYS, ids=[text.replace("\n", " ") for text, _ in BAD_KEYS])
def test_bad_value_is_reported_with_place_and_remedy(parse_job, tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    base = TINY_MODEL if not text.startswith("training =") else ""
    before = {path.name for path in tmp_path.iterdir()}
    outcome = parse_job(text, base=base)
    assert outcome.status == 2
    for word in words:
        assert word in outcome.message
    assert "Traceback" not in outcome.message
    assert {path.name for path in tmp_path.iterdir()} - before == {"job.toml"}


BAD_MODELS = [
    ('flavor = "debugmodel"', 'flavor = "72B"', ['"72B" is not a Qwen3 flavor', "32B", "4B-Instruct-2507"]),
    ("n_layers = 2", "n_layers = 0", ["model.n_layers"]),
    ("n_kv_heads = 2", "n_kv_heads = 3", ["model.n_kv_heads"]),
    ("vocab_size = 4096", "vocab_size = 100", ["model.vocab_size: 100 is less than"]),
    ("seq_len = 64", "seq_len = -64", ["training.seq_len: -64"]),
    ("seq_len = 64", "seq_len = 8192", ["training.seq_len: 8192 is beyond the 4096 positions"]),
    ("steps = 3", "steps = 0", ["training.steps: 0"]),
    ("steps = 3", "steps = 9223372036854775808", ["training.steps: 9223372036854775808 is out of range"]),
    ("n_layers = 2", "n_layers = 1000000000", ["model.n_layers: 1000000000", "at most 1024"]),
    ("n_layers = 2", "n_layers = 1000000000\nbackend = 'huggingface_v5'", ["model.n_layers: 1000000000"]),
    ('mode = "none"', 'mode = "memory_budget"', ["1 problem\n", "activation_checkpoint: Memory budget"]),
    ("local_batch_size = 2", "local_batch_size = -2", ["training.local_batch_size: -2"]),
    ("local_batch_size = 2", "local_batch_size = 2\nglobal_batch_size = 3",
     ["training.global_batch_size: 3", "nearest is 2"]),
    ("[model]", '[model]\nname = "llama3"', ["model.name", '"qwen3"']),
    ("[model]", '[model]\nbackend = "nativ"', ["model.backend", "did you mean 'native'"]),
    ("[model]", '[model]\nhf_assets_path = "/nowhere"', ["model.hf_assets_path: /nowhere does not exist"]),
    ("[model]", "[model]\nnum_experts = 8\ntop_k = 9\nmoe_hidden_dim = 32", ["model.top_k"]),
    ('flavor = "debugmodel"\n', "", ["model.flavor", "config.json"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), BAD_MODELS, ids=[new or "no flavor" for _, new, _ in BAD_MODELS])
def test_bad_model_or_training_value_is_reported(parse_job, old, new, words):
    outcome = parse_job(base=TINY_MODEL.replace(old, new, 1))
    assert outcome.status == 2
    for word in words:
        assert word in outcome.message
    assert "Traceback" not in outcome.message


def test_folder_without_tokenizer_is_reported(parse_job, tmp_path):
    (tmp_path / "empty").mkdir()
    outcome = parse_job(base=TINY_MODEL.replace("[model]", f'[model]\nhf_assets_path = "{tmp_path}/empty"'))
    assert outcome.status == 2
    assert "holds no tokenizer" in outcome.message


def test_heads_must_divide_by_the_tensor_parallel_degree(parse_job):
    outcome = parse_job("[parallelism]\ntensor_parallel_degree = 4\n", world_size=4)
    assert outcome.status == 2
    assert "4 does not divide the 2 key and value heads" in outcome.message
    assert "[1, 2]" in outcome.message


def test_degrees_must_multiply_to_the_world_size(parse_job):
    outcome = parse_job("[parallelism]\ntensor_parallel_degree = 2\n", world_size=3)
    assert outcome.status == 2
    assert "3 is not a multiple of 2" in outcome.message


UNREADABLE = [
    (None, "does not exist"),
    ("directory", "is a directory"),
    (b"[training\nsteps = 1", "line 1, column 10"),
    (b"\xff\xfe[training]", "not UTF-8"),
]


@pytest.mark.parametrize(("content", "words"), UNREADABLE, ids=["missing", "directory", "not TOML", "not UTF-8"])
def test_unreadable_file_is_reported(parse, tmp_path, content, words):
    path = tmp_path / "job.toml"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    outcome = parse("--job.config_file", path)
    assert outcome.status == 2
    assert words in outcome.message
    assert str(path) in outcome.message


def test_byte_order_mark_is_no_part_of_the_job(parse, tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TINY_MODEL.encode())
    assert parse("--job.config_file", path).status is None


def test_two_job_files_are_refused(parse, write_job):
    job = write_job(base=TINY_MODEL)
    outcome = parse("--job.config_file", job, f"--job.config-file={job}")
    assert outcome.status == 2
    assert "--job.config_file: is given more than once" in outcome.message


def test_word_for_true_is_corrected_to_what_toml_has(parse_job):
    outcome = parse_job('[checkpoint]\nenable = "yes"\n')
    assert 'found the string "yes"; write true without quotes' in outcome.message


def test_word_for_a_number_gets_no_advice_that_toml_refuses(parse_job):
    outcome = parse_job(
        '[plugins.nki-moe]\nblock_rows = "x"\n[profiler]\nprofile_freq = "7"\n', "--model.backend", "nki_moe"
    )
    assert 'plugins.nki-moe.block_rows: expected an integer, found the string "x"\n' in outcome.message
    assert 'found the string "7"; write 7 without quotes' in outcome.message


def test_text_without_the_field_text_is_reported(parse_job, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.json").write_text('{"body": "once"}\n')
    outcome = parse_job(f'[dataloader]\ndataset_path = "{tmp_path}/text"\n')
    assert outcome.status == 2
    assert f"dataloader.dataset_path: the records of {tmp_path}/text/a.json have no field text but body" in (
        outcome.message
    )


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "{"},
        {"tokenizer.json": "[]"},
        {"tokenizer.json": TOKENIZER.read_text(), "tokenizer_config.json": "{"},
        {"vocab.json": "{"},
        {"vocab.json": "{}"},
    ],
    ids=["no JSON", "no tokenizer", "no JSON beside it", "no vocabulary", "empty vocabulary"],
)
def test_broken_tokenizer_is_named(parse_job, tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    outcome = parse_job(base=TINY_MODEL.replace("[model]", f'[model]\nhf_assets_path = "{tmp_path}"'))
    assert outcome.status == 2
    assert f"model.hf_assets_path: the tokenizer in {tmp_path} " in outcome.message


def test_dataset_path_without_text_is_reported(parse_job, tmp_path):
    (tmp_path / "text").mkdir()
    message = parse_job(f'[dataloader]\ndataset_path = "{tmp_path}/text"\n').message
    assert f"dataloader.dataset_path: {tmp_path}/text holds no file" in message
    message = parse_job(f'[dataloader]\ndataset_path = "{tmp_path}/job.toml"\n').message
    assert f"dataloader.dataset_path: {tmp_path}/job.toml is not a folder" in message


def test_dump_folder_below_a_file_is_reported(parse_job, tmp_path):
    outcome = parse_job(f"[job]\ndump_folder = '{tmp_path}/job.toml/out'\n")
    assert outcome.status == 2
    assert f"job.dump_folder: {tmp_path}/job.toml is a file" in outcome.message


def test_folder_that_is_closed_to_this_user_is_reported(parse_job, tmp_path, monkeypatch):
    closed = tmp_path / "out" / "checkpoint"
    closed.mkdir(parents=True)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    outcome = parse_job(f"[job]\ndump_folder = '{tmp_path}/out'\n[checkpoint]\nenable = true\n")
    assert outcome.status == 2
    assert f"checkpoint.folder: this user may not write to {closed}" in outcome.message


def test_checkpoint_of_another_model_is_not_resumed(parse_job, tmp_path):
    job = f"[job]\ndump_folder = '{tmp_path}/out'\n[checkpoint]\nenable = true\n"
    with torch.device("meta"):
        model = parse_job(job).config.model_spec.model.build()
    tensors = {name: torch.zeros(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    step = tmp_path / "out/checkpoint/step-1"
    dcp.save({**tensors, "train_state": torch.zeros(1)}, checkpoint_id=str(step), no_dist=True)
    assert parse_job(job).status is None
    outcome = parse_job(job, base=TINY_MODEL.replace("hidden_dim = 128", "hidden_dim = 256"))
    assert outcome.status == 2
    assert f"checkpoint.folder: {step} is of another model: layers.0.feed_forward" in outcome.message
    outcome = parse_job(job, base=TINY_MODEL.replace("n_layers = 2", "n_layers = 3"))
    assert "layers.2.attention" in outcome.message
    assert "(absent, the job wants" in outcome.message
    assert " more" in outcome.message


def test_job_file_and_module_do_not_go_together(parse, write_job):
    outcome = parse(
        "--job.config_file", write_job(base=TINY_MODEL), "--module", "qwen3", "--config", "qwen3_debugmodel"
    )
    assert outcome.status == 2
    assert "--module: cannot be combined" in outcome.message
    assert "--config: cannot be combined" in outcome.message


def test_flag_without_a_file_is_reported(parse):
    for args in (["--job.config_file"], ["--job.config_file="]):
        outcome = parse(*args)
        assert outcome.status == 2
        assert "needs a file" in outcome.message


def test_activation_checkpoint_mode_of_another_type_is_reported(parse_job):
    outcome = parse_job(base=TINY_MODEL.replace('mode = "none"', 'mode = ["none"]'))
    assert outcome.status == 2
    assert "activation_checkpoint.mode: expected one of" in outcome.message


def test_host_made_for_an_accelerator_does_not_train_the_cpu_profile(parse_job, tmp_path, monkeypatch):
    (tmp_path / "torch_neuronx.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused = parse_job()
    assert refused.status == 2
    assert "torch-neuronx is installed, but torch finds no accelerator" in refused.message
    assert parse_job("", "--job.profile", "cpu").status is None


def test_several_problems_are_reported_together(parse_job):
    outcome = parse_job('[metrics2]\nx = 1\n[optimizer]\nlr = "big"\n', "--training.steps", "-1")
    assert outcome.status == 2
    assert "3 problems" in outcome.message.splitlines()[0]
    for word in ("metrics2", "optimizer.lr", "training.steps"):
        assert word in outcome.message


def test_only_rank_zero_speaks(parse_job, monkeypatch):
    monkeypatch.setattr("torchtitan_qwen3_trn.launch._SILENT_RANK_DELAY_S", 0)
    outcome = parse_job("[metrics2]\nx = 1\n", world_size=2, rank=1)
    assert outcome.status == 2
    assert outcome.message == ""


def test_pipeline_schedule_is_looked_up_before_anything_is_built(parse_job):
    job = "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = '1F2B'\n"
    outcome = parse_job(job, world_size=2)
    assert outcome.status == 2
    assert "parallelism.pipeline_parallel_schedule: Unknown schedule" in outcome.message
    assert "1f2b" in outcome.message.lower()


def test_seed_checkpoint_is_started_from(parse_job, tmp_path):
    job = f"[job]\ndump_folder = '{tmp_path}/out'\n[checkpoint]\nenable = true\n"
    with torch.device("meta"):
        model = parse_job(job).config.model_spec.model.build()
    tensors = {name: torch.zeros(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for step, words in (("step-0", ""), ("step-4", "as a finished run leaves it")):
        dcp.save(tensors, checkpoint_id=str(tmp_path / "out/checkpoint" / step), no_dist=True)
        outcome = parse_job(job)
        assert words in outcome.message
        assert (outcome.status is None) == (not words)
    assert parse_job(job, "--checkpoint.load_step", "0").status is None
    outcome = parse_job(job, "--checkpoint.load_step", "2")
    assert "no complete checkpoint of step 2; choose one of [0, 4]" in outcome.message
    assert "incomplete (no .metadata)" not in outcome.log


def test_interrupted_checkpoint_is_named(parse_job, tmp_path):
    (tmp_path / "out/checkpoint/step-7").mkdir(parents=True)
    outcome = parse_job(f"[job]\ndump_folder = '{tmp_path}/out'\n[checkpoint]\nenable = true\n")
    assert outcome.status is None
    assert f"{tmp_path}/out/checkpoint/step-7 is incomplete (no .metadata)" in outcome.log


def test_number_of_ranks_that_is_no_number_is_reported(parse_job, monkeypatch):
    assert "WORLD_SIZE: 'two' is not a number of ranks" in parse_job(world_size="two").message
    message = parse_job(rank="first").message
    assert "RANK: 'first' is not a rank" in message
    assert "LOCAL_RANK: 'first' is not a rank" in message
    monkeypatch.delenv("NGPU", raising=False)
    assert "NGPU: is not set" in parse_job("", "--comm.mode", "fake_backend").message
    monkeypatch.setenv("NGPU", "0")
    assert "NGPU: '0' is not a number of ranks" in parse_job("", "--comm.mode", "fake_backend").message


def test_bad_flag_of_a_job_by_name_is_a_message(parse):
    outcome = parse("--module", "torchtitan_qwen3_trn", "--config", "qwen3_moe", "--plugins.enable", "sdqa")
    assert outcome.status == 2
    assert "plugins.enable: no plugin is called 'sdqa'" in outcome.message


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.steps", "many"],
        ["--training.steps", "9223372036854775808"],
        ["--model.n_layers", "99999999999999999999"],
        ["--training.stepz", "1"],
        ["--validator.steps", "0"],
        ["--checkpoint.interval", "0"],
    ],
)
def test_bad_flag_is_reported_without_traceback(parse_job, flags):
    outcome = parse_job("", *flags)
    assert outcome.status == 2
    assert "Traceback" not in outcome.message


def test_job_without_a_launcher_is_told_to_use_one(write_job, monkeypatch, capsys):
    from torchtitan.config import ConfigManager

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop:
        ConfigManager().parse_args(["--job.config_file", str(write_job(base=TINY_MODEL))])
    assert stop.value.code == 2
    assert "torchrun" in capsys.readouterr().err


def test_size_of_the_host_in_the_environment_must_be_a_number(parse_job, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    outcome = parse_job()
    assert outcome.status == 2
    assert "LOCAL_WORLD_SIZE: 'two' is not a number of ranks" in outcome.message


def test_folder_that_the_system_refuses_is_a_message(parse_job):
    name = "x" * 300  # longer than any file system allows
    outcome = parse_job(f"[job]\ndump_folder = '{name}'\n")
    assert outcome.status == 2
    assert "job.dump_folder" in outcome.message
    assert "cannot be used: File name too long" in outcome.message
    assert "Error" not in outcome.message
