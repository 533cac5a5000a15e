"""From a job to its Qwen3 model on the native route."""

from __future__ import annotations

import logging

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.launch import is_rank_zero
from torchtitan_qwen3_trn.models.described_spec import DescribedModelSpec
from torchtitan_qwen3_trn.models.model_section import described
from torchtitan_qwen3_trn.models.qwen3.flavors import SEPARATE_QKV
from torchtitan_qwen3_trn.models.qwen3.spec import model_spec
from torchtitan_qwen3_trn.models.qwen3.unsupported import unsupported
from torchtitan_qwen3_trn.models.value_rules import expert_layers

logger = logging.getLogger(__name__)

# torchtitan's default step of the expert bias (arXiv 2408.15664 uses the same).
_BIAS_STEP = 1e-3


def model_spec_for(config: JobConfig) -> DescribedModelSpec:
    """The model that ``[model]`` describes.

    Raises:
        JobError: as `described`, or a config.json that the native model cannot represent.
    """
    name, hf_config = described(config, rule=unsupported)
    by_loss, by_bias = (config.model.load_balance == way for way in ("aux_loss", "bias"))
    if by_loss and not expert_layers(hf_config):
        raise JobError([Problem("model.load_balance", '"aux_loss", but this model has no experts', "leave it out")])
    return model_spec(
        hf_config,
        flavor=name,
        load_balance_coeff=_BIAS_STEP if by_bias else None,
        balancing_loss=by_loss,
        fuse_qkv=config.model.flavor not in SEPARATE_QKV,
    )


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
