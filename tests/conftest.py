"""Fixtures shared by all tests: job files, in-process parsing, and installable throw-away plugins."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Files run side by side; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

TINY_MODEL = """
[model]
flavor = "debugmodel"
n_layers = 2
dim = 64
n_heads = 4
n_kv_heads = 2
head_dim = 16
hidden_dim = 128
vocab_size = 4096

[training]
local_batch_size = 2
seq_len = 64
steps = 3

[metrics]
log_freq = 1

[activation_checkpoint]
mode = "none"
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that no worker is left with one when the others are done."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, "rehearsal" not in item.nodeid))


@dataclass
class Outcome:
    """What parsing a command line gave: a configuration, or an exit status and what was printed."""

    config: Any
    status: int | None
    message: str
    log: str
    job: Any
    """The prepared job behind ``config``."""


@pytest.fixture(autouse=True)
def trainium2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run for Trainium2, where AWS's own simulator would otherwise choose the newest device."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """Write a job file; ``base=TINY_MODEL`` puts a small trainable model in front."""

    def write(text: str = "", *, base: str = "", name: str = "job.toml") -> Path:
        path = tmp_path / name
        path.write_text(base + textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture
def parse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Callable[..., Outcome]:
    """Run the configuration manager that ``torchtitan.train`` runs, in this process, as one rank of a job."""

    def run(*args: str | Path, world_size: int = 1, rank: int = 0) -> Outcome:
        from torchtitan.config import ConfigManager

        from torchtitan_qwen3_trn import launcher

        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
            monkeypatch.setenv(name, str(value))
        caplog.set_level("INFO")
        caplog.clear()
        capsys.readouterr()
        config, status, jobs = None, None, []
        buildable = launcher._buildable
        monkeypatch.setattr(launcher, "_buildable", lambda job: jobs.append(job) or buildable(job))
        try:
            config = ConfigManager().parse_args([str(arg) for arg in args])
        except SystemExit as stop:
            status = int(stop.code or 0)
        printed = capsys.readouterr()
        monkeypatch.setattr(launcher, "_buildable", buildable)
        return Outcome(config, status, printed.err + printed.out, caplog.text, jobs[0] if jobs else None)

    return run


@pytest.fixture
def parse_job(write_job: Callable[..., Path], parse: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Write a job file and parse it."""

    def run(text: str = "", *args: str, base: str = TINY_MODEL, **launch: int) -> Outcome:
        return parse("--job.config_file", write_job(text, base=base), *args, **launch)

    return run


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a module discoverable as an installed distribution with one plugin, and routes if given."""

    def install(
        name: str,
        source: str,
        *,
        distribution: str | None = None,
        module: str | None = None,
        routes: dict[str, tuple[str, ...]] | None = None,
    ) -> Path:
        distribution = distribution or f"{name}-dist"
        module = module or name.replace("-", "_") + "_module"
        site = tmp_path / f"site-{distribution}"
        info = site / f"{distribution.replace('-', '_')}-1.2.3.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n")
        entry_points = f"[torchtitan.plugins]\n{name} = {module}\n"
        if routes:
            (site / f"{module}_routes.py").write_text("".join(f"{key} = {value!r}\n" for key, value in routes.items()))
            entry_points += "[torchtitan.routes]\n"
            entry_points += "".join(f"{key} = {module}_routes:{key}\n" for key in routes)
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(str(site))
        return site

    return install
