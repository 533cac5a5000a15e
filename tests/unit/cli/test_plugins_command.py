"""The torchtitan-trn command."""

from __future__ import annotations

import json

from torchtitan_qwen3_trn.cli import main


def test_plugins_json_tells_name_version_routes_hooks_and_options(capsys):
    assert main(["plugins", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    sdpa = rows["sdpa"]
    assert sdpa["distribution"] == "torchtitan-qwen3-trn"
    assert sdpa["routes"] == ["native", "nki_moe"]
    assert sdpa["hooks"] == ["check_job", "model_inputs", "node_overrides"]
    assert {"name": "document_mask", "type": "true or false", "default": True} in sdpa["options"]


def test_plugins_table_shows_a_broken_plugin_and_fails(capsys, install_plugin):
    install_plugin("broken", "raise ValueError('kaput')", module="broken_for_cli")
    assert main(["plugins"]) == 1
    printed = capsys.readouterr().out
    assert "gather-free-rope" in printed
    assert "kaput" in printed


def test_paths_stay_whole_where_no_terminal_sets_the_width(capsys, tmp_path):
    folder = tmp_path / ("a-long-name-" * 12) / "[/model]"
    assert main(["verify-weights", str(folder)]) == 1
    assert f"{folder}: does not exist" in capsys.readouterr().out


def test_a_route_that_cannot_be_read_is_reported_beside_the_list(install_plugin, capsys):
    install_plugin("lone", "", routes={"odd": 3}, module="lone_module")
    assert main(["plugins"]) == 1
    printed = capsys.readouterr()
    assert "safetensors-export" in printed.out
    assert "route odd (lone-dist 1.2.3)" in printed.err
