"""The router's auxiliary loss of Transformers' mixture-of-experts models.

Shape suffixes: B batch, L sequence, D model width, T = B * L tokens, E experts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from torchtitan_qwen3_trn.models.balancing import with_loss

_FUNCTION = "load_balancing_loss_func"


def has_router_loss(model: PreTrainedModel) -> bool:
    """Whether Transformers has an auxiliary loss for this model."""
    return _FUNCTION in vars(_modeling(model)) and getattr(model.config, "router_aux_loss_coef", None) is not None


class RouterLoss:
    """Transformers' load-balancing loss of one microbatch, times the configuration's ``router_aux_loss_coef``.

    The loss is Switch Transformer's (arXiv 2101.03961, equations 4 to 6): experts times the sum over experts of the
    share of tokens that visit it times the mean router probability; top-k is perfect balance. Statistics are those of
    one microbatch on one rank, as in Transformers. Microbatches and data-parallel ranks count equally.

    Attributes:
        coefficient: ``router_aux_loss_coef`` of the configuration.
        share: what one microbatch contributes to an optimizer step, 1 / (data-parallel degree x accumulation steps).
        values: detached losses since `take` was last called, one per microbatch.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._function = vars(_modeling(model))[_FUNCTION]
        self._experts, self._top_k = config.num_experts, config.num_experts_per_tok
        self.coefficient = float(config.router_aux_loss_coef)
        self.share = 1.0
        self.values: list[torch.Tensor] = []

    def attach(self, hidden_BLD: torch.Tensor, router_logits_TE: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """``hidden_BLD``, whose gradient includes the auxiliary loss of ``router_logits_TE`` (one tensor per layer)."""
        loss = self._function(router_logits_TE, self._experts, self._top_k)
        self.values.append(loss.detach())
        return with_loss(hidden_BLD, loss * (self.coefficient * self.share))

    def take(self) -> torch.Tensor | None:
        """Mean loss, without the coefficient, of the microbatches since the last call; ``None`` if there were none."""
        mean = torch.stack(self.values).mean() if self.values else None
        self.values = []
        return mean


def _modeling(model: PreTrainedModel) -> Any:
    return sys.modules[type(model).__module__]
