"""Checks that need no plugin: sizes, parallel degrees, folders. Everything is reported, nothing is changed."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_qwen3_trn.checks.checkpoints import check_checkpoint_folders
from torchtitan_qwen3_trn.checks.optimizer import check_optimizer
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.job.trial import silenced
from torchtitan_qwen3_trn.job.values import LARGEST_INTEGER, integer_range, join

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

_POSITIVE = (
    "training.local_batch_size",
    "training.seq_len",
    "training.steps",
    "training.max_norm",
    "training.gc_freq",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "metrics.log_freq",
    "profiler.profile_freq",
    "validator.freq",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "loss.num_chunks",
    "job.gradient_accumulation_steps",
)
_POSITIVE_OR_MINUS_ONE = (
    "training.global_batch_size",
    "parallelism.data_parallel_shard_degree",
    "validator.steps",
)
_SHARES = ("lr_scheduler.decay_ratio",)
_NOT_NEGATIVE = (
    "lr_scheduler.warmup_steps",
    "lr_scheduler.total_steps",
    "lr_scheduler.min_lr_factor",
    "dataloader.num_workers",
)
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def check_config(config: PluginTrainer.Config, machine: Machine, known: set[str]) -> list[Problem]:
    """Every problem of ``config`` on ``machine``; keys in ``known`` were reported already and are skipped."""
    problems = [*_sizes(config), *check_optimizer(config)]
    if not any(problem.where.startswith("parallelism.") for problem in problems):
        problems += _world_size(config, machine)
        problems += _batches(config, machine)
        problems += _sequence(config)
    problems += [
        *_folders(config),
        *_output_folders(config),
        *_data(config),
        *_device(config, machine),
        *_compilation(config),
        *_profiler(config),
        *check_checkpoint_folders(config),
    ]
    return [problem for problem in problems if problem.where not in known]


def impossible_numbers(section: Any, where: str = "") -> Iterator[Problem]:
    """Numbers that nothing could be done with, in all sections; in a job file they were refused when it was read."""
    for item in fields(section):
        value, path = getattr(section, item.name), join(where, item.name)
        if is_dataclass(value) and item.name != "model_spec":
            yield from impossible_numbers(value, path)
        elif isinstance(value, int) and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            yield Problem(path, f"{value} is out of range", integer_range())
        elif isinstance(value, float) and math.isnan(value):
            yield Problem(path, "nan is not possible", "give a number")


def data_parallel_degree(config: PluginTrainer.Config, machine: Machine) -> int:
    """Ranks that read different data: replicate degree times shard degree, the latter inferred when it is -1."""
    degrees = config.parallelism
    shard = degrees.data_parallel_shard_degree
    if shard == -1:
        shard = max(machine.world_size // _fixed_degrees(config), 1)
    return degrees.data_parallel_replicate_degree * shard


def _sizes(config: Any) -> list[Problem]:
    rules = [
        (_POSITIVE, lambda value: value > 0, "must be positive"),
        (
            _POSITIVE_OR_MINUS_ONE,
            lambda value: value > 0 or value == -1,
            "must be positive, or -1 to infer it",
        ),
        (_NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
        (_SHARES, lambda value: 0 <= value <= 1, "is a share of the steps, from 0 to 1"),
    ]
    problems = []
    for paths, accepts, requirement in rules:
        for path in paths:
            section, _, key = path.partition(".")
            value = getattr(getattr(config, section), key, None)
            if value is not None and not accepts(value):
                problems.append(Problem(path, f"{value} is not possible", f"it {requirement}"))
    return problems


def _fixed_degrees(config: Any) -> int:
    """Product of all degrees but ``data_parallel_shard_degree``."""
    degrees = config.parallelism
    return (
        degrees.data_parallel_replicate_degree
        * degrees.context_parallel_degree
        * degrees.tensor_parallel_degree
        * degrees.pipeline_parallel_degree
    )


def _world_size(config: Any, machine: Machine) -> list[Problem]:
    degrees, fixed, ranks = config.parallelism, _fixed_degrees(config), machine.world_size
    shard = degrees.data_parallel_shard_degree
    formula = (
        f"replicate {degrees.data_parallel_replicate_degree} x shard {shard} x context "
        f"{degrees.context_parallel_degree} x tensor {degrees.tensor_parallel_degree} x pipeline "
        f"{degrees.pipeline_parallel_degree}"
    )
    problems = []
    if shard == -1 and (ranks % fixed or ranks < fixed):
        what = f"{formula} cannot fill {ranks} ranks: {ranks} is not a multiple of {fixed}"
        problems.append(Problem("parallelism", what, "change a degree or the number of ranks"))
    elif shard != -1 and shard * fixed != ranks:
        what = f"{formula} = {shard * fixed} ranks, but the job was started with {ranks}"
        fix = f"start it with --nproc_per_node={shard * fixed}, or set data_parallel_shard_degree = -1"
        problems.append(Problem("parallelism", what, fix))
    expert = degrees.expert_parallel_degree
    region = (ranks // degrees.pipeline_parallel_degree) // degrees.data_parallel_replicate_degree
    if not problems and region % expert:
        what = f"{expert} does not divide the {region} ranks of shard x context x tensor"
        problems.append(Problem("parallelism.expert_parallel_degree", what, "choose a divisor"))
    return problems


def _batches(config: Any, machine: Machine) -> list[Problem]:
    training, problems = config.training, []
    if training.local_batch_size <= 0:
        return []
    per_step = training.local_batch_size * data_parallel_degree(config, machine)
    if training.global_batch_size > 0 and training.global_batch_size % per_step:
        what = f"{training.global_batch_size} is not a multiple of local batch size x data-parallel degree ({per_step})"
        nearest = max(training.global_batch_size // per_step, 1) * per_step
        problems.append(Problem("training.global_batch_size", what, f"the nearest is {nearest}"))
    steps = config.job.gradient_accumulation_steps
    if steps and training.global_batch_size > 0 and training.global_batch_size != steps * per_step:
        what = f"{steps} x {per_step} contradicts training.global_batch_size = {training.global_batch_size}"
        problems.append(Problem("job.gradient_accumulation_steps", what, "set only one of them"))
    problems += _pipeline_microbatches(config)
    return problems


def _pipeline_microbatches(config: Any) -> list[Problem]:
    stages, size = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_microbatch_size
    if stages > 1 and (problem := _pipeline_schedule(config.parallelism.pipeline_parallel_schedule)):
        return [problem]
    microbatches = config.training.local_batch_size // max(size, 1)
    if stages == 1 or microbatches >= stages:
        return []
    what = (
        f"{config.training.local_batch_size} makes {microbatches} microbatches of {size} for {stages} pipeline stages"
    )
    return [Problem("training.local_batch_size", what, f"at least {stages * size}")]


def _pipeline_schedule(name: str) -> Problem | None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    try:
        get_schedule_class(name)
    except ValueError as error:
        return Problem("parallelism.pipeline_parallel_schedule", str(error))
    return None


def _sequence(config: Any) -> list[Problem]:
    degrees, seq_len = config.parallelism, config.training.seq_len
    context = degrees.context_parallel_degree
    divisor = (degrees.tensor_parallel_degree if degrees.enable_sequence_parallel else 1) * (
        2 * context if context > 1 else 1
    )
    chunks = getattr(config.loss, "num_chunks", 1)
    problems = []
    if seq_len > 0 and seq_len % divisor:
        what = f"{seq_len} is not a multiple of {divisor}, as sequence and context parallelism need"
        problems.append(Problem("training.seq_len", what, _nearest_multiple(seq_len, divisor)))
    elif seq_len > 0 and chunks > 0 and (seq_len // context) % chunks:
        what = f"{seq_len} per context-parallel rank does not split into loss.num_chunks = {chunks} equal parts"
        problems.append(Problem("training.seq_len", what, _nearest_multiple(seq_len, chunks * context)))
    return problems


def _nearest_multiple(value: int, divisor: int) -> str:
    return f"the nearest is {max(round(value / divisor), 1) * divisor}"


def _folders(config: Any) -> list[Problem]:
    where, path = "model.hf_assets_path", Path(config.hf_assets_path)
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        fix = "download the tokenizer there (README, 'Weights in and out'), or leave the key out for the bundled one"
        return [Problem(where, f"{path} {what}", fix)]
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        what = f"{path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})"
        return [Problem(where, what, "put the checkpoint's tokenizer.json and tokenizer_config.json there")]
    try:
        with silenced():
            tokenizer = config.tokenizer.build(tokenizer_path=str(path))
    except Exception as error:
        what = f"the tokenizer in {path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [Problem(where, what, "download it again")]
    if tokenizer.get_vocab_size() == 0:
        return [Problem(where, f"the tokenizer in {path} has no entries", "download it again")]
    return []


def _output_folders(config: Any) -> list[Problem]:
    """Folders that a run creates or writes to: nothing on their way may be a file or closed to this user."""
    wanted = [("job.dump_folder", config.dump_folder)]
    if config.checkpoint.enable:
        wanted.append(("checkpoint.folder", str(Path(config.dump_folder, config.checkpoint.folder))))
    problems = []
    for where, folder in wanted:
        if not folder or "://" in folder:
            continue
        path = Path(folder).absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():
            problems.append(Problem(where, f"{there} is a file", "choose a folder"))
        elif not os.access(there, os.W_OK | os.X_OK):
            problems.append(Problem(where, f"this user may not write to {there}", "choose another folder"))
    return problems[:1]


def _compilation(config: Any) -> list[Problem]:
    """Parts and back ends that torchtitan would pass over in silence, or look for when the first step begins."""
    if not config.compile.enable:
        return []
    problems = [
        Problem("compile.components", f"{name!r} is nothing that can be compiled", "choose from model and loss")
        for name in config.compile.components
        if name not in ("model", "loss")
    ]
    if config.compile.backend != "inductor":
        from torch._dynamo import list_backends

        if config.compile.backend not in list_backends(exclude_tags=None):
            what = f"torch has no compiler back end {config.compile.backend!r}"
            problems.append(Problem("compile.backend", what, f"choose one of {', '.join(list_backends())}"))
    return problems


def _profiler(config: Any) -> list[Problem]:
    profiler = config.profiler
    least = profiler.profiler_warmup + profiler.profiler_active
    if not profiler.enable_profiling or profiler.profile_freq >= least:
        return []
    what = f"{profiler.profile_freq} is less than profiler_warmup + profiler_active = {least}"
    return [Problem("profiler.profile_freq", what, f"at least {least}")]


def _data(config: Any) -> list[Problem]:
    from torchtitan.hf_datasets.text_datasets import DATASETS

    loaders = [("dataloader", config.dataloader)]
    if config.validator.enable:
        loaders.append(("validator.dataloader", config.validator.dataloader))
    problems = []
    for where, loader in loaders:
        if loader.num_workers and loader.prefetch_factor is not None and loader.prefetch_factor < 1:
            what = f"{loader.prefetch_factor} is not possible"
            problems.append(Problem(f"{where}.prefetch_factor", what, "it must be positive"))
        for source in getattr(loader, "sources", None) or [loader]:
            name = source.dataset.lower()
            if name not in DATASETS:
                close = difflib.get_close_matches(name, DATASETS, n=1)
                fix = (f"did you mean {close[0]!r}? " if close else "") + f"known are {sorted(DATASETS)}"
                problems.append(Problem(f"{where}.dataset", f"no dataset is called {source.dataset!r}", fix))
            elif name == "c4_test" and source.dataset_path and (reason := _no_text(Path(source.dataset_path))):
                fix = "name a folder of JSON-lines files, or leave the key out for the bundled text"
                problems.append(Problem(f"{where}.dataset_path", f"{source.dataset_path} {reason}", fix))
            elif name == "c4_test" and source.dataset_path:
                problems += _text_fields(f"{where}.dataset_path", Path(source.dataset_path))
    return problems


def _no_text(folder: Path) -> str:
    """Why nothing can be read from ``folder``; empty if something may."""
    if not folder.is_dir():
        return "is not a folder" if folder.exists() else "does not exist"
    return "" if any(path.is_file() for path in folder.rglob("*")) else "holds no file"


def _text_fields(where: str, folder: Path) -> list[Problem]:
    """A look at the first record of the first JSON file: torchtitan reads the field ``text``."""
    first = next(iter(sorted(folder.glob("*.json*"))), None)
    if first is None or first.suffix not in (".json", ".jsonl"):
        return []
    try:
        with first.open(encoding="utf-8") as lines:
            record = json.loads(next(lines, "null"))
    except (OSError, ValueError):
        return []  # one document over many lines, or another form that the dataset library may know
    if not isinstance(record, dict) or "text" in record:
        return []
    what = f"the records of {first} have no field text but {', '.join(sorted(record))[:200]}"
    return [Problem(where, what, 'every line is one document, such as {"text": "Once upon a time ..."}')]


def _device(config: Any, machine: Machine) -> list[Problem]:
    if machine.device_type != "cpu":
        return []
    accelerator_only = {
        "profiler.enable_memory_snapshot": (
            config.profiler.enable_memory_snapshot,
            "memory snapshots come from an accelerator's allocator",
        ),
        "training.enable_cpu_offload": (config.training.enable_cpu_offload, "there is nothing to offload from"),
        "checkpoint.async_mode": (
            config.checkpoint.enable and getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem",
            "pinned memory belongs to an accelerator",
        ),
    }
    return [
        Problem(where, f"{reason}, and this job runs on the CPU", "switch it off, for instance in [profile.cpu]")
        for where, (asked, reason) in accelerator_only.items()
        if asked
    ]
