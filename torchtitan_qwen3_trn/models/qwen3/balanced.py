"""Native Qwen3 balanced by the auxiliary loss of Qwen3's own recipe, with statistics of the global batch.

The Qwen3 report (arXiv 2505.09388, section 2) trains with the global-batch load-balancing loss of arXiv 2501.11873: how
often an expert is visited is counted over all data-parallel ranks and, with a buffer, over the microbatches of a step,
so that experts may specialise within a sequence. The router's probabilities are those of the local microbatch; their
mean over ranks and microbatches comes about by adding gradients.

Shape suffixes: B batch, L sequence, E experts, K experts of a token, Y layers with experts of this pipeline stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.parallelize import parallelize_qwen3

from torchtitan_qwen3_trn.models.balancing import balancing_loss, with_loss


class GlobalBatchLoss:
    """What the routers of one model part decide, and the loss made of it.

    Attributes:
        coefficient: weight of the loss, ``router_aux_loss_coef`` of config.json.
        layers: layers with experts of the whole model, over which the loss is averaged.
        rows: sequences of an optimizer step, each counted as often as ranks compute its loss; a microbatch of B of them
            has the share B / rows.
        group: the ranks with other tokens; ``None`` for one rank.
        values: detached losses since `take` was last called, one per microbatch.
    """

    def __init__(self, coefficient: float, layers: int) -> None:
        self.coefficient, self.layers = coefficient, layers
        self.rows = 1.0
        self.group: dist.ProcessGroup | None = None
        self.values: list[torch.Tensor] = []
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._visits_YE: torch.Tensor | None = None
        self._tokens = 0

    def start(self) -> None:
        """A microbatch begins; what routers decide before its `attach` counts."""
        self._seen = []

    def record(self, scores_BLE: torch.Tensor, expert_ids_BLK: torch.Tensor) -> None:
        """A router's probabilities and choices; ignored when activation checkpointing computes them again."""
        if self._seen is not None:
            self._seen.append((scores_BLE, expert_ids_BLK))

    def attach(self, output: torch.Tensor) -> torch.Tensor:
        """``output`` with the microbatch's loss behind it. A collective over ``group``."""
        seen, self._seen = self._seen, None
        if not seen:
            return output
        batch, length, _ = seen[0][0].shape
        probability_YE = torch.stack([scores_BLE.mean(dim=(0, 1)) for scores_BLE, _ in seen])
        self._count([_visits(scores_BLE, expert_ids_BLK) for scores_BLE, expert_ids_BLK in seen], batch * length)
        if self._visits_YE is None:
            return output
        loss = balancing_loss(self._visits_YE / self._tokens, probability_YE) * (len(seen) / self.layers)
        self.values.append(loss.detach())
        return with_loss(output, loss * (self.coefficient * batch / self.rows))

    def take(self) -> torch.Tensor | None:
        """Mean loss, without the coefficient, of the microbatches since the last call; ``None`` if there were none."""
        mean = torch.stack(self.values).mean() if self.values else None
        self.values = []
        return mean

    def forget(self) -> None:
        """A step ends: the next one counts anew."""
        self._visits_YE, self._tokens = None, 0

    @torch.no_grad()
    def _count(self, visits: list[torch.Tensor], tokens: int) -> None:
        visits_YE = torch.stack(visits)
        if self.group is not None:
            dist.all_reduce(visits_YE, group=self.group)
            tokens *= self.group.size()
        self._visits_YE = visits_YE if self._visits_YE is None else self._visits_YE + visits_YE
        self._tokens += tokens


class BalancedQwen3Model(Qwen3Model):
    """torchtitan's Qwen3 whose routers are trained to spread tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """Stock's options and the loss's weight."""

        router_aux_loss_coef: float = 0.001
        """Weight of the balancing loss."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        routers = [layer.moe.router for layer in self.layers.values() if layer.moe_enabled]
        self.router_loss = GlobalBatchLoss(config.router_aux_loss_coef, len(routers))
        for router in routers:
            router.register_forward_hook(self._record)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock's; a training forward carries the balancing loss in its gradient."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        self.router_loss.start()
        return self.router_loss.attach(super().forward(*args, **kwargs))

    def _record(self, router: nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        _, expert_ids_BLK, scores_BLE = output
        self.router_loss.record(scores_BLE, expert_ids_BLK)


def parallelize_balanced(
    model: BalancedQwen3Model, *, parallel_dims: ParallelDims, training: TrainingConfig, **options: Any
) -> nn.Module:
    """torchtitan's parallelization, and the ranks and rows over which balance is counted."""
    mesh = parallel_dims.get_optional_mesh("loss")
    degree = parallel_dims.dp_replicate * parallel_dims.dp_shard
    model.router_loss.group = mesh.get_group() if mesh is not None else None
    # Ranks of a context parallel group share the rows among them; those of a tensor parallel group see the same
    # tokens, and torchtitan adds up their gradients.
    repeats = parallel_dims.cp * parallel_dims.tp
    model.router_loss.rows = max(training.global_batch_size, training.local_batch_size * degree) * repeats
    return parallelize_qwen3(model, parallel_dims=parallel_dims, training=training, **options)


def forget_counts_after_steps(
    optimizers: OptimizersContainer, model_parts: Sequence[nn.Module], parallel_dims: ParallelDims
) -> None:
    """Register with the optimizers that the counts of a step end with it."""
    losses = [part.router_loss for part in model_parts if isinstance(part.router_loss, GlobalBatchLoss)]

    def forget(*_: Any, **__: Any) -> None:
        for loss in losses:
            loss.forget()

    optimizers.register_step_post_hook(forget)


def _visits(scores_BLE: torch.Tensor, expert_ids_BLK: torch.Tensor) -> torch.Tensor:
    """How many tokens visit each expert, ``[E]``, float32."""
    chosen_BLE = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, expert_ids_BLK, True)
    return chosen_BLE.sum(dim=(0, 1), dtype=torch.float32)
