"""The sections a job file has beyond those of stock ``Trainer.Config``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

# Stock keeps these two outside every section; in a job file they live where they belong by meaning.
TOP_LEVEL_HOMES = {"dump_folder": "job", "hf_assets_path": "model"}

Backend = Literal["native", "huggingface_v5", "nki_moe"]


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

    name: Literal["qwen3"] = "qwen3"
    """Model family."""

    backend: Backend = "native"
    """Route: torchtitan's Qwen3, Transformers v5, or torchtitan's Qwen3 with NKI kernels."""

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


_NOT_ARCHITECTURE = ("name", "backend", "flavor", "load_balance")
