"""Questions that need no model: sizes, folders, device, compilation, profiler. Everything is reported."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch._dynamo import list_backends

from torchtitan_qwen3_trn.checks.checkpoints import check_checkpoint_folders
from torchtitan_qwen3_trn.checks.data import check_text, check_tokenizer
from torchtitan_qwen3_trn.checks.optimizer import check_optimizer
from torchtitan_qwen3_trn.checks.parallelism import check_parallelism
from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import LARGEST_INTEGER, Problem, integer_range, join
from torchtitan_qwen3_trn.launch import Machine, is_simulated, launch_problems

_POSITIVE = (
    "training.local_batch_size training.seq_len training.steps training.max_norm training.gc_freq "
    "parallelism.data_parallel_replicate_degree parallelism.tensor_parallel_degree "
    "parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_microbatch_size "
    "parallelism.context_parallel_degree parallelism.expert_parallel_degree metrics.log_freq profiler.profile_freq "
    "validator.freq comm.init_timeout_seconds comm.train_timeout_seconds loss.num_chunks "
    "job.gradient_accumulation_steps"
)
_POSITIVE_OR_INFERRED = "training.global_batch_size parallelism.data_parallel_shard_degree validator.steps"
_NOT_NEGATIVE = "lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.min_lr_factor dataloader.num_workers"
# What numbers must be.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("must be positive", lambda value: value > 0, _POSITIVE),
    ("must be positive, or -1 to infer it", lambda value: value > 0 or value == -1, _POSITIVE_OR_INFERRED),
    ("must not be negative", lambda value: value >= 0, _NOT_NEGATIVE),
    ("is a share of the steps, from 0 to 1", lambda value: 0 <= value <= 1, "lr_scheduler.decay_ratio"),
)
_ACCELERATOR_ONLY = {
    "profiler.enable_memory_snapshot": "memory snapshots come from an accelerator's allocator",
    "training.enable_cpu_offload": "there is nothing to offload from",
    "checkpoint.async_mode": "pinned memory belongs to an accelerator",
}


def check_settings(config: JobConfig, machine: Machine) -> list[Problem]:
    """Every problem of ``config`` on ``machine`` that needs no model to be found."""
    problems = [*_sizes(config), *check_optimizer(config)]
    if not any(problem.where.startswith("parallelism.") for problem in problems):
        problems += check_parallelism(config, machine)
    return [
        *problems,
        *launch_problems(config),
        *_absent_accelerator(config, machine),
        *check_tokenizer(config),
        *check_text(config),
        *_output_folders(config),
        *_device(config, machine),
        *_compilation(config),
        *_profiler(config),
        *check_checkpoint_folders(config),
    ]


def impossible_numbers(section: Any, where: str = "") -> Iterator[Problem]:
    """Integers out of range and nan, in all sections; in a job file they were refused when it was read."""
    for item in fields(section):
        value, path = getattr(section, item.name), join(where, item.name)
        if is_dataclass(value) and item.name != "model_spec":
            yield from impossible_numbers(value, path)
        elif isinstance(value, int) and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            yield Problem(path, f"{value} is out of range", integer_range())
        elif isinstance(value, float) and math.isnan(value):
            yield Problem(path, "nan is not possible", "give a number")


def _sizes(config: JobConfig) -> Iterator[Problem]:
    for requirement, accepts, keys in _RULES:
        for key in keys.split():
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name, None)
            if value is not None and not accepts(value):
                yield Problem(key, f"{value} is not possible", f"it {requirement}")


def _compilation(config: JobConfig) -> Iterator[Problem]:
    """Parts and back ends that torchtitan would ignore silently, or look for when the first step begins."""
    if not config.compile.enable:
        return
    for name in config.compile.components:
        if name not in ("model", "loss"):
            yield Problem("compile.components", f"{name!r} cannot be compiled", "choose from model and loss")
    if config.compile.backend not in list_backends(exclude_tags=None):
        what = f"torch has no compiler back end {config.compile.backend!r}"
        yield Problem("compile.backend", what, f"choose one of {', '.join(list_backends())}")


def _profiler(config: JobConfig) -> list[Problem]:
    profiler = config.profiler
    least = profiler.profiler_warmup + profiler.profiler_active
    if not profiler.enable_profiling or profiler.profile_freq >= least:
        return []
    what = f"{profiler.profile_freq} is less than profiler_warmup + profiler_active = {least}"
    return [Problem("profiler.profile_freq", what, f"at least {least}")]


def _device(config: JobConfig, machine: Machine) -> list[Problem]:
    if machine.device_type != "cpu":
        return []
    asked = {
        "profiler.enable_memory_snapshot": config.profiler.enable_memory_snapshot,
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        "checkpoint.async_mode": config.checkpoint.enable
        and getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem",
    }
    return [
        Problem(where, f"{reason}, and this job runs on the CPU", "switch it off, for instance in [profile.cpu]")
        for where, reason in _ACCELERATOR_ONLY.items()
        if asked[where]
    ]


def _output_folders(config: JobConfig) -> Iterator[Problem]:
    """Folders that a run creates or writes to: every part of their paths is a folder, or absent, and writable."""
    wanted = [("job.dump_folder", config.dump_folder)]
    if config.checkpoint.enable:
        wanted.append(("checkpoint.folder", str(Path(config.dump_folder, config.checkpoint.folder))))
    for where, folder in wanted:
        if folder and "://" not in folder and (defect := _folder_defect(Path(folder).absolute())):
            yield Problem(where, defect, "choose another folder")
            return  # the second folder lies in the first one


def _folder_defect(path: Path) -> str:
    """Why the folder ``path`` cannot be created or written to; empty if it can."""
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"this user may not write to {there}"


def _absent_accelerator(config: JobConfig, machine: Machine) -> list[Problem]:
    """A host made for an accelerator on which none answers must not train the small CPU profile instead."""
    if machine.device_type != "cpu" or config.job.profile != "auto" or is_simulated(config):
        return []
    signs = {
        "torch-neuronx is installed": importlib.util.find_spec("torch_neuronx") is not None,
        "/dev/neuron0 exists": Path("/dev/neuron0").exists(),
        "/dev/nvidia0 exists": Path("/dev/nvidia0").exists(),
    }
    seen = [sign for sign, present in signs.items() if present]
    if not seen:
        return []
    what = f"{seen[0]}, but torch finds no accelerator"
    fix = "check the driver and that the back end of torch loads; --job.profile cpu runs on the CPU anyway"
    return [Problem("device", what, fix)]
