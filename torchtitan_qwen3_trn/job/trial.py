"""Trying a configuration out: whether torchtitan takes it, without what torchtitan would log about it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hold back warnings and what is less: they are for the configuration that is used, and come when it is made."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(level)


def refusal(instance: Any, values: Mapping[str, Any]) -> str | None:
    """What the dataclass of ``instance`` has against these ``values``; ``None`` if it takes them."""
    try:
        with silenced():
            replace(instance, **values)
    except (ValueError, AssertionError, NotImplementedError) as error:
        return str(error) or "these values are not possible"
    return None
