"""Rotary embedding without a table: stock's bits, no gather, and a buffer that survives how torchtitan builds."""

from __future__ import annotations

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_qwen3_trn.models.qwen3.yarn_rope import YarnCosSinRoPE
from torchtitan_qwen3_trn.overrides.position_rope import GatherFreeRoPE, gather_free_rope

YARN = {"scaling": "yarn", "rope_factor": 4.0, "original_seq_len": 1024}
LOOK_UPS = ("gather", "index", "scatter", "embedding", "take")


def both(config: CosSinRoPE.Config) -> tuple[CosSinRoPE, GatherFreeRoPE]:
    return config.build(), gather_free_rope(config).build()


def random_qk(batch: int, length: int, *, dim: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, length, heads, dim, generator=generator).to(dtype).requires_grad_() for heads in (4, 2)]


def outputs_and_gradients(rope, q, k, positions) -> list[torch.Tensor]:
    rotated = rope(q, k, positions)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype) for x in rotated]
    return [*rotated, *torch.autograd.grad(rotated, (q, k), weights)]


def assert_same_bits(stock: CosSinRoPE, ours: GatherFreeRoPE, q, k, positions) -> None:
    results = [outputs_and_gradients(rope, q, k, positions) for rope in (stock, ours)]
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


class SeenOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def look_ups(self) -> set[str]:
        return {name for name in self.names if any(word in name for word in LOOK_UPS)}


@pytest.mark.parametrize(("dim", "theta"), [(128, 1e6), (128, 5e6), (64, 5e6)])
def test_every_position_up_to_262143_has_the_bits_of_stock(dim, theta):
    stock, ours = both(CosSinRoPE.Config(dim=dim, max_seq_len=2**18, theta=theta))
    query = torch.empty(1, 2**18, 1, dim)
    cos, sin = ours._reshape_cache(query, torch.arange(2**18)[None]).chunk(2, dim=-1)
    assert torch.equal(torch.cat((cos, cos, sin, sin), dim=-1)[0, :, 0], stock.cache)

    shuffled = torch.randperm(2**18, generator=torch.Generator().manual_seed(0))[: 3 * 77].view(3, 77)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(stock, ours, *random_qk(3, 77, dim=dim, dtype=dtype), shuffled)


@pytest.mark.parametrize("length", [1, 7, 33])
@pytest.mark.parametrize("layout", ["none", "one row for the batch", "one row each", "batch of one"])
def test_every_layout_of_positions_has_the_bits_of_stock(layout, length):
    batch = 1 if layout == "batch of one" else 3
    rows = batch if layout == "one row each" else 1
    positions = torch.randint(0, 100, (rows, length), generator=torch.Generator().manual_seed(0))
    config = CosSinRoPE.Config(dim=16, max_seq_len=100, theta=1e6)
    assert_same_bits(*both(config), *random_qk(batch, length, dim=16), None if layout == "none" else positions)


def test_inputs_that_are_strided_views_have_the_bits_of_stock():
    q, k = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in random_qk(2, 9, dim=16))
    assert not q.is_contiguous()
    assert_same_bits(*both(CosSinRoPE.Config(dim=16, max_seq_len=16)), q, k, torch.arange(9)[None])


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("attention_factor", [None, 1.0, 1.1386294361119891])
def test_yarn_has_the_bits_of_the_table(attention_factor, truncate):
    options = {"dim": 128, "max_seq_len": 4096, "theta": 1e6, "truncate": truncate, **YARN}
    if attention_factor is None:
        config = CosSinRoPE.Config(**options)
    else:
        config = YarnCosSinRoPE.Config(attention_factor=attention_factor, **options)
    positions = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    assert_same_bits(*both(config), *random_qk(2, 40, dim=128, dtype=torch.bfloat16), positions)


def test_llama_scaling_is_refused():
    with pytest.raises(NotImplementedError, match="llama"):
        GatherFreeRoPE.Config(dim=16, max_seq_len=16, scaling="llama").build()


@pytest.mark.parametrize("positions", [None, torch.arange(8).expand(2, 8)], ids=["none", "per row"])
def test_forward_and_backward_look_nothing_up(positions):
    stock, ours = both(CosSinRoPE.Config(dim=16, max_seq_len=16))
    seen = {}
    for name, rope in (("stock", stock), ("ours", ours)):
        q, k = random_qk(2, 8, dim=16)
        with SeenOperators() as operators:
            outputs_and_gradients(rope, q, k, positions)
        seen[name] = operators
    assert not seen["ours"].look_ups(), seen["ours"].names
    assert {"cos", "mul", "cat"} <= seen["ours"].names
    if positions is not None:
        assert seen["stock"].look_ups()


def test_only_cos_and_sin_are_saved_for_backward():
    _, rope = both(CosSinRoPE.Config(dim=16, max_seq_len=64))
    q, k = random_qk(2, 8, dim=16)
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        assert not tensor.requires_grad
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        rope(q, k, torch.arange(8).expand(2, 8))
    assert sum(saved.values()) == 2 * 8 * 16 * 4


@pytest.mark.parametrize("max_seq_len", [16, 2**18])
def test_the_buffer_holds_one_frequency_per_pair_and_is_not_saved(max_seq_len):
    rope = gather_free_rope(CosSinRoPE.Config(dim=16, max_seq_len=max_seq_len)).build()
    assert [tuple(buffer.shape) for buffer in rope.buffers()] == [(8,)]
    assert rope.state_dict() == {}


