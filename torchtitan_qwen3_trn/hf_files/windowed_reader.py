"""Reading safetensors into a model with little more in memory than the model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

# Elements read before the files are closed again: 16 MiB of bfloat16.
_WINDOW = 8 * 1024 * 1024
_MOST_THREADS = 4


class WindowedReader(HuggingFaceStorageReader):
    """PyTorch's reader, but the files are closed after every window, and several windows are read at once.

    safetensors maps a file into memory, and pages once read stay resident until the file is closed. Reading a whole
    file at once therefore needs its size in memory on top of the model's. Threads read, convert and copy: as many as
    there are cores for each rank of this host, at most four.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all of ``plan``, window by window."""

        def read(window: list[ReadItem]) -> None:
            super(WindowedReader, self).read_data(replace(plan, items=window), planner).wait()

        with ThreadPoolExecutor(max_workers=_threads()) as threads:
            for _ in threads.map(read, _windows(plan.items)):
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done


class WindowedLoading:
    """What makes torchtitan's checkpointer read with a `WindowedReader`; a base class of state dict adapters."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """A reader that keeps little of the files resident.

        Raises:
            ValueError: quantized files are asked for.
        """
        if from_quantized:
            raise ValueError("checkpoint.initial_load_in_hf_quantized: quantized weights cannot be trained here")
        return WindowedReader(path)


def _threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(len(os.sched_getaffinity(0)) // ranks, 1), _MOST_THREADS)


def _windows(items: list[ReadItem]) -> Iterator[list[ReadItem]]:
    window: list[ReadItem] = []
    size = 0
    for item in items:
        for part in _parts(item):
            window.append(part)
            size += math.prod(part.lengths)
            if size >= _WINDOW:
                yield window
                window, size = [], 0
    if window:
        yield window


def _parts(item: ReadItem) -> Iterator[ReadItem]:
    """``item``, with a large tensor's rows divided into windows."""
    if not item.lengths:
        yield item
        return
    rows, *inner = item.lengths
    step = max(_WINDOW // max(math.prod(inner), 1), 1)
    for start in range(0, rows, step):
        yield replace(
            item,
            lengths=torch.Size([min(step, rows - start), *inner]),
            storage_offsets=torch.Size([item.storage_offsets[0] + start, *item.storage_offsets[1:]]),
            dest_offsets=torch.Size([item.dest_offsets[0] + start, *item.dest_offsets[1:]]),
        )
