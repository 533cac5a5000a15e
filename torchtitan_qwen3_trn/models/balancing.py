"""The auxiliary loss that keeps a mixture of experts balanced, under torchtitan's chunked loss.

torchtitan computes the loss from the model's output alone. So the auxiliary loss is not added to that loss but its
gradient is: `with_loss` passes the output on unchanged and gives the auxiliary loss its gradient in backward.

Shape suffixes: B batch, L sequence, E experts, K experts of a token, Y layers with experts, T = B * L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from torchtitan_qwen3_trn.hooks import StepLog


def balancing_loss(visits_YE: torch.Tensor, probability_YE: torch.Tensor) -> torch.Tensor:
    """Switch Transformer's load-balancing loss (arXiv 2101.03961, equations 4 to 6), its mean over layers.

    Args:
        visits_YE: share of the tokens that visit each expert; a row sums to top-k. No gradient flows into it.
        probability_YE: mean probability the router gives each expert.

    Returns:
        A scalar: experts times the sum over experts of visits times probability. The number of experts a token
        visits is perfect balance, as with Transformers' ``load_balancing_loss_func``.
    """
    return visits_YE.shape[-1] * (visits_YE.detach() * probability_YE).sum(-1).mean()


def with_loss(output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``output``, unchanged; in backward the scalar ``loss`` gets the gradient 1."""
    return _WithLoss.apply(output, loss)


@runtime_checkable
class _Loss(Protocol):
    coefficient: float

    def take(self) -> torch.Tensor | None: ...


def log_router_loss(model_parts: Sequence[nn.Module], dims: ParallelDims, device: torch.device, log: StepLog) -> None:
    """Log the auxiliary loss of the step just taken. A collective.

    Every model part has the share of its layers in the mean over all layers, so parts and pipeline stages add up.
    """
    losses = [loss for part in model_parts if isinstance(loss := getattr(part, "router_loss", None), _Loss)]
    shares = [share for loss in losses if (share := loss.take()) is not None]
    # A stage without experts still takes part in the sum over stages.
    if not losses or not (shares or dims.pp_enabled) or not log.due:
        return
    mean = torch.stack(shares).sum() if shares else torch.zeros((), device=device)
    if dims.dp_enabled:
        mesh = dims.get_mesh("batch")
        mean = dist_utils.dist_sum_tensor(mean, mesh) / mesh.size()
    if dims.pp_enabled:
        mean = dist_utils.dist_sum_tensor(mean, dims.get_mesh("pp"))
    log({"router_aux_loss": mean, "router_aux_loss_coef": losses[0].coefficient})


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.one = torch.ones_like(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, ctx.one
