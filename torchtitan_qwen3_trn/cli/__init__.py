"""The ``torchtitan-trn`` command: one module per subcommand."""

from __future__ import annotations

import argparse
import sys
import warnings

from torchtitan_qwen3_trn.cli import export_checkpoint, import_folder, list_plugins, verify_weights
from torchtitan_qwen3_trn.errors import JobError

COMMANDS = {
    "plugins": list_plugins,
    "export": export_checkpoint,
    "import": import_folder,
    "verify-weights": verify_weights,
}


def main(argv: list[str] | None = None) -> int:
    """Run ``torchtitan-trn``; returns the exit status: 0, or 2 when the user has something to correct."""
    parser = argparse.ArgumentParser(prog="torchtitan-trn", description="Tools around torchtitan-qwen3-trn jobs.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(subparsers.add_parser(name, help=command.HELP))
    arguments = parser.parse_args(argv)
    # These commands run in one process.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        return COMMANDS[arguments.command].run(arguments)
    except JobError as error:
        error.source = error.source or f"torchtitan-trn {arguments.command}"
        print(error.report(), file=sys.stderr)  # noqa: T201
        return 2
