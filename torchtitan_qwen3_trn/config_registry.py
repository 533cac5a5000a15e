"""Configurations for ``--module torchtitan_qwen3_trn --config <name>``: the example job files by name.

Nothing is imported at the top, because stock's ``ConfigManager`` turns an ``ImportError`` raised there into "Cannot
import module" without its cause.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_qwen3_trn.trainer import PluginTrainer


def qwen3_moe() -> PluginTrainer.Config:
    """``examples/qwen3_moe.toml``."""
    return _example("qwen3_moe")


def qwen3_4b_native() -> PluginTrainer.Config:
    """``examples/qwen3_4b_native.toml``."""
    return _example("qwen3_4b_native")


def qwen3_4b_hf() -> PluginTrainer.Config:
    """``examples/qwen3_4b_hf.toml``."""
    return _example("qwen3_4b_hf")


def qwen3_4b_finetune() -> PluginTrainer.Config:
    """``examples/qwen3_4b_finetune.toml``."""
    return _example("qwen3_4b_finetune")


def _example(name: str) -> PluginTrainer.Config:
    from torchtitan_qwen3_trn.autoload import install_cpu_device_late
    from torchtitan_qwen3_trn.config_manager import message_on_command_line
    from torchtitan_qwen3_trn.errors import JobError
    from torchtitan_qwen3_trn.job.configuration import load_job

    install_cpu_device_late()
    job = load_job(_examples_folder() / f"{name}.toml", sys.argv[1:])
    job.log()
    if job.problems:
        with message_on_command_line():
            raise JobError(job.problems, name)
    return job.config


def _examples_folder() -> Path:
    """``examples/`` as installed in the package, or beside it in a checkout."""
    installed = Path(__file__).parent / "examples"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "examples"
