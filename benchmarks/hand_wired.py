"""Stock's ``Trainer`` wired by hand to train what `route_overhead` trains through the plugin route.

Built from stock's own configuration functions. Taken from this package is only what a CPU needs, the SDPA override
with its document mask, and in `with_same_rope` the native route's rotary embedding, so that both compute the same.
``torchtitan.train --module benchmarks.hand_wired --config with_same_rope`` trains it, where torchtitan sees a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torchtitan.config.override import override
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3 import config_registry, model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn import assets
from torchtitan_qwen3_trn.overrides.document_sdpa import DocumentSDPA, document_mask, sdpa
from torchtitan_qwen3_trn.overrides.position_rope import GatherFreeRoPE, gather_free_rope

VOCAB_SIZE, BATCH, SEQ_LEN = 4096, 2, 256
STEPS = 10_000  # more than any run takes


class MaskedTrainer(Trainer):
    """Stock's trainer, which builds no mask for SDPA, with one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Stock's options."""

    def init_distributed(self) -> ParallelDims:
        """As in stock, or with the process group of a trainer that this process already has."""
        if torch.distributed.is_initialized():
            return ParallelDims.from_config(self.config.parallelism, 1)
        return super().init_distributed()

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Stock's inputs, labels and forward arguments, and the document mask."""
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        extra["attention_masks"] = document_mask(extra["positions"])
        return inputs, labels, extra


@override(target=FlexAttention.Config)
def attention(config: FlexAttention.Config) -> DocumentSDPA.Config:
    """The attention that has a backward pass on the CPU."""
    return sdpa(config)


@override(target=CosSinRoPE.Config)
def rope(config: CosSinRoPE.Config) -> GatherFreeRoPE.Config:
    """The rotary embedding of the plugin route."""
    return gather_free_rope(config)


def _model() -> ModelSpec:
    spec = model_registry("debugmodel")
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = VOCAB_SIZE
    return spec


def with_stock_rope() -> MaskedTrainer.Config:
    """The job with torchtitan's own rotary embedding."""
    stock = config_registry.qwen3_debugmodel()
    made = MaskedTrainer.Config(**{each.name: getattr(stock, each.name) for each in fields(stock)})
    made.model_spec = _model()
    made.loss.loss_fn.global_vocab_size = VOCAB_SIZE
    made.training = replace(
        made.training,
        local_batch_size=BATCH,
        seq_len=SEQ_LEN,
        steps=STEPS,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    made.hf_assets_path = str(assets.tokenizer_path())
    made.dataloader.dataset_path = str(assets.text_path())
    made.lr_scheduler = replace(made.lr_scheduler, warmup_steps=200, decay_ratio=None)
    made.activation_checkpoint = None
    made.debug.seed = 1
    made.override.imports = ["benchmarks.hand_wired.attention"]
    return made


def with_same_rope() -> MaskedTrainer.Config:
    """The job with the rotary embedding of the plugin route."""
    made = with_stock_rope()
    made.override.imports = [*made.override.imports, "benchmarks.hand_wired.rope"]
    return made
