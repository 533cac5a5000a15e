"""SDPA in place of FlexAttention: documents stay apart, the mathematics is FlexAttention's, and what it refuses."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed import ParallelDims, utils
from torchtitan.distributed.full_dtensor import validate_config
from torchtitan.models.common.attention import FlexAttention, get_causal_mask_mod, get_document_mask_mod
from torchtitan.models.common.decoder_sharding import set_gqa_inner_attention_local_map
from torchtitan.models.qwen3 import Qwen3Model, qwen3_configs
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

from torchtitan_qwen3_trn.checks.attention import check_attention, context_parallel_problem
from torchtitan_qwen3_trn.hooks import Machine
from torchtitan_qwen3_trn.overrides.document_sdpa import DocumentSDPA, document_mask, sdpa

CPU = Machine(device_type="cpu", world_size=1)


def packed(*rows: tuple[int, ...]) -> torch.Tensor:
    """Positions (B, L) of rows that pack documents of the given lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])


def random_qkv(positions: torch.Tensor, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list:
    torch.manual_seed(0)
    return [torch.randn(*positions.shape, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


def qwen3(name: str, *, with_document_mask: bool, layers: int = 2) -> Qwen3Model:
    config = qwen3_configs[name]("flex", **({"moe_comm_backend": "standard"} if "moe" in name else {}))
    config.layers = config.layers[:layers]
    for layer in config.layers:
        inner = layer.attention.inner_attention
        layer.attention.inner_attention = sdpa(inner, document_mask=with_document_mask)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def change_in_second_document(model: Qwen3Model, *, first: int, second: int) -> torch.Tensor:
    """Largest change of any logit of document 2 when every token of document 1 is replaced."""
    positions = packed((first, second))
    tokens = torch.randint(0, 2048, positions.shape, generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, :first] = (changed[:, :first] + 977) % 2048
    mask = document_mask(positions)
    with torch.no_grad():
        before, after = model(tokens, positions, mask), model(changed, positions, mask)
    assert not torch.equal(before[:, :first], after[:, :first])
    return (before[:, first:] - after[:, first:]).abs().max()


class SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_mask_is_block_causal():
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 0, 1, 0],
            [0, 0, 0, 1, 1],
        ],
        dtype=torch.bool,
    )
    mask = document_mask(packed((2, 1, 2), (5,)))
    assert mask.dtype == torch.bool
    assert mask.shape == (2, 1, 5, 5)
    assert torch.equal(mask[0, 0], expected)
    assert torch.equal(mask[1, 0], torch.ones(5, 5, dtype=torch.bool).tril())


def test_every_query_sees_itself_even_when_a_row_starts_inside_a_document():
    mask = document_mask(torch.tensor([[7, 8, 0, 1, 0]]))
    assert mask.diagonal(dim1=2, dim2=3).all()
    assert not mask[0, 0, 2:, :2].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_mask_uses_neither_gather_nor_sort_nor_host_values(dtype):
    with SeenOperators() as seen:
        document_mask(packed((3, 5)).to(dtype))
    heavy = ("gather", "index", "sort", "scatter", "nonzero", "bincount", "_local_scalar_dense", "item")
    assert not [name for name in seen.names if any(word in name for word in heavy)], seen.names
    assert "cumsum" in seen.names


@pytest.mark.parametrize(("first", "second"), [(5, 20), (600, 40)], ids=["short", "longer than a key block"])
def test_second_document_never_notices_the_first(first, second):
    model = qwen3("debugmodel", with_document_mask=True)
    # Exactly zero: a masked key has weight exp(-inf) = 0, whatever its finite value.
    assert change_in_second_document(model, first=first, second=second) == 0


def test_documents_of_a_mixture_of_experts_stay_apart_up_to_expert_rounding():
    model = qwen3("debugmodel_moe", with_document_mask=True)
    # Zero on the CPUs tried. Experts multiply in bfloat16 over however many tokens both documents send them, and a
    # kernel may sum in another order for another count: allow one bfloat16 step (2**-8) on logits of size 1.
    assert change_in_second_document(model, first=30, second=20) <= 2**-8


@pytest.mark.parametrize("name", ["debugmodel", "debugmodel_moe"])
def test_without_the_document_mask_documents_leak(name):
    model = qwen3(name, with_document_mask=False)
    assert change_in_second_document(model, first=30, second=20) > 0.1


