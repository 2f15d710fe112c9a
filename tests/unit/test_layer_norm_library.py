"""The sums of the residual stream and their LayerNorm in C, against float64 in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from virnucpro.core.native import call

EPSILON = 1e-5


def from_bf16(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def random_bf16(shape: tuple[int, ...], seed: int) -> np.ndarray:
    numbers = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def add_and_norm(
    x: np.ndarray,
    branch: np.ndarray | None,
    weight: np.ndarray,
    bias: np.ndarray | None,
    *,
    scale: float = 1.0,
    is_bf16: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Call the library. -> the sums, (n_rows, dim) float32, and the normed rows, float32"""
    sums = x.copy()
    out = np.empty(x.shape, dtype=np.uint16 if is_bf16 else np.float32)
    call(
        "add_and_norm",
        x.ctypes.data,
        0 if branch is None else branch.ctypes.data,
        scale,
        weight.ctypes.data,
        0 if bias is None else bias.ctypes.data,
        EPSILON,
        *x.shape,
        sums.ctypes.data,
        out.ctypes.data,
        is_bf16,
    )
    return sums, from_bf16(out) if is_bf16 else out


# Vectors have sixteen numbers.
@pytest.mark.parametrize("dim", [1, 15, 16, 17, 72, 320])
@pytest.mark.parametrize("has_branch", [False, True])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_sums_are_normed(dim, has_branch, is_bf16):
    rng = np.random.default_rng(dim)
    x, weight, bias = (
        rng.normal(3, 1, shape).astype(np.float32) for shape in ((3, dim), (dim,), (dim,))
    )
    branch = random_bf16((3, dim), dim) if has_branch else None
    sums, normed = add_and_norm(x, branch, weight, bias, scale=0.5, is_bf16=is_bf16)

    exact = x.astype(np.float64)
    if branch is not None:
        exact += 0.5 * from_bf16(branch)
    np.testing.assert_allclose(sums, exact, rtol=2**-24)
    deviations = np.sqrt(exact.var(axis=1, keepdims=True) + EPSILON)
    expected = (exact - exact.mean(axis=1, keepdims=True)) / deviations * weight + bias
    # a sum over sixteenths of a row and then over the sixteen lanes, twice, and a few other
    # roundings: each is off by 2^-24 of the largest number at most
    n_roundings = 2 * (dim / 16 + 4) + 8
    limit = n_roundings * 2**-24 * np.abs(exact).max() / deviations * np.abs(weight) + 1e-6
    limit = limit + (2**-8 * np.abs(expected) if is_bf16 else 0)
    assert (np.abs(normed - expected) <= limit).all()


def test_norm_without_bias():
    x = np.random.default_rng(0).normal(size=(2, 33)).astype(np.float32)
    weight = np.ones(33, dtype=np.float32)
    without = add_and_norm(x, None, weight, None)
    with_zeros = add_and_norm(x, None, weight, np.zeros(33, dtype=np.float32))
    np.testing.assert_array_equal(without, with_zeros)


@pytest.mark.parametrize("dim", [16, 40])
def test_rows_do_not_depend_on_others(dim):
    x = np.random.default_rng(dim).normal(size=(5, dim)).astype(np.float32)
    x[0] *= 1e30
    branch = random_bf16((5, dim), dim)
    weight, bias = x[1].copy(), x[2].copy()
    together = add_and_norm(x, branch, weight, bias)
    alone = add_and_norm(x[3:4].copy(), branch[3:4].copy(), weight, bias)
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(found[3:4], expected)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_fault_makes_its_row_nan(fault):
    x = np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32)
    x[1, 7] = fault
    weight = np.ones(20, dtype=np.float32)
    _, normed = add_and_norm(x, None, weight, weight, is_bf16=True)
    assert np.isnan(normed[1]).all()
    assert np.isfinite(normed[[0, 2]]).all()
