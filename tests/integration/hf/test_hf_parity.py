"""Training on the Hugging Face route against a plain loop, the native route, and itself under other layouts.

All cases of one number of ranks run in one launch (see ``worker.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_batches import plain_losses
from hf_checkpoints import write_checkpoint
from launch import run_cases
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

SEQ_LEN = 64
JOB = """
[model]
backend = "huggingface_v5"
load_balance = "none"
hf_assets_path = "{folder}"
[training]
local_batch_size = 4
seq_len = 64
steps = 10
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
initial_load_in_hf = true
load_only = true
[optimizer]
lr = 2e-3
[lr_scheduler]
warmup_steps = 0
min_lr_factor = 1.0
[metrics]
log_freq = 1
[debug]
seed = 1
"""
TWO_ROWS = ("--training.local_batch_size", "2")
TENSOR = ("--parallelism.tensor_parallel_degree", "2")
# Nothing moves: a step of 1e-30 is lost in the rounding of any weight that is not zero.
STILL = ("lr = 2e-3", "lr = 1e-30")
EXPORT = ("--checkpoint.no-load_only", "--checkpoint.last_save_in_hf", "--training.steps", "1")
KINDS = ("qwen3", "qwen3_moe")


class Jobs:
    """Checkpoints and job files, and the cases made of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_checkpoint(folder / "qwen3", "qwen3")
        write_checkpoint(folder / "qwen3_moe", "qwen3_moe", router_aux_loss_coef=0.5)

    def case(self, name: str, kind: str, *args: str, accumulation: int = 1, edit: tuple[str, str] = ("", "")) -> Any:
        job = self.folder / f"{name}.toml"
        job.write_text(JOB.format(folder=self.folder / kind).replace(*edit))
        dump = str(self.folder / "dump" / name)
        return {
            "name": name,
            "args": ["--job.config_file", str(job), "--dump_folder", dump, *args],
            "accumulation": accumulation,
        }

    def exported(self, name: str) -> dict[str, torch.Tensor]:
        step = self.folder / "dump" / name / "checkpoint" / "step-1"
        return {key: value for file in step.glob("*.safetensors") for key, value in load_file(file).items()}

    def original(self, kind: str) -> dict[str, torch.Tensor]:
        files = (self.folder / kind).glob("*.safetensors")
        return {key: value for file in files for key, value in load_file(file).items()}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def one(jobs):
    """Results with one rank."""
    native = ("--model.backend", "native", "--training.steps", "1")
    bfloat16 = ("--training.mixed_precision_param", "bfloat16", "--training.steps", "1")
    full, selective = (('mode = "none"', f'mode = "{mode}"') for mode in ("full", "selective"))
    compiled = ("[debug]", '[compile]\nenable = true\ncomponents = ["model"]\nbackend = "aot_eager"\n[debug]')
    aux = ('load_balance = "none"', 'load_balance = "aux_loss"')
    short = ("--training.steps", "3")
    cases = []
    for kind in KINDS:
        cases += [
            jobs.case(f"{kind} base", kind, "--training.steps", "20"),
            jobs.case(f"{kind} native", kind, *native),
            jobs.case(f"{kind} bfloat16", kind, *bfloat16),
            jobs.case(f"{kind} native bfloat16", kind, *native, *bfloat16),
            jobs.case(f"{kind} full", kind, *short, edit=full),
            jobs.case(f"{kind} selective", kind, *short, edit=selective),
            jobs.case(f"{kind} compiled", kind, *short, edit=compiled),
        ]
    cases += [
        jobs.case("aux", "qwen3_moe", edit=aux),
        jobs.case("aux accumulated", "qwen3_moe", *TWO_ROWS, "--training.global_batch_size", "4",
                  accumulation=2, edit=aux),
        jobs.case("random", "qwen3", *short, edit=("enable = true\ninitial_load_in_hf = true", "enable = false")),
    ]  # fmt: skip
    return run_cases(cases, 1, jobs.folder)


