"""The route nki_moe on an emulated device ``neuron``: stock ``torchtitan.train``, NKI kernels run by the emulator."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
from conftest import EXAMPLES, ROOT
from launch import Run, train

pytestmark = pytest.mark.slow

SMALL = """
[profile.{device}.model]
n_layers = 2
num_experts = 4
top_k = 2
dim = 128
n_heads = 4
n_kv_heads = 2
head_dim = 32
moe_hidden_dim = 128
vocab_size = 2048

[profile.{device}.plugins.nki-moe]
block_rows = 128

[profile.{device}.training]
seq_len = 256
steps = 11
mixed_precision_param = "float32"

[profile.{device}.parallelism]
data_parallel_shard_degree = -1

[profile.{device}.activation_checkpoint]
mode = "none"
"""
EXAMPLE = (EXAMPLES / "qwen3_moe.toml").read_text().partition("[profile.cpu.model]")[0]
JOB = EXAMPLE + SMALL.format(device="cpu") + SMALL.format(device="neuron")
"""The example, on both devices at sizes for an emulator and in float32."""

NEURON = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/emulated_neuron/site'}",
    "NEURON_LOGICAL_NC_CONFIG": "2",
}

TENSOR_PARALLEL = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1"]

_GRAD_NORM = re.compile(r"step:\s*(\d+)\s.*grad_norm:\s*([\d.]+)")

MISSING = {
    "sort", "argsort", "topk", "unique", "_unique2", "unique_dim", "bincount", "histc", "searchsorted", "bucketize",
    "multinomial", "polar", "view_as_complex", "complex", "scatter_add", "index_add", "index_put", "_index_put_impl_",
    "index", "gather", "nonzero", "masked_select", "repeat_interleave", "one_hot", "_grouped_mm", "_scaled_mm",
    "_assert_async",
}  # fmt: skip
"""Operators that public sources of torch-neuronx lack, hand to the CPU, or run only for some shapes."""

REMAINING = {
    "scatter.value_out": "stock's MoE.forward marks the chosen experts; torch-neuronx registers scatter",
    "scatter.src_out": "inverse of a permutation; torch-neuronx registers scatter, and no index occurs twice",
    "index_select": "row gathers; every index is in range, where torch-neuronx computes it",
    "embedding_dense_backward": "stock's embedding; torch-neuronx has it",
    "cumsum.out": "the document mask, once per batch",
}
"""Operators worth a look that remain, and why they may."""

ORDINARY = {
    "_fused_adamw_", "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "add", "all",
    "amax", "amin", "arange", "bitwise_and", "bmm", "cat", "clamp", "cos", "div", "eq", "fill_", "floor_divide", "ge",
    "gt", "isneginf", "linalg_vector_norm", "lt", "masked_fill_", "maximum", "mean", "mm", "mul", "neg",
    "nll_loss_backward", "nll_loss_forward", "normal_", "pow", "reciprocal", "rsqrt", "sign", "sin", "sub", "sum",
    "tril", "where", "zero_",
}  # fmt: skip
"""Arithmetic, comparisons, reductions, products, fills and stock's loss and optimizer, whatever their overload.

