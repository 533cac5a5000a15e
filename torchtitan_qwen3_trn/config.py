"""The configuration of a job: stock's sections, and those a job file has beside them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.validate import Validator
from torchtitan.trainer import Trainer

from torchtitan_qwen3_trn.components import NotifyingCheckpointManager, PluginValidator

TOP_LEVEL_HOMES = {"dump_folder": "job", "hf_assets_path": "model"}
"""Two fields that stock keeps outside every section, and the section a job file has them in."""


@dataclass(kw_only=True, slots=True)
class JobOptions:
    """Section ``[job]``. ``dump_folder`` also lives there and is stock's top-level field of that name."""

    config_file: str | None = None
    """The job file; set from ``--job.config_file``."""

    description: str = ""
    """Free text, shown at start."""

    profile: Literal["auto", "none", "cpu", "cuda", "neuron"] = "auto"
    """Which ``[profile.<device>]`` to lay over the file: the detected device's, none, or one by name."""

    gradient_accumulation_steps: int | None = None
    """Sets ``training.global_batch_size`` to this many times local batch size times data-parallel degree."""


@dataclass(kw_only=True, slots=True)
class ModelOptions:
    """Section ``[model]``. ``hf_assets_path`` also lives there and is stock's top-level field of that name.

    The architecture comes from ``flavor`` or else from ``config.json`` in ``hf_assets_path``; the fields after
    ``load_balance`` replace single values of it.
    """

    backend: str = "native"
    """Route by name: ``native`` (torchtitan's Qwen3), ``huggingface_v5`` (Transformers), ``nki_moe`` (torchtitan's
    Qwen3 with NKI kernels), or a route that another distribution provides."""

    flavor: str | None = None
    """Published size, such as ``4B-Instruct-2507``; absent: ``config.json`` decides."""

    load_balance: Literal["bias", "aux_loss", "none"] = "bias"
    """How a mixture of experts is kept balanced: torchtitan's auxiliary-loss-free expert bias (native routes), which
    Hugging Face files have no place for; an auxiliary loss, of the global batch (native routes) or of Transformers
    (huggingface_v5); or not at all."""

    vocab_size: int | None = None
    """Vocabulary entries."""

    dim: int | None = None
    """Model width."""

    n_layers: int | None = None
    """Transformer layers."""

    n_heads: int | None = None
    """Query heads."""

    n_kv_heads: int | None = None
    """Key and value heads."""

    head_dim: int | None = None
    """Width of one head."""

    hidden_dim: int | None = None
    """Width of the dense feed-forward layer."""

    num_experts: int | None = None
    """Experts per mixture-of-experts layer."""

    top_k: int | None = None
    """Experts each token is sent to."""

    moe_hidden_dim: int | None = None
    """Width of one expert."""

    rope_theta: float | None = None
    """Base of the rotary frequencies."""

    max_seq_len: int | None = None
    """Positions the model is made for."""

    enable_weight_tying: bool | None = None
    """Whether the output layer shares the embedding's weight."""

    def changes(self) -> dict[str, object]:
        """The architecture fields that were set, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NOT_ARCHITECTURE}
        return {name: value for name, value in values.items() if value is not None}


_NOT_ARCHITECTURE = ("backend", "flavor", "load_balance")


@dataclass(kw_only=True, slots=True)
class OptimizerOptions:
    """Section ``[optimizer]`` in its short form: one group with all parameters."""

    name: Literal["Adam", "AdamW"] = "AdamW"
    """Optimizer of ``torch.optim``."""

    lr: float = 8e-4
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Decoupled weight decay."""

    implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = "fused"
    """As in torchtitan's ``[optimizer]``."""


@dataclass(kw_only=True, slots=True)
class PluginsConfig:
    """Section ``[plugins]``; a job's own type adds one field per enabled plugin that has options."""

    enable: list[str] = field(default_factory=list)
    """Plugins to add to those of the route."""

    disable: list[str] = field(default_factory=list)
    """Plugins to leave out."""


@dataclass(kw_only=True, slots=True)
class JobConfig(Trainer.Config):
    """Stock's configuration and the sections a job file adds to it.

    ``build()`` makes a `Trainer`, whose module sets ``_owner``.
    """

    _owner: ClassVar[type | None] = None

    job: JobOptions = field(default_factory=JobOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    validator: Validator.Config = field(default_factory=PluginValidator.Config)
    checkpoint: BaseCheckpointManager.Config = field(default_factory=NotifyingCheckpointManager.Config)
