"""Makes `import nki` find the emulator where AWS's package is not installed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from . import collectives, dtypes, isa, isa_common, language, language_math, launch, ops


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name, f"Emulated {name}.")
    module.__dict__.update(members)
    return module


def install(*, force: bool = False) -> ModuleType:
    """Provide `nki`, `nki.language`, `nki.isa`, `nki.typing` and `nki.collectives` to import.

    Where AWS's `nki` is installed it is returned unchanged and `nki.simulate` is AWS's own, unless `force`.

    Returns:
        The module `nki`.
    """
    present = sys.modules.get("nki")
    if present is not None and getattr(present, "__emulated__", False):
        return present
    if not force and importlib.util.find_spec("nki") is not None:
        import nki

        return nki
    members = {name: getattr(language, name) for name in language.__all__}
    maths = {name: getattr(language_math, name) for name in language_math.__all__}
    nl = _module("nki.language", **members, **ops.ALL, **maths)
    constants = {
        name: getattr(isa_common, name)
        for name in (
            "engine",
            "reduce_cmd",
            "dge_mode",
            "oob_mode",
            "matmul_perf_mode",
            "nc_version",
            "dma_engine",
        )
    }
    annotations = {"tensor": language.NkiTensor, "mutable_tensor": language.NkiTensor}
    modules = {
        "nki.language": nl,
        "nki.isa": isa,
        "nki.isa.constants": _module("nki.isa.constants", **constants),
        "nki.typing": _module("nki.typing", **annotations),
        "nki.collectives": collectives,
        # The name of NKI before 0.3; one module of nki-library still imports its annotations from there.
        "neuronxcc": _module("neuronxcc", __path__=[]),
        "neuronxcc.nki": _module("neuronxcc.nki", __path__=[]),
        "neuronxcc.nki.typing": _module("neuronxcc.nki.typing", **annotations),
    }
    nki = _module("nki", jit=launch.jit, simulate=launch.simulate, __emulated__=True, __path__=[])
    # Names that only annotations of public kernels use; AWS's front end does not evaluate annotations.
    nki.dtype = nl.dtype = dtypes.DType
    nki.tensor = nl.tensor = language.NkiTensor
    isa.__path__ = []  # `nki.isa.constants` is imported as a submodule
    sys.modules["nki"] = nki
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return nki
