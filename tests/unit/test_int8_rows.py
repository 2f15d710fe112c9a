"""Rows rounded to int8 in C, and their restored products, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from virnucpro.core.native import call


def round_rows(rows: np.ndarray, *, is_bf16: bool = False, has_gelu: bool = False):
    """Round rows by the library. -> (n_rows, dim) int8, (n_rows,) float32"""
    values = np.empty(rows.shape, dtype=np.int8)
    scales = np.empty(len(rows), dtype=np.float32)
    results = values.ctypes.data, scales.ctypes.data
    call("round_to_int8", rows.ctypes.data, is_bf16, has_gelu, *rows.shape, *results)
    return values, scales


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


# Vectors have sixteen numbers.
@pytest.mark.parametrize("dim", [1, 15, 16, 17, 31, 320])
@pytest.mark.parametrize("has_gelu", [False, True])
def test_rows_of_any_width_are_rounded(dim, has_gelu):
    rows = np.random.default_rng(dim).normal(0, 2, (3, dim)).astype(np.float32)
    values, scales = round_rows(rows, has_gelu=has_gelu)
    exact = gelu(rows.astype(np.float64)) if has_gelu else rows.astype(np.float64)
    largest = np.abs(exact).max(axis=1)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-5)
    restored = values * scales[:, None].astype(np.float64)
    assert (np.abs(restored - exact) <= 0.5001 * largest[:, None] / 127 + 1e-6).all()


@pytest.mark.parametrize("dim", [1, 16, 33])
def test_bf16_is_the_upper_half_of_float32(dim):
    halves = np.random.default_rng(dim).integers(0x3E00, 0x4100, (4, dim)).astype(np.uint16)
    halves[1] |= 0x8000  # negative numbers
    floats = (halves.astype(np.uint32) << 16).view(np.float32)
    for found, expected in zip(round_rows(halves, is_bf16=True), round_rows(floats), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_row_of_zeros_has_zeros():
    values, scales = round_rows(np.zeros((2, 20), dtype=np.float32))
    assert not values.any() and (scales > 0).all()


@pytest.mark.parametrize(("n_rows", "n_out"), [(1, 1), (2, 16), (3, 35)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_scaled_and_rounded_to_bf16(n_rows, n_out, has_bias):
    rng = np.random.default_rng(n_out)
    product = rng.integers(-(2**23), 2**23, (n_rows, n_out), dtype=np.int32)
    row_scales = rng.uniform(1e-4, 1e-2, n_rows).astype(np.float32)
    column_scales = rng.uniform(1e-4, 1e-2, n_out).astype(np.float32)
    bias = rng.normal(size=n_out).astype(np.float32)
    out = np.empty((n_rows, n_out), dtype=np.uint16)
    call(
        "restore_int8",
        product.ctypes.data,
        row_scales.ctypes.data,
        column_scales.ctypes.data,
        bias.ctypes.data if has_bias else 0,
        n_rows,
        n_out,
        out.ctypes.data,
    )
    exact = product * (row_scales[:, None].astype(np.float64) * column_scales)
    exact += bias if has_bias else 0
    found = (out.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-5)
