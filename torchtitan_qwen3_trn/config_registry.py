"""Configurations for ``--module torchtitan_qwen3_trn --config <name>``: the example job files by name.

Nothing is imported at the top, because stock's ``ConfigManager`` turns an ``ImportError`` raised there into "Cannot
import module" without its cause.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.config import JobConfig


def qwen3_moe() -> JobConfig:
    """``examples/qwen3_moe.toml``."""
    return _example("qwen3_moe")


def qwen3_4b_native() -> JobConfig:
    """``examples/qwen3_4b_native.toml``."""
    return _example("qwen3_4b_native")


def qwen3_4b_hf() -> JobConfig:
    """``examples/qwen3_4b_hf.toml``."""
    return _example("qwen3_4b_hf")


def qwen3_4b_finetune() -> JobConfig:
    """``examples/qwen3_4b_finetune.toml``."""
    return _example("qwen3_4b_finetune")


def _example(name: str) -> JobConfig:
    from torchtitan_qwen3_trn.autoload import install_cpu_device_late
    from torchtitan_qwen3_trn.errors import JobError
    from torchtitan_qwen3_trn.job.command_line import parse_flags
    from torchtitan_qwen3_trn.job.configuration import configure
    from torchtitan_qwen3_trn.launch import message_on_command_line
    from torchtitan_qwen3_trn.trainer import PluginTrainer  # noqa: F401  makes JobConfig.build() give it

    install_cpu_device_late()
    job = configure(replace(parse_flags(sys.argv[1:]), job_file=str(_examples_folder() / f"{name}.toml")))
    job.log()
    if job.problems:
        with message_on_command_line():
            raise JobError(job.problems, name)
    return job.config


def _examples_folder() -> Path:
    """``examples/`` as installed in the package, or beside it in a checkout."""
    installed = Path(__file__).parent / "examples"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "examples"
