"""The export of a training job: when, where to, and what keeps it from being faithful."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_qwen3_trn.checks.checkpoints import newest_checkpoint
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.file_plan import parse_size
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.job.configuration import is_rank_zero
from torchtitan_qwen3_trn.models.described_spec import hf_config_of
from torchtitan_qwen3_trn.weights.export import Export, export, from_rank_zero, in_agreement
from torchtitan_qwen3_trn.weights.folder_assets import assets_problems, layout_and_class, write_assets
from torchtitan_qwen3_trn.weights.manifest import MANIFEST, manifest_problems
from torchtitan_qwen3_trn.weights.publish import clear_leftovers, destination_problem

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

__all__ = ["ASSETS", "Settings", "check", "export_model", "keep_assets", "without_expert_bias"]

logger = logging.getLogger(__name__)

# Folder inside a training checkpoint with what an export needs beside the weights.
ASSETS = "hf_assets"

_EXPERT_BIAS = re.compile(r"layers\.\d+\.moe\.expert_bias_E")
_SIMULATED = ("fake_backend", "local_tensor")


class Settings(Protocol):
    """The plugin's options."""

    folder: str
    at_end: bool
    steps: list[int]
    max_shard_size: str
    drop_expert_bias: bool


def check(config: PluginTrainer.Config, settings: Settings) -> list[Problem]:
    """Report at the start what would make an export fail at the end."""
    where = "plugins.safetensors-export"
    problems = assets_problems(Path(config.hf_assets_path))
    try:
        parse_size(settings.max_shard_size)
    except ValueError as error:
        problems.append(Problem(f"{where}.max_shard_size", str(error)))
    beyond = [step for step in settings.steps if not 1 <= step <= config.training.steps]
    if beyond:
        what = f"steps {beyond} do not exist in a run of {config.training.steps}"
        problems.append(Problem(f"{where}.steps", what, "name steps that the run takes"))
    if "://" in config.dump_folder + settings.folder:
        what = "exports go to a file system only"
        problems.append(Problem(f"{where}.folder", what, "name a folder on a disk that all hosts see"))
        return problems
    for step in _steps(config, settings):
        destination = _destination(config, settings, step)
        if step <= _resumed_step(config) or _is_export(destination, _facts(config, step)):
            continue
        if problem := destination_problem(destination):
            problems.append(problem)
    if _trains_expert_bias(config) and not settings.drop_expert_bias:
        what = 'Hugging Face files have no place for the expert bias that "bias" trains, so routing would change'
        fix = f'set it to "aux_loss" or "none", or {where}.drop_expert_bias = true'
        problems.append(Problem("model.load_balance", what, fix))
    return problems


def export_model(trainer: PluginTrainer, settings: Settings, step: int) -> None:
    """Export the model as it is now. A collective: call it on every rank.

    The export of the same step that this job wrote before it was restarted is kept.

    Raises:
        JobError: on every rank; nothing is published then.
    """
    config = trainer.config
    if config.comm.mode in _SIMULATED:
        logger.info("No export: the other ranks of this job are simulated, and so are their weights")
        return
    destination, facts = _destination(config, settings, step), _facts(config, step)
    if _rank_zero_says(lambda: _is_export(destination, facts)):
        in_agreement(lambda: clear_leftovers(destination) if is_rank_zero() else None)
        logger.info("%s holds this job's export of step %d from before a restart and is kept", destination, step)
        return
    wanted = in_agreement(
        lambda: Export(
            destination=destination,
            config=hf_config_of(config.model_spec),
            dtype=TORCH_DTYPE_MAP[config.checkpoint.export_dtype],
            limit=parse_size(settings.max_shard_size),
            assets=Path(config.hf_assets_path),
            facts=facts,
        )
    )
    export(in_agreement(lambda: _tensors(trainer, settings)), wanted)


