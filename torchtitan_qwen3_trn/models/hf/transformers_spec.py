"""From a job to its Transformers model."""

from __future__ import annotations

import logging
from typing import Literal

from torchtitan.tools import utils

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.launch import is_rank_zero
from torchtitan_qwen3_trn.models.described_spec import DescribedModelSpec
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of
from torchtitan_qwen3_trn.models.hf.model import HFModel
from torchtitan_qwen3_trn.models.hf.parallelize import parallelize
from torchtitan_qwen3_trn.models.hf.router_loss import has_router_loss
from torchtitan_qwen3_trn.models.hf.state_dict_adapter import HFStateDictAdapter
from torchtitan_qwen3_trn.models.model_section import described

logger = logging.getLogger(__name__)

Experts = Literal["auto", "eager", "grouped_mm", "batched_mm"]


def model_spec_for(config: JobConfig, *, document_mask: bool, experts: Experts) -> DescribedModelSpec:
    """The model that ``[model]`` describes, as Transformers has it.

    Args:
        config: the job.
        document_mask: whether batches will come with a document mask.
        experts: Transformers' experts implementation; ``auto`` chooses by device.

    Raises:
        JobError: the model cannot be built, or is of a kind this route cannot train.
    """
    name, hf_config = described(config)
    chosen = _experts_for(utils.device_type) if experts == "auto" else experts
    skeleton = build_on_meta(hf_config, document_mask=document_mask, experts=chosen)
    router_loss = config.model.load_balance == "aux_loss"
    if router_loss and not (has_router_loss(skeleton) and getattr(hf_config, "num_experts", None)):
        what = f'"aux_loss", but Transformers has no router loss for {type(skeleton).__name__}'
        raise JobError([Problem("model.load_balance", what, 'set it to "none"')])
    if config.model.load_balance == "bias" and getattr(hf_config, "num_experts", None) and is_rank_zero():
        logger.warning(
            'model.load_balance = "bias" is torchtitan\'s own and does not exist for a Transformers model: its experts '
            'are not balanced. "aux_loss" trains on the router loss of Transformers'
        )
    return DescribedModelSpec(
        name=f"transformers/{hf_config.model_type}",
        flavor=name,
        model=HFModel.Config(
            architecture=hf_config,
            layout=layout_of(skeleton),
            tensor_parallel_plan=dict(skeleton.tp_plan or {}),
            vocab_size=hf_config.vocab_size,
            document_mask=document_mask,
            experts=chosen,
            router_loss=router_loss,
        ),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=HFStateDictAdapter,
        hf_config=hf_config,
    )


def _experts_for(device_type: str) -> str:
    """Grouped matrix products, but not on Neuron: according to torch-neuronx's sources its ``_grouped_mm`` needs the
    rows of every group to be a multiple of 128, which Transformers does not guarantee."""
    return "eager" if device_type == "neuron" else "grouped_mm"
