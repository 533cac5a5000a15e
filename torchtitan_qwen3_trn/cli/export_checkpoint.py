"""``torchtitan-trn export``: a training checkpoint as a Hugging Face folder, in one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_qwen3_trn.errors import JobError, Problem
from torchtitan_qwen3_trn.hf_files.file_plan import parse_size
from torchtitan_qwen3_trn.weights.offline import export_checkpoint

HELP = "write a training checkpoint as a Hugging Face folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("checkpoint", type=Path, help="folder step-N of a training checkpoint")
    parser.add_argument("out", type=Path, help="folder to write; it must not exist")
    parser.add_argument("--assets", type=Path, help="folder with config.json and tokenizer; default: the checkpoint's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in the checkpoint")
    parser.add_argument("--max-shard-size", default="5GB", help="bytes of tensors in one file at most (default: 5GB)")
    parser.add_argument("--drop-expert-bias", action="store_true", help="export without torchtitan's expert bias")


def run(arguments: argparse.Namespace) -> int:
    """Export; status 2 with a message when that is not possible."""
    try:
        limit = parse_size(arguments.max_shard_size)
    except ValueError as error:
        raise JobError([Problem("--max-shard-size", str(error))]) from error
    export_checkpoint(
        arguments.checkpoint,
        arguments.out,
        assets=arguments.assets,
        dtype=TORCH_DTYPE_MAP[arguments.dtype] if arguments.dtype else None,
        limit=limit,
        drop_expert_bias=arguments.drop_expert_bias,
    )
    print(arguments.out)  # noqa: T201
    return 0
