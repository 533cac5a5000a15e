"""Normalisation of query and key heads and rotary embedding in one operator.

torchtitan's attention normalises query and key in two modules, then rotates them in a third. `DeferredNorm` takes the
place of the first two: it keeps the weight, under stock's name, and passes its input through. `QKNormRoPE` takes the
place of the third and does the work of all; `link` gives it the weights once the model is built.

Shape suffixes: B batch, b = B or 1, L sequence, N query heads, M key heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.config.override import derive
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import CosSinRoPE

from torchtitan_qwen3_trn.kernels.qk_norm_rope import qk_norm_rope
from torchtitan_qwen3_trn.overrides.kernel_rope import on_shards
from torchtitan_qwen3_trn.overrides.position_rope import GatherFreeRoPE


class DeferredNorm(RMSNorm):
    """The weight of a norm that `QKNormRoPE` applies."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """No options of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """``input``, unchanged."""
        return input


class QKNormRoPE(GatherFreeRoPE):
    """RMSNorm of query and key, then `CosSinRoPE`, as one operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatherFreeRoPE.Config):
        """Options of `QKNormRoPE`."""

        kernel: bool = True
        """Whether the NKI kernel runs on Neuron; false computes with PyTorch operators everywhere."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._norms: tuple[RMSNorm, ...] = ()

    def use_norms(self, *norms: RMSNorm) -> None:
        """Apply the weights of these modules, the queries' and the keys', which stay where they are in the model."""
        self._norms = norms  # a tuple, so that they do not become submodules of this one

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Normalise and rotate ``query`` ``(B, L, N, H)`` and ``key`` ``(B, L, M, H)`` for ``positions`` ``(b, L)``.

        Raises:
            RuntimeError: `link` was not called on the model.
        """
        if not self._norms:
            raise RuntimeError("QKNormRoPE has no norms to apply: call link() on the built model")
        q_norm, k_norm = self._norms
        cos_sin_bLH = self._reshape_cache(query, positions).squeeze(2)

        def normalise_and_rotate(*tensors: Tensor) -> Any:
            q_BLNH, k_BLMH, table_bLH = tensors
            operator = qk_norm_rope if self.config.kernel else qk_norm_rope.portable
            return operator(q_BLNH, k_BLMH, q_norm.weight, k_norm.weight, table_bLH, q_norm.eps)

        return on_shards(normalise_and_rotate, query, key, cos_sin_bLH)


def link(model: nn.Module) -> None:
    """Give every `QKNormRoPE` of ``model`` the norms beside it; a model without any is left alone."""
    for module in model.modules():
        if isinstance(module, GQAttention) and isinstance(module.rope, QKNormRoPE):
            module.rope.use_norms(module.q_norm, module.k_norm)


def norms_beside(rope_fqns: Iterable[str]) -> list[str]:
    """Names of the norms' configurations in the attention layers whose rotary embeddings are given."""
    return [f"{fqn.removesuffix('.rope')}.qk_norm" for fqn in rope_fqns]


def fused_rope(config: CosSinRoPE.Config, *, kernel: bool = True) -> QKNormRoPE.Config:
    """Override factory: the `QKNormRoPE` that takes the place of ``config``, sharding and YaRN factor included."""
    return derive(config, QKNormRoPE.Config, kernel=kernel)


def deferred_norm(config: RMSNorm.Config) -> DeferredNorm.Config:
    """Override factory: the `DeferredNorm` that takes the place of ``config``, sharding and initialisation included."""
    return derive(config, DeferredNorm.Config)
