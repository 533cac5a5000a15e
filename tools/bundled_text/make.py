"""Makes the bundled text and tokenizer. Run it in the repository's root: ``python -m tools.bundled_text [OUTDIR]``.

Without OUTDIR it rewrites the files in ``torchtitan_qwen3_trn/assets``. The output depends on nothing but these
sources: the text is the same on every Python version, the tokenizer with every ``tokenizers`` release that trains BPE
the same way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bundled_text.corpus import documents

ASSETS = Path(__file__).parents[2] / "torchtitan_qwen3_trn" / "assets"

DOCUMENTS = 4096
"""The tokenizer is trained on this many documents."""

BUNDLED_DOCUMENTS = 384
"""The first of them are the bundled text: 396 kB, and six documents for each of 64 ranks."""

# The folder loader of Hugging Face datasets reads files with such names as one split, "train", in the order of their
# names, and ignores everything else in the folder.
TEXT_FILES = 3
TEXT_NAME = "train-{index:05d}-of-{count:05d}.json"


def write_text(folder: Path, texts: Sequence[str]) -> None:
    """Writes the documents as JSON lines ``{"text": ...}``, divided equally among ``TEXT_FILES`` files."""
    folder.mkdir(parents=True, exist_ok=True)
    share = -(-len(texts) // TEXT_FILES)
    for index in range(TEXT_FILES):
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts[index * share : (index + 1) * share])
        data = "".join(f"{line}\n" for line in lines)
        (folder / TEXT_NAME.format(index=index, count=TEXT_FILES)).write_bytes(data.encode("utf-8"))


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Trains the tokenizer on the documents and writes tokenizer.json and tokenizer_config.json."""
    # Deferred so that the text can be made with the standard library alone.
    from tools.bundled_text.tokenizer import tokenizer_config, train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts)
    (folder / "tokenizer.json").write_bytes(f"{tokenizer.to_str(pretty=False)}\n".encode())
    # ASCII, because torchtitan opens this file in the locale's encoding.
    config = json.dumps(tokenizer_config(tokenizer), indent=2)
    (folder / "tokenizer_config.json").write_bytes(f"{config}\n".encode("ascii"))


def make(folder: Path) -> None:
    """Writes ``folder/c4_test`` and ``folder/tokenizer``."""
    texts = list(documents(DOCUMENTS))
    write_text(folder / "c4_test", texts[:BUNDLED_DOCUMENTS])
    write_tokenizer(folder / "tokenizer", texts)


def main(arguments: Sequence[str]) -> None:
    """The command: at most one argument, the folder to write to."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise SystemExit("usage: python -m tools.bundled_text [OUTDIR]")
    folder = Path(arguments[0]) if arguments else ASSETS
    make(folder)
    for path in sorted([*(folder / "c4_test").iterdir(), *(folder / "tokenizer").iterdir()]):
        sys.stdout.write(f"{path.stat().st_size:>9}  {path}\n")
