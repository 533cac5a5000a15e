"""Questions about what a job reads: the tokenizer and the text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)

from torchtitan_qwen3_trn.config import JobConfig
from torchtitan_qwen3_trn.errors import Problem, did_you_mean
from torchtitan_qwen3_trn.launch import without_warnings

TEXT_LOADERS = (HuggingFaceTextDataLoader.Config, InterleavedHuggingFaceTextDataLoader.Config)
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def check_tokenizer(config: JobConfig) -> list[Problem]:
    """The folder of the tokenizer exists, and torchtitan can read a tokenizer with entries from it."""
    where, path = "model.hf_assets_path", Path(config.hf_assets_path)
    if not os.path.isdir(path):
        what = "is not a folder" if os.path.exists(path) else "does not exist"
        fix = "download the tokenizer there (docs/weights.md), or leave the key out for the bundled one"
        return [Problem(where, f"{path} {what}", fix)]
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        fix = "put the checkpoint's tokenizer.json and tokenizer_config.json there"
        return [Problem(where, f"{path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})", fix)]
    try:
        with without_warnings():
            tokenizer = config.tokenizer.build(tokenizer_path=str(path))
    except Exception as error:
        what = f"the tokenizer in {path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [Problem(where, what, "download it again")]
    if tokenizer.get_vocab_size() == 0:
        return [Problem(where, f"the tokenizer in {path} has no entries", "download it again")]
    return []


def check_text(config: JobConfig) -> Iterator[Problem]:
    """Data sets exist by name, and local ones hold files with the field that torchtitan reads.

    A data loader that is not one of stock's for text is left to whoever has made it.
    """
    loaders = [("dataloader", config.dataloader)]
    if config.validator.enable:
        loaders.append(("validator.dataloader", config.validator.dataloader))
    for where, loader in loaders:
        if not isinstance(loader, TEXT_LOADERS):
            continue
        if loader.num_workers and loader.prefetch_factor is not None and loader.prefetch_factor < 1:
            what = f"{loader.prefetch_factor} is not possible"
            yield Problem(f"{where}.prefetch_factor", what, "it must be positive")
        for source in getattr(loader, "sources", None) or [loader]:
            name = source.dataset.lower()
            if name not in DATASETS:
                what = f"no dataset is called {source.dataset!r}"
                yield Problem(f"{where}.dataset", what, did_you_mean(name, DATASETS))
            elif name == "c4_test" and source.dataset_path and (reason := _no_text(Path(source.dataset_path))):
                fix = "name a folder of JSON-lines files, or leave the key out for the bundled text"
                yield Problem(f"{where}.dataset_path", f"{source.dataset_path} {reason}", fix)
            elif name == "c4_test" and source.dataset_path:
                yield from _text_fields(f"{where}.dataset_path", Path(source.dataset_path))


def _no_text(folder: Path) -> str:
    """Why nothing can be read from ``folder``; empty if something may."""
    if not os.path.isdir(folder):
        return "is not a folder" if os.path.exists(folder) else "does not exist"
    return "" if any(path.is_file() for path in folder.rglob("*")) else "holds no file"


def _text_fields(where: str, folder: Path) -> list[Problem]:
    """A look at the first record of the first JSON file: torchtitan reads the field ``text``."""
    first = next(iter(sorted(folder.glob("*.json*"))), None)
    if first is None or first.suffix not in (".json", ".jsonl"):
        return []
    try:
        with first.open(encoding="utf-8") as lines:
            record = json.loads(next(lines, "null"))
    except (OSError, ValueError):
        return []  # one document over many lines, or another form that the dataset library may know
    if not isinstance(record, dict) or "text" in record:
        return []
    what = f"the records of {first} have no field text but {', '.join(sorted(record))[:200]}"
    return [Problem(where, what, 'every line is one document, such as {"text": "Once upon a time ..."}')]
