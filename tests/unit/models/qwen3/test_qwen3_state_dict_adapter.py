import json
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.models.common import ComplexRoPE
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from torchtitan_qwen3_trn.models.qwen3.spec import model_config
from torchtitan_qwen3_trn.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
UNTIED = Qwen3Config(**SIZES)
TIED = Qwen3Config(**SIZES, tie_word_embeddings=True)
MOE = Qwen3MoeConfig(**SIZES, **EXPERTS)
MIXED = Qwen3MoeConfig(**SIZES | EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [1]})
ALL = {"tied": TIED, "untied": UNTIED, "moe": MOE, "mixed": MIXED, "separate qkv": TIED}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 8}
ONE_WIDE = Qwen3MoeConfig(**SIZES | EXPERTS | {"moe_intermediate_size": 1})


def built(hf_config, *, fuse_qkv=True):
    """A model with random weights that are nowhere zero or one, and its adapter."""
    config = model_config(hf_config, fuse_qkv=fuse_qkv)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model, Qwen3StateDictAdapter(config, None)


def built_as(name):
    return built(ALL[name], fuse_qkv=name != "separate qkv")


def published(hf_config, folder):
    """The tensors Transformers itself writes for this model, with random weights."""
    model = AutoModelForCausalLM.from_config(hf_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", ALL)
def test_published_tensors_survive_the_way_through_the_model_bit_for_bit(name, tmp_path):
    files = published(ALL[name], tmp_path)
    model, adapter = built_as(name)
    result = model.load_state_dict(adapter.from_hf(files), strict=False)
    assert [key for key in result.missing_keys if "expert_bias" not in key] == []
    assert result.unexpected_keys == []
    same(adapter.to_hf(model.state_dict()), files)


@pytest.mark.parametrize("name", ALL)
def test_native_tensors_survive_the_way_through_files_bit_for_bit(name):
    model, adapter = built_as(name)
    native = {key: value for key, value in model.state_dict().items() if "expert_bias" not in key}
    same(adapter.from_hf(adapter.to_hf(model.state_dict())), native)


@pytest.mark.parametrize("name", ALL)
def test_the_names_are_exactly_those_of_published_files(name, tmp_path):
    model, adapter = built_as(name)
    assert adapter.to_hf(model.state_dict()).keys() == published(ALL[name], tmp_path).keys()


def test_neither_direction_changes_its_argument():
    model, adapter = built(TIED)
    native = dict(model.state_dict())
    files = adapter.to_hf(native)
    kept = dict(files)
    adapter.from_hf(files)
    assert files.keys() == kept.keys()
    assert native.keys() == model.state_dict().keys()


def test_experts_of_width_one_keep_their_two_dimensions():
    model, adapter = built(ONE_WIDE)
    files = adapter.to_hf(model.state_dict())
    assert files["model.layers.0.mlp.experts.0.gate_proj.weight"].shape == (1, 16)
    assert files["model.layers.0.mlp.experts.0.down_proj.weight"].shape == (16, 1)
    same(adapter.to_hf(adapter.from_hf(files)), files)


def test_a_tied_checkpoint_loads_with_and_without_an_output_projection():
    model, adapter = built(TIED)
    files = adapter.to_hf(model.state_dict())
    assert "lm_head.weight" not in files
    for extra in ({}, {"lm_head.weight": torch.zeros(32, 16)}):
        native = adapter.from_hf({**files, **extra})
        assert torch.equal(native["lm_head.weight"], model.lm_head.weight)
        assert torch.equal(native["tok_embeddings.weight"], model.lm_head.weight)


def test_a_part_of_a_tied_checkpoint_needs_no_embedding():
    adapter = built(TIED)[1]
    part = {"model.norm.weight": torch.ones(16)}
    assert adapter.from_hf(part).keys() == {"norm.weight"}


def test_unknown_published_tensors_are_refused_by_name():
    model, adapter = built(MOE)
    files = adapter.to_hf(model.state_dict())
    strange = {f"model.layers.{layer}.mlp.gate.bias": torch.zeros(1) for layer in range(7)}
    with pytest.raises(ValueError, match=r"7 tensors \(model\.layers\.0\.mlp\.gate\.bias, .*, \.\.\.\)"):
        adapter.from_hf({**files, **strange})
    for beyond in ("model.layers.0.mlp.experts.4.up_proj.weight", "model.layers.2.input_layernorm.weight"):
        with pytest.raises(ValueError, match=re.escape(f"1 tensor ({beyond})")):
            adapter.from_hf({**files, beyond: torch.zeros(1)})


def test_rotary_frequencies_of_old_exports_are_ignored():
    model, adapter = built(UNTIED)
    files = adapter.to_hf(model.state_dict())
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    same(adapter.to_hf(adapter.from_hf({**files, **old, "model.rotary_emb.inv_freq": torch.ones(4)})), files)


def test_missing_experts_are_named_instead_of_left_random():
    model, adapter = built(MIXED)
    files = adapter.to_hf(model.state_dict())
    del files["model.layers.2.mlp.experts.1.up_proj.weight"]
    with pytest.raises(ValueError, match=r"w3_EFD is missing: 1 tensor \(model\.layers\.2\.mlp\.experts\.1\.up_proj"):
        adapter.from_hf(files)


def test_unknown_native_tensors_are_refused_by_name():
    model, adapter = built(MIXED)
    elsewhere = ("layers.1.moe.router.gate.weight", "layers.0.feed_forward.w1.weight")
    for strange in (*elsewhere, "layers.0.attention.qkv_linear.wqkv.weight", "adapter.weight"):
        with pytest.raises(ValueError, match=re.escape(f"1 tensor ({strange})")):
            adapter.to_hf({**model.state_dict(), strange: torch.zeros(1)})


def test_an_expert_bias_that_moved_stops_an_export_and_a_fresh_one_does_not():
    model, adapter = built(MOE)
    assert "layers.1.moe.expert_bias_E" in model.state_dict()
    assert not [name for name in adapter.to_hf(model.state_dict()) if "bias" in name]
    model.layers["1"].moe.expert_bias_E[2] = -0.25
    model.layers["0"].moe.expert_bias_E[0] = 0.125
    with pytest.raises(ValueError, match=r"2 layers \(furthest in layers\.1\.moe\.expert_bias_E: 0\.25\)"):
        adapter.to_hf(model.state_dict())


def test_a_model_on_the_meta_device_can_be_planned():
    config = model_config(MOE)
    with torch.device("meta"):
        model = config.build()
    loaded, adapter = built(MOE)
    assert adapter.to_hf(model.state_dict()).keys() == adapter.to_hf(loaded.state_dict()).keys()


def test_other_rotary_kinds_are_refused_and_derived_ones_accepted():
    config = model_config(Qwen3Config(**SIZES, rope_parameters=YARN))
    model = config.build()
    adapter = Qwen3StateDictAdapter(config, None)
    files = adapter.to_hf(model.state_dict())
    adapter.from_hf(files)
    config.layers[0].attention.rope = ComplexRoPE.Config(dim=8, max_seq_len=16)
    with pytest.raises(ValueError, match="CosSinRoPE"):
        adapter.from_hf(files)


@pytest.mark.parametrize("name", ALL)
def test_the_checkpointers_own_steps_load_published_files(name, tmp_path):
    """What CheckpointManager.dcp_load and dcp_save do, on one process and without the manager."""
    files = published(ALL[name], tmp_path / "in")
    model, adapter = built_as(name)
    wrapper = ModelWrapper(model)
    planned = adapter.to_hf(wrapper.state_dict())
    dcp.load(planned, storage_reader=adapter.get_hf_storage_reader(str(tmp_path / "in")))
    wrapper.load_state_dict(adapter.from_hf(planned))
    same(adapter.to_hf(wrapper.state_dict()), files)

    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path / "out"), save_distributed=True, enable_consolidation=True)
    dcp.save(adapter.to_hf(wrapper.state_dict()), storage_writer=writer)
    written = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written.update(load_file(path))
    same(written, files)


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_export_goes_to_the_files_the_published_index_names(tmp_path):
    model, adapter = built(TIED)
    names = list(adapter.to_hf(model.state_dict()))
    where = {name: f"model-0000{1 + (position > 5)}-of-00002.safetensors" for position, name in enumerate(names)}
    index(tmp_path, {**where, "lm_head.weight": "model-00002-of-00002.safetensors"})
    mapping = Qwen3StateDictAdapter(model_config(TIED), str(tmp_path)).fqn_to_index_mapping
    assert mapping == {name: 1 + (position > 5) for position, name in enumerate(names)}


