"""The two seams, and all else that this package changes in other libraries.

1. ``torchtitan.config.ConfigManager`` becomes a subclass that understands ``--job.config_file``.
2. ``torchtitan.tools.utils.device_type`` and ``device_module`` become the CPU's when no accelerator exists
   (stock assumes CUDA and fails). In a process where PyTorch loads no back ends this happens late, and the copies of
   these two names in other modules of torchtitan are replaced as well (`install_cpu_device_late`).

No other attribute of a host library is replaced. A job that trains a Transformers model without a document mask
registers Transformers' attention function under one more name in its public registry (``models/hf/build.py``).

PyTorch calls :func:`autoload` at the end of ``import torch`` (entry-point group ``torch.backends``), so both are
registered as post-import hooks: a process that never imports torchtitan is left as it was. Set
``TORCHTITAN_QWEN3_TRN_SEAMS=0`` to switch both off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

SWITCH = "TORCHTITAN_QWEN3_TRN_SEAMS"


def autoload() -> None:
    """Register both seams. Never raises: an exception here would break ``import torch`` for everybody."""
    if not seams_enabled():
        return
    try:
        _after_import("torchtitan.config", _install_config_manager)
        _after_import("torchtitan.tools.utils", _install_cpu_device)
    except Exception as error:
        _step_aside(error)


def seams_enabled() -> bool:
    """Whether ``TORCHTITAN_QWEN3_TRN_SEAMS`` leaves the seams on (the default)."""
    return os.environ.get(SWITCH, "1").lower() not in ("0", "false", "off", "no")


def install_cpu_device_late() -> None:
    """Apply the CPU seam in a process where :func:`autoload` never ran, or ran while torchtitan was being imported.

    With ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torchtitan is imported before this package, and several of its modules
    already hold their own copy of ``device_type`` and ``device_module`` (``from torchtitan.tools.utils import``).
    Those copies follow the seam. Does nothing when an accelerator exists or the seams are switched off.
    """
    utils = sys.modules.get("torchtitan.tools.utils")
    if utils is None or not seams_enabled():
        return
    stock = {"device_type": utils.device_type, "device_module": utils.device_module}
    _install_cpu_device(utils)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and module is not utils:
            for attribute, before in stock.items():
                if module.__dict__.get(attribute) is before:
                    setattr(module, attribute, getattr(utils, attribute))


def _install_config_manager(config: Any) -> None:
    if not hasattr(config, "ConfigManager"):
        # torchtitan.config is what imported torch, so it is still being filled; its last submodule comes later.
        _after_import("torchtitan.config.override", lambda _: _install_config_manager(config))
        return
    from torchtitan_qwen3_trn.config_manager import JobConfigManager

    config.ConfigManager = JobConfigManager


def _install_cpu_device(utils: Any) -> None:
    if not hasattr(utils, "device_module"):
        # torchtitan.tools.utils is what imported torch, so it is still being filled and would overwrite the seam.
        _after_import("torchtitan.trainer", lambda _: install_cpu_device_late())
        return
    if utils._get_available_device_type() is not None:
        return
    from torchtitan_qwen3_trn.device.cpu import cpu_device_module

    utils.device_type = "cpu"
    utils.device_module = cpu_device_module


def _after_import(module_name: str, install: Callable[[ModuleType], None]) -> None:
    from wrapt.importer import register_post_import_hook

    def hook(module: ModuleType) -> None:
        try:
            install(module)
        except Exception as error:
            _step_aside(error)

    register_post_import_hook(hook, module_name)


def _step_aside(error: Exception) -> None:
    text = f"torchtitan-qwen3-trn stepped aside and left torchtitan as it is: {type(error).__name__}: {error}"
    # Where warnings are errors, this one must still not end the import.
    with contextlib.suppress(RuntimeWarning):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
