"""NKI data types and the two conversions hardware does: into float32 before maths, out of it on write.

Formats: nki.api.shared.rst, table "Supported Data Types". Float to integer conversion rounds to nearest even and
saturates (release notes of NKI 0.6).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .errors import fail


class DType(str):
    """A data type; compares and prints as its name, as kernels expect (`str(t.dtype) == str(nl.float32)`)."""

    np: np.dtype
    itemsize: int
    kind: str  # "f" float, "i" integer, "p" packed, of which only whole elements move

    def __new__(cls, name: str, np_dtype: object, kind: str) -> DType:
        self = super().__new__(cls, name)
        self.np = np.dtype(np_dtype)
        self.itemsize = self.np.itemsize
        self.kind = kind
        return self

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return as_dtype, (str(self),)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind == "i"


bool_ = DType("bool", np.uint8, "i")
int8 = DType("int8", np.int8, "i")
int16 = DType("int16", np.int16, "i")
int32 = DType("int32", np.int32, "i")
uint8 = DType("uint8", np.uint8, "i")
uint16 = DType("uint16", np.uint16, "i")
uint32 = DType("uint32", np.uint32, "i")
float16 = DType("float16", np.float16, "f")
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16, "f")
tfloat32 = DType("tfloat32", np.float32, "f")
float32 = DType("float32", np.float32, "f")
float8_e4m3 = DType("float8_e4m3", ml_dtypes.float8_e4m3, "f")
float8_e4m3fn = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "f")
float8_e5m2 = DType("float8_e5m2", ml_dtypes.float8_e5m2, "f")
float8_e8m0fnu = DType("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "f")
float8_e5m2_x4 = DType("float8_e5m2_x4", np.uint32, "p")
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", np.uint32, "p")
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", np.uint16, "p")

ALL = {
    str(d): d
    for d in (
        bool_,
        int8,
        int16,
        int32,
        uint8,
        uint16,
        uint32,
        float16,
        bfloat16,
        tfloat32,
        float32,
        float8_e4m3,
        float8_e4m3fn,
        float8_e5m2,
        float8_e8m0fnu,
        float8_e5m2_x4,
        float8_e4m3fn_x4,
        float4_e2m1fn_x4,
    )
}
FP8 = frozenset({float8_e4m3, float8_e4m3fn, float8_e5m2})


def as_dtype(dtype: object, where: object = "dtype") -> DType:
    """The NKI type named by a `DType`, a name, or a NumPy or torch type.

    Raises:
        NkiValidationError: NKI has no such type (int64 and float64 for instance).
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, (np.dtype, type)):
        name = np.dtype(dtype).name
    else:
        name = str(dtype).removeprefix("torch.")
    if name not in ALL:
        fail(where, f"NKI has no data type {name!r}, only {', '.join(ALL)}")
    return ALL[name]


def to_float32(array: np.ndarray) -> np.ndarray:
    """Elements as the float32 the compute engines work on; float32 arrays come back unchanged, not copied."""
    if array.dtype == np.float32:
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded.astype(np.uint16).view(ml_dtypes.bfloat16)


def from_float32(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Float32 results as they are stored in a tile of `dtype`."""
    if dtype is float32:
        return x
    if dtype is bfloat16:
        return _to_bfloat16(x)
    if dtype is tfloat32:
        bits = np.ascontiguousarray(x).view(np.uint32)
        rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        return np.where(np.isnan(x), x, (rounded & np.uint32(0xFFFFE000)).view(np.float32))
    if dtype.is_float:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype.np)
    if dtype.is_int:
        limits = np.iinfo(dtype.np)
        whole = np.nan_to_num(np.rint(x.astype(np.float64)), nan=0.0, posinf=limits.max, neginf=limits.min)
        return np.clip(whole, limits.min, limits.max).astype(dtype.np)
    fail("dtype", f"{dtype} holds packed elements; no engine converts float32 to it")


def uninitialised(dtype: DType) -> object:
    """What a cell holds before its first write: NaN, or 4 in integers (nki_simulator.rst)."""
    if dtype is float8_e8m0fnu:
        return np.array(0xFF, np.uint8).view(dtype.np)
    return np.array(np.nan if dtype.is_float else 4).astype(dtype.np)