def test_the_index_of_another_depth_or_tying_is_fitted_to_the_model(tmp_path):
    where = {f"model.layers.{layer}.input_layernorm.weight": f"model-0000{layer + 1}-of-00004" for layer in range(4)}
    index(tmp_path, {name: f"{file}.safetensors" for name, file in list(where.items())[1:]})
    adapter = Qwen3StateDictAdapter(model_config(UNTIED), str(tmp_path))
    assert adapter.fqn_to_index_mapping.keys() == adapter.to_hf(built(UNTIED)[0].state_dict()).keys()
    assert set(adapter.fqn_to_index_mapping.values()) == {1}


def test_an_index_of_one_unnumbered_file_is_understood(tmp_path):
    index(tmp_path, {"model.norm.weight": "model.safetensors"})
    assert set(Qwen3StateDictAdapter(model_config(TIED), str(tmp_path)).fqn_to_index_mapping.values()) == {1}


def test_without_an_index_the_export_is_one_file(tmp_path):
    assert Qwen3StateDictAdapter(model_config(TIED), str(tmp_path)).fqn_to_index_mapping is None
    index(tmp_path, {"something.else": "model-00001-of-00001.safetensors"})
    assert Qwen3StateDictAdapter(model_config(TIED), str(tmp_path)).fqn_to_index_mapping is None


