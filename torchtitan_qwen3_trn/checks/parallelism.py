"""Questions about parallel degrees: do they fit the ranks, the batches, the sequence and the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.pipelining.schedules import get_schedule_class

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.launch import Machine


def check_parallelism(config: JobConfig, machine: Machine) -> list[Problem]:
    """Degrees against ranks, batches and sequence; every degree is positive."""
    return [*_world_size(config, machine), *_batches(config, machine), *_sequence(config)]


def data_parallel_degree(config: JobConfig, machine: Machine) -> int:
    """Ranks that read different data: replicate degree times shard degree, the latter inferred when it is -1."""
    degrees = config.parallelism
    shard = degrees.data_parallel_shard_degree
    if shard == -1:
        shard = max(machine.world_size // max(_fixed_degrees(config), 1), 1)
    return degrees.data_parallel_replicate_degree * shard


def _fixed_degrees(config: JobConfig) -> int:
    """Product of all degrees but ``data_parallel_shard_degree``."""
    degrees = config.parallelism
    inner = degrees.context_parallel_degree * degrees.tensor_parallel_degree * degrees.pipeline_parallel_degree
    return degrees.data_parallel_replicate_degree * inner


def _world_size(config: JobConfig, machine: Machine) -> Iterator[Problem]:
    degrees, fixed, ranks = config.parallelism, _fixed_degrees(config), machine.world_size
    shard = degrees.data_parallel_shard_degree
    formula = (
        f"replicate {degrees.data_parallel_replicate_degree} x shard {shard} x context "
        f"{degrees.context_parallel_degree} x tensor {degrees.tensor_parallel_degree} x pipeline "
        f"{degrees.pipeline_parallel_degree}"
    )
    expert = degrees.expert_parallel_degree
    region = (ranks // degrees.pipeline_parallel_degree) // degrees.data_parallel_replicate_degree
    if shard == -1 and (ranks % fixed or ranks < fixed):
        what = f"{formula} cannot fill {ranks} ranks: {ranks} is not a multiple of {fixed}"
        yield Problem("parallelism", what, "change a degree or the number of ranks")
    elif shard != -1 and shard * fixed != ranks:
        what = f"{formula} = {shard * fixed} ranks, but the job was started with {ranks}"
        fix = f"start it with --nproc_per_node={shard * fixed}, or set data_parallel_shard_degree = -1"
        yield Problem("parallelism", what, fix)
    elif region % expert:
        what = f"{expert} does not divide the {region} ranks of shard x context x tensor"
        yield Problem("parallelism.expert_parallel_degree", what, "choose a divisor")


def _batches(config: JobConfig, machine: Machine) -> Iterator[Problem]:
    training = config.training
    if training.local_batch_size <= 0:
        return
    per_step = training.local_batch_size * data_parallel_degree(config, machine)
    if training.global_batch_size > 0 and training.global_batch_size % per_step:
        what = f"{training.global_batch_size} is not a multiple of local batch size x data-parallel degree ({per_step})"
        nearest = max(training.global_batch_size // per_step, 1) * per_step
        yield Problem("training.global_batch_size", what, f"the nearest is {nearest}")
    steps = config.job.gradient_accumulation_steps
    if steps and training.global_batch_size > 0 and training.global_batch_size != steps * per_step:
        what = f"{steps} x {per_step} contradicts training.global_batch_size = {training.global_batch_size}"
        yield Problem("job.gradient_accumulation_steps", what, "set only one of them")
    yield from _pipeline_microbatches(config)


def _pipeline_microbatches(config: JobConfig) -> list[Problem]:
    stages, size = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_microbatch_size
    if stages == 1:
        return []
    try:
        get_schedule_class(config.parallelism.pipeline_parallel_schedule)
    except ValueError as error:
        return [Problem("parallelism.pipeline_parallel_schedule", str(error))]
    microbatches = config.training.local_batch_size // max(size, 1)
    if microbatches >= stages:
        return []
    batch = config.training.local_batch_size
    what = f"{batch} makes {microbatches} microbatches of {size} for {stages} pipeline stages"
    return [Problem("training.local_batch_size", what, f"at least {stages * size}")]


def _sequence(config: JobConfig) -> Iterator[Problem]:
    degrees, seq_len = config.parallelism, config.training.seq_len
    context = degrees.context_parallel_degree
    divisor = 2 * context if context > 1 else 1
    divisor *= degrees.tensor_parallel_degree if degrees.enable_sequence_parallel else 1
    chunks = getattr(config.loss, "num_chunks", 1)
    if seq_len > 0 and seq_len % divisor:
        what = f"{seq_len} is not a multiple of {divisor}, as sequence and context parallelism need"
        yield Problem("training.seq_len", what, _nearest_multiple(seq_len, divisor))
    elif seq_len > 0 and chunks > 0 and (seq_len // context) % chunks:
        what = f"{seq_len} per context-parallel rank does not split into loss.num_chunks = {chunks} equal parts"
        yield Problem("training.seq_len", what, _nearest_multiple(seq_len, chunks * context))


def _nearest_multiple(value: int, divisor: int) -> str:
    return f"the nearest is {max(round(value / divisor), 1) * divisor}"
