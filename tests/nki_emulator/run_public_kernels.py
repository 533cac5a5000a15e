"""Run AWS's public kernels, unmodified, through the emulator and compare them with their own references.

    python tests/nki_emulator/run_public_kernels.py --nki-library PATH --nki-samples PATH [--sdk PATH] [--only TEXT]

The paths are checkouts of github.com/aws-neuron/nki-library, nki-samples and, for the kernels printed in the
documentation, aws-neuron-sdk. Nothing of them is copied here. Prints one line per kernel and exits with 1 if a kernel
that is listed as running does not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nki_emulator
from nki_emulator.nki_library_tests import neuron_dtypes

Outputs = Any
Case = Callable[[], tuple[Outputs, Outputs, float, float]]
CASES: list[tuple[str, str, Case]] = []
LIB = "nkilib_src.nkilib"
ROOTS: dict[str, Path] = {}


def case(source: str, name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES.append((source, name, function))
        return function

    return register


def lib(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{LIB}.{module}"), name)


def simulate(kernel: Any, *args: Any, lnc: int = 1, **kwargs: Any) -> Any:
    import nki

    return nki.simulate(nki.jit(kernel)[lnc])(*args, **kwargs)


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def numpy_inputs(values: dict[str, Any]) -> dict[str, Any]:
    """Torch tensors as arrays, with bfloat16 as ml_dtypes; the kernels' tests pass arrays."""
    import ml_dtypes

    def convert(v: Any) -> Any:
        if not isinstance(v, torch.Tensor):
            return v
        return v.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if v.dtype is torch.bfloat16 else v.numpy()

    return {k: convert(v) for k, v in values.items()}


# -- nki-library: embeddings -----------------------------------------------------------------------------------------


def rope_hf(backward: bool, dtype: torch.dtype, lnc: int) -> tuple[Outputs, Outputs, float, float]:
    q, k = randn(1, 32, 256, 128, dtype=dtype), randn(1, 8, 256, 128, seed=1, dtype=dtype)
    cos, sin = randn(1, 256, 128, seed=2, dtype=dtype), randn(1, 256, 128, seed=3, dtype=dtype)
    arguments = {"cos": cos, "sin": sin, "backward": backward}
    got = simulate(
        lib("core.embeddings.rope_hf.rope_hf"), q, k, torch.zeros_like(q), torch.zeros_like(k), lnc=lnc, **arguments
    )
    reference = lib("core.embeddings.rope_hf_torch.rope_hf_torch_ref")
    want = reference(q, k, torch.zeros_like(q), torch.zeros_like(k), **arguments)
    return got, want, 1e-6, 1e-6


@case("nki-library", "rope_hf forward, float32, LNC 1")
def _() -> Any:
    return rope_hf(False, torch.float32, 1)


@case("nki-library", "rope_hf forward, bfloat16, LNC 2")
def _() -> Any:
    return rope_hf(False, torch.bfloat16, 2)


@case("nki-library", "rope_hf backward, float32, LNC 2")
def _() -> Any:
    return rope_hf(True, torch.float32, 2)


@case("nki-library", "RoPE, contiguous and interleaved, LNC 2")
def _() -> Any:
    got, want = [], []
    for contiguous, relayout in ((True, False), (False, False), (False, True)):
        x = randn(128, 2, 4, 128)
        cos, sin = randn(64, 2, 128, seed=1), randn(64, 2, 128, seed=2)
        options = {"lnc_shard": True, "contiguous_layout": contiguous, "relayout_in_sbuf": relayout}
        got.append(simulate(lib("core.embeddings.rope.RoPE"), x, cos, sin, lnc=2, **options))
        want.append(lib("core.embeddings.rope_torch.rope_torch_ref")(x, cos, sin, **options))
    return got, want, 1e-5, 1e-5


# -- nki-library: reductions and search ------------------------------------------------------------------------------


