"""Broken and hostile checkpoint folders: refused with file and reason, nothing read outside, nothing run."""

from __future__ import annotations

import json
import logging
import os
import struct

import pytest
from hf_checkpoints import write_checkpoint
from mutate import run as judge_mutations
from safetensors.torch import load_file, save_file

from torchtitan_qwen3_trn.cli import main
from torchtitan_qwen3_trn.hf_files.headers import read_headers
from torchtitan_qwen3_trn.weights.verify import verify

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "folder", "llama")


def files(folder):
    return sorted(folder.glob("*.safetensors"))


def edit_json(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_header(path, edit, *, raw=False):
    """Change the header of a safetensors file; the tensors stay."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length]
    if raw:
        header = edit(header)
    else:
        content = json.loads(header)
        edit(content)
        header = json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def name_in(folder, number=0):
    return next(iter(load_file(files(folder)[number])))


def leads_up(folder):
    secret = folder.parent / "secret.safetensors"
    save_file(load_file(files(folder)[0]), secret)
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({name_in(folder): "../secret.safetensors"}))


def leads_to_root(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({name_in(folder): "/etc/passwd"}))


def links_out(folder):
    outside = folder.parent / "outside.safetensors"
    files(folder)[0].rename(outside)
    (folder / outside.name).symlink_to(outside)


def links_config_out(folder):
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to("../config.json")


def truncated(folder):
    files(folder)[1].write_bytes(files(folder)[1].read_bytes()[:-100])


def header_too_long(folder):
    data = files(folder)[0].read_bytes()
    files(folder)[0].write_bytes(struct.pack("<Q", 2**63) + data[8:])


def overlapping(folder):
    def edit(header):
        one, two = [entry for name, entry in header.items() if name != "__metadata__"][:2]
        size = two["data_offsets"][1] - two["data_offsets"][0]
        begin = one["data_offsets"][1] - 4
        two["data_offsets"] = [begin, begin + size]

    edit_header(max(files(folder), key=lambda file: len(load_file(file))), edit)


def out_of_range(folder):
    def edit(header):
        entry = header[name_in(folder)]
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [2**40, 2**40 + size]

    edit_header(files(folder)[0], edit)


def negative_offset(folder):
    edit_header(files(folder)[0], lambda header: header[name_in(folder)].update(data_offsets=[-8, 0]))


def shape_beyond_offsets(folder):
    edit_header(files(folder)[0], lambda header: header[name_in(folder)].update(shape=[2**40, 2**40]))


def doubled_key(folder):
    """Two valid entries of one name, of which safetensors itself takes the last."""

    def edit(raw):
        name = name_in(folder)
        entry = json.dumps({name: json.loads(raw)[name]})[1:-1].encode()
        return raw.rstrip()[:-1] + b"," + entry + b"}"

    edit_header(files(folder)[0], edit, raw=True)


def unknown_dtype(folder):
    edit_header(files(folder)[0], lambda header: header[name_in(folder)].update(dtype="F13"))


def deep_header(folder):
    edit_header(files(folder)[0], lambda raw: b"[" * 100_000, raw=True)


def shard_absent(folder):
    files(folder)[1].unlink()


def stored_elsewhere(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({name_in(folder): files(folder)[1].name}))


def not_listed(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(name_in(folder)))


def config_is_a_list(folder):
    (folder / "config.json").write_text("[1, 2]")


def deep_config(folder):
    (folder / "config.json").write_text("[" * 100_000)


def index_is_a_list(folder):
    (folder / INDEX).write_text("[]")


def remote_code(folder):
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')")
    edit_json(folder / "config.json", lambda config: config.update(auto_map={"AutoModelForCausalLM": "evil.Model"}))


def fifo(folder):
    os.mkfifo(folder / "extra.safetensors")


def endless_layers(folder):
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=10**9))


def endless_nested_layers(folder):
    edit_json(folder / "config.json", lambda config: config.update(text_config={"n_layer": 10**9}))


def endless_layers_by_another_name(folder):
    edit_json(folder / "config.json", lambda config: config.update(num_layers=10**9))


def another_config(folder):
    edit_json(folder / "config.json", lambda config: config.update(configuration_files=["config.4.0.0.json"]))


CASES = {
    leads_up: "names files outside the folder (../secret.safetensors)",
    leads_to_root: "names files outside the folder (/etc/passwd)",
    links_out: "outside.safetensors: is a symbolic link out of the folder",
    links_config_out: "config.json: is a symbolic link out of the folder",
    truncated: "truncated or damaged",
    header_too_long: "header too large",
    overlapping: "invalid offset for tensor `",
    out_of_range: "its header describes 10995121",
    negative_offset: "'data_offsets': [-8, 0]}",
    shape_beyond_offsets: "'shape': [1099511627776, 1099511627776]",
    doubled_key: "its header has the key model.embed_tokens.weight twice",
    unknown_dtype: "unknown variant `F13`",
    deep_header: "invalid JSON in header",
    shard_absent: "names 1 files that are not there",
    stored_elsewhere: "not in the file that the index names",
    not_listed: "stored but not listed",
    config_is_a_list: "config.json: must hold a JSON object, got a list",
    deep_config: "config.json: is not JSON",
    index_is_a_list: "index.json: must hold a JSON object, got a list",
    remote_code: "asks to run Python code",
    fifo: "extra.safetensors: is not a regular file",
    endless_layers: "num_hidden_layers: 1000000000 cannot be right",
    endless_nested_layers: "config.json: text_config.n_layer: 1000000000 cannot be right",
    endless_layers_by_another_name: "config.json: num_layers: 1000000000 cannot be right",
    another_config: "config.json: configuration_files: asks to read another file",
}


@pytest.mark.parametrize("spoil", CASES, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_folder_is_refused_with_the_reason(folder, capsys, spoil):
    spoil(folder)
    target = folder.parent / "dcp"
    assert main(["verify-weights", str(folder), "--json"]) == 1
    failed = [row["detail"] for row in json.loads(capsys.readouterr().out) if row["outcome"] == "failed"]
    assert any(CASES[spoil] in detail for detail in failed), failed
    assert main(["import", str(folder), str(target), "--route", "huggingface_v5"]) == 2
    assert CASES[spoil] in capsys.readouterr().err
    assert not target.exists()
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("target", ["/etc", "/etc/passwd", "../../outside"])
def test_a_link_out_of_a_subfolder_is_refused(folder, target):
    (folder / "original").mkdir()
    (folder / "original/inside").symlink_to("../config.json")
    assert verify(folder, cheap=True)[0].outcome == "ok"
    (folder / "original/link").symlink_to(target)
    finding = verify(folder, cheap=True)[0]
    assert finding.outcome == "failed"
    assert "original/link: is a symbolic link out of the folder" in finding.detail


def test_the_links_of_the_hugging_face_cache_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert read_headers(snapshot)[1] == []
    assert all(finding.outcome != "failed" for finding in verify(snapshot, cheap=True))


def test_mutated_folders_are_judged_without_a_crash():
    """``python tests/unit/weights/mutate.py 10000`` does more of it."""
    logging.disable(logging.WARNING)
    try:
        refused = judge_mutations(200, first=0)
    finally:
        logging.disable(logging.NOTSET)
    # Most mutations hit something that matters; some only the tensors' values or a name nobody reads.
    assert refused > 100
