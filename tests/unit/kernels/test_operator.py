"""One declaration per operator: the same on every device, and honest about kernels that are not there."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchtitan_qwen3_trn.kernels.experts import block_plan, experts
from torchtitan_qwen3_trn.kernels.limits import JobSize, Limit, violations
from torchtitan_qwen3_trn.kernels.nkilib_rope import nkilib_rope
from torchtitan_qwen3_trn.kernels.operator import KernelUnavailableError, Operator, logical_core_size
from torchtitan_qwen3_trn.kernels.qk_norm_rope import qk_norm_rope
from torchtitan_qwen3_trn.kernels.rope import rope


def rope_arguments() -> tuple:
    q, k = torch.randn(2, 6, 4, 8, requires_grad=True), torch.randn(2, 6, 2, 8, requires_grad=True)
    return q, k, torch.randn(1, 6, 8)


def qk_norm_rope_arguments() -> tuple:
    q, k, table = rope_arguments()
    return q, k, torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True), table, 1e-6


def experts_arguments() -> tuple:
    shapes = ((9, 6), (3, 5, 6), (3, 6, 5), (3, 5, 6))
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return (*tensors, *block_plan(torch.tensor([4, 0, 3]), 9, 4))


CASES = {
    "rope": (rope, rope_arguments),
    "nkilib_rope": (nkilib_rope, rope_arguments),
    "qk_norm_rope": (qk_norm_rope, qk_norm_rope_arguments),
    "experts": (experts, experts_arguments),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    operator, arguments = CASES[request.param]
    return operator, arguments()


def gradients(function, arguments) -> list[torch.Tensor]:
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    outputs = [x for x in function(*arguments) if x.requires_grad]
    return list(torch.autograd.grad([x.square().sum() for x in outputs], leaves))


def test_custom_operator_passes_the_checks_of_torch_library(case):
    operator, arguments = case
    torch.library.opcheck(operator.portable, arguments)


class Calls(TorchDispatchMode):
    """Arguments and results of the operators called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.seen[function._schema.name] = (function, args, results)
        return results


def test_backward_operators_declare_their_results(case):
    """`opcheck` of the forward operator only reaches them through autograd; shapes of theirs are checked here."""
    operator, arguments = case
    with Calls() as calls:
        gradients(operator, arguments)
    assert operator.backward
    for backward in operator.backward:
        function, args, results = calls.seen[backward.name]
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = function(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args])
        described = [[(x.shape, x.dtype, x.stride()) for x in each] for each in (results, fakes)]
        assert described[0] == described[1]


@pytest.mark.parametrize("wrapped", ["compiled in one graph", "checkpointed"])
def test_gradients_survive_compilation_and_checkpointing(case, wrapped):
    operator, arguments = case
    expected = gradients(operator, arguments)
    if wrapped == "checkpointed":
        actual = gradients(lambda *args: checkpoint(operator, *args, use_reentrant=False), arguments)
    else:
        actual = gradients(torch.compile(lambda *args: operator(*args), fullgraph=True, backend="aot_eager"), arguments)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def declare(name: str, kernel: str = "no_such_module:kernel", **others) -> Operator:
    return Operator(name=f"tests_operator::{name}", reference=double, fake=torch.empty_like, kernel=kernel, **others)


