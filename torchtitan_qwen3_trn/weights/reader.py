"""Reading safetensors into a model with little more resident than the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

__all__ = ["WindowedReader"]

# Elements read before the files are closed again: 16 MiB of bfloat16.
_WINDOW = 8 * 1024 * 1024


class WindowedReader(HuggingFaceStorageReader):
    """PyTorch's reader, which closes the files after every window.

    safetensors maps a file into memory, and pages once read stay resident until the file is closed. Reading a whole
    file in one go therefore costs its size on top of the model's.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all of ``plan``, window by window."""
        for window in _windows(plan.items):
            super().read_data(replace(plan, items=window), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _windows(items: list[ReadItem]) -> Iterator[list[ReadItem]]:
    window: list[ReadItem] = []
    size = 0
    for item in items:
        window.append(item)
        size += math.prod(item.lengths)
        if size >= _WINDOW:
            yield window
            window, size = [], 0
    if window:
        yield window
