"""nki-library's kernels for attention, experts, convolutions and projections."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from .cases import LIB, as_torch, case, flatten, lib, lib_test, numpy_inputs, plain, randn, simulate


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
