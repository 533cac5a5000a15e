"""Mixture-of-experts layers with static shapes: routing without sorting, experts as one operator.

Shape suffixes: B batch, L sequence, D model dimension, F hidden dimension of an expert, E experts, e experts of this
rank, K experts chosen per token, T = B L tokens, R rows routed to this rank's experts, G ranks that share the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from torchtitan_qwen3_trn.kernels.experts import block_plan, experts, no_block_plan
from torchtitan_qwen3_trn.kernels.routing import (
    Routes,
    combine_rows,
    exchange_rows,
    regroup_routes,
    routes,
    take_rows,
    top_k,
)


class KernelExperts(GroupedExperts):
    """`GroupedExperts` as one operator, in the dtype it is given instead of always bfloat16.

    Parameters keep stock's names and layout.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Options of `KernelExperts`."""

        block_rows: int = 256
        """Rows of the blocks that the kernel works in."""

        kernel: bool = True
        """Whether the NKI kernels run on Neuron; false computes with PyTorch operators everywhere."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.block_rows, self.kernel = config.block_rows, config.kernel

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Outputs of each row's expert.

        Args:
            x_RD: rows sorted by expert, then rows that no expert owns.
            num_tokens_per_expert_E: integer counts on the same device.

        Returns:
            Shape and dtype of ``x_RD``; zeros in rows that no expert owns.
        """
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        dtype = _compute_dtype(x_RD, weights[0])
        if self.kernel and x_RD.device.type == "neuron":
            compute, plan = experts.neuron, block_plan(num_tokens_per_expert_E, len(x_RD), self.block_rows)
        else:
            compute, plan = experts.portable, no_block_plan(num_tokens_per_expert_E)
        y_RD, _, _ = compute(x_RD.to(dtype), *(w.to(dtype) for w in weights), *plan)
        return y_RD.type_as(x_RD)


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@dataclass(frozen=True, kw_only=True)
class _Dispatched:
    """What `StaticDispatcher.combine` needs from its ``dispatch``."""

    scores_TK: Tensor
    sent: Routes
    regrouped: Routes | None


class StaticDispatcher(AllToAllTokenDispatcher):
    """Moves tokens to experts and back with static shapes, without sorting and without reading counts on the host.

    With expert parallelism every rank sends every other the same number of rows, enough for the worst routing; the
    rows not needed are skipped by the experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """No options of its own."""

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Rows sorted by expert, rows per expert of this rank, and what `combine` needs.

        The counts that stock passes in are not used: they miss what a token that chose one expert twice adds.
        """
        if self.ep_mesh is None:
            sent = routes(topk_expert_ids_TK, self.num_experts)
            metadata = _Dispatched(scores_TK=topk_scores_TK, sent=sent, regrouped=None)
            return take_rows(x_TD, sent), sent.counts_E, metadata
        ranks = self.ep_mesh.size()
        sent = routes(topk_expert_ids_TK, self.num_experts, ranks=ranks)
        counts_GE = self._exchange(sent.counts_E).view(ranks, -1)
        received_RD = self._exchange(take_rows(x_TD, sent))
        capacity = exchange_rows(len(x_TD), self.top_k, self.num_experts // ranks)
        regrouped = regroup_routes(counts_GE, capacity)
        metadata = _Dispatched(scores_TK=topk_scores_TK, sent=sent, regrouped=regrouped)
        return take_rows(received_RD, regrouped), regrouped.counts_E, metadata

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Expert outputs back in token order, weighted and summed, ``(T, D)``."""
        if metadata.regrouped is not None:
            regrouped = metadata.regrouped
            back = Routes(regrouped.counts_E, regrouped.source_R[:, None], regrouped.row_TK[:, 0])
            routed_output_RD = self._exchange(take_rows(routed_output_RD, back))
        return combine_rows(routed_output_RD, metadata.scores_TK, metadata.sent)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Send each rank its equal share of ``rows``; differentiable, and waited for."""
        # torchtitan's "spmd_types" backend would exchange a list of tensors, which gloo does not have.
        return wait_tensor(all_to_all_single(rows, None, None, self.ep_mesh))


class StaticRouter(TokenChoiceTopKRouter):
    """`TokenChoiceTopKRouter` that chooses experts without top-k and gather operators, ties to the lower expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """No options of its own."""

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and indices of the chosen experts, ``(B, L, K)`` each, and the scores of all, ``(B, L, E)``.

        Args:
            x_BLD: tokens.
            expert_bias_E: added to the scores for choosing only.
        """
        device_type = x_BLD.device.type
        # Autocast to float32 does not exist on the CPU and would warn on every call.
        with torch.autocast(device_type, dtype=torch.float32, enabled=device_type != "cpu"):
            scores_BLE = self.gate(x_BLD)
        scores_BLE = _SCORES[self.score_func](scores_BLE)
        chooser_BLE = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E
        if self.num_expert_groups is not None:
            chooser_BLE = self._get_node_limited_routing_scores(chooser_BLE)
        chosen_BLK, ids_BLK = _choose_on_shards(chooser_BLE, scores_BLE, self.top_k)
        if self._debug_force_load_balance:
            ids_BLK, chosen_BLK = self._debug_force_load_balance_routing(scores_BLE)
        if self.route_norm:
            chosen_BLK = chosen_BLK / (chosen_BLK.sum(dim=-1, keepdim=True) + _ROUTE_NORM_EPS)
        return chosen_BLK * self.route_scale, ids_BLK, scores_BLE


class RouteKeepingSelectiveAC(SelectiveAC):
    """Stock's selective checkpointing, which also keeps the experts that `StaticRouter` chose.

    It keeps the rows exchanged between ranks, as stock does; choosing again from scores that differ in the last bit
    would give them to other experts. Stock keeps its own top-k for the same reason.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Stock's options."""

    def get_save_ops(self) -> set[Any]:
        """Stock's operators and `top_k`."""
        return super().get_save_ops() | {torch.ops.torchtitan_qwen3_trn.top_k.default}


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.nn.functional.softmax, dim=-1),
}
_ROUTE_NORM_EPS = 1e-20  # as stock's router