def keep_assets(trainer: PluginTrainer, step: int) -> None:
    """Put config.json and tokenizer into the checkpoint of ``step``, so that it can be exported later on its own.

    A collective: call it on every rank.

    Raises:
        JobError: on every rank, when rank 0 cannot write them.
    """
    config = trainer.config
    if config.comm.mode in _SIMULATED or "://" in config.dump_folder + config.checkpoint.folder:
        return
    folder = Path(config.dump_folder, config.checkpoint.folder, f"step-{step}", ASSETS)

    def write() -> None:
        hf_config = hf_config_of(config.model_spec)
        _, class_name = layout_and_class(hf_config)
        dtype = TORCH_DTYPE_MAP[config.checkpoint.export_dtype]
        try:
            write_assets(folder, hf_config, class_name=class_name, dtype=dtype, source=Path(config.hf_assets_path))
        except OSError as error:
            what = f"cannot be written ({error.strerror or error}), and exporting this checkpoint later needs it"
            fix = "free space, or correct the folder; the checkpoint itself is complete"
            raise JobError([Problem(str(error.filename or folder), what, fix)]) from error

    in_agreement(lambda: write() if is_rank_zero() else None)


def without_expert_bias(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` without torchtitan's expert bias; a bias that is not zero is logged."""
    largest = {key: _largest(value) for key, value in state_dict.items() if _EXPERT_BIAS.fullmatch(key)}
    if any(value != 0 for value in largest.values()):
        # NaN is not larger than anything, and yet the worst.
        key = max(largest, key=lambda each: (math.isnan(largest[each]), largest[each]))
        logger.warning(
            "The expert bias is left out of the export, as the job asks for; the largest is %g in %s. "
            "Tokens will go to other experts than in training",
            largest[key],
            key,
        )
    return {key: value for key, value in state_dict.items() if key not in largest}


def _tensors(trainer: PluginTrainer, settings: Settings) -> dict[str, Any]:
    """This rank's tensors by their names in files."""
    state_dict = {key: value for part in trainer.model_parts for key, value in part.state_dict().items()}
    if settings.drop_expert_bias:
        state_dict = without_expert_bias(state_dict)
    adapter = _spec(trainer.config).state_dict_adapter(trainer.model_config, None)
    with torch.no_grad():
        return adapter.to_hf(state_dict)


def _facts(config: PluginTrainer.Config, step: int) -> dict[str, Any]:
    """What the manifest says of the job."""
    return {
        "step": step,
        "job": {"file": config.job.config_file, "description": config.job.description},
        "model": {"backend": config.model.backend, "flavor": getattr(config.model_spec, "flavor", None)},
    }


def _is_export(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether ``folder`` is a complete export of this step and model, by its manifest."""
    if not (folder / MANIFEST).is_file() or manifest_problems(folder, checksums=False):
        return False
    manifest = read_json(folder / MANIFEST)
    return all(manifest.get(key) == facts[key] for key in ("step", "model"))


def _rank_zero_says(action: Callable[[], bool]) -> bool:
    """What ``action`` finds on rank 0, on every rank: file systems may show other ranks something older."""
    return from_rank_zero(in_agreement(lambda: action() if is_rank_zero() else False))


def _destination(config: PluginTrainer.Config, settings: Settings, step: int) -> Path:
    return Path(config.dump_folder, settings.folder, f"step-{step}")


def _steps(config: PluginTrainer.Config, settings: Settings) -> list[int]:
    last = [config.training.steps] if settings.at_end else []
    return sorted({*settings.steps, *last})


def _resumed_step(config: PluginTrainer.Config) -> int:
    """The step a run continues after; 0 when it starts anew."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return 0
    newest = newest_checkpoint(Path(config.dump_folder, checkpoint.folder), checkpoint.load_step)
    return int(newest.name.removeprefix("step-")) if newest is not None else 0


def _spec(config: PluginTrainer.Config) -> Any:
    if config.model_spec is None:
        raise JobError([Problem("model", "the job has no model")])
    return config.model_spec


def _trains_expert_bias(config: PluginTrainer.Config) -> bool:
    layers = getattr(getattr(config.model_spec, "model", None), "layers", None) or []
    return any(getattr(getattr(layer, "moe", None), "load_balance_coeff", None) for layer in layers)


def _largest(value: torch.Tensor) -> float:
    local = value.to_local() if isinstance(value, DTensor) else value
    return float(local.detach().abs().max()) if local.numel() else 0.0
