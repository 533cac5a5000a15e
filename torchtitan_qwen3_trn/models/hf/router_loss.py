"""The router's auxiliary loss of Transformers' mixture-of-experts models, under torchtitan's chunked loss.

torchtitan computes the loss from the decoder's output alone. So the auxiliary loss is not added to that loss but its
gradient is: `RouterLoss.attach` passes the hidden states on unchanged and gives the router its gradient in backward.

Shape suffixes: B batch, L sequence, D model width, T = B * L tokens, E experts.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.distributed import utils as dist_utils
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer

__all__ = ["RouterLoss", "has_router_loss", "log"]

logger = logging.getLogger(__name__)

_FUNCTION = "load_balancing_loss_func"


def has_router_loss(model: PreTrainedModel) -> bool:
    """Whether Transformers has an auxiliary loss for this model."""
    return _FUNCTION in vars(_modeling(model)) and getattr(model.config, "router_aux_loss_coef", None) is not None


class RouterLoss:
    """Transformers' load-balancing loss of one microbatch, times the configuration's ``router_aux_loss_coef``.

    The loss is Switch Transformer's (arXiv 2101.03961, equations 4 to 6): experts times the sum over experts of the
    share of tokens it gets times the mean router probability; 1 is perfect balance. Statistics are those of one
    microbatch on one rank, as in Transformers. Microbatches and data-parallel ranks count equally.

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
        """``hidden_BLD``, with the auxiliary loss of ``router_logits_TE`` (one tensor per layer) behind it."""
        loss = self._function(router_logits_TE, self._experts, self._top_k)
        self.values.append(loss.detach())
        return _WithLoss.apply(hidden_BLD, loss * (self.coefficient * self.share))

    def take(self) -> torch.Tensor | None:
        """Mean loss, without the coefficient, of the microbatches since the last call; ``None`` if there were none."""
        mean = torch.stack(self.values).mean() if self.values else None
        self.values = []
        return mean


def log(trainer: PluginTrainer, step: int) -> None:
    """Log the router loss of the step just taken, where torchtitan logs its loss too. A collective."""
    for part in trainer.model_parts:
        router_loss = getattr(part, "router_loss", None)
        if not isinstance(router_loss, RouterLoss):
            continue
        mean = router_loss.take()
        if mean is None or not trainer.metrics_processor.should_log(step):
            continue
        dims = trainer.parallel_dims
        if dims.dp_enabled:
            mesh = dims.get_mesh("batch")
            mean = dist_utils.dist_sum_tensor(mean, mesh) / mesh.size()
        trainer.metrics_processor.logger.log({"loss_metrics/router_aux_loss": float(mean)}, step)
        logger.info("step: %2d  router_aux_loss: %8.5f  (x %g)", step, float(mean), router_loss.coefficient)


class _WithLoss(torch.autograd.Function):
    """Identity on the first argument; in backward the second, a scalar loss, gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, hidden_BLD: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.one = torch.ones_like(loss)
        return hidden_BLD.view_as(hidden_BLD)

    @staticmethod
    def backward(ctx: Any, grad_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad_BLD, ctx.one


def _modeling(model: PreTrainedModel) -> Any:
    return sys.modules[type(model).__module__]
