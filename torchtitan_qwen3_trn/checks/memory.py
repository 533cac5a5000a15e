"""Whether a model can fit into the machine at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_qwen3_trn.device.cpu import cpu_device_module
from torchtitan_qwen3_trn.errors import Problem
from torchtitan_qwen3_trn.hooks import Machine

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

__all__ = ["check_memory"]


def check_memory(parameters: int, config: PluginTrainer.Config, machine: Machine) -> list[Problem]:
    """Report a model whose weights alone are larger than the memory of this host.

    That is the least a job needs; gradients and AdamW's states take three times as much again. Looked at on the CPU
    only, and where this host's share is known: all ranks are here, or shards are equal.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    known = here >= machine.world_size or config.parallelism.pipeline_parallel_degree == 1
    if machine.device_type != "cpu" or not known:
        return []
    itemsize = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    needed = parameters * itemsize * min(here / machine.world_size, 1)
    total = cpu_device_module.get_device_properties().total_memory
    if needed <= total:
        return []
    what = (
        f"{parameters:,} parameters in {config.training.dtype} are {needed / 1e9:,.1f} GB on this host, which has "
        f"{total / 1e9:,.1f} GB of memory"
    )
    return [Problem("model", what, "choose a smaller one, for instance in [profile.cpu], or more hosts")]
