"""A Transformers causal language model behind torchtitan's model protocol.

Shape suffixes: B batch, L sequence, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torchtitan.models.utils import get_dense_model_nparams_and_flops
from torchtitan.protocols.model import BaseModel
from transformers import PreTrainedConfig, PreTrainedModel

from torchtitan_qwen3_trn.models.hf.build import build
from torchtitan_qwen3_trn.models.hf.init import initialize
from torchtitan_qwen3_trn.models.hf.layout import Layout
from torchtitan_qwen3_trn.models.hf.router_loss import RouterLoss


class HFModel(BaseModel):
    """``AutoModelForCausalLM`` as torchtitan trains it.

    Parameters keep the names Transformers gives them (``model.layers.0.self_attn.q_proj.weight``, ``lm_head.weight``).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What is needed to build the model."""

        architecture: PreTrainedConfig
        """Transformers' configuration of the model."""

        layout: Layout
        """Names and shapes of the tensors in its checkpoint files."""

        tensor_parallel_plan: dict[str, str]
        """Transformers' plan, module names with ``*`` to styles."""

        vocab_size: int
        """Vocabulary entries; torchtitan's loss reads it."""

        document_mask: bool = True
        """Whether batches come with a document mask; without one attention is causal over the whole row."""

        experts: str = "grouped_mm"
        """How Transformers computes experts."""

        router_loss: bool = False
        """Whether the router's auxiliary loss is trained on."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Does nothing: the model does not depend on the rest of the job."""

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and floating-point operations per token of a forward and backward pass."""
            text = self.architecture
            heads = text.num_attention_heads
            width = getattr(text, "head_dim", None) or text.hidden_size // heads
            nparams, flops = get_dense_model_nparams_and_flops(
                model, text.num_hidden_layers, heads, 2 * width, seq_len, enable_weight_tying=True
            )
            unused = cast(HFModel, model).idle_parameters()
            if not self.layout.tied:
                unused += text.vocab_size * text.hidden_size
            return nparams, flops - 6 * unused

        def to_dict(self) -> dict[str, Any]:
            """For the log and for metric back ends."""
            return {
                "architecture": self.architecture.to_dict(),
                "document_mask": self.document_mask,
                "experts": self.experts,
                "router_loss": self.router_loss,
            }

    def __init__(self, config: Config) -> None:
        super().__init__()
        transformers_model = build(config.architecture, document_mask=config.document_mask, experts=config.experts)
        self.model: nn.Module = transformers_model.model
        self.lm_head: nn.Module = transformers_model.lm_head
        # In a tuple, so that it is not registered as a child: its children are registered already.
        self._whole = (transformers_model,)
        self.router_loss = RouterLoss(transformers_model) if config.router_loss else None
        self._skip_lm_head = False

    @property
    def transformers_model(self) -> PreTrainedModel:
        """The model as Transformers built it; it shares all modules and parameters with this one."""
        return self._whole[0]

    @property
    def layers(self) -> nn.Module:
        """The decoder layers, where torchtitan's activation checkpointing and compilation look for them."""
        return self.model.get_submodule("layers")

    def forward(
        self,
        tokens_BL: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model.

        Args:
            tokens_BL: token ids, int64.
            positions: ``[B, L]``, int64, restarting with each packed document; ``None`` counts from 0.
            attention_masks: boolean ``[B, 1, L, L]``, true where a query may attend to a key.

        Returns:
            Logits ``[B, L, V]``, or hidden states ``[B, L, D]`` when torchtitan's chunked loss applies ``lm_head``
            itself.
        """
        router_loss = self.router_loss if torch.is_grad_enabled() else None
        extra = {"output_router_logits": True} if router_loss is not None else {}
        output = self.model(
            input_ids=tokens_BL, position_ids=positions, attention_mask=attention_masks, use_cache=False, **extra
        )
        hidden_BLD = output.last_hidden_state
        if router_loss is not None:
            hidden_BLD = router_loss.attach(hidden_BLD, output.router_logits)
        return hidden_BLD if self._skip_lm_head else self.lm_head(hidden_BLD)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Random weights by Transformers' own rule, rotary frequencies, tied weights."""
        initialize(self.transformers_model, buffer_device=buffer_device)

    def verify_module_protocol(self) -> None:
        """Transformers' modules are not torchtitan's and need not follow its protocol."""

    def idle_parameters(self) -> int:
        """Parameters that one token does not use: the experts it is not sent to."""
        idle = 0
        for module in self.modules():
            experts = getattr(module, "experts", None)
            top_k = getattr(getattr(module, "gate", None), "top_k", None)
            if isinstance(experts, nn.Module) and isinstance(top_k, int):
                idle += sum(each.numel() - each.numel() // each.shape[0] * top_k for each in experts.parameters())
        return idle
