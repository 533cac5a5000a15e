"""Checkpoint folders whose headers do not fit a model."""

from __future__ import annotations

import torch
from hf_checkpoints import small_config, write_checkpoint
from safetensors.torch import load_file, save_file

from torchtitan_qwen3_trn.hf_files.headers import check_tensors
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of


def layout(kind):
    return layout_of(build_on_meta(small_config(kind), document_mask=True, experts="eager"))


def changed(folder, edit):
    """Rewrite the tensors of a checkpoint as one file."""
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(tmp_path):
    def edit(tensors):
        for layer in (0, 1):
            for part in ("q", "k", "v", "o"):
                del tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"] = torch.zeros(63)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)

    folder = changed(write_checkpoint(tmp_path, "llama"), edit)
    problems = check_tensors(folder, layout("llama").shapes, ignores=layout("llama").ignores)
    missing, unexpected, misshapen, foreign = (str(problem) for problem in problems)
    assert "8 tensors (" in missing
    assert "...) of the model's 21 missing" in missing
    assert missing.count("_proj.weight") == 5  # the list is capped, the count is not
    assert "1 tensor (model.layers.9.mlp.up_proj.weight) without a place in the model" in unexpected
    assert "1 tensor (model.norm.weight [63] instead of [64])" in misshapen
    assert "1 tensor (model.layers.0.mlp.up_proj.weight I8)" in foreign


def test_redundant_tensors_of_old_exports_are_no_problem(tmp_path):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    folder = changed(write_checkpoint(tmp_path, "qwen3"), edit)
    assert check_tensors(folder, layout("qwen3").shapes, ignores=layout("qwen3").ignores) == []


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    (problem,) = check_tensors(tmp_path, {})
    assert "only Python pickles (pytorch_model.bin)" in problem.what
    assert "save_pretrained" in problem.fix


def test_a_folder_without_weights(tmp_path):
    assert "there is no .safetensors file" in str(check_tensors(tmp_path, {})[0])
    assert "there is no .safetensors file" in str(check_tensors(tmp_path / "absent", {})[0])


def test_a_truncated_file_is_named(tmp_path):
    folder = write_checkpoint(tmp_path, "llama")
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    (problem,) = check_tensors(folder, layout("llama").shapes)
    assert problem.where == str(file)


def test_files_the_index_names_must_be_there(tmp_path):
    folder = write_checkpoint(tmp_path, "llama")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    (problem,) = check_tensors(folder, layout("llama").shapes)
    assert "names 1 files that are not there (model-00002-of-" in problem.what


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path, "llama")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "copy.safetensors")
    (problem,) = check_tensors(folder, layout("llama").shapes)
    assert "1 tensor (model.norm.weight in " in problem.what
    assert problem.what.endswith(") in two files")
