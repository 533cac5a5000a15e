"""The table that is logged when a job starts."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.moe import RoutedExperts

from torchtitan_qwen3_trn.job.prepare import PreparedJob

logger = logging.getLogger(__name__)

_VERSIONED = ("torch", "torchtitan", "transformers", "torch-neuronx", "nki")
_WIDTH = 110


def log_startup(job: PreparedJob, model_parts: Sequence[nn.Module], dims: ParallelDims, device: torch.device) -> None:
    """Log one table on rank 0: model, size, route, plugins, overrides, parallel degrees, versions."""
    rows = startup_rows(job, model_parts, dims, device)
    if torch.distributed.get_rank() == 0:
        logger.info("Job\n%s", render(rows))


def startup_rows(
    job: PreparedJob, model_parts: Sequence[nn.Module], dims: ParallelDims, device: torch.device
) -> list[tuple[str, str]]:
    """Rows of the start-up table as (heading, text). A collective over pipeline stages: call it on every rank."""
    config, spec = job.config, job.config.model_spec
    total, active = parameter_counts(model_parts, dims, device)
    overrides = (f"{name} x {count}" for name, count in job.overrides.items())
    degrees = (
        f"replicate {dims.dp_replicate}, shard {dims.dp_shard}, tensor {dims.tp}, context {dims.cp}, "
        f"pipeline {dims.pp}, expert {dims.ep}"
    )
    rows = [
        ("job file", config.job.config_file or "none"),
        ("model", f"{spec.name} {spec.flavor}" if spec else "none"),
        ("parameters", f"{total:,} total, {active:,} active per token"),
        ("route", config.model.backend),
        ("plugins", ", ".join(job.plugins.names)),
        ("overrides", ", ".join(overrides) or "none"),
        ("device", f"{device.type}, {dims.world_size} rank(s)"),
        ("parallel degrees", degrees),
        ("versions", ", ".join(f"{name} {distribution_version(name)}" for name in _VERSIONED)),
    ]
    return [(name, text) for name, text in [("description", config.job.description), *rows] if text]


def parameter_counts(model_parts: Sequence[nn.Module], dims: ParallelDims, device: torch.device) -> tuple[int, int]:
    """Parameters of the whole model, and those that one token uses (``top_k`` of each layer's experts)."""
    total, idle = 0, 0
    for part in model_parts:
        total += sum(parameter.numel() for parameter in part.parameters())
        # A model that is not made of torchtitan's modules counts the parameters that one token does not use itself.
        if (count_idle := getattr(part, "idle_parameters", None)) is not None:
            idle += count_idle()
        for module in part.modules():
            if isinstance(module, RoutedExperts):
                experts = sum(parameter.numel() for parameter in module.inner_experts.parameters())
                dispatcher = module.token_dispatcher
                idle += experts - experts * dispatcher.top_k // dispatcher.num_experts
    if dims.pp_enabled:
        counts = torch.tensor([total, idle], dtype=torch.int64, device=device)
        stages = dims.get_mesh("pp")
        total, idle = (int(dist_utils.dist_sum(count, stages)) for count in counts)
    return total, total - idle


def render(rows: list[tuple[str, str]]) -> str:
    """A two-column table as plain text."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, force_terminal=False, color_system=None).print(table)
    return stream.getvalue().rstrip()


def distribution_version(distribution: str) -> str:
    """Installed version of a distribution, or ``not installed``."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
