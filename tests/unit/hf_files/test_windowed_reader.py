"""Reading by windows: what is read at once, by how many threads, and that it is what the files hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_checkpoints import small_config, write_checkpoint
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torchtitan_qwen3_trn.hf_files import windowed_reader as reader
from torchtitan_qwen3_trn.models.hf.build import build_on_meta
from torchtitan_qwen3_trn.models.hf.layout import layout_of


def read_item(*lengths, rows_before=0):
    """Reads a tensor of that shape which lies behind ``rows_before`` rows in its file."""
    zeros = torch.Size([0] * len(lengths))
    storage = torch.Size([rows_before, *zeros[1:]]) if lengths else zeros
    index = MetadataIndex("tensor")
    return ReadItem(LoadItemType.TENSOR, index, zeros, index, storage, torch.Size(lengths))


def test_files_are_closed_between_windows(monkeypatch, tmp_path):
    monkeypatch.setattr(reader, "_WINDOW", 10)
    items = [read_item(4, size) for size in (1, 2, 1, 2, 1)] + [read_item()]
    windows = [[tuple(item.lengths) for item in window] for window in reader._windows(items)]
    assert windows == [[(4, 1), (4, 2)], [(4, 1), (4, 2)], [(4, 1), ()]]
    opened = []
    monkeypatch.setattr(
        reader.HuggingFaceStorageReader,
        "read_data",
        lambda self, plan, planner: opened.append(len(plan.items)) or done(),
    )
    reader.WindowedReader(str(tmp_path)).read_data(LoadPlan(items), None)
    assert opened == [2, 2, 2]


def test_a_tensor_larger_than_a_window_is_read_by_rows(monkeypatch):
    monkeypatch.setattr(reader, "_WINDOW", 10)
    windows = list(reader._windows([read_item(7, 3, rows_before=2), read_item(2, 40)]))
    places = [[(each.storage_offsets[0], each.dest_offsets[0], each.lengths[0]) for each in part] for part in windows]
    assert places == [[(2, 0, 3), (5, 3, 3)], [(8, 6, 1), (0, 0, 1)], [(1, 1, 1)]]


def test_a_window_that_cannot_be_read_ends_the_load(monkeypatch, tmp_path):
    monkeypatch.setattr(reader, "_WINDOW", 10)

    def fail(self, plan, planner):
        if plan.items[0].lengths[0] == 2:
            raise OSError("the disk is gone")
        return done()

    monkeypatch.setattr(reader.HuggingFaceStorageReader, "read_data", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        reader.WindowedReader(str(tmp_path)).read_data(
            LoadPlan([read_item(*shape) for shape in ((5, 2), (2, 5), (5, 2))]), None
        )


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, None, 2), (192, "64", 3), (192, "8", 4), (2, "4", 1)])
def test_ranks_of_a_host_share_its_cores_for_reading(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(reader.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks) if ranks else monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert reader._threads() == threads


def done():
    future = torch.futures.Future()
    future.set_result(None)
    return future


def test_a_window_reads_what_the_files_hold(monkeypatch, tmp_path):
    monkeypatch.setattr(reader, "_WINDOW", 1000)
    folder = write_checkpoint(tmp_path, "llama")
    shapes = layout_of(build_on_meta(small_config("llama"), document_mask=True, experts="eager")).shapes
    target = {name: torch.empty(shape) for name, shape in shapes.items()}
    dcp.load(target, storage_reader=reader.WindowedReader(str(folder)))
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert all(torch.equal(target[name], opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
