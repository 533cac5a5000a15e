"""Writing safetensors from all ranks at once, every byte once.

PyTorch's ``HuggingFaceStorageWriter`` lets every rank write files of its own shards and then copies them into the final
ones: everything is written twice and read once. Here each rank writes its shards at their place in the final files,
because shapes and dtypes are enough to compute a safetensors header. The planner of ``torch.distributed.checkpoint``
decides as usual which rank writes what, and which replica.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, product
from operator import mul
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE as INDEX
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_qwen3_trn.hf_files.file_plan import FilePlan, Place, plan_files
from torchtitan_qwen3_trn.hf_files.tensor_names import shape_differences

# Bytes converted and written at a time.
_WINDOW = 32 * 2**20
# Windows in memory that wait to be hashed.
_MAX_UNHASHED = 4


class InPlaceWriter(HuggingFaceStorageWriter):
    """Writes a Hugging Face state dict into the final files of a folder that exists.

    The folder must be one that all ranks see.

    Args:
        folder: where to write.
        expected: shape of every tensor that must be written, by name.
        dtype: type of all tensors in the files.
        limit: bytes of tensors in one file at most.
        progress: called with the number of bytes after each piece this rank has written.

    Attributes:
        checksums: SHA-256 of the files that this rank wrote alone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        expected: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        limit: int,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        super().__init__(path=str(folder), save_distributed=True)
        self._folder = folder
        self._expected = {name: tuple(shape) for name, shape in expected.items()}
        self._dtype, self._limit, self._progress = dtype, limit, progress
        self._plan: FilePlan | None = None
        self.checksums: dict[str, str] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinating rank: check that all tensors are there, create the files, place the tensors.

        Raises:
            ValueError: tensors are missing, unexpected or misshapen.
            OSError: the files cannot be created.
        """
        shapes = {item.index.fqn: tuple(_size(item)) for plan in plans for item in plan.items}
        if differences := shape_differences(shapes, self._expected):
            raise ValueError(f"the model is not the one its config.json describes: {'; '.join(differences)}")
        self._plan = plan_files(shapes, self._dtype, self._limit)
        for file, header in self._plan.headers.items():
            with open(self._folder / file, "wb") as created:
                created.write(header)
                created.truncate(self._plan.sizes[file])
        writers: dict[str, set[int]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                writers.setdefault(self._plan.places[item.index.fqn].file, set()).add(rank)
        return [
            replace(
                plan,
                storage_data={
                    "places": {item.index.fqn: self._plan.places[item.index.fqn] for item in plan.items},
                    "headers": {file: self._plan.headers[file] for file, ranks in writers.items() if ranks == {rank}},
                },
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces; threads flush finished files, and hash those that this rank writes alone."""
        given: Mapping[str, Any] = plan.storage_data or {"places": {}, "headers": {}}
        places: Mapping[str, Place] = given["places"]
        headers: Mapping[str, bytes] = given["headers"]
        items = sorted(plan.items, key=lambda item: (places[item.index.fqn].file, places[item.index.fqn].offset))
        flushed: list[ThreadFuture[None]] = []
        # fsync and hashing run in threads: both release Python's global lock.
        with ThreadPoolExecutor(max_workers=1) as disk, ThreadPoolExecutor(max_workers=1) as hashing:
            digests = {}
            for file, group in groupby(items, key=lambda item: places[item.index.fqn].file):
                pieces = list(group)
                alone = file in headers and all(_is_whole(item, places[item.index.fqn]) for item in pieces)
                digest = _Digest(hashing, headers[file]) if alone else None
                descriptor = os.open(self._folder / file, os.O_WRONLY)
                try:
                    for item in pieces:
                        # Not bound to a name: a tensor that is read lazily is freed before the next one is read.
                        self._write_piece(descriptor, item, places[item.index.fqn], planner.resolve_data(item), digest)
                finally:
                    flushed.append(disk.submit(flush_and_close, descriptor))
                if digest is not None:
                    digests[file] = digest
            self.checksums = {file: digest.result() for file, digest in digests.items()}
            for each in flushed:
                each.result()
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinating rank, when all have written: the index."""
        if self._plan is not None:
            text = json.dumps(self._plan.index, indent=2) + "\n"
            (self._folder / INDEX).write_text(text, encoding="utf-8")

    def _write_piece(
        self, descriptor: int, item: WriteItem, place: Place, value: object, digest: _Digest | None
    ) -> None:
        if not isinstance(value, torch.Tensor) or item.tensor_data is None:
            raise ValueError(f"{item.index.fqn} is not a tensor")
        offsets = item.tensor_data.chunk.offsets
        for start, rows in _windows(value.detach()):
            data = rows.to(device="cpu", dtype=place.dtype).contiguous()
            origin = [offsets[0] + start, *offsets[1:]] if offsets else []
            if digest is not None:
                digest.add(data)
            _write_block(descriptor, data, place, origin)
            self._progress(data.nbytes)


class _Digest:
    """SHA-256 of a file that is being written from its beginning to its end."""

    def __init__(self, thread: ThreadPoolExecutor, header: bytes) -> None:
        self._thread, self._hash = thread, hashlib.sha256(header)
        self._waiting: deque[ThreadFuture[None]] = deque()

    def add(self, data: torch.Tensor) -> None:
        """The next bytes of the file; waits while too many are not hashed yet, because they stay in memory."""
        while len(self._waiting) >= _MAX_UNHASHED:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._hash.update, data.view(-1).view(torch.uint8).numpy().data))

    def result(self) -> str:
        """The checksum in hexadecimal."""
        for each in self._waiting:
            each.result()
        return self._hash.hexdigest()


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _size(item: WriteItem) -> torch.Size:
    if item.tensor_data is None:
        raise ValueError(f"{item.index.fqn} is not a tensor, and safetensors files hold nothing else")
    return item.tensor_data.size


def _is_whole(item: WriteItem, place: Place) -> bool:
    return item.tensor_data is not None and tuple(item.tensor_data.chunk.sizes) == place.shape


def _windows(value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """``value`` in windows of rows, each with the number of its first row."""
    if value.ndim == 0:
        yield 0, value
        return
    row = max(math.prod(value.shape[1:]) * 4, 1)
    step = max(_WINDOW // row, 1)
    for start in range(0, value.shape[0], step):
        yield start, value[start : start + step]


def _write_block(descriptor: int, data: torch.Tensor, place: Place, origin: Sequence[int]) -> None:
    """Write ``data``, the block of the whole tensor that begins at ``origin``, run by run of contiguous bytes."""
    if data.numel() == 0:
        return
    outer = data.ndim - _contiguous_dims(data.shape, place.shape)
    runs = data.reshape(-1, math.prod(data.shape[outer:])).view(torch.uint8).numpy()
    strides = [math.prod(place.shape[dim + 1 :]) for dim in range(data.ndim)]
    first = sum(map(mul, origin, strides))
    for index, run in zip(product(*map(range, data.shape[:outer])), runs, strict=True):
        at = first + sum(map(mul, index, strides))
        _write_all(descriptor, memoryview(run), place.offset + at * place.dtype.itemsize)


def _contiguous_dims(block: Sequence[int], whole: Sequence[int]) -> int:
    """How many of the last dimensions of a block are contiguous in the whole tensor."""
    pairs = enumerate(zip(reversed(block), reversed(whole), strict=True), start=1)
    return next((count for count, (part, full) in pairs if part != full), len(whole))


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def flush_and_close(descriptor: int) -> None:
    """Wait until a file or folder is on disk, and close it."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
