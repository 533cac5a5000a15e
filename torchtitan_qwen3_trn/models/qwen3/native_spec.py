"""From a job to its Qwen3 model on the native route."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.launch import is_rank_zero
from torchtitan_qwen3_trn.models.qwen3.architecture import Architecture, differences, with_changes
from torchtitan_qwen3_trn.models.qwen3.flavors import FLAVORS, flavor
from torchtitan_qwen3_trn.models.qwen3.hf_config import from_hf_config, read_hf_config
from torchtitan_qwen3_trn.models.qwen3.sizes import expected_first_loss
from torchtitan_qwen3_trn.models.qwen3.spec import model_spec

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.config import JobConfig

logger = logging.getLogger(__name__)

# torchtitan's default step of the expert bias (arXiv 2408.15664 uses the same).
_BIAS_STEP = 1e-3


def model_spec_for(config: JobConfig) -> ModelSpec:
    """The model that ``[model]`` describes.

    Raises:
        JobError: unknown flavor, no architecture given, a config.json the native model cannot represent, a flavor
            that contradicts the checkpoint to be loaded, or single values that do not fit together.
    """
    name, arch = described(config)
    by_loss = config.model.load_balance == "aux_loss"
    if by_loss and not arch.moe_layers:
        what = '"aux_loss", but this model has no experts'
        raise JobError([Problem("model.load_balance", what, "leave it out")])
    bias_step = _BIAS_STEP if config.model.load_balance == "bias" and arch.num_experts else None
    return model_spec(arch, flavor=name, load_balance_coeff=bias_step, balancing_loss=by_loss)


def expected_random_loss(config: JobConfig) -> float:
    """First loss of this job's model if its weights were random, in nats per token (see `expected_first_loss`)."""
    _, arch = published(config)
    return expected_first_loss(with_changes(arch, config.model.changes()))


def use_supported_spmd_backend(config: JobConfig, machine: Machine) -> None:
    """Expert parallelism on gloo: torchtitan's default SPMD backend uses an all-to-all that gloo does not have."""
    degrees = config.parallelism
    if machine.device_type == "cpu" and degrees.expert_parallel_degree > 1 and degrees.spmd_backend == "spmd_types":
        degrees.spmd_backend = "partial_dtensor"
        if is_rank_zero():
            logger.info(
                'parallelism.spmd_backend is set to "partial_dtensor": the uneven all-to-all of "spmd_types" '
                "does not exist in gloo"
            )


def described(config: JobConfig) -> tuple[str, Architecture]:
    """Name and architecture of the job's model; raises as `model_spec_for`."""
    name, arch = published(config)
    changes = config.model.changes()
    if changes:
        arch = with_changes(arch, changes)
        name += " with " + ", ".join(f"{key} {value}" for key, value in changes.items())
    return name, arch


def published(config: JobConfig) -> tuple[str, Architecture]:
    """Name and architecture from the flavor, or from config.json beside the weights; raises as `model_spec_for`."""
    folder = Path(config.hf_assets_path)
    has_config = (folder / "config.json").is_file()
    if config.model.flavor is None:
        if not has_config:
            what = f"no flavor is given and {folder} holds no config.json to take the architecture from"
            raise JobError([Problem("model.flavor", what, f"choose one of {', '.join(FLAVORS)}")])
        return folder.name, from_hf_config(read_hf_config(folder))
    arch = flavor(config.model.flavor)
    if has_config:
        _compare(config, arch, folder)
    return config.model.flavor, arch


def _compare(config: JobConfig, arch: Architecture, folder: Path) -> None:
    checkpoint = config.checkpoint
    source = Path(checkpoint.initial_load_path or folder)
    if not checkpoint.initial_load_in_hf or source.resolve() != folder.resolve():
        return
    conflicts = differences(arch, from_hf_config(read_hf_config(folder)))
    if conflicts:
        what = f"{config.model.flavor!r} is not the checkpoint in {folder} (flavor, checkpoint): {'; '.join(conflicts)}"
        raise JobError([Problem("model.flavor", what, "leave flavor out: config.json then decides")])
