"""The one error every misuse ends in: instruction, operand, what was found, what the limit is."""

from __future__ import annotations

from typing import NoReturn


class NkiValidationError(Exception):
    """A documented limit of the language, the simulator or the hardware is violated."""


def fail(where: object, what: str) -> NoReturn:
    raise NkiValidationError(f"{where}: {what}")
