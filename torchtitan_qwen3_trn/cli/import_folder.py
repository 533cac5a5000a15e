"""``torchtitan-trn import``: a Hugging Face folder as a training checkpoint, in one process."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_qwen3_trn.weights.offline import import_folder

HELP = "write a Hugging Face folder as a training checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("folder", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("checkpoint", type=Path, help="folder to write; checkpoint.initial_load_path takes it")
    parser.add_argument(
        "--route", choices=["native", "huggingface_v5"], default="native", help="route that loads it (default: native)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Import; status 2 with a message when that is not possible."""
    import_folder(arguments.folder, arguments.checkpoint, route=arguments.route)
    print(arguments.checkpoint)  # noqa: T201
    return 0
