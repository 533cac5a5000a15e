"""Mutated checkpoint folders for the header and config readers: every one must be judged, none may crash.

    python tests/unit/weights/mutate.py [COUNT] [SEED]

Prints how many of COUNT (default 10,000) mutations were refused; a crash or a hang ends it with its seed and mutation.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from torchtitan_qwen3_trn.errors import JobError
from torchtitan_qwen3_trn.models.hf_config import from_folder
from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.unsupported import unsupported
from torchtitan_qwen3_trn.weights.verify import verify

# Processor time. A verdict on such a folder takes milliseconds; a mutated number must not make it build forever.
LIMIT_S = 5.0

NUMBERS = [-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, float("inf"), float("nan")]
VALUES = [None, True, [], {}, "", "../x", "\x00", "a" * 300, *NUMBERS]


def write_seed(folder: Path) -> None:
    """A small mixture of experts in two files, with index and config.json."""
    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=4,
    )  # fmt: skip
    from torchtitan_qwen3_trn.models.hf.build import build_on_meta
    from torchtitan_qwen3_trn.models.hf.layout import layout_of

    shapes = layout_of(build_on_meta(config)).shapes
    config.save_pretrained(folder)
    names = sorted(shapes)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, group in parts.items():
        save_file({name: torch.ones(shapes[name]) for name in group}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, group in parts.items() for name in group}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def mutate(folder: Path, seed: int) -> tuple[Path, bytes]:
    """Change one file of ``folder``; returns it with what it held before."""
    draw = random.Random(seed)
    file = draw.choice(sorted(folder.iterdir()))
    before = file.read_bytes()
    kind = draw.choice([_flip, _cut, _insert, _length] if file.suffix == ".safetensors" else [_flip, _cut, _value])
    file.write_bytes(_header_value(before, draw) if kind is _length and draw.random() < 0.6 else kind(before, draw))
    return file, before


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        # The header is where a byte matters.
        changed[draw.randrange(min(len(changed), 2000))] = draw.randrange(256)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(draw.choice([1, 8, 100])) + data[at:]


def _length(data: bytes, draw: random.Random) -> bytes:
    return draw.choice([0, 1, 7, len(data), 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]


def _value(data: bytes, draw: random.Random) -> bytes:
    """Another value somewhere in a JSON file."""
    return json.dumps(_changed(json.loads(data), draw)).encode()


def _header_value(data: bytes, draw: random.Random) -> bytes:
    """Another value somewhere in a safetensors header, with a header length that fits."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(_changed(json.loads(data[8 : 8 + length]), draw)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _changed(value: object, draw: random.Random) -> object:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {(each if each != key else key + "x"): value[each] for each in value}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    if isinstance(value, int) and draw.random() < 0.3:
        return value + draw.choice([-1, 1, 1000])
    return draw.choice(VALUES)


class Hang(BaseException):
    """A verdict that did not come; not an `Exception`, so that nobody takes it for a finding."""


@contextlib.contextmanager
def no_hang(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the body after so many seconds of processor time."""

    def stop(*_: object) -> None:
        raise Hang(f"no verdict after {seconds} s of work")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(count: int, first: int, report: Callable[[str], None] = print) -> int:
    """Judge ``count`` mutations; returns how many were refused.

    Raises:
        AssertionError: a verdict was an exception that nobody had expected.
        Hang: there was none in `LIMIT_S`.
    """
    refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "seed")
        folder.mkdir()
        write_seed(folder)
        assert all(finding.outcome != "failed" for finding in verify(folder, cheap=True))
        for seed in range(first, first + count):
            file, before = mutate(folder, seed)
            try:
                with no_hang(LIMIT_S):
                    findings = verify(folder, cheap=True)
                    with contextlib.suppress(JobError):
                        model_config(from_folder(folder, rule=unsupported))
            except BaseException:
                report(f"seed {seed}: {file.name} now {file.read_bytes()[:400]!r}")
                raise
            unexpected = [
                f.detail for f in findings if f.outcome == "failed" and f.detail.split(":")[0].endswith("Error")
            ]
            assert not unexpected, f"seed {seed}: {unexpected}"
            refused += any(finding.outcome == "failed" for finding in findings)
            file.write_bytes(before)
    return refused


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(
        f"{run(number, int(sys.argv[2]) if len(sys.argv) > 2 else 0)} of {number} mutated folders refused, none crashed"
    )
