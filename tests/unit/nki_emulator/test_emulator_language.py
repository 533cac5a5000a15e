"""The maths of `nki.language` that makes its own tiles, and questions about the target and the program."""

import numpy as np
import pytest

from nki_emulator.testing import load, nisa, nl, rows, run, store

X = rows([1, -2, 3], [4, 5, -6])


def result(make, *arrays):
    return run(lambda *tensors: store(make(*(load(t) for t in tensors))), *arrays)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: nl.sum(x, axis=1, keepdims=True), [[2], [3]]),
        (lambda x: nl.max(x, axis=1), [[3], [5]]),
        (lambda x: nl.min(x, axis=1), [[-2], [-6]]),
        (lambda x: nl.prod(x, axis=1), [[-6], [-120]]),
        (lambda x: nl.mean(x, axis=1), [[2 / 3], [1]]),
        (lambda x: nl.var(x, axis=1), [[14 / 3 - 4 / 9], [77 / 3 - 1]]),
        (lambda x: nl.all(x, axis=1), [[1], [1]]),
        (lambda x: nl.negative(x), -X),
        (lambda x: nl.transpose(x), X.T),
        (lambda x: nl.add(x, 1.0), X + 1),
        (lambda x: nl.subtract(1.0, x), 1 - X),
        (lambda x: nl.subtract(x, nl.sum(x, axis=1)), X - [[2], [3]]),
        (lambda x: nl.square(x), X * X),
        (lambda x: nl.less_equal(x, 3.0), [[1, 1, 1], [0, 0, 1]]),
        (lambda x: nl.not_equal(x, 3.0), [[1, 1, 0], [1, 1, 1]]),
        (lambda x: nl.greater(x, 3.0), [[0, 0, 0], [1, 1, 0]]),
        (lambda x: nl.where(nl.greater(x, 0.0), x, 0.0), np.maximum(X, 0)),
        (lambda x: nl.broadcast_to(nl.sum(x, axis=1), (2, 2)), [[2, 2], [3, 3]]),
        (lambda x: nl.expand_dims(x, 1), X.reshape(2, 1, 3)),
        (lambda x: nl.floor(nl.multiply(x, 0.5)), np.floor(X / 2)),
        (lambda x: nl.ceil(nl.multiply(x, 0.5)), np.ceil(X / 2)),
        (lambda x: nl.trunc(nl.multiply(x, 0.5)), np.trunc(X / 2)),
        (lambda x: nl.cos(x), np.cos(X)),
        (lambda x: nl.abs_max(x, nl.full((2, 3), 3.0, dtype=nl.float32)), [[3, 3, 3], [4, 5, 6]]),
        (lambda x: nl.zeros_like(x), np.zeros((2, 3))),
        (lambda x: nl.ones((2, 3), dtype=nl.float32), np.ones((2, 3))),
    ],
)
def test_maths_on_tiles(make, expected):
    np.testing.assert_allclose(result(make, X), np.array(expected, np.float32), rtol=1e-6)


def test_softmax_and_rms_norm():
    e = np.exp(X.astype(np.float64))
    np.testing.assert_allclose(result(lambda x: nl.softmax(x), X), e / e.sum(1, keepdims=True), rtol=1e-6)
    weight = rows([1, 2, 3], [1, 2, 3])
    normed = X / np.sqrt((X * X).mean(1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(result(lambda x, w: nl.rms_norm(x, w, 1, 3), X, weight), normed, rtol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_matmul(transposed):
    y = rows([1, 0], [2, 1], [0, 3])
    out = result(lambda x, w: nl.matmul(x, w, transpose_x=transposed), X.T.copy() if transposed else X, y)
    np.testing.assert_array_equal(out, X @ y)


def test_load_transpose2d():
    np.testing.assert_array_equal(run(lambda x: store(nl.load_transpose2d(x)), X), X.T)


def test_power_needs_two_tiles():
    out = result(lambda x: nl.power(x, nl.full((2, 3), 2.0, dtype=nl.float32)), X)
    np.testing.assert_allclose(out, X * X, rtol=1e-6)


def test_invert_flips_bits():
    def kernel(x):
        tile = load(x)
        nisa.tensor_scalar(tile, tile, nl.invert, 0)
        return store(tile)

    np.testing.assert_array_equal(run(kernel, rows([0, 5], dtype=np.uint8)), [[255, 250]])


@pytest.mark.parametrize(("target", "version", "sbuf"), [("trn2", 3, 224), ("trn3", 4, 256)])
def test_constants_of_the_target(target, version, sbuf, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    seen = {}

    def kernel(x):
        seen["version"] = nisa.get_nc_version()
        seen["sbuf"] = nl.tile_size.sbuf_size_bytes
        seen["tile"] = (nl.tile_size.pmax, nl.tile_size.psum_bank_fmax, nl.tile_size.gemm_stationary_fmax)
        seen["psum"] = (nl.is_psum(nl.psum), nl.is_hbm(nl.shared_hbm), nl.is_on_chip(nl.sbuf), nl.is_sbuf(nl.psum))
        return x

    run(kernel, X)
    assert seen["version"] == nisa.nc_version(version)
    assert seen["sbuf"] == sbuf * 1024 * 128
    assert seen["tile"] == (128, 512, 128)
    assert seen["psum"] == (True, True, True, False)


def test_dynamic_range_yields_registers():
    def kernel(x):
        total = nl.zeros((2, 1), dtype=nl.float32)
        for i in nl.dynamic_range(nisa.register_alloc(3)):
            column = nl.ndarray((2, 1), dtype=x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(column, x.ap([[3, 2], [1, 1]], scalar_offset=i, indirect_dim=1))
            nisa.tensor_tensor(total, total, column, nl.add)
        return store(total)

    np.testing.assert_array_equal(run(kernel, X), [[2], [3]])
