"""nki-library's kernels for embeddings, reductions, search, norms and losses."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .cases import LIB, Outputs, case, lib, randn, simulate

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
