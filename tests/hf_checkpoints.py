"""Small Hugging Face checkpoints with weights that are neither zero, one nor alike, made by Transformers itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from torchtitan_qwen3_trn import assets

VOCAB = 2048
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
ARCHITECTURES = ("qwen3", "qwen3_moe", "qwen2", "llama")


def small_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Configuration of a small model; ``qwen3`` is tied, the others are not."""
    if kind == "qwen3":
        return Qwen3Config(**{**SIZES, "head_dim": 16, "tie_word_embeddings": True, **changes})
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(**{**SIZES, **EXPERTS, "head_dim": 16, **changes})
    return {"qwen2": Qwen2Config, "llama": LlamaConfig}[kind](**{**SIZES, **changes})


def write_checkpoint(folder: Path, kind: str, *, file_size: str = "150KB", **changes: Any) -> Path:
    """Write a checkpoint of several files, with the bundled tokenizer, to ``folder``."""
    model = AutoModelForCausalLM.from_config(small_config(kind, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.ndim == 1 and not name.endswith("bias")
            parameter.copy_(1 + 0.1 * noise if norm else 0.06 * noise)
    model.save_pretrained(folder, max_shard_size=file_size)
    for path in assets.tokenizer_path().iterdir():
        shutil.copy(path, folder)
    return folder


def packed_batch(rows: int = 2, length: int = 48, vocab_size: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions ``[rows, length]`` of packed documents; boundaries differ between rows."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(vocab_size, (rows, length), generator=generator)
    positions = torch.arange(length).repeat(rows, 1)
    for row in range(rows):
        start = 10 + 7 * row
        positions[row, start:] = torch.arange(length - start)
    return tokens, positions
