# ruff: noqa: E501  a row of the table is one line
"""Every violated limit gives one message that names instruction, operand and limit. One row per limit."""

import numpy as np
import pytest

from nki_emulator import NkiValidationError
from nki_emulator.testing import emulator_only, load, nisa, nki, nl, store

pytestmark = emulator_only

F32, I32 = "float32", "int32"


def sb(*shape, dtype=F32, fill=1):
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(tile, fill)
    return tile


def ps(*shape, dtype=F32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def hbm(*shape, dtype=F32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def written(tile):
    nisa.memset(tile, 0)
    return tile


def rows_of(tensor, *index, dtype=I32, count=None):
    tile = sb(len(index), 1, dtype=dtype, fill=0)
    for i, value in enumerate(index):  # partitions 1, 2, .. cannot be addressed alone; go through HBM
        cell = nisa.register_alloc(value)
        scratch = hbm(1, 1, dtype=dtype)
        nisa.register_store(scratch, cell)
        nisa.dma_copy(tile[i : i + 1], scratch)
    n = count or len(index)
    return tensor.ap([[tensor.shape[1], n], [1, tensor.shape[1]]], vector_offset=tile, indirect_dim=0)


def escaped_tile():
    kept = []
    nl.fori_loop(0, 1, lambda i: kept.append(sb(1, 1)))
    nisa.tensor_copy(sb(1, 1), kept[0])


def too_much_sbuf():
    tiles = [sb(128, 20000) for _ in range(3)]
    for tile in tiles:
        nisa.tensor_copy(tile, tile)


def too_much_psum():
    tiles = [ps(128, 512) for _ in range(9)]
    for tile in (*tiles, *tiles):
        nisa.memset(tile, 0)


def matmul_partly_started():
    out, k = ps(4, 8), sb(4, 4)
    nisa.nc_matmul(out[:, 0:4], k, sb(4, 4))
    nisa.nc_matmul(out, k, sb(4, 8))


MISUSES = {
    # memory
    "partitions": (lambda: sb(129, 1), "nl.ndarray.*129 partitions.*sbuf has 128"),
    "sbuf size": (lambda: sb(1, 60000), "240000 bytes per partition; sbuf has 212992"),
    "psum size": (lambda: ps(1, 4097), "16388 bytes per partition; psum has 16384"),
    "sbuf in use at one time": (too_much_sbuf, "240000 bytes of sbuf per partition at one time; 212992 are usable"),
    "psum in use at one time": (too_much_psum, "18432 bytes of psum per partition at one time; 16384 are usable"),
    "psum address": (lambda: nl.ndarray((1, 1), F32, nl.psum, address=(0, 4)), "must start on a bank, a multiple of 2048"),
    "address range": (lambda: nl.ndarray((2, 1), F32, nl.sbuf, address=(127, 0)), "exceeds the 128 partitions of sbuf"),
    "data type": (lambda: sb(1, 1, dtype="float64"), "NKI has no data type 'float64'"),
    "tile of a loop body used after it": (escaped_tile, "was made inside a dynamic loop and is used outside it"),
    # views
    "slice range": (lambda: sb(2, 4)[:, 2:6], "slice 2:6 is out of bounds for dimension 1 with size 4"),
    "index range": (lambda: sb(2, 4)[:, 4], "index 4 is out of bounds for dimension 1 with size 4"),
    "negative step": (lambda: sb(2, 4)[:, ::-1], "step must be at least 1, got -1"),
    "partitions moved": (lambda: sb(2, 4).permute((1, 0)), "dimension 0, the partitions, must stay first"),
    "partitions reshaped": (lambda: sb(2, 4).reshape((4, 2)), "the partitions, must stay 2"),
    "reshape of a gap": (lambda: sb(2, 4, 4)[:, :, 0:2].reshape((2, 8)), "without a copy"),
    "partition stride": (lambda: sb(4, 8).ap([[16, 2], [1, 8]]), "first stride steps partitions and must be 8"),
    "pattern range": (lambda: nisa.tensor_copy(sb(2, 9), sb(2, 8).ap([[8, 2], [1, 9]])), "includes element 8 of a partition that has 8"),
    "two kinds of offset": (lambda: hbm(4, 4).ap([[4, 4]], scalar_offset=sb(1, 1, dtype=I32), vector_offset=sb(4, 1, dtype=I32)), "mutually exclusive"),
    "indirect twice": (lambda: hbm(4, 4).select(0, sb(1, 1, dtype=I32)).select(0, sb(1, 1, dtype=I32)), "already indirect"),
    "float index": (lambda: hbm(4, 4).select(0, sb(1, 1)), "index must be an int32 or uint32 tensor in sbuf"),
    "gather on chip": (lambda: sb(4, 4).ap([[4, 4], [1, 4]], vector_offset=sb(4, 1, dtype=I32)), "needs a tensor in HBM"),
    "register as an integer": (lambda: sb(2, 4)[:, nisa.register_alloc(1)], "not an integer known while the kernel is built"),
    # operands
    "start partition": (lambda: nisa.memset(sb(128, 4)[16:32], 0), "memset: dst.*starts at partition 16; it may start at 0, 32, 64, 96"),
    "start partition of 64": (lambda: nisa.memset(sb(128, 4)[32:96], 0), "starts at partition 32; it may start at 0, 64"),
    "start partition of 65": (lambda: nisa.memset(sb(128, 4)[32:97], 0), "starts at partition 32; it may start at 0$"),
    "hbm operand": (lambda: nisa.tensor_copy(sb(1, 1), hbm(1, 1)), "tensor_copy: src.*must be in sbuf or psum"),
    "element counts": (lambda: nisa.tensor_copy(sb(2, 3), sb(2, 4)), "src.*has 4 elements per partition, dst.*3"),
    "partition counts": (lambda: nisa.tensor_copy(sb(2, 3), sb(3, 3)), "src.*has 3 partitions, dst.*2"),
    "two psum inputs": (lambda: nisa.tensor_tensor(sb(2, 2), written(ps(2, 2)), written(ps(2, 2)), nl.add), "data1, data2: .* both in psum"),
    "gpsimd and psum": (lambda: nisa.tensor_copy(sb(2, 2), written(ps(2, 2)), engine=nisa.engine.gpsimd), "src.*is in psum; the GpSimd Engine cannot"),
    "engine": (lambda: nisa.memset(sb(1, 1), 0, engine=nisa.engine.scalar), "memset: engine: must be vector or gpsimd, got scalar"),
    "memset range": (lambda: nisa.memset(sb(1, 1, dtype="uint8"), 256), "256 does not fit uint8"),
    # arithmetic
    "activation function as operator": (lambda: nisa.tensor_scalar(sb(1, 1), sb(1, 1), nl.tanh, 0), "must be an arithmetic operator; nl.tanh is an activation function"),
    "bits of floats": (lambda: nisa.tensor_tensor(sb(1, 1), sb(1, 1), sb(1, 1), nl.bitwise_and), "bit operators need integers, got float32"),
    "mixed operators": (lambda: nisa.tensor_scalar(sb(1, 1, dtype=I32), sb(1, 1, dtype=I32), nl.add, 1, op1=nl.left_shift, operand1=1), "both must be arithmetic or both bit operators"),
    "operand shape": (lambda: nisa.tensor_scalar(sb(2, 3), sb(2, 3), nl.add, sb(2, 2)), r"operand0.*must have shape \(2, 1\)"),
    "integer operand": (lambda: nisa.tensor_scalar(sb(2, 3), sb(2, 3), nl.add, sb(2, 1, dtype=I32)), "operand0.*must be a float type"),
    "scalar engine operators": (lambda: nisa.tensor_scalar(sb(1, 1), sb(1, 1), nl.maximum, 0.0, engine=nisa.engine.scalar), "Scalar Engine runs multiply then add"),
    "reduction axis": (lambda: nisa.tensor_reduce(sb(2, 4), nl.add, sb(2, 3, 4), axis=1), "must be the last free dimensions"),
    "reduction over partitions": (lambda: nisa.tensor_reduce(sb(2, 1), nl.add, sb(2, 4), axis=0), "without 0"),
    "reduction operator": (lambda: nisa.tensor_reduce(sb(2, 1), nl.equal, sb(2, 4), axis=1), "must be a reduction, got nl.equal"),
    "activation operator": (lambda: nisa.activation(sb(1, 1), nl.add, sb(1, 1)), "nl.add is not an activation function"),
    "activation scale": (lambda: nisa.activation(sb(1, 1), nl.exp, sb(1, 1), scale=sb(1, 1, dtype="bfloat16")), "scale.*must be float32"),
    "activation reduction": (lambda: nisa.activation(sb(1, 1), nl.exp, sb(1, 1), reduce_op=nl.maximum, reduce_cmd=nisa.reduce_cmd.reset_reduce), "must be nl.add, got nl.maximum"),
    "predicate": (lambda: nisa.tensor_copy_predicated(sb(1, 1), sb(1, 1), sb(1, 1)), "predicate.*must be uint8, uint16 or uint32"),
    "false value": (lambda: nisa.range_select(sb(1, 8), sb(1, 8), nl.less, nl.less, sb(1, 1), sb(1, 1), on_false_value=0.0), "must be -3.4.*, got 0.0"),
    "max8 size": (lambda: nisa.max8(sb(1, 8), sb(1, 7)), "must have 8 to 16384 elements per partition, got 7"),
    "bn_stats size": (lambda: nisa.bn_stats(sb(1, 6), sb(1, 513)), "513 elements per partition; the limit is 512"),
    "shuffle mask": (lambda: nisa.nc_stream_shuffle(sb(32, 1), sb(32, 1), [32] * 32), "32 numbers from 0 to 31, or 255"),
    "iota pattern": (lambda: nisa.iota(sb(1, 4, dtype=I32), [[1, 3]]), "yields 3 values per partition; the tile has 4"),
    # Tensor Engine
    "stationary columns": (lambda: nisa.nc_matmul(ps(128, 4), sb(4, 129), sb(4, 4)), "stationary.*129 columns; the limit is 128"),
    "moving columns": (lambda: nisa.nc_matmul(ps(4, 512), sb(4, 4), sb(4, 513)), "moving.*513 columns; the limit is 512"),
    "matmul operand in psum": (lambda: nisa.nc_matmul(ps(4, 4), written(ps(4, 4)), sb(4, 4)), "stationary.*must be in sbuf"),
    "matmul result in sbuf": (lambda: nisa.nc_matmul(sb(4, 4), sb(4, 4), sb(4, 4)), "dst.*must be in psum"),
    "matmul result type": (lambda: nisa.nc_matmul(ps(4, 4, dtype="bfloat16"), sb(4, 4), sb(4, 4)), "dst.*must be float32"),
    "matmul types": (lambda: nisa.nc_matmul(ps(4, 4), sb(4, 4), sb(4, 4, dtype="bfloat16")), "float32 can only be multiplied with float32"),
    "matmul of integers": (lambda: nisa.nc_matmul(ps(4, 4), sb(4, 4, dtype=I32), sb(4, 4, dtype=I32)), "stationary.*takes fp8, bfloat16"),
    "contraction": (lambda: nisa.nc_matmul(ps(4, 4), sb(4, 4), sb(5, 4)), "different partitions, the contracted dimension"),
    "matmul result shape": (lambda: nisa.nc_matmul(ps(4, 5), sb(4, 4), sb(4, 4)), "dst.*must hold 4 partitions of 4 elements"),
    "two psum banks": (lambda: nisa.nc_matmul(ps(4, 1024)[:, 256:768], sb(4, 4), sb(4, 512)), r"touches PSUM banks \[0, 1\]"),
    "accumulating on nothing": (lambda: nisa.nc_matmul(ps(4, 4), sb(4, 4), sb(4, 4), accumulate=True), "must be False for the first matmul"),
    "accumulating on a memset": (lambda: nisa.nc_matmul(written(ps(4, 4)), sb(4, 4), sb(4, 4), accumulate=True), "written by something other than a matmul"),
    "accumulating on a part": (matmul_partly_started, "only a part of .* was written by a matmul"),
    "transpose size": (lambda: nisa.nc_transpose(ps(128, 128), sb(128, 129)), "transposes up to 128 x 128"),
    "vector transpose size": (lambda: nisa.nc_transpose(sb(33, 32), sb(32, 33)), "transposes up to 32 x 32"),
    "transpose type": (lambda: nisa.nc_transpose(ps(4, 4, dtype="bfloat16"), sb(4, 4)), "dst.*must have data's type float32"),
    # DMA
    "dma to psum": (lambda: nisa.dma_copy(ps(1, 1), hbm(1, 1)), "dma_copy: dst.*is in psum; DMA can only access"),
    "dma element count": (lambda: nisa.dma_copy(sb(1, 2), hbm(1, 3)), "src.*has 3 elements, dst.*2"),
    "hwdge converts": (lambda: nisa.dma_copy(sb(1, 2), hbm(1, 2, dtype=I32), dge_mode=nisa.dge_mode.hwdge), "hwdge cannot convert int32"),
    "hwdge gathers": (lambda: nisa.dma_copy(sb(1, 2), rows_of(hbm(2, 2), 0), dge_mode=nisa.dge_mode.hwdge), "only swdge takes a vector_offset"),
    "gather range": (lambda: nisa.dma_copy(sb(2, 2), rows_of(hbm(2, 2), 0, 2)), "runtime index 2 is out of bounds for .* must be 0 to 1 unless oob_mode is skip"),
    "negative index": (lambda: nisa.dma_copy(sb(1, 2), rows_of(hbm(2, 2), -1)), "runtime index -1"),
    "scalar range": (lambda: nisa.dma_copy(sb(1, 2), hbm(2, 2).select(0, sb(1, 1, dtype=I32, fill=2))), "runtime index 2 is out of bounds for .* must be 0 to 1"),
    "indices per row": (lambda: nisa.dma_copy(sb(1, 2), rows_of(hbm(2, 2), 0, 1, count=1)), r"vector_offset.*must have shape \(1, 1\)"),
    "repeated rows in a sum": (
        lambda: (lambda t: nisa.dma_compute(rows_of(t, 1, 1), [rows_of(t, 1, 1), sb(2, 2)], nl.add))(hbm(2, 2)),
        "row 1 of .* occurs more than once; indices must be unique",
    ),
    "dma_compute operator": (lambda: nisa.dma_compute(hbm(1, 1), [hbm(1, 1)], nl.maximum), "must be nl.add, got nl.maximum"),
    "dma_transpose shape": (lambda: nisa.dma_transpose(sb(2, 4), hbm(2, 4)), r"shape \(2, 4\) must be \(4, 2\)"),
    "dma_transpose type": (lambda: nisa.dma_transpose(sb(4, 2), hbm(2, 4, dtype="bfloat16")), "must have src's type bfloat16"),
    "gather transpose": (lambda: nisa.dma_transpose(sb(2, 16), rows_of(hbm(16, 2), *range(16), dtype="uint32")), "elements must have 2 bytes"),
    # control
    "barrier at LNC 1": (lambda: nisa.core_barrier(hbm(1, 1), (0, 1)), "core_barrier: needs LNC 2"),
    "barrier data": (lambda: nisa.core_barrier(sb(1, 1), (0, 1)), "core_barrier: data: must be a tensor in shared_hbm"),
    "sendrecv at LNC 1": (lambda: nisa.sendrecv(sb(1, 1), sb(1, 1), 0, 0, 0), "sendrecv: needs LNC 2"),
    "register size": (lambda: nisa.register_load(nisa.register_alloc(), sb(1, 2, dtype=I32)), "exactly one element"),
    "empty register": (lambda: nisa.register_store(sb(1, 1, dtype=I32), nisa.register_alloc()), "read before it was written"),
    "loop step": (lambda: nl.fori_loop(0, 3, lambda i: None, step=0), "step: must be a positive integer.*, got 0"),
    "loop result": (lambda: nl.fori_loop(0, 3, lambda i: i), "must return None"),
    "tensor as a condition": (lambda: bool(sb(1, 1)), "no truth value"),
    "store from psum": (lambda: nl.store(hbm(1, 1), written(ps(1, 1))), "must be a tile in sbuf"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named(name, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    misuse, message = MISUSES[name]

    def kernel():
        misuse()

    with pytest.raises(NkiValidationError, match=message):
        nki.simulate(kernel)()


def test_returned_tensors_must_be_shared():
    with pytest.raises(NkiValidationError, match="in private_hbm; a returned tensor must be in shared_hbm"):
        nki.simulate(lambda: nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.hbm))()


def test_arguments_must_have_an_nki_type():
    with pytest.raises(NkiValidationError, match="argument x: NKI has no data type 'int64'"):
        nki.simulate(lambda x: None)(np.zeros(3, np.int64))


def test_lnc_is_1_or_2():
    with pytest.raises(NkiValidationError, match="LNC must be 1 or 2, got 3"):
        nki.jit(lambda x: None)[3]


def test_instructions_need_a_kernel():
    with pytest.raises(NkiValidationError, match="called outside a kernel"):
        nl.ndarray((1, 1), dtype=nl.float32)


def test_registers_have_no_arithmetic():
    def kernel():
        return nisa.register_alloc(1) + 1

    with pytest.raises(TypeError):
        nki.simulate(kernel)()


def test_rows_scattered_twice_become_undefined():
    def kernel(x, i):
        nisa.dma_copy(x.ap([[2, 2], [1, 2]], vector_offset=load(i), indirect_dim=0), store(load(x[0:2])))
        return x

    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    out = nki.simulate(kernel)(x, np.array([[2], [2]], np.int32))
    assert np.isnan(out[2]).all()


@pytest.mark.parametrize(("target", "limit"), [("trn2", 212992), ("trn3", 245760)])
def test_limits_follow_the_target(target, limit, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)

    def kernel(x):
        sb(1, x.shape[0], dtype="uint8")

    nki.simulate(kernel)(np.zeros(limit, np.uint8))
    with pytest.raises(NkiValidationError, match=f"sbuf has {limit}"):
        nki.simulate(kernel)(np.zeros(limit + 1, np.uint8))
