"""Export, import and verification of small models in one process."""

from __future__ import annotations

import gc
import json
import resource
import shutil
import signal

import pytest
import torch
from hf_checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

from torchtitan_qwen3_trn.cli import main
from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.models.hf_config import from_folder
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.weights import offline
from torchtitan_qwen3_trn.weights.offline import export_checkpoint, import_folder
from torchtitan_qwen3_trn.weights.verify import verify

KINDS = {
    "tied": ("qwen3", {}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "moe": ("qwen3_moe", {}),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 2.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    for kind, (architecture, changes) in KINDS.items():
        write_checkpoint(root / kind, architecture, **changes)
    return root


def tensors(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def outcomes(findings):
    return {finding.check: finding.outcome for finding in findings}


@pytest.mark.parametrize("route", ["native", "huggingface_v5"])
@pytest.mark.parametrize("kind", KINDS)
def test_import_and_export_give_the_same_tensors_and_config(published, tmp_path, kind, route):
    import_folder(published / kind, tmp_path / "dcp", route=route)
    export_checkpoint(tmp_path / "dcp", tmp_path / "out", limit=150_000)
    assert same(tensors(tmp_path / "out"), tensors(published / kind))
    before, after = (read_json(folder / "config.json") for folder in (published / kind, tmp_path / "out"))
    assert before.items() <= after.items()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "out"]
    findings = verify(tmp_path / "out", checkpoint=tmp_path / "dcp")
    assert set(outcomes(findings).values()) == {"ok"}, findings
    if kind != "moe":  # a sum over experts is taken in another order
        assert "equal bit for bit" in {finding.check: finding.detail for finding in findings}["logits"]


@pytest.fixture
def nothing_old():
    """`gc.get_objects` gives what comes from here on."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def tensors_alive():
    """Bytes of all tensors that the garbage collector gives, each memory once."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.device.type == "cpu"]
    return sum({each.data_ptr(): each.nbytes for each in found}.values())


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch, nothing_old):
    folder = write_checkpoint(tmp_path / "folder", "qwen3", num_hidden_layers=12, vocab_size=256)
    nbytes = {name: value.nbytes for name, value in tensors(folder).items()}
    allowed = 3 * max(nbytes.values())
    assert allowed < sum(nbytes.values()) / 2
    alive = []
    lookup = offline._LazyPlanner.lookup_object

    def watched(self, index):
        alive.append(tensors_alive())
        return lookup(self, index)

    monkeypatch.setattr(offline._LazyPlanner, "lookup_object", watched)
    import_folder(folder, tmp_path / "checkpoint")
    assert len(alive) >= len(nbytes)
    assert max(alive) <= allowed
    alive.clear()
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    assert len(alive) == len(nbytes)
    assert max(alive) <= allowed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_type_in_the_files_is_kept_on_the_way_in_and_chosen_on_the_way_out(published, tmp_path, dtype):
    import_folder(published / "moe", tmp_path / "dcp")
    export_checkpoint(tmp_path / "dcp", tmp_path / "half", dtype=getattr(torch, dtype))
    expected = {name: value.to(getattr(torch, dtype)) for name, value in tensors(published / "moe").items()}
    assert same(tensors(tmp_path / "half"), expected)
    assert read_json(tmp_path / "half" / "config.json")["dtype"] == dtype
    import_folder(tmp_path / "half", tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "out")
    assert same(tensors(tmp_path / "out"), expected)
    assert set(outcomes(verify(tmp_path / "out")).values()) == {"ok"}


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_transformers_gives_the_training_models_logits_bit_for_bit(published, tmp_path, kind):
    """On the huggingface_v5 route the training model is Transformers' own class behind torchtitan's protocol."""
    from torchtitan_qwen3_trn.models.hf.build import build_on_meta
    from torchtitan_qwen3_trn.models.hf.layout import layout_of
    from torchtitan_qwen3_trn.models.hf.model import HFModel

    import_folder(published / kind, tmp_path / "dcp", route="huggingface_v5")
    export_checkpoint(tmp_path / "dcp", tmp_path / "out")
    config = from_folder(published / kind)
    layout = layout_of(build_on_meta(config, document_mask=True, experts="grouped_mm"))
    training = HFModel.Config(architecture=config, layout=layout, tensor_parallel_plan={}, vocab_size=2048).build()
    original = AutoModelForCausalLM.from_pretrained(published / kind, dtype=torch.float32)
    training.load_state_dict(original.state_dict())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.randint(2048, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(training.eval()(tokens), exported.eval()(tokens).logits)


def native_checkpoint(folder, source, bias=0.0):
    """A training checkpoint of the native route, with the expert bias that training moves."""
    import_folder(source, folder.with_name("plain"))
    config = model_config(from_folder(source))
    from torch.distributed.checkpoint.state_dict_loader import load

    state_dict = config.build().state_dict()
    load(state_dict, checkpoint_id=folder.with_name("plain"))
    state_dict["layers.1.moe.expert_bias_E"][3] = bias
    save(state_dict, storage_writer=FileSystemWriter(folder))
    return folder


def test_an_expert_bias_that_has_moved_is_refused_with_its_size_unless_told_otherwise(published, tmp_path, caplog):
    checkpoint = native_checkpoint(tmp_path / "dcp", published / "moe", bias=-0.25)
    with pytest.raises(JobError, match=r"furthest in layers.1.moe.expert_bias_E: 0.25.*--drop-expert-bias"):
        export_checkpoint(checkpoint, tmp_path / "out", assets=published / "moe")
    assert not (tmp_path / "out").exists()
    export_checkpoint(checkpoint, tmp_path / "out", assets=published / "moe", drop_expert_bias=True)
    assert "the largest is 0.25 in layers.1.moe.expert_bias_E" in caplog.text
    assert same(tensors(tmp_path / "out"), tensors(published / "moe"))


def test_a_config_of_another_model_is_refused_before_anything_is_written(published, tmp_path, capsys):
    import_folder(published / "untied", tmp_path / "dcp")
    other = tmp_path / "other"
    other.mkdir()
    config = read_json(published / "untied" / "config.json") | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "layer_types": None,
    }
    (other / "config.json").write_text(json.dumps(config))
    assert main(["export", str(tmp_path / "dcp"), str(tmp_path / "out"), "--assets", str(other)]) == 2
    message = capsys.readouterr().err
    assert "11 tensors (" in message
    assert "layers.0.feed_forward.w1.weight [128, 64] instead of [96, 64]" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "other"]