@pytest.fixture
def stand_in(monkeypatch):
    """Modules `torch_neuronx` and `stand_in_kernels` that can be imported; the former registers CPU operators."""
    neuronx, kernels = types.ModuleType("torch_neuronx"), types.ModuleType("stand_in_kernels")
    neuronx.nki_op = torch.library.custom_op
    kernels.kernel = double
    for module in (neuronx, kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return neuronx


def test_missing_kernel_is_an_error_that_names_it(stand_in):
    message = r"no_such_module:kernel cannot be used: ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.raises(KernelUnavailableError, match=message):
        declare("strict").neuron  # noqa: B018
    with pytest.raises(KernelUnavailableError, match="stand_in_kernels:other cannot be used: AttributeError"):
        declare("strict_name", "stand_in_kernels:other").neuron  # noqa: B018


def test_whatever_registering_raises_is_the_same_error(stand_in, monkeypatch):
    def refuse(name: str, mutates_args: tuple = ()) -> None:
        raise RuntimeError("unsupported instance")

    monkeypatch.setattr(stand_in, "nki_op", refuse)
    operator = declare("refused", "stand_in_kernels:kernel")
    message = "stand_in_kernels:kernel cannot be used: RuntimeError: unsupported instance"
    with pytest.raises(KernelUnavailableError, match=message):
        operator.neuron  # noqa: B018
    monkeypatch.setattr(stand_in, "nki_op", torch.library.custom_op)
    assert operator.neuron is not None  # a failure is not remembered


@pytest.mark.parametrize("text", ["two", "", "0", "3"])
def test_core_size_that_is_none_makes_kernels_unavailable(monkeypatch, text):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", text)
    with pytest.raises(KernelUnavailableError, match=f"NEURON_LOGICAL_NC_CONFIG is '{text}', expected 1 or 2"):
        logical_core_size()


def doubled_gradient(ctx, gradient, *, backward):
    return backward[0](gradient)


def test_gradients_of_kernel_and_reference_use_operators_of_their_own_kind(stand_in, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    backward = declare("kind_backward", "stand_in_kernels:kernel")
    options = {"backward": (backward,), "save": lambda ctx, inputs, output: None, "gradient": doubled_gradient}
    operator = declare("kind", "stand_in_kernels:kernel", **options)
    for variant, name in (
        (operator.portable, "tests_operator::kind_backward"),
        (operator.neuron, "tests_operator::kind_backward_nki"),
    ):
        x = torch.ones(3, requires_grad=True)
        with Calls() as calls:
            variant(x).sum().backward()
        assert [each for each in calls.seen if "kind_backward" in each] == [name]
        assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_reference_needs_no_kernel(stand_in):
    operator = declare("lenient")
    assert torch.equal(operator.portable(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(KernelUnavailableError):
        operator.neuron  # noqa: B018


@pytest.mark.parametrize(
    ("limit", "value", "cores", "nearest"),
    [
        (Limit(size="L", multiple_of=128, per_core=True, reason=""), 256, 2, 256),
        (Limit(size="L", multiple_of=128, per_core=True, reason=""), 300, 1, 256),
        (Limit(size="L", multiple_of=128, per_core=True, reason=""), 320, 1, 384),
        (Limit(size="L", multiple_of=128, per_core=True, reason=""), 300, 2, 256),
        (Limit(size="L", multiple_of=128, per_core=True, reason=""), 1, 2, 256),
        (Limit(size="S", multiple_of=128, at_most=512, reason=""), 4096, 1, 512),
        (Limit(size="H", multiple_of=2, at_most=255, reason=""), 900, 1, 254),
        (Limit(size="H", at_least=8, reason=""), 3, 1, 8),
    ],
)
def test_nearest_allowed_value(limit, value, cores, nearest):
    assert limit.nearest(value, cores=cores) == nearest
    assert limit.nearest(nearest, cores=cores) == nearest


def test_violation_names_key_value_reason_and_nearest_value():
    limit = Limit(size="L", multiple_of=128, per_core=True, reason="tiles of 128 positions")
    sizes = {"L": JobSize("training.seq_len", 300), "H": JobSize("model.head_dim", 3)}
    (problem,) = violations("rope", (limit,), sizes, cores=2)
    assert str(problem) == (
        "training.seq_len: 300 does not fit the rope kernel: tiles of 128 positions; the nearest that does is 256"
    )
    assert violations("rope", (limit,), {"H": JobSize("model.head_dim", 3)}, cores=2) == []


@pytest.mark.parametrize(("value", "nearest"), [(768, 1024), (513, 512), (3, 512)])
def test_size_that_ranks_share_is_checked_per_rank_and_reported_whole(value, nearest):
    limit = Limit(size="F", multiple_of=128, reason="tiles of 128 columns")
    (problem,) = violations("experts", (limit,), {"F": JobSize("model.moe_hidden_dim", value, 4)}, cores=2)
    assert problem.what == f"{value} over 4 ranks does not fit the experts kernel: tiles of 128 columns"
    assert problem.fix == f"the nearest that does is {nearest}"
    assert violations("experts", (limit,), {"F": JobSize("model.moe_hidden_dim", nearest, 4)}, cores=2) == []
