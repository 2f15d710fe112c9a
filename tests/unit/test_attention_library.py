"""Attention in C, in float32 and in products of bf16 numbers, against float64 in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import virnucpro
from virnucpro.core.native import call, multiplies_bf16

N_HEADS = 3
ROUNDING = 0.42 * 2**-8  # root mean square of a relative error in bf16, see `roundings.py`
KERNELS = [
    "attend",
    pytest.param(
        "attend_bf16",
        marks=pytest.mark.skipif(not multiplies_bf16(), reason="no AVX512_BF16 here"),
    ),
]


def to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Round float32 half to even. -> uint16"""
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(halves: np.ndarray) -> np.ndarray:
    """Return float64."""
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def random_tokens(n_tokens: int, dim: int, spread: float = 1.0) -> np.ndarray:
    """Return queries, keys and values, (n_tokens, 3, N_HEADS, dim) bf16.

    ``spread`` multiplies the queries.
    """
    numbers = np.random.default_rng([n_tokens, dim]).normal(size=(n_tokens, 3, N_HEADS, dim))
    numbers[:, 0] *= spread
    return to_bf16(numbers)


def rotary_tables(n_tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosine and sine of each angle, (n_tokens, dim / 2) float32."""
    angles = np.arange(n_tokens)[:, None] / 10000 ** (np.arange(0, dim, 2) / dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def attend(kernel: str, tokens: np.ndarray, n_proteins: int = 1) -> np.ndarray:
    """Call the library for equally long proteins. -> (n_tokens, N_HEADS, dim) bf16"""
    n_tokens = len(tokens) // n_proteins
    dim = tokens.shape[-1]
    cosines, sines = rotary_tables(n_tokens, dim)
    tables = np.tile(cosines, (n_proteins, 2)), np.tile(sines, (n_proteins, 1))
    addresses = [table.ctypes.data for table in tables]
    options = [True] if kernel == "attend" else []
    runs = np.array([[0, n_proteins, n_tokens]])
    guard = np.full(64, 12345, dtype=np.uint16)  # nothing is written around the result
    out = np.concatenate([guard, np.zeros(len(tokens) * N_HEADS * dim, dtype=np.uint16), guard])
    result = out[len(guard) : -len(guard)]
    shape = len(runs), N_HEADS, dim
    call(kernel, tokens.ctypes.data, *options, *addresses, runs, *shape, result.ctypes.data)
    assert (out[: len(guard)] == guard).all() and (out[-len(guard) :] == guard).all()
    return result.reshape(len(tokens), N_HEADS, dim)


def attend_exactly(kernel: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attend in float64, and estimate the errors of a kernel to first order.

    With weights p, the result is o = sum_j p_j v_j. It moves by sum_j p_j e_j (v_j - o) if the
    scores move by e_j. `attend_bf16` rounds the turned query, which moves all scores, the turned
    keys, which move one score each, and the weights, which act like scores. The errors are
    independent, so their squares add. Both kernels round the result.

    Returns:
        The result and the standard deviation of its error, (n_tokens, N_HEADS, dim).
    """
    dim = tokens.shape[-1]
    half = dim // 2
    numbers = from_bf16(tokens)
    cosines, sines = (
        table.astype(np.float64)[:, None] for table in rotary_tables(len(tokens), dim)
    )
    low, high = numbers[:, :2, :, :half], numbers[:, :2, :, half:]
    turned = np.concatenate(
        [
            low * cosines[:, None] - high * sines[:, None],
            high * cosines[:, None] + low * sines[:, None],
        ],
        axis=-1,
    )
    queries, keys = turned.transpose(1, 2, 0, 3)  # (N_HEADS, n_tokens, dim)
    values = numbers[:, 2].transpose(1, 0, 2)
    queries = queries / dim**0.5
    scores = queries @ keys.transpose(0, 2, 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    exact = weights @ values
    squares = exact**2
    if kernel == "attend_bf16":
        # sum_j p_j k_j (v_j - o), for each dimension of the query and of the result
        products = (keys[..., None] * values[..., None, :]).reshape(*keys.shape[:2], -1)
        joint = (weights @ products).reshape(*keys.shape, dim)
        joint -= (weights @ keys)[..., None] * exact[..., None, :]
        squares += (queries[..., None] ** 2 * joint**2).sum(axis=2)
        own = weights**2 * (queries**2 @ (keys**2).transpose(0, 2, 1) + 1)
        squares += own @ values**2 - 2 * (own @ values) * exact
        squares += own.sum(axis=-1, keepdims=True) * exact**2
    errors = ROUNDING * np.sqrt(np.maximum(squares, 0))
    return exact.transpose(1, 0, 2), errors.transpose(1, 0, 2)


# Vectors have sixteen numbers, blocks of columns eight, sixteen or twenty-four.
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("n_tokens", "dim"),
    [
        *((n, dim) for n in (1, 2, 15, 16, 17, 100) for dim in (2, 10, 16, 20, 24, 32, 40, 64, 72)),
        (1000, 16),
        (1000, 24),
    ],
)
def test_errors_are_those_of_roundings(kernel, n_tokens, dim):
    tokens = random_tokens(n_tokens, dim)
    exact, deviations = attend_exactly(kernel, tokens)
    errors = from_bf16(attend(kernel, tokens)) - exact
    # all heads and queries have their own roundings, so the estimate is off by some tenths at most
    assert np.linalg.norm(errors) <= 1.25 * np.linalg.norm(deviations)
    # of up to 72,000 normal numbers, the largest is 4.5 deviations from 0; float32 adds 1e-6
    assert (np.abs(errors) <= 6 * deviations + 1e-6).all()


def test_limit_detects_truncation():
    """Results that are cut off instead of rounded are twice as far away."""
    exact, deviations = attend_exactly("attend", random_tokens(17, 16))
    cut_off = (exact.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert np.linalg.norm(from_bf16(cut_off) - exact) > 1.25 * np.linalg.norm(deviations)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n_tokens", [1, 16, 33])
def test_bits_do_not_depend_on_the_batch(kernel, n_tokens):
    first = random_tokens(n_tokens, 24)
    other = random_tokens(n_tokens, 24, spread=3.0)
    found = attend(kernel, np.concatenate([other, first, other]), n_proteins=3)
    np.testing.assert_array_equal(found[n_tokens : 2 * n_tokens], attend(kernel, first))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n_tokens", [1, 7, 40])
def test_weights_add_up_to_one(kernel, n_tokens):
    tokens = random_tokens(n_tokens, 16)
    tokens[:, 2] = tokens[0, 2]  # the same values for all keys
    np.testing.assert_array_equal(attend(kernel, tokens), tokens[:, 2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n_tokens", [1, 2, 21])
def test_large_scores_select_a_value(kernel, n_tokens):
    tokens = random_tokens(n_tokens, 32, spread=1e4)
    found = from_bf16(attend(kernel, tokens))
    values = from_bf16(tokens[:, 2])
    assert (values.min(axis=0) <= found).all() and (found <= values.max(axis=0)).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_negative_scores_are_not_those_of_padding(kernel):
    tokens = random_tokens(1, 16)
    tokens[:, 0] = to_bf16(-1e4 * from_bf16(tokens[:, 1]))
    np.testing.assert_array_equal(attend(kernel, tokens), tokens[:, 2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("part", "rows"), [(0, [20]), (1, slice(None)), (2, slice(None))])
def test_fault_makes_results_nan(kernel, fault, part, rows):
    """A fault in a query affects its token. A fault in a key or value affects all tokens."""
    tokens = random_tokens(35, 16)
    tokens[20, part, 1] = to_bf16(np.array(fault))
    is_number = np.isfinite(from_bf16(attend(kernel, tokens)))
    expected = np.ones(35, dtype=np.bool_)
    expected[rows] = False
    assert (is_number[:, 1] == expected[:, None]).all()
    assert is_number[:, [0, 2]].all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sign", [1, -1])
def test_score_that_overflows_makes_its_query_nan(kernel, sign):
    tokens = random_tokens(20, 16)
    tokens[3, 0] = to_bf16(np.array(1e30))
    tokens[3, 1] = to_bf16(np.array(sign * 1e30))
    is_number = np.isfinite(from_bf16(attend(kernel, tokens)))
    np.testing.assert_array_equal(is_number.any(axis=(1, 2)), np.arange(20) != 3)


def test_instructions_are_those_of_the_processor():
    """Zig compiles the wheels, and its ``__builtin_cpu_supports`` finds no instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no list of the processor's instructions on this machine")
    flags = set(cpuinfo.read_text().split())
    needed = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
    assert multiplies_bf16() == (needed <= flags)
    sources = Path(virnucpro.__file__).parent.rglob("*.[ch]")
    assert not [path.name for path in sources if "__builtin_cpu_supports(" in path.read_text()]
