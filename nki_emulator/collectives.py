"""The module `nki.collectives`: names only. A launch is one device, so nothing can be exchanged between devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import fail
from .objects import NKIObject


@dataclass
class ReplicaGroup(NKIObject):
    """Lists of ranks that take part in a collective."""

    groups: Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        fail(f"nki.collectives.{name}", "collectives between devices are not emulated")

    return missing