@case("nki-library", "cumsum, float32")
def _() -> Any:
    x = randn(200, 2500)
    return (
        simulate(lib("core.cumsum.cumsum.cumsum"), x),
        lib("core.cumsum.cumsum_torch.cumsum_torch_ref")(x),
        1e-4,
        1e-4,
    )


@case("nki-library", "cascaded_max, LNC 2")
def _() -> Any:
    x = randn(4, 1, 16384)
    got = simulate(lib("core.max.cascaded_max.cascaded_max"), x, lnc=2)
    return got, lib("core.max.cascaded_max_torch.cascaded_max_torch_ref")(x), 0, 0


@case("nki-library", "find_nonzero_indices, LNC 2")
def _() -> Any:
    x = (randn(4096, 128) > 1.5).to(torch.int32)
    got = simulate(lib("core.subkernels.find_nonzero_indices.find_nonzero_indices"), x, chunk_size=4096, lnc=2)
    want = lib("core.subkernels.find_nonzero_indices_torch.find_nonzero_indices_torch_ref")(x)
    # Past the count, the kernel leaves padding or nothing; the reference holds -1.
    known = want["indices"] >= 0
    return (got[0][known], got[1]), (want["indices"][known], want["nonzero_counts"]), 0, 0


@case("nki-library", "indexed_flatten, LNC 2")
def _() -> Any:
    t, e, f = 4096, 3, 128
    x = torch.arange(t * e, dtype=torch.int32).reshape(e, t)
    offsets = torch.tensor([t // f * i for i in range(5)], dtype=torch.int32)
    arguments = {
        "f_len": f,
        "output_len": 5 * t + 1024,
        "row_offsets": offsets,
        "row_offsets_start": torch.tensor([1], dtype=torch.int32),
    }
    got = simulate(lib("core.subkernels.indexed_flatten.indexed_flatten"), x, lnc=2, **arguments)
    return got, lib("core.subkernels.indexed_flatten_torch.indexed_flatten_torch_ref")(x, **arguments), 0, 0


@case("nki-library", "find_nonzero_indices_with_count")
def _() -> Any:
    x = torch.zeros(1, 512)
    x[0, torch.randperm(512, generator=torch.Generator().manual_seed(0))[:80]] = 1.0
    got = simulate(lib("experimental.benchmark.find_nonzero_indices_with_count.find_nonzero_indices_with_count"), x)
    where = torch.nonzero(x[0]).reshape(-1).to(torch.int32)
    want = torch.full((1, 513), -1, dtype=torch.int32)
    want[0, : len(where)], want[0, -1] = where, len(where)
    return got, want, 0, 0


@case("nki-library", "rotational_topk, LNC 2")
def _() -> Any:
    import nki.language as nl

    module = importlib.import_module(f"{LIB}.core.topk.rotational_topk")
    x = randn(8, 4096)
    config = module.create_topk_config(inp_shape=(8, 1, 4096), inp_dtype=nl.float32, k=64, sorted=True, num_programs=2)
    config = module.create_rotational_topk_config(inp_shape=(8, 4096), topk_config=config)
    config = module.prepare_rotational_constants(config)
    got = simulate(module.rotational_topk, x, config, lnc=2)
    return got, lib("core.topk.torch_ref.topk_torch_ref")(x, config), 0, 0


# -- nki-library: norms ----------------------------------------------------------------------------------------------


@case("nki-library", "rmsnorm_tkg, float16, LNC 1")
def _() -> Any:
    x, gamma = randn(1, 8, 8192, dtype=torch.float16), randn(1, 8192, seed=1, dtype=torch.float16)
    kernel = lib("core.subkernels.rmsnorm_tkg.rmsnorm_tkg")
    got = simulate(kernel, x, gamma, torch.zeros(128, 8, 64, dtype=torch.float16))
    want = lib("core.subkernels.rmsnorm_torch.rmsnorm_tkg_torch_ref_lnc1")(x, gamma, None)
    return got, want, 2e-2, 1e-5


@case("nki-library", "layernorm_tkg, float16, LNC 1")
def _() -> Any:
    x, gamma = randn(1, 8, 8192, dtype=torch.float16), randn(1, 8192, seed=1, dtype=torch.float16)
    beta = randn(1, 8192, seed=2, dtype=torch.float16)
    kernel = lib("core.subkernels.layernorm_tkg.layernorm_tkg")
    got = simulate(kernel, x, gamma, torch.zeros(128, 8, 64, dtype=torch.float16), beta)
    return got, lib("core.subkernels.layernorm_torch.layernorm_tkg_torch_ref_lnc1")(x, gamma, None, beta), 2e-2, 1e-2


# -- nki-library: loss, shapes, convolution --------------------------------------------------------------------------


@case("nki-library", "cross_entropy_forward, float32, LNC 2")
def _() -> Any:
    logits = randn(128, 4096)
    targets = torch.randint(0, 4096, (128,), generator=torch.Generator().manual_seed(1))
    module = "experimental.loss.cross_entropy"
    got = simulate(lib(f"{module}.cross_entropy_forward"), logits, targets.to(torch.int32), lnc=2, **ce_options())
    return (
        got,
        lib("experimental.loss.cross_entropy_torch.cross_entropy_forward_torch_ref")(logits, targets),
        1e-4,
        1e-4,
    )


def ce_options() -> dict[str, Any]:
    import nki.language as nl

    return {"positions_per_batch": 32, "chunk_size": 2048, "dtype": nl.float32}


@case("nki-library", "cross_entropy_backward, float32, LNC 2")
def _() -> Any:
    logits = randn(128, 4096)
    targets = torch.randint(0, 4096, (128,), generator=torch.Generator().manual_seed(1))
    lse = torch.logsumexp(logits, dim=1)
    kernel = lib("experimental.loss.cross_entropy.cross_entropy_backward")
    got = simulate(
        kernel, logits.clone(), targets.to(torch.int32), lse, lnc=2, reduction="mean", inplace=False, **ce_options()
    )
    want = lib("experimental.loss.cross_entropy_torch.cross_entropy_backward_torch_ref")(logits, targets)
    return got, want, 1e-4, 1e-6


@case("nki-library", "dynamic_elementwise_add, bfloat16")
def _() -> Any:
    a, b = randn(256, 1024, dtype=torch.bfloat16), randn(256, 1024, seed=1, dtype=torch.bfloat16)
    count = torch.tensor([[2]], dtype=torch.int32)
    got = simulate(lib("experimental.dynamic_shapes.dynamic_elementwise_add.dynamic_elementwise_add"), a, b, count)
    reference = lib("experimental.dynamic_shapes.dynamic_elementwise_add_torch.dynamic_elementwise_add_torch_ref")
    return got, reference(a, b), 1e-2, 1e-3


@case("nki-library", "topk_reduce, bfloat16, LNC 2")
def _() -> Any:
    tokens, k, h, ranks = 8, 4, 2880, 8
    rows = torch.full((ranks * tokens, h + 2), -1.0, dtype=torch.bfloat16)
    values = randn(tokens * k, h, dtype=torch.bfloat16)
    ids = torch.arange(tokens, dtype=torch.int32).repeat_interleave(k).reshape(-1, 1).view(torch.bfloat16)
    at = torch.randperm(ranks * tokens, generator=torch.Generator().manual_seed(0))[: tokens * k]
    rows[at] = torch.cat([values, ids], dim=1)
    got = simulate(lib("experimental.collectives.topk_reduce.topk_reduce"), rows, T=tokens, K=k, lnc=2)
    return got, lib("experimental.collectives.topk_reduce_torch.topk_reduce_torch_ref")(rows, tokens, k), 5e-2, 5e-2


# -- nki-library: attention and projections --------------------------------------------------------------------------


@case("nki-library", "attention_cte, causal, bfloat16, LNC 2")
def _() -> Any:
    q, k, v = (randn(2, 128, 512, seed=i, dtype=torch.bfloat16) for i in range(3))
    q, v = q.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    arguments = {"scale": 128**-0.5, "causal_mask": True, "tp_q": True, "tp_k": False, "tp_out": False}
    got = simulate(lib("core.attention.attention_cte.attention_cte"), q, k, v, lnc=2, **arguments)
    return got, lib("core.attention.attention_cte_torch.attention_cte_torch_ref")(q, k, v, **arguments), 2e-2, 2e-2


def attention_bwd(dtype: torch.dtype, lnc: int) -> Any:
    q, k, v, dy = (randn(1, 2, 64, 512, seed=i, dtype=dtype) for i in range(4))
    module = "core.attention.attention_bwd_torch"
    o, lse, _ = lib(f"{module}.compute_o_lse")(q, k, v, True, True)
    inputs = (q, k, v, o.to(dtype), dy, lse.float())
    got = simulate(
        lib("core.attention.attention_bwd.attention_bwd"), *inputs, use_causal_mask=True, mixed_precision=True, lnc=lnc
    )
    want = lib(f"{module}.attention_bwd_torch_ref")(*inputs, use_causal_mask=True, mixed_precision=True)
    return got, want, 2e-2, 2e-2 if dtype is torch.bfloat16 else 1e-4


@case("nki-library", "attention_bwd, causal, float32, LNC 1")
def _() -> Any:
    return attention_bwd(torch.float32, 1)


@case("nki-library", "attention_bwd, causal, bfloat16, LNC 2")
def _() -> Any:
    return attention_bwd(torch.bfloat16, 2)


def bwmm_forward(variant: str, skip: int, top_k: int) -> Any:
    """AWS's own input generator and reference, at hidden 1024, intermediate 256, 512 tokens, 4 experts."""
    common = lib_test("core.moe.moe_cte.test_moe_cte_common")
    import nki.language as nl

    types = importlib.import_module(f"{LIB}.core.utils.common_types")
    inputs = common.generate_moe_cte_inputs(
        bwmm_func_enum=common.BWMMFunc[variant], tokens=512, hidden=1024, intermediate=256, expert=4, block_size=256,
        top_k=top_k, dtype=nl.bfloat16, skip=skip, bias=False, training=False, quantize=None,
        activation_function=types.ActFnType.SiLU,
        expert_affinities_scaling_mode=types.ExpertAffinityScaleMode.POST_SCALE, gate_clamp_upper=None,
        gate_clamp_lower=None, up_clamp_upper=None, up_clamp_lower=None, expert_affinity_multiply_on_I=False,
        lnc_degree=2,
    )  # fmt: skip
    got = simulate(common.moe_cte_kernel_wrapper, lnc=2, **plain(inputs))
    want = common.moe_cte_torch_wrapper(**as_torch(inputs))["output"]
    got = next(iter(flatten(got)))
    tokens = 512  # the row after them takes the padding and has no defined value
    axis = 0
    return got.narrow(axis, 0, tokens), want.narrow(axis, 0, tokens), 2e-2, 2e-2


def plain(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without the marks AWS's test harness puts on names of tensors that are written."""
    return {k.removesuffix(".must_alias_input"): v for k, v in inputs.items()}


def as_torch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a reference: torch tensors, bfloat16 widened to float32 as AWS's harness does."""

    def convert(v: Any) -> Any:
        if not isinstance(v, np.ndarray):
            return v
        return torch.from_numpy(v.astype(np.float32) if v.dtype.name == "bfloat16" else v)

    return {k: convert(v) for k, v in plain(inputs).items()}


def lib_test(path: str) -> Any:
    """A module of nki-library's tests: input generators and NumPy references that are not in the package."""
    return importlib.import_module(f"test.integration.nkilib.{path}")


@case("nki-library", "moe_cte bwmm_shard_on_I, top-1, bfloat16, LNC 2")
def _() -> Any:
    return bwmm_forward("SHARD_ON_INTERMEDIATE", skip=0, top_k=1)


@case("nki-library", "moe_cte bwmm_shard_on_I, top-2, token skipping, bfloat16, LNC 2")
def _() -> Any:
    return bwmm_forward("SHARD_ON_INTERMEDIATE", skip=1, top_k=2)


@case("nki-library", "moe_cte bwmm_shard_on_I hybrid (dynamic loop), top-2, bfloat16, LNC 2")
def _() -> Any:
    return bwmm_forward("SHARD_ON_INTERMEDIATE_HW", skip=1, top_k=2)


@case("nki-library", "moe_cte bwmm_shard_on_block, top-2, bfloat16, LNC 2")
def _() -> Any:
    return bwmm_forward("SHARD_ON_BLOCK", skip=0, top_k=2)


@case("nki-library", "blockwise_mm_bwd (dropless MoE backward), float32, LNC 2")
def _() -> Any:
    return bwmm_backward("float32")


@case("nki-library", "blockwise_mm_bwd (dropless MoE backward), bfloat16, LNC 2")
def _() -> Any:
    return bwmm_backward("bfloat16")


def bwmm_backward(dtype: str) -> Any:
    import nki.language as nl

    common = lib_test("experimental.moe.test_bwmm_bwd_common")
    parameters = importlib.import_module(f"{LIB}.experimental.moe.bwd.moe_bwd_parameters")
    inputs, _, _ = common.build_bwmm_bwd_inputs(
        tokens=512, hidden=512, intermediate=256, expert=4, block_size=256, top_k=2, dtype=getattr(nl, dtype),
        dma_skip=common.map_skip_mode(0), bias_flag=False, clamp_limits=parameters.ClampLimits(None, None, None, None),
        activation_type=parameters.ActFnType.SiLU,
    )  # fmt: skip
    kernel = lib("experimental.moe.bwd.blockwise_mm_backward.blockwise_mm_bwd")
    got = simulate(kernel, lnc=2, **plain(inputs))
    want = common.blockwise_mm_bwd_torch_ref(**as_torch(inputs))
    # The padding row has no defined value: it is left out.
    e = 4
    cut = lambda a, n: next(iter(flatten(a)))[:n]  # noqa: E731
    got, want = list(flatten(got)), list(flatten(want))
    for side in (got, want):
        side[0], side[1] = cut(side[0], 512), cut(side[1], 512 * e)
    return got, want, 2e-2, 1e-4 if dtype == "float32" else 0.1


@case("nki-library", "conv1d, float32, LNC 1 and 2")
def _() -> Any:
    act = importlib.import_module(f"{LIB}.core.utils.common_types").ActFnType
    got, want = [], []
    for lnc, stride, dilation, activation in ((1, 1, 1, None), (1, 2, 2, act.GELU), (2, 1, 1, act.SiLU)):
        x, filters, bias = randn(2, 64, 100), randn(5, 64, 128, seed=1, scale=0.1), randn(128, seed=2)
        options = {
            "stride": stride,
            "padding": (2, 2),
            "dilation": dilation,
            "activation_fn": activation,
            "lnc_shard": lnc == 2,
        }
        got.append(simulate(lib("experimental.conv.conv1d.conv1d"), x, filters, bias, lnc=lnc, **options))
        want.append(lib("experimental.conv.conv1d_torch.conv1d_torch_ref")(x, filters, bias, **options))
    return got, want, 1e-4, 1e-4


@case("nki-library", "depthwise_conv1d_implicit_gemm, bfloat16")
def _() -> Any:
    x, w = randn(1, 256, 1, 512, dtype=torch.bfloat16), randn(256, 1, 1, 64, seed=1, dtype=torch.bfloat16)
    kernel = lib("experimental.conv.depthwise_conv1d.depthwise_conv1d_implicit_gemm")
    got = simulate(kernel, x, w, padding=((0, 0), (0, 0)), stride=(1, 1), rhs_dilation=(1, 1), lhs_dilation=(1, 1),
                   feature_group_count=256, batch_group_count=1)  # fmt: skip
    want = torch.nn.functional.conv2d(x.float(), w.float(), groups=256)
    return got, want, 2**-8, 1e-3


@case("nki-library", "router_topk, softmax, top-8, float32, LNC 2")
def _() -> Any:
    act = importlib.import_module(f"{LIB}.core.utils.common_types").RouterActFnType
    tokens, hidden, experts, k = 256, 1024, 128, 8
    x, w = randn(hidden, tokens, scale=0.1), randn(hidden, experts, seed=1, scale=0.1)
    logits, affinities = torch.zeros(tokens, experts), torch.zeros(tokens, experts)
    index = torch.zeros(tokens, k, dtype=torch.int32)
    options = {
        "act_fn": act.SOFTMAX,
        "k": k,
        "x_hbm_layout": 0,
        "x_sb_layout": 0,
        "router_pre_norm": True,
        "norm_topk_prob": True,
    }
    numpy = numpy_inputs({"x": x, "w": w, "logits": logits, "affinities": affinities, "index": index})
    numpy["index"] = numpy["index"].view(np.uint32)
    simulate(lib("core.router_topk.router_topk.router_topk"), numpy["x"], numpy["w"], None, numpy["logits"],
             numpy["affinities"], numpy["index"], lnc=2, **options)  # fmt: skip
    want = lib("core.router_topk.router_topk_torch.router_topk_torch_ref")(
        x, w, None, logits, affinities, index, **options
    )
    want = (want["router_logits"], want["expert_index"], want["expert_affinities"])
    return (numpy["logits"], numpy["index"], numpy["affinities"]), want, 1e-3, 1e-4


@case("nki-library", "output_projection_tkg, bfloat16, LNC 1")
def _() -> Any:
    d, b, n, s, h = 128, 4, 8, 1, 2048
    attention, weight = (
        randn(d, b, n, s, dtype=torch.bfloat16),
        randn(n * d, h, seed=1, scale=0.05, dtype=torch.bfloat16),
    )
    quantization = importlib.import_module(f"{LIB}.core.utils.common_types").QuantizationType.NONE
    kernel = lib("core.output_projection.output_projection_tkg.output_projection_tkg")
    got = simulate(kernel, attention, weight, None, quantization_type=quantization)
    reference = lib("core.output_projection.output_projection_tkg_torch.output_projection_tkg_torch_ref")
    want = reference(attention.float(), weight.float(), None, quantization_type=quantization)
    return got, want, 2e-2, 2e-2


@case("nki-library", "output_projection_cte, bfloat16, LNC 2")
def _() -> Any:
    b, n, d, s, h = 1, 8, 128, 512, 1024
    attention, weight = (
        randn(b, n, d, s, dtype=torch.bfloat16),
        randn(n * d, h, seed=1, scale=0.05, dtype=torch.bfloat16),
    )
    kernel = lib("core.output_projection.output_projection_cte.output_projection_cte.output_projection_cte")
    got = simulate(kernel, attention, weight, None, lnc=2)
    module = "core.output_projection.output_projection_cte.output_projection_cte_torch"
    want = lib(f"{module}.output_projection_cte_torch_ref")(attention.float(), weight.float())
    return got, want, 2**-7, 1e-3


@case("nki-library", "qkv (context encoding), bfloat16, LNC 1")
def _() -> Any:
    b, s, h, width = 1, 512, 1024, 1536
    x, w = randn(b, s, h, dtype=torch.bfloat16), randn(h, width, seed=1, scale=0.05, dtype=torch.bfloat16)
    layout = importlib.import_module(f"{LIB}.core.utils.common_types").QKVOutputLayout.BSD
    got = simulate(lib("core.qkv.qkv.qkv"), x, w, output_layout=layout)
    return got, x.float() @ w.float(), 2**-8, 1e-3


# -- the kernels of the documentation, and of nki-samples where they are written for `nki` -----------------------------


def example(source: str, path: str) -> Any:
    """A module by its file: the directories are no packages."""
    file = ROOTS[source] / path
    sys.path.insert(0, str(file.parent))
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    try:
        spec = importlib.util.spec_from_file_location(f"{source}_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = target  # some examples set it when imported
    return module


def matmul(source: str, path: str, name: str) -> Any:
    big = "optimized" in name
    k, m, n = (1024, 4096, 2048) if big else (1024, 1024, 1024)
    if name.endswith("basic_"):
        k, m, n = 128, 64, 512
    left, right = randn(k, m, dtype=torch.bfloat16), randn(k, n, seed=1, dtype=torch.bfloat16)
    got = simulate(getattr(example(source, path), name), left, right)
    return got, left.float().T @ right.float(), 2**-8, 1e-3  # one bfloat16 rounding


for _name in ("basic_", "tiled_", "hoist_load_", "block_free_dimension_", "fully_optimized_"):
    for _source, _path in (
        ("nki-samples", "src/nki_samples/tutorials/matrix_multiplication/matrix_multiplication_nki_kernels.py"),
        ("aws-neuron-sdk", "nki/examples/matrix_multiplication/matrix_multiplication_nki_kernels.py"),
    ):
        CASES.append((_source, f"nki_matmul_{_name}", partial(matmul, _source, _path, f"nki_matmul_{_name}")))


@case("aws-neuron-sdk", "nki_tensor_add")
def _() -> Any:
    a, b = randn(256, 1024), randn(256, 1024, seed=1)
    module = example("aws-neuron-sdk", "nki/examples/tensor_addition/tensor_addition_nki_kernels.py")
    return simulate(module.nki_tensor_add, a, b), a + b, 0, 0


@case("aws-neuron-sdk", "tensor_avgpool_kernel")
def _() -> Any:
    x = randn(64, 12, 18)
    module = example("aws-neuron-sdk", "nki/examples/average_pool2d/average_pool2d_nki_kernels.py")
    return simulate(module.tensor_avgpool_kernel, x, 2), module.np_average_pool_2D(x.numpy(), 2), 1e-5, 1e-6


@case("aws-neuron-sdk", "tensor_transpose2D_kernel_")
def _() -> Any:
    x = randn(64, 12 * 20)
    module = example("aws-neuron-sdk", "nki/examples/transpose2d/transpose2d_nki_kernels.py")
    want = x.reshape(64, 12, 20).transpose(1, 2).reshape(64, 240)
    return simulate(module.tensor_transpose2D_kernel_, x, (12, 20)), want, 0, 0


def mamba(version: str) -> Any:
    delta, u = randn(1, 256, 512, scale=0.5), randn(1, 256, 512, seed=1)
    a, b, c = -randn(256, 4, seed=2).abs(), randn(1, 4, 512, seed=3), randn(1, 4, 512, seed=4)
    delta = delta.abs()
    module = example("aws-neuron-sdk", "nki/examples/fused_mamba/mamba_nki_kernels.py")
    got = simulate(getattr(module, version), delta, u, a, b, c)
    gate = torch.exp(delta[:, :, None, :] * a[None, :, :, None])
    value = delta[:, :, None, :] * b[:, None, :, :] * u[:, :, None, :]
    state, states = torch.zeros(1, 256, 4), []
    for t in range(512):
        state = gate[..., t] * state + value[..., t]
        states.append(state)
    return got, (c[:, None] * torch.stack(states, dim=-1)).sum(dim=2), 1e-4, 1e-4


for _name in ("mamba_v1", "mamba_v2", "mamba_v3"):
    CASES.append(("aws-neuron-sdk", _name, partial(mamba, _name)))


# -- running ---------------------------------------------------------------------------------------------------------


# Kernels that do not run here, and why.
KNOWN_FAILURES = {
    "moe_cte bwmm_shard_on_I hybrid": "passes an SBUF tile to core_barrier, which must be given shared HBM (nki.isa)",
    "nki-samples: nki_matmul_basic_": "passes tensor_copy(dtype=), which NKI 0.6 no longer has",
    "nki-samples: nki_matmul_tiled_": "passes tensor_copy(dtype=), which NKI 0.6 no longer has",
    "nki-samples: nki_matmul_hoist_load_": "passes tensor_copy(dtype=), which NKI 0.6 no longer has",
}


@dataclass
class Result:
    source: str
    name: str
    status: str
    detail: str
    seconds: float


def flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    elif value is not None:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.astype(np.float64))
        yield value.detach().double()


def compare(got: Any, want: Any, rtol: float, atol: float) -> tuple[str, str]:
    a, b = list(flatten(got)), list(flatten(want))
    if len(a) != len(b):
        return "FAIL", f"{len(a)} outputs, {len(b)} in the reference"
    worst = relative = 0.0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.numel() != y.numel():
            return "FAIL", f"output {i}: shape {tuple(x.shape)}, {tuple(y.shape)} in the reference"
        error = (x.reshape(-1) - y.reshape(-1)).abs()
        if not torch.isfinite(error).all():
            return "FAIL", f"output {i}: {int((~torch.isfinite(error)).sum())} values are not finite"
        worst = max(worst, float(error.max()))
        relative = max(relative, float(error.norm() / y.norm().clamp_min(1e-30)))
        outside = error > atol + rtol * y.reshape(-1).abs()
        if outside.any():
            return (
                "FAIL",
                f"output {i}: {int(outside.sum())} of {x.numel()} values differ, by up to {float(error.max()):.3g}",
            )
    return "ok", f"max |difference| {worst:.2g}, relative {relative:.2g} (rtol {rtol:.2g}, atol {atol:g})"


def run(source: str, name: str, function: Case) -> Result:
    start = time.perf_counter()
    try:
        with redirect_stdout(StringIO()):
            status, detail = compare(*function())
    except Exception as error:
        status, detail = "FAIL", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if os.environ.get("TRACEBACK"):
            import traceback

            traceback.print_exc()
    return Result(source, name, status, detail, time.perf_counter() - start)


def commit(path: Path) -> str:
    done = subprocess.run(["git", "-C", str(path), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()[:12] or "unknown commit"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nki-library", type=Path)
    parser.add_argument("--nki-samples", type=Path)
    parser.add_argument("--sdk", type=Path)
    parser.add_argument("--only", default="", help="run the kernels whose name contains this text")
    options = parser.parse_args()
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    logging.disable(logging.CRITICAL)
    nki_emulator.install(force=True)
    sys.modules.setdefault("neuron_dtypes", neuron_dtypes())
    roots = {"nki-library": options.nki_library, "nki-samples": options.nki_samples, "aws-neuron-sdk": options.sdk}
    ROOTS.update({source: path.resolve() for source, path in roots.items() if path})
    for source, below in (("nki-library", "src"), ("nki-samples", "src"), ("aws-neuron-sdk", ".")):
        if roots[source]:
            sys.path[:0] = [str(roots[source] / below), str(roots[source])]
    print(", ".join(f"{source} {commit(path)}" for source, path in ROOTS.items()))
    failed = 0
    for source, name, function in CASES:
        if roots[source] is None or options.only not in name:
            continue
        result = run(source, name, function)
        known = [why for text, why in KNOWN_FAILURES.items() if text in f"{source}: {name}"]
        if known and result.status == "FAIL":
            result.status, result.detail = "known", f"{known[0]}; {result.detail}"
        failed += result.status == "FAIL"
        print(
            f"{result.status:5s} {result.seconds:6.1f} s  {result.source}: {result.name}: {result.detail}", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