def test_packed_documents_equal_documents_run_alone():
    model = qwen3("debugmodel", with_document_mask=True)
    lengths = (9, 30, 1)
    positions = packed(lengths)
    tokens = torch.randint(0, 2048, positions.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        together = model(tokens, positions, document_mask(positions)).split(lengths, dim=1)
        alone = [
            model(part, packed((part.shape[1],)), document_mask(packed((part.shape[1],))))
            for part in tokens.split(lengths, dim=1)
        ]
    for a, b in zip(together, alone, strict=True):
        # Logits of size 1 from float32 sums of other lengths: 1.2e-7 a rounding, two layers deep.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_equals_flex_attention():
    positions = packed((50, 78), (128,), (1, 100, 27))
    q, k, v = random_qkv(positions, heads=32, kv_heads=8, head_dim=128, dtype=torch.float32)
    mask_mod = and_masks(get_causal_mask_mod(), get_document_mask_mod(positions))
    block_mask = create_block_mask(mask_mod, len(positions), None, 128, 128, device="cpu")
    bnlh = [t.transpose(1, 2) for t in (q, k, v)]
    expected = flex_attention(*bnlh, block_mask=block_mask, enable_gqa=True).transpose(1, 2)
    actual = DocumentSDPA.Config().build()(q, k, v, attention_masks=document_mask(positions), enable_gqa=True)
    # Averages of up to 128 standard normals in float32, at most 4.5: a few roundings of 2**-22.
    torch.testing.assert_close(actual, expected, rtol=0, atol=4e-6)


def textbook(q, k, v, mask, scale):
    """softmax(q k^T * scale) v with the masked logits left out, head by head."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    logits = torch.einsum("blnh,bsnh->bnls", q, k) * scale
    return torch.einsum("bnls,bsnh->blnh", logits.masked_fill(~mask, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)],
    ids=["float32", "bfloat16"],
)
def test_output_and_gradients_follow_the_float64_textbook(dtype, tolerance):
    positions = packed((17, 23), (1, 39))
    inputs = random_qkv(positions, heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    for tensor in inputs:
        tensor.requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = document_mask(positions)
    actual = DocumentSDPA.Config().build()(*inputs, attention_masks=mask, scale=0.3, enable_gqa=True)
    expected = textbook(*exact, mask, 0.3)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    actual.backward(weight.to(dtype))
    expected.backward(weight.to(dtype).double())
    # Relative to the largest entry: about 100 roundings of float32 (1.2e-7), 5 of bfloat16 (8e-3).
    for a, b in [(actual, expected), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))]:
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("with_document_mask", [True, False])
def test_without_a_mask_attention_is_plain_causal(with_document_mask):
    positions = packed((12, 8))
    q, k, v = random_qkv(positions, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    mask = None if with_document_mask else document_mask(positions)
    actual = DocumentSDPA.Config(document_mask=with_document_mask).build()(q, k, v, attention_masks=mask)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    torch.testing.assert_close(actual, textbook(q, k, v, causal, 8**-0.5), rtol=0, atol=2e-6)


def test_a_block_mask_is_refused_with_the_reason():
    positions = packed((128,))
    q, k, v = random_qkv(positions, heads=1, kv_heads=1, head_dim=8, dtype=torch.float32)
    block_mask = create_block_mask(get_causal_mask_mod(), 1, None, 128, 128, device="cpu")
    with pytest.raises(TypeError, match=r"boolean mask .* got BlockMask; .* replace all of them or none"):
        DocumentSDPA.Config().build()(q, k, v, attention_masks=block_mask)


@pytest.mark.parametrize("wrapped", ["compile", "checkpoint"])
def test_compiled_and_checkpointed_gradients_are_the_eager_ones(wrapped):
    positions = packed((12, 8))
    inputs = [t.requires_grad_() for t in random_qkv(positions, heads=2, kv_heads=1, head_dim=8, dtype=torch.float32)]
    mask = document_mask(positions)
    module = DocumentSDPA.Config().build()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    def run(call) -> list[torch.Tensor]:
        out = call()
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    expected = run(lambda: module(*inputs, attention_masks=mask, enable_gqa=True))
    if wrapped == "compile":
        actual = run(lambda: compiled(*inputs, attention_masks=mask, enable_gqa=True))
    else:
        actual = run(lambda: checkpoint(module, *inputs, attention_masks=mask, enable_gqa=True, use_reentrant=False))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_the_factory_keeps_sharding_and_initialisation():
    config = FlexAttention.Config(param_init={"weight": torch.nn.init.ones_})
    set_gqa_inner_attention_local_map(config)
    replacement = sdpa(config, document_mask=False)
    assert isinstance(replacement, DocumentSDPA.Config)
    assert replacement.sharding_config is config.sharding_config
    assert replacement.param_init is config.param_init
    assert not replacement.build().document_mask
    # local_map finds the layouts of q, k and v by the names of forward's positional arguments.
    assert set(replacement.build()._cache_pos_arg_names()) == set(config.sharding_config.in_src_shardings)


@pytest.fixture
def parallel_dims(request):
    """Rank 0 of two tensor-parallel ranks that never talk, with the SPMD backend of the parametrization."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    utils.set_spmd_backend(request.param)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2, spmd_backend=request.param)
    dims.build_mesh()
    yield dims
    utils.set_spmd_backend("spmd_types")
    dist.destroy_process_group()


def sharded_attention(parallel_dims: ParallelDims) -> torch.nn.Module:
    config = FlexAttention.Config()
    set_gqa_inner_attention_local_map(config)
    module = sdpa(config).build()
    module.parallelize(parallel_dims)
    return module


@pytest.mark.parametrize("parallel_dims", ["spmd_types"], indirect=True)
def test_typechecked_tensor_parallel_attention_equals_attention_over_the_local_heads(parallel_dims):
    positions = packed((5, 7))
    qkv = random_qkv(positions, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    mask = document_mask(positions)
    expected = DocumentSDPA.Config().build()(*qkv, attention_masks=mask, enable_gqa=True)
    module = sharded_attention(parallel_dims)
    heads_sharded = {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)}
    with utils.get_spmd_context(parallel_dims=parallel_dims, spmd_typechecking=True)():
        for tensor in qkv:
            spmd.assert_type(tensor, heads_sharded)
        actual = module(*qkv, attention_masks=mask, enable_gqa=True)
        spmd.assert_type(actual, heads_sharded)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("parallel_dims", ["partial_dtensor"], indirect=True)
def test_dtensor_attention_equals_attention_over_the_local_heads(parallel_dims):
    positions = packed((5, 7))
    qkv = random_qkv(positions, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    mask = document_mask(positions)
    expected = DocumentSDPA.Config().build()(*qkv, attention_masks=mask, enable_gqa=True)
    mesh = parallel_dims.get_mesh("tp")
    sharded = [DTensor.from_local(t, mesh, [Shard(2)]) for t in qkv]
    actual = sharded_attention(parallel_dims)(*sharded, attention_masks=mask, enable_gqa=True)
    assert actual.placements == (Shard(2),)
    assert torch.equal(actual.to_local(), expected)


@pytest.mark.parametrize("parallel_dims", ["full_dtensor"], indirect=True)
def test_a_mask_from_dtensor_positions_is_local(parallel_dims):
    positions = packed((5, 7))
    sharded = DTensor.from_local(positions, parallel_dims.get_mesh("tp"), [Replicate()])
    mask = document_mask(sharded)
    assert not isinstance(mask, DTensor)
    assert torch.equal(mask, document_mask(positions))


@pytest.mark.parametrize(
    ("with_document_mask", "backend", "device", "reason"),
    [
        (True, "spmd_types", "cpu", "document mask"),
        (True, "partial_dtensor", "cuda", "document mask"),
        (False, "spmd_types", "cuda", "FlexAttention only"),
        (False, "full_dtensor", "cuda", "FlexAttention only"),
        (False, "partial_dtensor", "neuron", "no handler .* 'neuron'"),
        (False, "partial_dtensor", "cuda", None),
    ],
)
def test_context_parallelism_is_refused_for_the_right_reason(with_document_mask, backend, device, reason):
    answer = context_parallel_problem(document_mask=with_document_mask, spmd_backend=backend, device_type=device)
    if reason is None:
        assert answer is None
    else:
        assert re.search(reason, answer or "")


def test_torchtitan_itself_refuses_context_parallelism_on_its_multi_axis_backends():
    dims = SimpleNamespace(cp_enabled=True, spmd_backend="spmd_types")
    with pytest.raises(NotImplementedError, match=r"spmd_types \+ CP is not supported"):
        validate_config(dims, qwen3("debugmodel", with_document_mask=False, layers=1))


def test_check_names_the_key_of_context_parallelism():
    config = qwen3_debugmodel()
    config.parallelism.context_parallel_degree = 2
    (problem,) = check_attention(config, CPU, document_mask=True, fqns=None)
    assert problem.where == "parallelism.context_parallel_degree"
    assert "cannot run with 2" in problem.what
    assert 'plugins.disable = ["sdpa"]' in problem.fix


@pytest.mark.parametrize(
    ("with_document_mask", "fqns", "left"),
    [
        (True, None, None),
        (True, ["layers.*"], None),
        (True, ["layers.0"], "layers.1."),
        (True, ["layers.[1-7]"], "layers.0."),
        (False, ["layers.0"], "layers.1."),
        (False, ["layers.[1-7]"], None),
        (True, ["nothing"], None),
    ],
)
def test_check_refuses_layers_left_on_flex_attention_with_a_mask_they_cannot_use(with_document_mask, fqns, left):
    problems = check_attention(qwen3_debugmodel(), CPU, document_mask=with_document_mask, fqns=fqns)
    assert [problem.where for problem in problems] == ([] if left is None else ["plugins.sdpa.fqns"])
    assert left is None or problems[0].what.startswith(left)
