"""The export of a training job: its destination, its tensors, and the files that a later export needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.file_plan import parse_size
from torchtitan_qwen3_trn.hf_files.folder import read_json
from torchtitan_qwen3_trn.launch import is_simulated
from torchtitan_qwen3_trn.models.described_spec import hf_config_of
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import EXPERT_BIAS, moved_expert_biases
from torchtitan_qwen3_trn.weights.export import Export, export, from_rank_zero, in_agreement, on_rank_zero
from torchtitan_qwen3_trn.weights.folder_assets import write_assets
from torchtitan_qwen3_trn.weights.manifest import MANIFEST, manifest_problems
from torchtitan_qwen3_trn.weights.publish import clear_leftovers

logger = logging.getLogger(__name__)

# Folder inside a training checkpoint with what an export needs beside the weights.
ASSETS = "hf_assets"


def export_model(
    trainer: Trainer, config: JobConfig, step: int, *, folder: str, max_shard_size: str, drop_expert_bias: bool
) -> None:
    """Export the model as it is now. A collective: call it on every rank.

    The export of the same step that this job wrote before it was restarted is kept.

    Args:
        trainer: holds the model.
        config: the job.
        step: the step just taken.
        folder: where exports go, below the job's ``dump_folder``.
        max_shard_size: bytes of tensors in one file at most, such as ``5GB``.
        drop_expert_bias: whether to leave torchtitan's expert bias out.

    Raises:
        JobError: on every rank; nothing is published then.
    """
    if is_simulated(config):
        logger.info("No export: the other ranks of this job are simulated, and so are their weights")
        return
    target, facts = destination(config, folder, step), facts_of(config, step)
    # Shared file systems may show other ranks an older state.
    if from_rank_zero(on_rank_zero(lambda: is_export(target, facts))):
        on_rank_zero(lambda: clear_leftovers(target))
        logger.info("%s holds this job's export of step %d from before a restart and is kept", target, step)
        return
    wanted = in_agreement(
        lambda: Export(
            destination=target,
            config=hf_config_of(config.model_spec),
            dtype=TORCH_DTYPE_MAP[config.checkpoint.export_dtype],
            limit=parse_size(max_shard_size),
            assets=Path(config.hf_assets_path),
            facts=facts,
        )
    )
    export(in_agreement(lambda: _tensors(trainer, config, drop_expert_bias=drop_expert_bias)), wanted)


def keep_assets(config: JobConfig, step: int) -> None:
    """Put config.json and tokenizer into the checkpoint of ``step``, so that it can be exported later on its own.

    A collective: call it on every rank.

    Raises:
        JobError: on every rank, when rank 0 cannot write them.
    """
    if is_simulated(config) or "://" in config.dump_folder + config.checkpoint.folder:
        return
    folder = Path(config.dump_folder, config.checkpoint.folder, f"step-{step}", ASSETS)

    def write() -> None:
        hf_config = hf_config_of(config.model_spec)
        dtype = TORCH_DTYPE_MAP[config.checkpoint.export_dtype]
        try:
            write_assets(folder, hf_config, dtype=dtype, source=Path(config.hf_assets_path))
        except OSError as error:
            what = f"cannot be written ({error.strerror or error}), and exporting this checkpoint later needs it"
            fix = "free space, or correct the folder; the checkpoint itself is complete"
            raise JobError([Problem(str(error.filename or folder), what, fix)]) from error

    on_rank_zero(write)


def without_expert_bias(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` without torchtitan's expert bias; a bias that is not zero is logged."""
    if moved := moved_expert_biases(state_dict):
        key, largest = next(iter(moved.items()))
        logger.warning(
            "The expert bias is left out of the export, as the job asks for; the largest is %g in %s. "
            "Tokens will go to other experts than in training",
            largest,
            key,
        )
    return {key: value for key, value in state_dict.items() if not EXPERT_BIAS.fullmatch(key)}


def _tensors(trainer: Trainer, config: JobConfig, *, drop_expert_bias: bool) -> dict[str, Any]:
    """This rank's tensors by their names in files."""
    state_dict = {key: value for part in trainer.model_parts for key, value in part.state_dict().items()}
    if drop_expert_bias:
        state_dict = without_expert_bias(state_dict)
    adapter = cast(ModelSpec, config.model_spec).state_dict_adapter
    if adapter is None:
        raise JobError([Problem("model", "comes without a state dict adapter, which Hugging Face files need")])
    with torch.no_grad():
        return adapter(trainer.model_config, None).to_hf(state_dict)


def facts_of(config: JobConfig, step: int) -> dict[str, Any]:
    """What the manifest says of the job."""
    return {
        "step": step,
        "job": {"file": config.job.config_file, "description": config.job.description},
        "model": {"backend": config.model.backend, "flavor": getattr(config.model_spec, "flavor", None)},
    }


def is_export(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether ``folder`` is a complete export of this step and model, by its manifest."""
    if not (folder / MANIFEST).is_file() or manifest_problems(folder, checksums=False):
        return False
    manifest = read_json(folder / MANIFEST)
    return all(manifest.get(key) == facts[key] for key in ("step", "model"))


def destination(config: JobConfig, folder: str, step: int) -> Path:
    """Where the export of ``step`` goes."""
    return Path(config.dump_folder, folder, f"step-{step}")
