"""Numbers no model can have end in one message before anything is built, wherever they stand and on both routes."""

from __future__ import annotations

import json
import time

import pytest
from conftest import TINY_MODEL
from hf_checkpoints import write_checkpoint

from torchtitan_qwen3_trn.checks import model_limits as memory
from torchtitan_qwen3_trn.weights.verify import verify

BACKENDS = ["native", "huggingface_v5"]
JOB = """
[model]
backend = "{backend}"
hf_assets_path = "{folder}"
{changes}
[training]
seq_len = 64
{rest}
"""
LOAD = '[checkpoint]\nenable = true\ninitial_load_in_hf = true\n[job]\ndump_folder = "{folder}/out"\n'
IN_FILES = [
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 10**4),
    ("vocab_size", 10**15),
    ("hidden_size", 2**63),
    ("intermediate_size", 10**12),
    ("num_attention_heads", 10**9),
    ("head_dim", 10**9),
    ("max_position_embeddings", 10**18),
]


def spoil(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": None} | changes))
    return folder


@pytest.fixture
def judged(parse_job):
    """Parse a job that must be refused, at once."""

    def run(*args, **options):
        started = time.monotonic()
        outcome = parse_job(*args, **options)
        assert time.monotonic() - started < 20  # a message takes less than one second; what it forbids, hours
        assert outcome.status == 2
        assert "Traceback" not in outcome.message
        return outcome.message

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("key", "value"), IN_FILES)
def test_a_job_refuses_a_config_json_with_an_absurd_number(judged, tmp_path, backend, key, value):
    folder = spoil(write_checkpoint(tmp_path, "qwen3"), **{key: value})
    for rest in ("", LOAD.format(folder=tmp_path)) if key == "num_hidden_layers" else ("",):
        message = judged(JOB.format(backend=backend, folder=folder, changes="", rest=rest), base="")
        assert f"config.json: {key}: {value} is far beyond any published model; at most" in message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_job_refuses_a_config_json_with_absurdly_many_experts(judged, tmp_path, backend, key):
    folder = write_checkpoint(tmp_path, "qwen3_moe")
    job = JOB.format(backend=backend, folder=folder, changes='load_balance = "none"', rest="")
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("num_experts", "num_local_experts")}
    for experts, layers, what in ((10**9, 2, "far beyond"), (16_000, 1000, "16000 in each of 1000 layers are far")):
        numbers = {"num_hidden_layers": layers, "layer_types": None, key: experts}
        (folder / "config.json").write_text(json.dumps(config | numbers))
        message = judged(job, base="")
        assert "experts: " in message
        assert what in message


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_refuses_a_list_that_would_be_searched_for_ever(judged, tmp_path, backend):
    folder = spoil(write_checkpoint(tmp_path, "qwen3_moe"), mlp_only_layers=[7] * 10**6, num_hidden_layers=1000)
    message = judged(JOB.format(backend=backend, folder=folder, changes='load_balance = "none"', rest=""), base="")
    assert "config.json: mlp_only_layers: " in message
    assert " 1000000 " in message


@pytest.mark.parametrize("backend", BACKENDS)
def test_deeply_nested_configurations_are_no_trouble(parse_job, tmp_path, backend):
    folder = write_checkpoint(tmp_path, "qwen3")
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(text + ', "more": ' + '{"a": ' * 800 + "1" + "}" * 801)
    outcome = parse_job(JOB.format(backend=backend, folder=folder, changes="", rest=""), base="")
    assert outcome.status in (None, 2)
    assert "Traceback" not in outcome.message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", ["num_hidden_layers = 1000", "num_experts = 1000"])
def test_a_number_that_only_the_weights_refute_is_refused_too(judged, tmp_path, backend, changes):
    key, _, value = changes.partition(" = ")
    folder = spoil(write_checkpoint(tmp_path, "qwen3_moe"), **{key: int(value)})
    message = judged(
        JOB.format(backend=backend, folder=folder, changes='load_balance = "none"', rest=LOAD.format(folder=tmp_path)),
        base="",
    )
    assert f"{key}: {value} cannot be right for files with " in message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["vocab_size", "dim", "n_layers", "n_heads", "head_dim", "hidden_dim", "max_seq_len"])
def test_a_job_refuses_an_absurd_number_of_its_own(judged, tmp_path, backend, key):
    text = f'backend = "{backend}"\n{key} = {10**15}'
    lines = [line for line in TINY_MODEL.splitlines() if not line.startswith(f"{key} =")]
    with_flavor = judged(base="\n".join(lines).replace("[model]", f"[model]\n{text}"))
    with_folder = judged(
        JOB.format(backend=backend, folder=write_checkpoint(tmp_path, "qwen3"), changes=f"{key} = {10**15}", rest=""),
        base="",
    )
    for message in (with_flavor, with_folder):
        assert f"model.{key}: {10**15} is far beyond any published model; at most" in message


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_refuses_too_many_experts_of_its_own(judged, backend):
    text = f'[model]\nbackend = "{backend}"\nload_balance = "none"\nnum_experts = 16000\ntop_k = 2\nmoe_hidden_dim = 8'
    message = judged(base=TINY_MODEL.replace("[model]", text).replace("n_layers = 2", "n_layers = 1000"))
    assert "model.num_experts: 16000 in each of 1000 layers are far beyond any published model" in message


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_exceed_the_memory_of_the_host_are_reported(judged, parse_job, backend, monkeypatch):
    base = TINY_MODEL.replace("[model]", f'[model]\nbackend = "{backend}"')
    message = judged(
        base=base.replace("\ndim = 64", f"\ndim = {2**20}").replace("\nhidden_dim = 128", "\nhidden_dim = 1000000")
    )
    assert "model: 6," in message
    assert " parameters in float32 are 2" in message
    assert parse_job(base=base).status is None
    # A host of two holds half of the shards; one of all simulated ranks holds one.
    parameters = 10**10
    config = parse_job(base=base).config
    properties = type("Properties", (), {"total_memory": 25 * 10**9})
    monkeypatch.setattr(memory.cpu_device_module, "get_device_properties", lambda *_: properties)
    for here, ranks, fits in ((1, 1, False), (2, 2, False), (1, 2, True), (2, 4, True), (8, 8, False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        machine = memory.Machine(device_type="cpu", world_size=ranks)
        assert (memory.check_memory(parameters, config, machine) == []) == fits
    assert memory.check_memory(parameters, config, memory.Machine(device_type="neuron", world_size=1)) == []


@pytest.mark.parametrize(("key", "value"), IN_FILES)
def test_verify_refuses_them(tmp_path, key, value):
    folder = spoil(write_checkpoint(tmp_path, "qwen3"), **{key: value})
    failed = [finding.detail for finding in verify(folder, cheap=True) if finding.outcome == "failed"]
    assert failed
    assert str(value) in failed[0]
