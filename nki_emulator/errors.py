"""The error for every misuse. Its message names the instruction, the operand, the value and the limit."""

from __future__ import annotations

from typing import NoReturn


class NkiValidationError(Exception):
    """A kernel violates a documented limit of the language, the simulator or the hardware."""


def fail(where: object, what: str) -> NoReturn:
    """Raise `NkiValidationError`; `where` names the instruction and the operand."""
    raise NkiValidationError(f"{where}: {what}")
