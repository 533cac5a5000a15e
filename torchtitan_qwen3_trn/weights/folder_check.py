"""The part of verifying a Hugging Face folder that reads headers and small files only."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.headers import check_tensors, read_headers
from torchtitan_qwen3_trn.hf_files.index import total_size_problems
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.config import LAYERS_AND_EXPERTS, counts, from_folder
from torchtitan_qwen3_trn.models.hf.layout import Layout, layout_of
from torchtitan_qwen3_trn.models.qwen3.hf_config import read_hf_config
from torchtitan_qwen3_trn.weights.manifest import manifest_problems

__all__ = ["check_export", "config_differences", "count_problems", "layout_of_folder"]

# Keys of config.json that decide what the weights compute, in any architecture.
_MEANING = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "rope_parameters",
    "tie_word_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
)


def check_export(folder: Path, config: PreTrainedConfig) -> list[Problem]:
    """What keeps ``folder`` from being a faithful export of the model ``config`` describes; the cheap checks only."""
    try:
        layout = layout_of_folder(folder)
        written = from_folder(folder)
    except JobError as error:
        return error.problems
    differences = config_differences(written, config)
    problems = [Problem(str(folder / "config.json"), each) for each in differences]
    problems += check_tensors(folder, layout.shapes)
    problems += total_size_problems(folder, sum(header.nbytes for header in read_headers(folder)[0].values()))
    return problems + manifest_problems(folder, checksums=False)


def layout_of_folder(folder: Path) -> Layout:
    """The tensors that the model of ``folder/config.json`` has in files.

    Raises:
        JobError: config.json cannot be used, or has more layers or experts than there are tensors.
    """
    found, problems = read_headers(folder)
    if problems:
        raise JobError(problems)
    if problems := count_problems(folder, len(found)):
        raise JobError(problems)
    return layout_of(build_on_meta(from_folder(folder), document_mask=True, experts="eager"))


def count_problems(folder: Path, tensors: int) -> list[Problem]:
    """Numbers of layers or experts in ``folder/config.json`` that are too large for a model of so many tensors.

    Raises:
        JobError: config.json cannot be read.
    """
    return [
        Problem(
            f"{folder / 'config.json'}: {where}",
            f"{ascii(count)[:40]} cannot be right for files with {tensors} tensors",
            "use the config.json of these weights",
        )
        for where, key, count in counts(read_hf_config(folder))
        if key in LAYERS_AND_EXPERTS and not 0 <= count <= tensors
    ]


def config_differences(written: PreTrainedConfig, meant: PreTrainedConfig) -> list[str]:
    """Keys in which two configurations describe different computations, as ``key: one, other``."""
    return [
        f"{key}: {getattr(written, key, None)!r}, and not {getattr(meant, key, None)!r}"
        for key in _MEANING
        if getattr(written, key, None) != getattr(meant, key, None)
    ]
