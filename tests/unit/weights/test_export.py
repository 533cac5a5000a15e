"""Exports in one process: blocks of bytes, config.json, full disks, and what a job checks before it starts."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY_MODEL
from hf_checkpoints import small_config, write_checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_qwen3_trn import assets
from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.hf_files.file_plan import Place
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.weights import export as export_module
from torchtitan_qwen3_trn.weights import job_export as export_job
from torchtitan_qwen3_trn.weights.export import Export, export
from torchtitan_qwen3_trn.weights.writer import _write_block


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 5), (1, 9), ()])
def test_blocks_of_any_split_make_up_the_whole_tensor(tmp_path, shape):
    whole = torch.randn(shape).bfloat16()
    place = Place("x", 16, shape, torch.bfloat16)
    file = tmp_path / "x"
    file.write_bytes(b"\xff" * (16 + whole.nbytes + 4))
    descriptor = os.open(file, os.O_WRONLY)
    blocks = [((0,) * len(shape), whole)]
    for dim in range(len(shape)):
        blocks = [
            ((*origin[:dim], origin[dim] + start, *origin[dim + 1 :]), piece)
            for origin, block in blocks
            for start, piece in zip((0, (shape[dim] + 1) // 2), block.chunk(2, dim), strict=False)
        ]
    for origin, block in reversed(blocks):
        _write_block(descriptor, block.contiguous(), place, origin)
    os.close(descriptor)
    data = file.read_bytes()
    assert data[:16] == b"\xff" * 16
    assert data[-4:] == b"\xff" * 4
    assert torch.equal(torch.frombuffer(bytearray(data[16:-4]), dtype=torch.bfloat16).reshape(shape), whole)


@pytest.fixture
def model():
    config = small_config("qwen3")
    shapes = layout_of(build_on_meta(config)).shapes
    return config, {name: torch.randn(shape) for name, shape in shapes.items()}


def wanted(config, tmp_path, **changes):
    values = {"dtype": torch.float32, "limit": 10**9, "assets": assets.tokenizer_path()} | changes
    return Export(destination=tmp_path / "out", config=config, **values)


def test_an_export_has_all_that_a_published_checkpoint_has(model, tmp_path):
    config, tensors = model
    export(tensors, wanted(config, tmp_path, facts={"step": 7}))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    manifest = json.loads((tmp_path / "out/export_manifest.json").read_text())
    assert manifest["files"].keys() == names - {"export_manifest.json"}
    assert manifest["step"] == 7
    assert manifest["versions"].keys() >= {"torch", "torchtitan", "transformers", "torchtitan-qwen3-trn"}


def test_config_json_also_speaks_to_transformers_4(tmp_path):
    config = small_config("qwen3_moe", rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    shapes = layout_of(build_on_meta(config)).shapes
    export({name: torch.randn(shape) for name, shape in shapes.items()}, wanted(config, tmp_path))
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert (raw["rope_theta"], raw["num_experts"], raw["torch_dtype"]) == (5e6, 8, "float32")


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_a_model_that_is_not_the_one_of_its_config_is_not_published(model, tmp_path, fault):
    config, tensors = model
    name = "model.norm.weight"
    value = tensors.pop(name)
    tensors |= {"missing": {}, "extra": {name: value, "more": value}, "shape": {name: value[1:]}}[fault]
    with pytest.raises(JobError, match=r"the model is not the one its config.json describes: 1 tensor"):
        export(tensors, wanted(config, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_seen_before_anything_is_written(model, tmp_path, monkeypatch):
    config, tensors = model
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(JobError, match=r"the disk is full: .* bytes are to be written and 1000 are free"):
        export(tensors, wanted(config, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_half_way_publishes_nothing(model, tmp_path):
    """The limit on the size of files stands in for a disk that fills up meanwhile."""
    config, tensors = model
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(JobError, match="the disk is full or the file may not grow"):
            export(tensors, wanted(config, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_the_same_fault_on_several_ranks_is_one_line(model, tmp_path, monkeypatch):
    def fail(*_, **__):
        failures = {rank: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out"), None) for rank in range(3)}
        raise CheckpointException("save", failures)

    monkeypatch.setattr(export_module, "save", fail)
    config, tensors = model
    with pytest.raises(JobError, match="the disk is full") as caught:
        export(tensors, wanted(config, tmp_path))
    assert len(caught.value.problems) == 1


JOB = """
[plugins]
enable = ["safetensors-export"]
[plugins.safetensors-export]
{options}
[job]
dump_folder = "{folder}"
"""


def test_a_job_hears_at_the_start_what_would_fail_at_the_end(parse_job, tmp_path):
    options = 'max_shard_size = "big"\nsteps = [2, 9]'
    (tmp_path / "export/step-3").mkdir(parents=True)
    outcome = parse_job(JOB.format(folder=tmp_path, options=options))
    assert outcome.status == 2
    for part in ('"big" is not a size', "steps [9] do not exist", "export/step-3: exists already"):
        assert part in outcome.message


def test_links_among_the_assets_are_judged_before_training(parse_job, tmp_path):
    folder = shutil.copytree(assets.tokenizer_path(), tmp_path / "model")
    base = TINY_MODEL.replace("[model]", f'[model]\nhf_assets_path = "{folder}"')
    (tmp_path / "secret").write_text("x")
    (folder / "merges.txt").symlink_to(tmp_path / "secret")
    (folder / "chat_template.jinja").symlink_to(folder / "nothing")
    (folder / "generation_config.json").mkdir()
    (folder / "special_tokens_map.json").symlink_to("tokenizer_config.json")
    outcome = parse_job(JOB.format(folder=tmp_path / "out", options=""), base=base)
    assert outcome.status == 2
    assert "3 problems" in outcome.message
    assert f"{folder}/merges.txt: is a symbolic link out of the folder, to {tmp_path}/secret" in outcome.message
    assert f"{folder}/chat_template.jinja: is a symbolic link to nothing" in outcome.message
    assert f"{folder}/generation_config.json: is not a regular file" in outcome.message


def test_a_run_that_goes_on_does_not_stumble_over_its_own_earlier_export(parse_job, tmp_path):
    import torch.distributed.checkpoint as dcp

    job = JOB.format(folder=tmp_path, options="steps = [2]") + "[checkpoint]\nenable = true\n"
    before = parse_job(job)
    (tmp_path / "export/step-2").mkdir(parents=True)
    assert "export/step-2: exists already" in parse_job(job).message
    with torch.device("meta"):
        tensors = before.config.model_spec.model.build().state_dict()
    trained = {name: torch.zeros(value.shape) for name, value in tensors.items()}
    dcp.save(trained | {"train_state": {"step": torch.tensor(2)}}, checkpoint_id=tmp_path / "checkpoint/step-2")
    assert parse_job(job).status is None


def test_a_restarted_run_keeps_the_export_it_has_written_and_no_other_folder(parse_job, tmp_path, caplog):
    job = JOB.format(folder=tmp_path, options="steps = [2]")
    config = parse_job(job).config
    trainer = SimpleNamespace(model_config=config.model_spec.model)
    trainer.model_parts = [config.model_spec.model.build()]
    options = {"folder": "export", "max_shard_size": "5GB", "drop_expert_bias": False}
    export_job.export_model(trainer, config, 2, **options)
    written = (tmp_path / "export/step-2/model.safetensors").stat()
    assert parse_job(job).status is None
    with caplog.at_level("INFO"):
        export_job.export_model(trainer, config, 2, **options)
    assert caplog.text.count("export of step 2 from before a restart and is kept") == 1
    assert (tmp_path / "export/step-2/model.safetensors").stat() == written
    (tmp_path / "export/step-2").rename(tmp_path / "export/step-3")
    assert "export/step-3: exists already" in parse_job(job).message
    (tmp_path / "export/step-3").rename(tmp_path / "export/step-2")
    os.truncate(tmp_path / "export/step-2/model.safetensors", 1000)
    assert "export/step-2: exists already" in parse_job(job).message


def test_a_job_that_trains_an_expert_bias_is_refused_unless_it_says_so(parse_job, tmp_path):
    base = TINY_MODEL.replace("[model]", "[model]\nnum_experts = 8\ntop_k = 2\nmoe_hidden_dim = 32")
    refused = parse_job(JOB.format(folder=tmp_path, options=""), base=base)
    assert refused.status == 2
    assert "no place for the expert bias" in refused.message
    assert parse_job(JOB.format(folder=tmp_path, options="drop_expert_bias = true"), base=base).status is None
    balanced = base.replace("[model]", '[model]\nload_balance = "none"')
    assert parse_job(JOB.format(folder=tmp_path, options=""), base=balanced).status is None


NATIVE = """
[model]
hf_assets_path = "{folder}"
{changes}
[training]
seq_len = 64
[checkpoint]
enable = true
initial_load_in_hf = true
[job]
dump_folder = "{folder}/out"
"""


@pytest.mark.parametrize("backend", ["native", "huggingface_v5"])
def test_a_config_that_disagrees_with_the_job_is_an_error_before_anything_is_built(parse_job, tmp_path, backend):
    folder = write_checkpoint(tmp_path, "qwen3")
    changes = f'backend = "{backend}"\nn_layers = 3\nrope_theta = 2e6'
    outcome = parse_job(NATIVE.format(folder=folder, changes=changes), base="")
    assert outcome.status == 2
    assert "num_hidden_layers: 2, and not 3" in outcome.message
    assert "rope_parameters: " in outcome.message
    assert "11 tensors (" in outcome.message
    assert parse_job(NATIVE.format(folder=folder, changes=f'backend = "{backend}"'), base="").status is None


@pytest.mark.parametrize("backend", ["native", "huggingface_v5"])
def test_a_job_does_not_start_from_a_tied_folder_with_another_output_layer(parse_job, tmp_path, backend):
    folder = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    outcome = parse_job(NATIVE.format(folder=folder, changes=f'backend = "{backend}"'), base="")
    assert outcome.status == 2
    assert "lm_head.weight is tied to model.embed_tokens.weight by config.json but differs" in outcome.message


def test_a_job_refuses_endless_layers_before_it_builds_them(parse_job, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    hostile = shutil.copytree(folder, tmp_path / "hostile")
    config = json.loads((hostile / "config.json").read_text())
    (hostile / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9, "layer_types": None}))
    job = NATIVE.format(folder=folder, changes="").replace("[job]", f'initial_load_path = "{hostile}"\n[job]')
    outcome = parse_job(job, base="")
    assert outcome.status == 2
    assert "num_hidden_layers: 1000000000 cannot be right" in outcome.message