def _choose(chooser_BLE: Tensor, scores_BLE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ids_BLK = top_k(chooser_BLE, k)
    expert_E = torch.arange(scores_BLE.shape[-1], device=scores_BLE.device)
    chosen = [torch.where(expert_E == id_BL[..., None], scores_BLE, 0).sum(-1) for id_BL in ids_BLK.unbind(-1)]
    return torch.stack(chosen, dim=-1), ids_BLK


def _choose_on_shards(chooser_BLE: Tensor, scores_BLE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose on each rank's own tokens; DTensors keep their placements, which never split the experts."""
    if not isinstance(chooser_BLE, DTensor) or not isinstance(scores_BLE, DTensor):
        return _choose(chooser_BLE, scores_BLE, k)
    mesh, placements = scores_BLE.device_mesh, scores_BLE.placements
    local = _choose(chooser_BLE.redistribute(placements=placements).to_local(), scores_BLE.to_local(), k)
    chosen_BLK, ids_BLK = (DTensor.from_local(part, mesh, placements, run_check=False) for part in local)
    return chosen_BLK, ids_BLK


def kernel_experts(
    config: GroupedExperts.Config, *, block_rows: int = 256, kernel: bool = True
) -> KernelExperts.Config:
    """Override factory: the `KernelExperts` that take the place of ``config``, sharding and initialisation included."""
    return derive(config, KernelExperts.Config, block_rows=block_rows, kernel=kernel)


def static_dispatcher(config: AllToAllTokenDispatcher.Config) -> StaticDispatcher.Config:
    """Override factory: the `StaticDispatcher` that takes the place of ``config``."""
    return derive(config, StaticDispatcher.Config)


def route_keeping(config: Any) -> Any:
    """The `RouteKeepingSelectiveAC` that takes the place of stock's selective checkpointing; others are unchanged."""
    if isinstance(config, SelectiveAC.Config):
        return derive(config, RouteKeepingSelectiveAC.Config)
    return config


def static_router(config: TokenChoiceTopKRouter.Config) -> StaticRouter.Config:
    """Override factory: the `StaticRouter` that takes the place of ``config``."""
    return derive(config, StaticRouter.Config)