All that are reached are listed, so that a new one is looked at before it is added: is it in `MISSING`?
"""

KERNELS = ("rope", "rope_backward", "experts", "experts_input_gradient", "experts_weight_gradients")

HOST_READS = ("_local_scalar_dense", "copy device to host")
HOST_READS_PER_STEP = 3  # stock's log of valid tokens, loss and gradient norm


@dataclass(frozen=True)
class Runs:
    """Finished runs by name, and the operators that reached the device, by run and rank."""

    log: dict[str, Run]
    operators: dict[str, list[dict[str, int]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("emulated_neuron")
    job = folder / "job.toml"
    saving = ["--checkpoint.enable", "--checkpoint.interval", "1000", "--checkpoint.no-last-save-model-only"]
    start = ["--model.backend", "native", "--plugins.disable", "nki-moe", "--training.steps", "1", *saving]
    first = folder / "native"
    log, operators = {}, {}

    def run(name: str, *args: str, ranks: int = 1, neuron: bool = False, replace: tuple[str, str] = ("", "")) -> None:
        job.write_text(JOB.replace(*replace))
        environment = {}
        if neuron:
            environment = {**NEURON, "EMULATED_NEURON_OPERATORS": str(folder / f"{name}.operators")}
        output = ["--job.dump_folder", str(folder / name)]
        done = train("--job.config_file", job, *output, *args, ranks=ranks, cwd=folder, environment=environment)
        assert done.status == 0, done.log
        log[name] = done
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.operators.*"))]
        operators[name] = [{key.removeprefix("aten::"): count for key, count in one.items()} for one in reports]

    run("native", *start)
    for name in ("cpu", "neuron", "neuron short", "cpu tensor parallel"):
        shutil.copytree(first / "checkpoint", folder / name / "checkpoint")
    selective = ('mode = "none"', 'mode = "selective"')
    run("cpu", *saving, replace=selective)
    run("neuron", *saving, neuron=True, replace=selective)
    run("neuron short", *saving, "--training.steps", "3", neuron=True, replace=selective)
    run("cpu tensor parallel", *saving, *TENSOR_PARALLEL, "--training.steps", "4", ranks=2)
    resume = [*saving, "--checkpoint.initial_load_path", str(first / "checkpoint/step-1"), "--training.steps", "10"]
    run("cpu fsdp", *resume, ranks=2)
    run("neuron fsdp", *resume, ranks=2, neuron=True)
    run("neuron expert parallel", *resume, "--parallelism.expert_parallel_degree", "2", ranks=2, neuron=True)
    return Runs(log, operators)


def grad_norms(run: Run) -> dict[int, float]:
    return {int(step): float(norm) for step, norm in _GRAD_NORM.findall(run.log)}


@pytest.mark.parametrize(
    ("emulated", "reference", "steps"),
    [
        ("neuron", "cpu", range(2, 12)),
        ("neuron fsdp", "cpu fsdp", range(1, 11)),
        ("neuron expert parallel", "cpu fsdp", range(1, 11)),
    ],
)
def test_ten_steps_on_neuron_equal_the_reference_on_the_cpu(runs, emulated, reference, steps):
    """1e-5 is what float32 sums in another order may move ten steps; logs round gradient norms to 1e-4."""
    actual, expected = runs.log[emulated], runs.log[reference]
    assert list(actual.losses) == list(expected.losses) == list(steps)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
    assert grad_norms(actual) == pytest.approx(grad_norms(expected), rel=1e-5, abs=1e-4)
    assert max(expected.losses.values()) - min(expected.losses.values()) > 0.1  # it trains


def test_tensor_parallel_steps_equal_those_of_one_rank(runs):
    actual, expected = runs.log["cpu tensor parallel"].losses, runs.log["cpu"].losses
    assert actual == pytest.approx({step: expected[step] for step in (2, 3, 4)}, rel=1e-5)


def test_stock_chooses_the_device_and_the_kernels_run(runs):
    assert re.search(r"device +│ neuron, 1 rank", runs.log["neuron"].log)
    (operators,) = runs.operators["neuron"]
    launches = {name: operators[f"torchtitan_qwen3_trn::{name}_nki"] for name in KERNELS}
    layers_and_steps = 2 * 10
    # Selective checkpointing computes the forward operators twice.
    assert launches == {name: layers_and_steps * (1 if "_" in name else 2) for name in KERNELS}


@pytest.mark.parametrize("name", ["neuron", "neuron fsdp", "neuron expert parallel"])
def test_no_operator_but_the_known_ones_is_reached(runs, name):
    known = {*REMAINING, *HOST_READS, *(f"torchtitan_qwen3_trn::{kernel}_nki" for kernel in KERNELS)}
    assert not ORDINARY & MISSING
    for operators in runs.operators[name]:
        assert operators.keys() >= known
        assert {operator.split(".")[0] for operator in operators.keys() - known} <= ORDINARY


def test_the_host_waits_for_nothing_but_stock_logging(runs):
    """Two runs differ in eight steps only, so that start, checkpoint and end cancel."""
    ((long,), (short,)) = (runs.operators[name] for name in ("neuron", "neuron short"))
    reads = [sum(operators.get(name, 0) for name in HOST_READS) for operators in (long, short)]
    assert (reads[0] - reads[1]) / 8 == HOST_READS_PER_STEP


def test_memory_statistics_reach_the_log(runs):
    used = re.findall(r"memory:\s+([\d.]+)GiB", runs.log["neuron"].log)
    assert used
    assert all(0 < float(size) < 1 for size in used)


def test_kernels_equal_their_references_however_they_are_called(tmp_path):
    """Also passes `torch.library.opcheck` on the device. RoPE to the bit; sums in another order to 1e-5."""
    script = ROOT / "tests/emulated_neuron/check_operators.py"
    environment = {**os.environ, **NEURON, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {name: len(ways) for name, ways in report.items()} == {"rope": 3, "qk_norm_rope": 3, "experts": 3}
    assert set(report["rope"].values()) == {0.0}
    assert all(difference < 1e-5 for ways in report.values() for difference in ways.values()), report
