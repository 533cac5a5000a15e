"""The ``torchtitan-trn`` command: one module per subcommand."""

from __future__ import annotations

import argparse
import sys
import warnings

from torchtitan_qwen3_trn.cli import export_checkpoint as export
from torchtitan_qwen3_trn.cli import import_folder as import_
from torchtitan_qwen3_trn.cli import list_plugins as plugins
from torchtitan_qwen3_trn.cli import verify_weights
from torchtitan_qwen3_trn.errors import JobError

COMMANDS = (plugins, export, import_, verify_weights)


def main(argv: list[str] | None = None) -> int:
    """Run ``torchtitan-trn``; returns the exit status: 0, or 2 when the user has something to correct."""
    parser = argparse.ArgumentParser(prog="torchtitan-trn", description="Tools around torchtitan-qwen3-trn jobs.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers).set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    # One process is what these commands are for.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        return int(arguments.run(arguments))
    except JobError as error:
        error.source = error.source or f"torchtitan-trn {arguments.command}"
        print(error.report(), file=sys.stderr)  # noqa: T201
        return 2
