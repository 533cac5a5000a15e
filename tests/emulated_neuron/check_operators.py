"""Run on the emulated device: every operator's kernel against its reference, by every way of calling it.

Prints one line of JSON: operator, then way of calling, to the largest difference from the reference on the CPU,
relative to the largest entry of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from torchtitan_qwen3_trn.kernels.experts import block_plan, experts
from torchtitan_qwen3_trn.kernels.operator import Operator
from torchtitan_qwen3_trn.kernels.qk_norm_rope import qk_norm_rope
from torchtitan_qwen3_trn.kernels.rope import rope

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
"""All of `torch.library.opcheck` but the check of autograd's registration, which knows CPU, CUDA and XPU only."""


def arguments(name: str) -> tuple:
    torch.manual_seed(0)
    if name == "experts":
        shapes = ((200, 128), (3, 128, 128), (3, 128, 128), (3, 128, 128))
        return (*(torch.randn(shape) * 0.1 for shape in shapes), *block_plan(torch.tensor([120, 0, 80]), 200, 128))
    q, k, table = torch.randn(1, 256, 2, 32), torch.randn(1, 256, 1, 32), torch.randn(1, 256, 32)
    return (q, k, table) if name == "rope" else (q, k, torch.rand(32), torch.rand(32), table, 1e-6)


def trained(name: str) -> int:
    """How many of the arguments get gradients."""
    return {"rope": 2, "qk_norm_rope": 4, "experts": 4}[name]


def results(function: Callable, args: tuple, device: str, count: int) -> list[torch.Tensor]:
    args = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    leaves = [arg.requires_grad_() for arg in (x.detach().clone() for x in args[:count])]
    outputs = [output for output in function(*leaves, *args[count:]) if output.requires_grad]
    weights = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(device) for x in outputs]
    return [x.detach().cpu() for x in (*outputs, *torch.autograd.grad(outputs, leaves, weights))]


def ways(operator: Operator) -> dict[str, Callable]:
    return {
        "called": operator,
        "compiled in one graph": torch.compile(lambda *args: operator(*args), fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *args: checkpoint(operator, *args, use_reentrant=False),
    }


def main() -> None:
    report: dict[str, dict[str, float]] = {}
    for name, operator in {"rope": rope, "qk_norm_rope": qk_norm_rope, "experts": experts}.items():
        operator.neuron  # noqa: B018  imports the kernels
        args, count = arguments(name), trained(name)
        expected = results(operator, args, "cpu", count)
        report[name] = {}
        for way, function in ways(operator).items():
            actual = results(function, args, "neuron", count)
            report[name][way] = max(
                float((one - other).abs().max() / one.abs().max()) for one, other in zip(expected, actual, strict=True)
            )
        on_device = [arg.to("neuron") if isinstance(arg, torch.Tensor) else arg for arg in args]
        for arg in on_device[:count]:
            arg.requires_grad_()
        kernel = getattr(torch.ops.torchtitan_qwen3_trn, f"{name}_nki").default
        torch.library.opcheck(kernel, tuple(on_device), test_utils=CHECKS)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
