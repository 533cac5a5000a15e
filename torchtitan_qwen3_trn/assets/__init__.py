"""The bundled tokenizer and text, and the script that makes them (``make.py``)."""

from __future__ import annotations

from pathlib import Path


def tokenizer_path() -> Path:
    """The folder with the bundled tokenizer's files, fit for ``--hf_assets_path`` and ``AutoTokenizer``."""
    return Path(__file__).parent / "tokenizer"


def text_path() -> Path:
    """The folder with the bundled text, fit for ``--dataloader.dataset_path`` with dataset ``c4_test``."""
    return Path(__file__).parent / "c4_test"
