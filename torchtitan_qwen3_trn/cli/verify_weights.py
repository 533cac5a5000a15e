"""``torchtitan-trn verify-weights``: checks that a Hugging Face folder holds a working model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.table import Table
from transformers.utils import logging

from torchtitan_qwen3_trn.cli.table import print_table
from torchtitan_qwen3_trn.weights.verify import Finding, verify

HELP = "check a Hugging Face folder: files, tensors, logits, generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("folder", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("--checkpoint", type=Path, help="training checkpoint step-N that the folder was exported from")
    parser.add_argument("--cheap", action="store_true", help="only what headers and small files tell")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; status 0 when all hold, 1 otherwise."""
    logging.disable_progress_bar()
    findings = verify(arguments.folder, checkpoint=arguments.checkpoint, cheap=arguments.cheap)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))  # noqa: T201
    else:
        _print_table(findings)
    return int(any(finding.outcome == "failed" for finding in findings))


def _print_table(findings: list[Finding]) -> None:
    table = Table("check", "outcome", "detail")
    for finding in findings:
        table.add_row(finding.check, finding.outcome, finding.detail)
    print_table(table)
