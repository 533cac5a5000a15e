"""A small tokenizer and a small text for tests, examples and smoke runs. ``tools/bundled_text`` makes both."""

from __future__ import annotations

from pathlib import Path


def tokenizer_path() -> Path:
    """The folder with the bundled tokenizer, for ``--hf_assets_path`` and ``AutoTokenizer.from_pretrained``."""
    return Path(__file__).parent / "tokenizer"


def text_path() -> Path:
    """The folder with the bundled text, for ``--dataloader.dataset_path`` with the dataset ``c4_test``."""
    return Path(__file__).parent / "c4_test"
