"""Checkpoint files in and out: names, views instead of copies, header checks, small windows, random-looking losses."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_checkpoints import ARCHITECTURES, small_config, write_checkpoint
from safetensors.torch import load_file, save_file

from torchtitan_qwen3_trn.hf_files.headers import read_headers
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter


def layout(kind, **changes):
    return layout_of(build_on_meta(small_config(kind, **changes), document_mask=True, experts="eager"))


def adapter_of(kind, folder=None, **changes):
    hf_config = small_config(kind, **changes)
    config = HFModel.Config(
        architecture=hf_config, layout=layout(kind, **changes), tensor_parallel_plan={}, vocab_size=2048
    )
    return HFStateDictAdapter(config, folder)


def parameters(kind, **changes):
    """Random parameters under the model's names; a tied head shares the embedding's tensor."""
    model = build_on_meta(small_config(kind, **changes), document_mask=True, experts="eager")
    generator = torch.Generator().manual_seed(2)
    made = {name: torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}
    made.update({name: made[source] for name, source in model.all_tied_weights_keys.items()})
    return made


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_names_and_shapes_are_those_transformers_writes(tmp_path, kind):
    found, problems = read_headers(write_checkpoint(tmp_path, kind))
    assert problems == []
    assert {name: header.shape for name, header in found.items()} == layout(kind).shapes


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_there_and_back_gives_the_very_same_tensors(kind):
    adapter, native = adapter_of(kind), parameters(kind)
    before = dict(native)
    files = adapter.to_hf(native)
    back = adapter.from_hf(files)
    assert back.keys() == native.keys()
    assert all(back[name] is native[name] for name in native)
    assert native == before


def test_experts_are_views_gate_then_up():
    adapter, native = adapter_of("qwen3_moe"), parameters("qwen3_moe")
    files = adapter.to_hf(native)
    fused = native["model.layers.1.mlp.experts.gate_up_proj"]
    files["model.layers.1.mlp.experts.5.up_proj.weight"].fill_(7.0)
    assert (fused[5, 32:] == 7.0).all()
    assert (fused[5, :32] != 7.0).all()
    assert torch.equal(
        files["model.layers.0.mlp.experts.3.down_proj.weight"], native["model.layers.0.mlp.experts.down_proj"][3]
    )


def test_loose_tensors_are_fused_by_copying():
    adapter, native = adapter_of("qwen3_moe"), parameters("qwen3_moe")
    loose = {name: value.clone() for name, value in adapter.to_hf(native).items()}
    names = list(loose)
    back = adapter.from_hf(loose)
    assert list(loose) == names
    assert all(torch.equal(back[name], native[name]) for name in native)


def test_a_tied_head_is_left_out_of_files_and_follows_the_embedding_in():
    adapter, native = adapter_of("qwen3"), parameters("qwen3")
    files = adapter.to_hf(native)
    assert "lm_head.weight" not in files
    with_head = {**files, "lm_head.weight": torch.zeros(1)}
    assert adapter.from_hf(with_head)["lm_head.weight"] is native["model.embed_tokens.weight"]
    assert "lm_head.weight" in adapter_of("qwen3", tie_word_embeddings=False).to_hf(
        parameters("qwen3", tie_word_embeddings=False)
    )


def test_strangers_and_gaps_are_refused_by_name():
    adapter, native = adapter_of("qwen3_moe"), parameters("qwen3_moe")
    with pytest.raises(ValueError, match=r"no parameter for 1 tensor \(model.extra\)"):
        adapter.to_hf({**native, "model.extra": torch.zeros(1)})
    files = {name: value.clone() for name, value in adapter.to_hf(native).items()}
    with pytest.raises(ValueError, match=r"no place for 1 tensor \(model.extra\)"):
        adapter.from_hf({**files, "model.extra": torch.zeros(1)})
    files.pop("model.layers.0.mlp.experts.2.up_proj.weight")
    with pytest.raises(ValueError, match=r"gate_up_proj is missing: 1 tensor \(model.layers.0.mlp.experts.2.up_proj"):
        adapter.from_hf(files)


def test_export_goes_to_the_files_of_the_index(tmp_path):
    adapter = adapter_of("qwen3", str(write_checkpoint(tmp_path, "qwen3")))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert adapter.fqn_to_index_mapping == {name: int(file[6:11]) for name, file in index.items()}


def changed(folder, edit):
    """Rewrite the tensors of a checkpoint as one file."""
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


WEIGHTS_JOB = """
[model]
backend = "huggingface_v5"
hf_assets_path = "{folder}"
[job]
dump_folder = "{folder}/out"
[training]
seq_len = 64
[checkpoint]
enable = {enable}
initial_load_in_hf = true
"""


def test_a_job_checks_the_headers_before_anything_is_built(parse_job, tmp_path):
    folder = changed(write_checkpoint(tmp_path, "llama"), lambda tensors: tensors.pop("lm_head.weight"))
    outcome = parse_job(base=WEIGHTS_JOB.format(folder=folder, enable="true"))
    assert outcome.status == 2
    assert "1 tensor (lm_head.weight) of the model's 21 missing" in outcome.message


def test_asking_for_weights_without_checkpointing_is_refused(parse_job, tmp_path):
    folder = write_checkpoint(tmp_path, "llama")
    outcome = parse_job(base=WEIGHTS_JOB.format(folder=folder, enable="false"))
    assert "checkpoint.initial_load_in_hf: has no effect while checkpoint.enable is false" in outcome.message
    assert parse_job(base=WEIGHTS_JOB.format(folder=folder, enable="true")).status is None


def test_a_job_that_resumes_does_not_need_the_files(parse_job, tmp_path):
    folder = changed(write_checkpoint(tmp_path, "llama"), lambda tensors: tensors.pop("lm_head.weight"))
    job = WEIGHTS_JOB.format(folder=folder, enable="true")
    step = folder / "out" / "checkpoint" / "step-5"
    with torch.device("meta"):
        model = parse_job(base=job.replace("in_hf = true", "in_hf = false")).config.model_spec.model.build()
    tensors = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    dcp.save({**tensors, "train_state": {"step": torch.tensor(5)}}, checkpoint_id=step)
    assert parse_job(base=job).status is None