def test_import_lists_everything_that_is_wrong_and_writes_nothing(published, tmp_path, capsys):
    folder = shutil.copytree(published / "untied", tmp_path / "folder")
    (folder / "model.safetensors.index.json").unlink()
    found = tensors(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    del found["model.norm.weight"]
    found["lm_head.weight"] = torch.zeros(3, 3)
    found["extra"] = torch.zeros(1)
    save_file(found, folder / "model.safetensors")
    assert main(["import", str(folder), str(tmp_path / "dcp")]) == 2
    message = capsys.readouterr().err
    for part in ("(model.norm.weight) of the model's", "(extra) without a place", "lm_head.weight [3, 3] instead of"):
        assert part in message
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def changed(published, tmp_path, edit, kind="tied"):
    folder = shutil.copytree(published / kind, tmp_path / "changed")
    edit(folder)
    return folder


def rewrite(folder, name, value):
    for file in folder.glob("*.safetensors"):
        found = load_file(file)
        if name in found:
            found[name] = value(found[name])
            save_file(found, file, metadata={"format": "pt"})


def nan(value):
    value[1, 1] = float("nan")
    return value


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


FAULTS = {
    "values": (
        lambda folder: rewrite(folder, "model.layers.1.mlp.up_proj.weight", nan),
        "NaN or infinity in 1 tensor (",
    ),
    "index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            (folder / "model.safetensors.index.json").read_text().replace('"total_size": ', '"total_size": 1')
        ),
        "says total_size 1",
    ),
    "tensors": (lambda folder: set_config(folder, dtype="float16"), "says torch.float16, but the files hold F32"),
}


@pytest.mark.parametrize("check", FAULTS)
def test_each_fault_is_found_by_its_check_and_fails_the_command(published, tmp_path, capsys, check):
    edit, detail = FAULTS[check]
    folder = changed(published, tmp_path, edit)
    assert main(["verify-weights", str(folder), "--json"]) == 1
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[check]["outcome"] == "failed"
    assert detail in rows[check]["detail"]


def test_a_checkpoint_that_went_on_training_is_told_from_the_export(published, tmp_path):
    checkpoint = native_checkpoint(tmp_path / "dcp", published / "moe")
    export_checkpoint(checkpoint, tmp_path / "out", assets=published / "moe")
    rewrite(tmp_path / "out", "model.layers.0.mlp.experts.5.up_proj.weight", lambda value: value + 1e-3)
    found = {finding.check: finding for finding in verify(tmp_path / "out", checkpoint=checkpoint)}
    assert found["manifest"].outcome == "failed"
    assert "another SHA-256" in found["manifest"].detail
    assert "experts.5.up_proj.weight differs from the one in" in found["checkpoint"].detail


def test_logits_that_differ_are_found(published, monkeypatch):
    from torchtitan_qwen3_trn.weights import verify as module

    native = module.model_config

    def other(arch, **options):
        config = native(arch, **options)
        for layer in config.layers:
            layer.attention.rope.theta *= 1.5
        return config

    monkeypatch.setattr(module, "model_config", other)
    found = {finding.check: finding for finding in verify(published / "untied")}
    assert found["logits"].outcome == "failed"
    assert "differ by" in found["logits"].detail


def test_a_folder_in_order_passes_with_a_table(published, capsys):
    assert main(["verify-weights", str(published / "moe")]) == 0
    printed = capsys.readouterr().out
    assert "16 tokens" in printed
    assert "failed" not in printed


def tied_config(published, tmp_path):
    folder = tmp_path / "tied_config"
    folder.mkdir()
    config = read_json(published / "untied" / "config.json") | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("route", ["native", "huggingface_v5"])