@pytest.mark.parametrize("buffer_device", [None, torch.device("cpu")])
def test_frequencies_survive_a_meta_build(buffer_device):
    config = gather_free_rope(CosSinRoPE.Config(dim=16, max_seq_len=32, theta=5e6, **YARN))
    expected = config.build().cache
    with torch.device("meta"):
        rope = config.build()
    assert rope.cache.is_meta
    rope.to_empty(device="cpu")
    rope.cache.fill_(torch.nan)
    rope.init_states(buffer_device=buffer_device)
    assert not rope.cache.is_meta
    assert torch.equal(rope.cache, expected)


def test_frequencies_are_float32_under_a_bfloat16_default():
    config = gather_free_rope(CosSinRoPE.Config(dim=16, max_seq_len=32, theta=5e6))
    expected = config.build().cache
    torch.set_default_dtype(torch.bfloat16)
    try:
        rope = config.build()
        rope.init_states()
    finally:
        torch.set_default_dtype(torch.float32)
    assert rope.cache.dtype == torch.float32
    assert torch.equal(rope.cache, expected)


def test_frequencies_do_not_depend_on_the_device_they_are_built_for(monkeypatch):
    config = gather_free_rope(CosSinRoPE.Config(dim=16, max_seq_len=32))
    devices = set()
    original = torch.arange

    def recording_arange(*args, **kwargs):
        result = original(*args, **kwargs)
        devices.add(result.device.type)
        return result

    monkeypatch.setattr(torch, "arange", recording_arange)
    with torch.device("meta"):
        config.build()
    assert devices == {"cpu"}


@pytest.mark.parametrize("wrapped", ["compile", "checkpoint"])
def test_compiled_and_checkpointed_results_are_the_eager_ones(wrapped):
    _, rope = both(CosSinRoPE.Config(dim=16, max_seq_len=64))
    q, k = random_qk(2, 8, dim=16)
    positions = torch.arange(8).expand(2, 8)
    if wrapped == "compile":
        call = torch.compile(rope, fullgraph=True, backend="aot_eager")
    else:

        def call(*args):
            return checkpoint(rope, *args, use_reentrant=False)

    expected = outputs_and_gradients(rope, q, k, positions)
    for a, b in zip(outputs_and_gradients(call, q, k, positions), expected, strict=True):
        assert torch.equal(a, b)


def test_the_factory_keeps_sharding_and_initialisation():
    sharding = ShardingConfig(state_shardings={"cache": dense_param_placement(tp=spmd.R)})
    config = CosSinRoPE.Config(dim=16, max_seq_len=32, theta=5e6, sharding_config=sharding, param_init={})
    replacement = gather_free_rope(config)
    assert isinstance(replacement, GatherFreeRoPE.Config)
    assert replacement.sharding_config is sharding
    assert replacement.param_init is config.param_init
    assert (replacement.theta, replacement.max_seq_len, replacement.attention_factor) == (5e6, 32, 1.0)
    # torchtitan shards each buffer by the name it has in stock.
    assert [name for name, _ in replacement.build().named_buffers()] == list(sharding.state_shardings)


@pytest.fixture
def parallel_dims(request):
    """Rank 0 of 2 x 2 data- and tensor-parallel ranks that never talk, on the SPMD backend of the parametrization."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    utils.set_spmd_backend(request.param)
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=1, ep=1, world_size=4, spmd_backend=request.param)
    dims.build_mesh()
    yield dims
    utils.set_spmd_backend("spmd_types")
    dist.destroy_process_group()


def sharded_rope(parallel_dims: ParallelDims) -> tuple[GatherFreeRoPE, GatherFreeRoPE]:
    """A plain module and its twin, built on meta and parallelized as stock's GQA block would."""
    sharding = ShardingConfig(state_shardings={"cache": dense_param_placement(tp=spmd.R)})
    config = gather_free_rope(CosSinRoPE.Config(dim=16, max_seq_len=64, sharding_config=sharding))
    with torch.device("meta"):
        sharded = config.build()
    sharded.parallelize(parallel_dims)
    sharded.to_empty(device="cpu")
    sharded.init_states()
    return config.build(), sharded


@pytest.mark.parametrize("parallel_dims", ["spmd_types"], indirect=True)
@pytest.mark.parametrize("positions", [None, torch.arange(40, 48).repeat(2, 1)], ids=["none", "per row"])
def test_typechecked_tensor_parallel_rotation_equals_rotation_of_the_local_heads(parallel_dims, positions):
    plain, sharded = sharded_rope(parallel_dims)
    q, k = random_qk(2, 8, dim=16)
    expected = plain(q, k, positions)
    heads_sharded = {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)}
    with utils.get_spmd_context(parallel_dims=parallel_dims, spmd_typechecking=True)():
        for tensor in (q, k):
            spmd.assert_type(tensor, heads_sharded)
        if positions is not None:
            spmd.assert_type(positions, {**heads_sharded, "tp": spmd.R})
        actual = sharded(q, k, positions)
        for tensor in actual:
            spmd.assert_type(tensor, heads_sharded)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("parallel_dims", ["partial_dtensor"], indirect=True)
@pytest.mark.parametrize("positions", [None, torch.arange(40, 48).expand(2, 8)], ids=["none", "per row"])
def test_heads_sharded_as_dtensors_are_rotated_like_local_ones(parallel_dims, positions):
    plain, sharded = sharded_rope(parallel_dims)
    assert isinstance(sharded.cache, DTensor)
    q, k = random_qk(2, 8, dim=16)
    expected = outputs_and_gradients(plain, q, k, positions)
    mesh = parallel_dims.get_mesh("tp")
    rotated = sharded(*(DTensor.from_local(t, mesh, [Shard(2)]) for t in (q, k)), positions)
    assert all(t.placements == (Shard(2),) for t in rotated)
    local = [t.to_local() for t in rotated]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in local]
    for a, b in zip([*local, *torch.autograd.grad(local, (q, k), weights)], expected, strict=True):
        assert torch.equal(a, b)