MESHES = {
    "fsdp": ({"fsdp": 2}, (Shard(0),)),
    "tensor": ({"tp": 2}, (Shard(1),)),
    "expert": ({"ep": 4}, (Shard(0),)),
    "fsdp and expert": ({"efsdp": 2, "ep": 2}, (_StridedShard(0, split_factor=2), Shard(0))),
    "fsdp on another dimension and expert": ({"efsdp": 2, "ep": 2}, (Shard(1), Shard(0))),
    "replicated and expert": ({"dp_replicate": 2, "ep": 2}, (Replicate(), Shard(0))),
    "replicated, fsdp and expert": (
        {"dp_replicate": 2, "efsdp": 2, "ep": 2},
        (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
    ),
    "replicated": ({"dp_replicate": 2}, (Replicate(),)),
    "fsdp and tensor": ({"fsdp": 2, "tp": 2}, (Shard(0), Shard(1))),
}


@pytest.fixture
def group():
    """Starts rank r of n without the others: nothing here needs to communicate."""
    started = []

    def start(rank, size):
        if started:
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        started.append(rank)

    yield start
    if started:
        dist.destroy_process_group()


def local_part(full, mesh, placements):
    """Cut ``full`` as DTensor lays it out: the last mesh axis that shards a dimension cuts first when strided."""
    order = sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard))
    for axis in order:
        if not isinstance(placements[axis], Replicate):
            full = full.chunk(mesh.size(axis), dim=placements[axis].dim)[mesh.get_local_rank(axis)]
    return full.contiguous()


@pytest.mark.parametrize("name", MESHES)
def test_sharded_experts_come_back_bit_for_bit_on_every_rank(name, group):
    axes, placements = MESHES[name]
    model, plain = built(MOE)
    complete = plain.to_hf(model.state_dict())
    size = torch.Size(axes.values()).numel()
    seen = set()
    for rank in range(size):
        group(rank, size)
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        native = {}
        for key, value in model.state_dict().items():
            if "inner_experts" in key:
                local = local_part(value, mesh, placements)
                native[key] = DTensor.from_local(local, mesh, placements, run_check=False)
            elif "expert_bias" not in key:
                native[key] = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        adapter = Qwen3StateDictAdapter(model_config(MOE), None)
        files = adapter.to_hf(native)
        for key, value in files.items():
            assert value.shape == complete[key].shape, key
            if not isinstance(value, DTensor):
                assert torch.equal(value, complete[key]), key
        seen |= files.keys()
        back = adapter.from_hf(files)
        assert back.keys() == native.keys()
        for key in native:
            assert back[key].placements == native[key].placements, key
            assert torch.equal(back[key].to_local(), native[key].to_local()), key
    assert seen == complete.keys()


def test_complete_files_load_after_a_sharded_plan(group):
    """A rank that planned for its own experts can still be given all of them."""
    model, plain = built(MOE)
    complete = plain.to_hf(model.state_dict())
    group(1, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    adapter = Qwen3StateDictAdapter(model_config(MOE), None)
    key = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
    adapter.to_hf({key: DTensor.from_local(model.state_dict()[key][2:], mesh, [Shard(0)], run_check=False)})
    assert torch.equal(adapter.from_hf(complete)[key], model.state_dict()[key])
