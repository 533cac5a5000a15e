"""One declaration per operator: PyTorch reference, NKI kernel, gradient, fake, limits.

To add an operator, write its reference as a function with annotated arguments and declare it::

    double = Operator(
        name="my_package::double",
        reference=double_reference,          # (x: torch.Tensor) -> torch.Tensor; defines the numbers
        fake=torch.empty_like,               # shapes and dtypes without data
        kernel="my_package.nki_double:double_kernel",
        save=lambda ctx, inputs, output: None,
        gradient=lambda ctx, grad, backward: grad * 2,
    )
    y = double(x)

Calling code never asks which device it is on. A tensor on ``neuron`` goes to the NKI kernel, through torch-neuronx's
``nki_op``; any other tensor goes to the reference. Both are custom operators of PyTorch with the same schema, fake and
gradient, so ``torch.compile(fullgraph=True)``, activation checkpointing and FSDP treat them alike. The kernel's module
and ``nki`` are imported when `Operator.neuron` is first asked for, which a job does before it trains.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from torchtitan_qwen3_trn.kernels.limits import Limit

_LOGICAL_CORE_SIZE = "NEURON_LOGICAL_NC_CONFIG"


class KernelUnavailableError(Exception):
    """The NKI kernel of an operator cannot be imported or registered here."""


def _launch(kernel: Callable[..., Any], *args: Any) -> Any:
    return kernel(*(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args))


@dataclass(kw_only=True, eq=False)
class Operator:
    """A callable that computes the same numbers on every device.

    Attributes:
        name: ``namespace::name`` of the custom operator; the one for Neuron is called ``namespace::name_nki``.
        reference: PyTorch implementation for any device; its annotations are the operator's schema. It must return
            new contiguous tensors and must not change its arguments.
        fake: same arguments, returns empty tensors of the right shapes and dtypes.
        kernel: ``module:function`` of the ``@nki.jit`` kernel. It takes the reference's arguments in their order,
            every tensor contiguous, and returns the reference's results in their order.
        save: called as ``save(ctx, inputs, output)`` in forward to store what ``gradient`` needs; ``None`` with
            ``gradient`` for an operator without derivative, such as a backward operator.
        gradient: called as ``gradient(ctx, *output_gradients, backward=...)``, returns one gradient or ``None`` per
            argument. ``backward`` are the callables of the operators below, in their order.
        backward: operators for ``gradient``: their kernels behind this operator's kernel, else their references.
        limits: the sizes that the kernel supports.
        launch: called as ``launch(kernel, *args)`` where the kernel's own arguments or layout differ from the
            reference's; ``kernel`` already knows on how many cores it runs.
        portable: the reference as a custom operator, forward and backward, on any device.
    """

    name: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    kernel: str
    save: Callable[..., None] | None = None
    gradient: Callable[..., Any] | None = None
    backward: tuple[Operator, ...] = ()
    limits: tuple[Limit, ...] = ()
    launch: Callable[..., Any] = _launch
    portable: CustomOpDef = field(init=False)

    def __post_init__(self) -> None:
        operator = torch.library.custom_op(self.name, self.reference, mutates_args=())
        self.portable = self._complete(operator, backward=tuple(each.portable for each in self.backward))

    def __call__(self, *args: Any) -> Any:
        """Compute; all tensors on one device.

        Raises:
            KernelUnavailableError: on ``neuron``, when the kernel cannot be used.
        """
        return self.neuron(*args) if args[0].device.type == "neuron" else self.portable(*args)

    @functools.cached_property
    def neuron(self) -> CustomOpDef:
        """The NKI kernels as a custom operator, forward and backward. They are imported on first access.

        Raises:
            KernelUnavailableError: naming the kernel and what is missing.
        """
        backward = tuple(each.neuron for each in self.backward)
        try:
            return self._complete(_register_with_neuron(self), backward=backward)
        except Exception as error:  # whatever importing or compiling foreign code raises
            what = f"kernel {self.kernel} cannot be used: {type(error).__name__}: {error}"
            raise KernelUnavailableError(what) from error

    def _complete(self, operator: CustomOpDef, *, backward: tuple[CustomOpDef, ...]) -> CustomOpDef:
        operator.register_fake(self.fake)
        if self.gradient is not None:
            gradient = functools.partial(self.gradient, backward=backward)
            operator.register_autograd(gradient, setup_context=self.save)
        return operator


def logical_core_size() -> int:
    """Physical cores per logical core (LNC): ``NEURON_LOGICAL_NC_CONFIG``, or 2, the default of Trn2 and Trn3.

    Raises:
        KernelUnavailableError: the variable is set to anything but 1 or 2.
    """
    text = os.environ.get(_LOGICAL_CORE_SIZE, "2")
    if text not in ("1", "2"):
        raise KernelUnavailableError(f"the environment variable {_LOGICAL_CORE_SIZE} is {text!r}, expected 1 or 2")
    return int(text)


def _register_with_neuron(operator: Operator) -> CustomOpDef:
    module_name, _, function = operator.kernel.partition(":")
    nki_op = importlib.import_module("torch_neuronx").nki_op
    kernel = getattr(importlib.import_module(module_name), function)

    def launch(*args: Any) -> Any:
        cores = logical_core_size()
        return operator.launch(kernel[cores] if cores > 1 else kernel, *args)

    # nki_op reads the schema from the signature; names of types in annotations mean nothing where it runs.
    launch.__signature__ = inspect.signature(operator.reference, eval_str=True)  # type: ignore[attr-defined]
    return nki_op(f"{operator.name}_nki", mutates_args=())(launch)
