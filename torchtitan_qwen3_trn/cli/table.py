"""Tables of findings and plugins on standard output."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

# More than any row has: where no terminal sets the width, lines are as long as their text and paths stay in one piece.
_UNLIMITED = 100_000


def print_table(table: Table) -> None:
    """Print ``table``; on a terminal, cells that do not fit are wrapped."""
    for column in table.columns:
        column.overflow = "fold"
    width = None if sys.stdout.isatty() else _UNLIMITED
    Console(width=width, soft_wrap=True, highlight=False, markup=False).print(table)