def test_an_untied_checkpoint_is_not_exported_as_a_tied_model(published, tmp_path, capsys, route):
    import_folder(published / "untied", tmp_path / "dcp", route=route)
    assets = tied_config(published, tmp_path)
    assert main(["export", str(tmp_path / "dcp"), str(tmp_path / "out"), "--assets", str(assets)]) == 2
    message = capsys.readouterr().err
    assert "lm_head.weight differs from " in message
    assert "tie_word_embeddings false" in message
    assert not (tmp_path / "out").exists()


def test_an_untied_checkpoint_is_told_from_a_tied_export(published, tmp_path):
    import_folder(published / "untied", tmp_path / "dcp")
    folder = changed(published, tmp_path, lambda folder: set_config(folder, tie_word_embeddings=True), kind="untied")
    found = {finding.check: finding for finding in verify(folder, checkpoint=tmp_path / "dcp")}
    assert found["checkpoint"].outcome == "failed"
    assert "lm_head.weight differs from tok_embeddings.weight" in found["checkpoint"].detail


def test_a_checkpoint_with_an_expert_bias_is_not_what_its_export_computes(published, tmp_path):
    checkpoint = native_checkpoint(tmp_path / "dcp", published / "moe", bias=-0.25)
    export_checkpoint(checkpoint, tmp_path / "out", assets=published / "moe", drop_expert_bias=True)
    found = {finding.check: finding for finding in verify(tmp_path / "out", checkpoint=checkpoint)}
    assert found["checkpoint"].outcome == "failed"
    assert "furthest in layers.1.moe.expert_bias_E: 0.25" in found["checkpoint"].detail


@pytest.mark.parametrize("route", ["native", "huggingface_v5"])
def test_a_tied_folder_with_another_output_layer_is_not_imported(published, tmp_path, capsys, route):
    folder = changed(published, tmp_path, lambda folder: set_config(folder, tie_word_embeddings=True), kind="untied")
    assert main(["import", str(folder), str(tmp_path / "dcp"), "--route", route]) == 2
    assert "lm_head.weight is tied to model.embed_tokens.weight by config.json but differs" in capsys.readouterr().err
    assert not (tmp_path / "dcp").exists()


def test_a_tied_folder_that_repeats_the_embedding_is_imported(published, tmp_path):
    def repeat(folder):
        set_config(folder, tie_word_embeddings=True)
        embedding = tensors(folder)["model.embed_tokens.weight"]
        rewrite(folder, "lm_head.weight", lambda _: embedding.clone())

    folder = changed(published, tmp_path, repeat, kind="untied")
    import_folder(folder, tmp_path / "dcp")
    assert "lm_head.weight repeats" in {row.check: row.detail for row in verify(folder, cheap=True)}["tying"]


@pytest.mark.parametrize("left", [0.0, 0.5, 0.999, None], ids=["empty", "half", "almost", "absent"])
def test_a_checkpoint_with_a_truncated_file_is_refused_in_one_message(published, tmp_path, capsys, left):
    import_folder(published / "untied", tmp_path / "dcp")
    file = next((tmp_path / "dcp").glob("*.distcp"))
    data = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(data[: int(left * len(data))])
    assert main(["export", str(tmp_path / "dcp"), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "export: 1 problem" in message
    assert f"dcp: {file.name}: " in message
    assert "cannot be read (" in message
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]
    found = {row.check: row for row in verify(published / "untied", checkpoint=tmp_path / "dcp")}
    assert found["checkpoint"].outcome == "failed"
    assert f"dcp: {file.name}: " in found["checkpoint"].detail


def test_an_import_onto_a_full_disk_says_so_and_leaves_nothing(published, tmp_path, capsys):
    """The limit on the size of files stands in for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        assert main(["import", str(published / "untied"), str(tmp_path / "dcp")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "the disk is full or the file may not grow" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_expert_bias_of_nan_has_moved(published, tmp_path, caplog):
    checkpoint = native_checkpoint(tmp_path / "dcp", published / "moe", bias=float("nan"))
    with pytest.raises(JobError, match=r"furthest in layers.1.moe.expert_bias_E: nan"):
        export_checkpoint(checkpoint, tmp_path / "out", assets=published / "moe")
    export_checkpoint(checkpoint, tmp_path / "out", assets=published / "moe", drop_expert_bias=True)
    assert "the largest is nan in layers.1.moe.expert_bias_E" in caplog.text


def test_what_is_no_folder_of_weights_is_called_by_its_name(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/.metadata").write_bytes(b"")
    cases = {"absent": "does not exist", "file": "is not a folder", "step-1": "is a training checkpoint"}
    for name, words in cases.items():
        assert main(["import", str(tmp_path / name), str(tmp_path / "out")]) == 2
        message = capsys.readouterr().err
        assert message.startswith("torchtitan-trn import: 1 problem\n")
        assert f"{tmp_path / name}: {words}" in message
    assert main(["export", str(tmp_path / "absent"), str(tmp_path / "out")]) == 2
    assert "is not a training checkpoint: there is no such folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
