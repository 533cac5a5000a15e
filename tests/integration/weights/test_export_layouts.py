"""Weights that go in come out bit for bit: every kind of model, both routes, every layout of ranks.

All cases of one number of ranks run in one launch of the worker of the other integration tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import write_checkpoint
from launch import run_cases
from safetensors.torch import load_file

from torchtitan_qwen3_trn.hf_files.index import INDEX
from torchtitan_qwen3_trn.weights.manifest import manifest_problems

pytestmark = pytest.mark.slow

JOB = """
[model]
backend = "{backend}"
load_balance = "none"
hf_assets_path = "{folder}"
[plugins]
enable = ["safetensors-export"]
[plugins.safetensors-export]
max_shard_size = "{limit}"
[training]
local_batch_size = 2
seq_len = 64
steps = 1
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
initial_load_in_hf = true
[debug]
seed = 1
"""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "moe": ("qwen3_moe", {"router_aux_loss_coef": 0.5}),
}
DEGREE = "--parallelism.{}_parallel_degree"
LAYOUTS = {
    "fsdp": (),
    "tp": (DEGREE.format("tensor"), "2"),
    "ep": (DEGREE.format("expert"), "2"),
    "pp": (DEGREE.format("pipeline"), "2"),
    "ddp": ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"),
}
ONE = [(backend, kind, "one") for backend in ("native", "huggingface_v5") for kind in KINDS]
TWO = [
    ("native", "tied", "fsdp"),
    ("native", "tied", "tp"),
    ("native", "untied", "pp"),
    *(("native", "moe", layout) for layout in ("fsdp", "tp", "ep", "ddp")),
    ("huggingface_v5", "tied", "fsdp"),
    ("huggingface_v5", "untied", "tp"),
    ("huggingface_v5", "moe", "fsdp"),
    ("huggingface_v5", "moe", "tp"),
]


def name_of(case: tuple[str, str, str]) -> str:
    return "-".join(case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    for kind, (architecture, changes) in KINDS.items():
        size = "10GB" if kind == "untied" else "150KB"
        write_checkpoint(root / kind, architecture, file_size=size, **changes)
    return root


TRAIN = (
    "--training.steps", "3", "--plugins.safetensors-export.no-at-end", "--checkpoint.load-only",
    "--lr_scheduler.warmup_steps", "0", "--lr_scheduler.min_lr_factor", "1",
)  # fmt: skip


def balanced(root: Path, rows: int, *args: str, name: str = "balanced", **options: Any) -> dict[str, Any]:
    """Three steps on four rows with the balancing loss."""
    job = root / "balanced.toml"
    text = JOB.format(backend="native", folder=root / "moe", limit="1GB")
    job.write_text(text.replace('load_balance = "none"', 'load_balance = "aux_loss"'))
    dump = str(root / "out" / f"{name}-{rows}")
    size = ("--training.local_batch_size", str(rows))
    return {
        "name": name,
        "args": ["--job.config_file", str(job), "--dump_folder", dump, *TRAIN, *size, *args],
        **options,
    }


def continued(root: Path) -> list[dict[str, Any]]:
    """A run that exports, and two that go on: from its checkpoint, and from its export imported again."""
    job = root / "continued.toml"
    text = JOB.format(backend="native", folder=root / "moe", limit="150KB")
    job.write_text(text.replace("[checkpoint]", "[checkpoint]\nlast_save_model_only = true"))
    args = ["--job.config_file", str(job), "--dump_folder"]
    out, imported = root / "out" / "first", root / "imported"
    follow = [*TRAIN, "--checkpoint.no-initial_load_in_hf", "--checkpoint.initial_load_path"]
    return [
        {"name": "first", "args": [*args, str(out), "--training.steps", "2"]},
        {"name": "from checkpoint", "args": [*args, str(root / "a"), *follow, str(out / "checkpoint/step-2")]},
        {
            "name": "from export",
            "args": [*args, str(root / "b"), *follow, str(imported)],
            "before": ["import", str(out / "export/step-2"), str(imported)],
        },
    ]


def launch(
    root: Path, cases: list[tuple[str, str, str]], ranks: int, more: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    jobs = [*more]
    for backend, kind, layout in cases:
        job = root / f"{backend}-{kind}-{layout}.toml"
        limit = "10GB" if kind == "untied" else "150KB"
        job.write_text(JOB.format(backend=backend, folder=root / kind, limit=limit))
        name = name_of((backend, kind, layout))
        args = ["--job.config_file", str(job), "--dump_folder", str(root / "out" / name), *LAYOUTS.get(layout, ())]
        jobs.append({"name": name, "args": args, "still": True})
    return run_cases(jobs, ranks, root)


@pytest.fixture(scope="module")
def one(folder):
    more = [
        *continued(folder),
        balanced(folder, 4),
        balanced(folder, 4, *("--model.load_balance", "none"), name="unbalanced"),
    ]
    return launch(folder, ONE, 1, more)


@pytest.fixture(scope="module")
def two(folder):
    more = [
        balanced(folder, 2),
        balanced(folder, 2, *LAYOUTS["ep"], name="balanced ep"),
        balanced(folder, 4, *LAYOUTS["tp"], name="balanced tp"),
    ]
    return launch(folder, TWO, 2, more)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def check(root: Path, results: dict[str, Any], case: tuple[str, str, str]) -> None:
    outcome = results[name_of(case)]
    assert "error" not in outcome, outcome["error"]
    places = list((root / "out" / name_of(case) / "export").iterdir())
    assert [path.name for path in places] == ["step-0"]  # no step was taken, and no draft is left
    exported, original = tensors(places[0]), tensors(root / case[1])
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    assert manifest_problems(places[0], checksums=True) == []
    several = len(set(json.loads((places[0] / INDEX).read_text())["weight_map"].values())) > 1
    assert several == (case[1] != "untied")
    assert ("lm_head.weight" in exported) == (case[1] != "tied")


@pytest.mark.parametrize("case", ONE, ids=name_of)
def test_one_rank(folder, one, case):
    check(folder, one, case)


@pytest.mark.parametrize("case", TWO, ids=name_of)
def test_two_ranks(folder, two, case):
    check(folder, two, case)


def losses(results: dict[str, Any], name: str) -> list[float]:
    assert "error" not in results[name], results[name]["error"]
    return results[name]["losses"]


def gradient_norms(results: dict[str, Any], name: str) -> list[float]:
    return [float(norm) for norm in re.findall(r"grad_norm:\s*([\d.]+)", results[name]["log"])]


def test_training_goes_on_from_an_imported_export_as_from_the_checkpoint_itself(one):
    assert len(losses(one, "from checkpoint")) == 3
    assert losses(one, "from export") == losses(one, "from checkpoint")
    assert losses(one, "from export")[0] < losses(one, "first")[0]


@pytest.mark.parametrize("name", ["balanced", "balanced ep"])
def test_balance_is_counted_over_all_ranks(one, two, name):
    """Two ranks with two rows each train as one rank with all four."""
    assert losses(two, name) == pytest.approx(losses(one, "balanced"), rel=1e-5)
    assert losses(one, "balanced")[2] != pytest.approx(losses(one, "unbalanced")[2], rel=1e-5)
    assert "step:  1  router_aux_loss:" in one["balanced"]["log"]


def test_balance_weighs_the_same_under_tensor_parallelism(one, two):
    """Experts are computed in bfloat16, and in two halves here: losses agree to 2e-4, and differ by more without it."""
    assert losses(two, "balanced tp") == pytest.approx(losses(one, "balanced"), rel=2e-4)
    assert gradient_norms(two, "balanced tp") == pytest.approx(gradient_norms(one, "balanced"), rel=2e-2)
