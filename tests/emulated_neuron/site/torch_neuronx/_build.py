"""Compile device.cpp once per source, torch and Python version; later processes load the cached library."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

_SOURCE = Path(__file__).with_name("device.cpp")
_NAME = "emulated_neuron_device"


def extension() -> ModuleType:
    """The compiled module. About 40 seconds of g++ the first time."""
    library = _cache() / f"{_NAME}.so"
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    spec = importlib.util.spec_from_file_location(_NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache() -> Path:
    versions = (_SOURCE.read_text(), torch.__version__, sys.version)
    key = hashlib.sha256("".join(versions).encode()).hexdigest()[:16]
    root = os.environ.get("EMULATED_NEURON_CACHE") or os.path.join(
        tempfile.gettempdir(), f"emulated-neuron-{os.getuid()}"
    )
    folder = Path(root) / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={_NAME}"]
    command += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    command += [f"-I{path}" for path in includes]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [str(_SOURCE), f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    partial = library.with_suffix(".partial")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the emulated neuron device does not compile:\n{done.stderr[-4000:]}")
    partial.rename(library)