@pytest.fixture(scope="module")
def two(jobs):
    """Results with two ranks."""
    accumulated = ("--training.local_batch_size", "1", "--training.global_batch_size", "4")
    replicated = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
    random = ("enable = true\ninitial_load_in_hf = true", "enable = false")
    aux = ('load_balance = "none"', 'load_balance = "aux_loss"')
    cases = []
    for kind in KINDS:
        cases += [
            jobs.case(f"{kind} fsdp", kind, *TWO_ROWS),
            jobs.case(f"{kind} tp", kind, *TENSOR),
            jobs.case(f"{kind} fsdp accumulated", kind, *accumulated, accumulation=2),
            jobs.case(f"{kind} hsdp", kind, *TWO_ROWS, *replicated),
            jobs.case(f"{kind} fsdp export", kind, *TWO_ROWS, *EXPORT, edit=STILL),
            jobs.case(f"{kind} tp export", kind, *TENSOR, *EXPORT, edit=STILL),
        ]
    cases += [
        jobs.case("random fsdp", "qwen3", *TWO_ROWS, "--training.steps", "3", edit=random),
        jobs.case("random tp", "qwen3", *TENSOR, "--training.steps", "3", edit=random),
        jobs.case("aux fsdp", "qwen3_moe", *TWO_ROWS, edit=aux),
        jobs.case("tp resumable", "qwen3_moe", *TENSOR, "--training.steps", "3", "--checkpoint.no-load_only",
                  "--checkpoint.no-last_save_model_only", "--dump_folder", str(jobs.folder / "resume")),
        jobs.case("fsdp resumed", "qwen3_moe", *TWO_ROWS, "--training.steps", "6",
                  "--dump_folder", str(jobs.folder / "resume")),
    ]  # fmt: skip
    return run_cases(cases, 2, jobs.folder)


def losses(results: dict[str, Any], name: str) -> list[float]:
    assert "error" not in results[name], results[name]["error"]
    return results[name]["losses"]


def plain(jobs: Jobs, kind: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(jobs.folder / kind, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_equal_a_plain_loop_over_the_transformers_model(jobs, one, kind):
    expected = plain_losses(plain(jobs, kind), steps=20, seq_len=SEQ_LEN)
    assert losses(one, f"{kind} base") == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_both_routes_start_one_checkpoint_at_the_same_loss(one, kind):
    assert losses(one, f"{kind} native")[0] == pytest.approx(losses(one, f"{kind} base")[0], rel=1e-5)
    # bfloat16 keeps 8 bits, and the routes round in different places.
    both = losses(one, f"{kind} native bfloat16")[0], losses(one, f"{kind} bfloat16")[0]
    assert both[0] == pytest.approx(both[1], rel=2e-3)
    assert both[1] == pytest.approx(losses(one, f"{kind} base")[0], rel=2e-3)


@pytest.mark.parametrize("layout", ["fsdp", "tp", "fsdp accumulated", "hsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_reproduces_the_losses_of_one_process(one, two, kind, layout):
    assert losses(two, f"{kind} {layout}") == pytest.approx(losses(one, f"{kind} base")[:10], rel=1e-4)


@pytest.mark.parametrize("way", ["full", "selective", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_and_compilation_change_no_loss(one, kind, way):
    assert losses(one, f"{kind} {way}") == pytest.approx(losses(one, f"{kind} base")[:3], rel=1e-6)


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_one_seed_gives_one_set_of_weights_on_any_layout(one, two, layout):
    assert losses(two, f"random {layout}") == pytest.approx(losses(one, "random"), rel=1e-5)


@pytest.mark.parametrize(("name", "rows"), [("aux", 4), ("aux accumulated", 2)])
def test_the_router_loss_trains_as_in_a_plain_loop(jobs, one, name, rows):
    expected = plain_losses(plain(jobs, "qwen3_moe"), steps=10, seq_len=SEQ_LEN, router_loss=True, rows=rows)
    assert losses(one, name) == pytest.approx(expected, rel=1e-5)
    assert losses(one, name)[9] != pytest.approx(losses(one, "qwen3_moe base")[9], rel=1e-5)


def test_the_router_loss_of_two_ranks_is_that_of_two_microbatches(one, two):
    assert losses(two, "aux fsdp") == pytest.approx(losses(one, "aux accumulated"), rel=1e-5)


def test_the_log_shows_the_router_loss(one):
    assert one["aux"]["log"].count("router_aux_loss:") == 10
    assert one["aux"]["log"].count("router_aux_loss_coef:  0.50000") == 10


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_out_as_they_went_in(jobs, two, kind, layout):
    losses(two, f"{kind} {layout} export")
    exported, original = jobs.exported(f"{kind} {layout} export"), jobs.original(kind)
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_a_tensor_parallel_run_resumes_under_fsdp_with_the_losses_it_would_have_had(one, two):
    assert losses(two, "fsdp resumed") == pytest.approx(losses(one, "qwen3_moe base")[3:6], rel=1e-4)


def test_an_untrained_checkpoint_is_called_out_on_every_route(one):
    """The small checkpoints here hold random weights: just what a failed load would look like."""
    for name in ("qwen3_moe base", "qwen3_moe native", "qwen3 native"):
        assert one[name]["log"].count("THE WEIGHTS LOOK RANDOM") == 1
    assert "THE WEIGHTS LOOK RANDOM" not in one["random"]["log"]
