"""The operators of `nki.language`. They are passed as `op=`, and issue an instruction when called on tiles.

Tables "Supported Math Operators" and "Supported Activation Functions" in nki.api.shared.rst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import fail

Function = Callable[..., np.ndarray]


@dataclass(frozen=True, eq=False)
class Op:
    """One operator.

    Attributes:
        arithmetic: the function on float32 arrays, for Vector and GpSimd instructions; None if it is not an ALU
            operator.
        bits: the function on integer arrays; None if it is not a bit operator.
        native: the exact function on 32-bit integers, for GpSimd.
        activation: the activation function of the Scalar Engine.
        identity: neutral element of a reduction; None if it is not a legal reduction.
        unary: takes one tile.
    """

    name: str
    arithmetic: Function | None = None
    bits: Function | None = None
    native: Function | None = None
    activation: Function | None = None
    reduce: Function | None = None
    identity: float | None = None
    unary: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from . import language

        return language.apply(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _truth(function: Function) -> Function:
    return lambda a, b: function(a, b).astype(np.float32)


def _logical(function: Function) -> Function:
    return lambda a, b: function(a != 0, b != 0).astype(np.float32)


def _erf(x: np.ndarray) -> np.ndarray:
    import torch

    return torch.special.erf(torch.from_numpy(np.ascontiguousarray(x, np.float32))).numpy()


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, np.float32(0))


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * np.float32(0.5) * (1 + _erf(x * np.float32(2**-0.5)))


def _normal_pdf(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) * np.float32((2 * np.pi) ** -0.5)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * np.float32(0.5) * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)))


def _gelu_sigmoid(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(np.float32(1.702) * x)


def _gelu_sigmoid_dx(x: np.ndarray) -> np.ndarray:
    s = _sigmoid(np.float32(1.702) * x)
    return s + np.float32(1.702) * x * s * (1 - s)


def _silu_dx(x: np.ndarray) -> np.ndarray:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _sin(x: np.ndarray) -> np.ndarray:
    """Exact inside [-pi, pi]. Outside, hardware uses an unpublished cubic; the result is NaN."""
    return np.where(np.abs(x) <= np.float32(np.pi) * np.float32(1 + 1e-6), np.sin(x), np.float32(np.nan))


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, np.float32(0))


def _shift_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return (a.view(unsigned) >> np.asarray(b).astype(unsigned)).view(a.dtype)


def _identity(x: np.ndarray) -> np.ndarray:
    return x


def _binary(name: str, function: Function, reduce: Function | None = None, identity: float | None = None) -> Op:
    return Op(name, arithmetic=function, native=function, reduce=reduce, identity=identity)


def _both(name: str, function: Function) -> Op:
    return Op(name, arithmetic=function, activation=function, unary=True)


def _activation(name: str, function: Function) -> Op:
    return Op(name, activation=function, unary=True)


add = _binary("add", np.add, np.add.reduce, 0.0)
subtract = _binary("subtract", np.subtract, np.subtract.reduce, 0.0)
multiply = _binary("multiply", np.multiply, np.multiply.reduce, 1.0)
maximum = _binary("maximum", np.maximum, np.maximum.reduce, -np.inf)
minimum = _binary("minimum", np.minimum, np.minimum.reduce, np.inf)
abs_max = Op("abs_max", arithmetic=lambda a, b: np.maximum(np.abs(a), np.abs(b)))
abs_min = Op("abs_min", arithmetic=lambda a, b: np.minimum(np.abs(a), np.abs(b)))
divide = Op("divide", arithmetic=np.divide)
power = Op("power", arithmetic=np.power)
equal = Op("equal", arithmetic=_truth(np.equal), native=np.equal)
not_equal = Op("not_equal", arithmetic=_truth(np.not_equal), native=np.not_equal)
less = Op("less", arithmetic=_truth(np.less), native=np.less)
less_equal = Op("less_equal", arithmetic=_truth(np.less_equal), native=np.less_equal)
greater = Op("greater", arithmetic=_truth(np.greater), native=np.greater)
greater_equal = Op("greater_equal", arithmetic=_truth(np.greater_equal), native=np.greater_equal)
logical_and = Op("logical_and", arithmetic=_logical(np.logical_and), reduce=np.logical_and.reduce, identity=1.0)
logical_or = Op("logical_or", arithmetic=_logical(np.logical_or), reduce=np.logical_or.reduce, identity=0.0)
logical_xor = Op("logical_xor", arithmetic=_logical(np.logical_xor), reduce=np.logical_xor.reduce, identity=0.0)
logical_not = Op("logical_not", arithmetic=lambda a: (a == 0).astype(np.float32), unary=True)
bitwise_and = Op("bitwise_and", bits=np.bitwise_and, reduce=np.bitwise_and.reduce)
bitwise_or = Op("bitwise_or", bits=np.bitwise_or, reduce=np.bitwise_or.reduce)
bitwise_xor = Op("bitwise_xor", bits=np.bitwise_xor, reduce=np.bitwise_xor.reduce)
invert = Op("invert", bits=np.invert, unary=True)
left_shift = Op("left_shift", bits=lambda a, b: np.left_shift(a, np.asarray(b).astype(a.dtype)))
right_shift = Op("right_shift", bits=_shift_right)

copy = _activation("copy", _identity)
abs = _both("abs", np.abs)
square = _both("square", np.square)
relu = _both("relu", _relu)
rsqrt = _both("rsqrt", _rsqrt)
reciprocal = _both("reciprocal", np.reciprocal)
sigmoid = _activation("sigmoid", _sigmoid)
gelu = _activation("gelu", _gelu)
gelu_dx = _activation("gelu_dx", lambda x: np.float32(0.5) * (1 + _erf(x * np.float32(2**-0.5))) + x * _normal_pdf(x))
gelu_apprx_tanh = _activation("gelu_apprx_tanh", _gelu_tanh)
gelu_apprx_sigmoid = _activation("gelu_apprx_sigmoid", _gelu_sigmoid)
gelu_apprx_sigmoid_dx = _activation("gelu_apprx_sigmoid_dx", _gelu_sigmoid_dx)
silu = _activation("silu", lambda x: x * _sigmoid(x))
silu_dx = _activation("silu_dx", _silu_dx)
tanh = _activation("tanh", np.tanh)
softplus = _activation("softplus", _softplus)
mish = _activation("mish", lambda x: x * np.tanh(_softplus(x)))
erf = _activation("erf", _erf)
erf_dx = _activation("erf_dx", lambda x: np.float32(2 / np.pi**0.5) * np.exp(-x * x))
exp = _activation("exp", np.exp)
log = _activation("log", np.log)
sin = _activation("sin", _sin)
arctan = _activation("arctan", np.arctan)
sqrt = _activation("sqrt", np.sqrt)
sign = _activation("sign", np.sign)

ALL: dict[str, Op] = {o.name: o for o in list(globals().values()) if isinstance(o, Op)}


def as_op(op: Any, where: str) -> Op:
    """`op` itself, or a NumPy function of the same name (older kernels pass `np.add`)."""
    if isinstance(op, Op):
        return op
    name = getattr(op, "__name__", None)
    if name in ALL:
        return ALL[name]
    fail(where, f"{op!r} is not an operator of nki.language")
