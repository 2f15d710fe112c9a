"""Generate synthetic negatives: low-complexity sequences that occur in samples, not in databases.

They are homopolymers, tandem repeats, mosaics of repeats and random sequence, random sequence with
a GC content of 0.2 to 0.8, and cellular sequences shuffled with their dinucleotide frequencies.
"""

from __future__ import annotations

import numpy as np

from virnucpro.sequences.open_codes import Digits

NEGATIVE_KINDS = ("homopolymer", "tandem repeat", "mosaic", "random", "shuffled")
_MAX_UNIT_BASES = 12  # of a tandem repeat
_ERROR_RATES = (0.0, 0.01, 0.05, 0.15)  # substitutions per base of a repeat
_GC_RANGE = (0.2, 0.8)


def make_negative(kind: str, n_bases: int, cellular: Digits, rng: np.random.Generator) -> Digits:
    """Make a negative of a kind, (n_bases,). ``cellular`` is the sequence to shuffle."""
    match kind:
        case "homopolymer":
            return _tandem_repeat(1, n_bases, rng)
        case "tandem repeat":
            n_unit = int(rng.integers(2, _MAX_UNIT_BASES, endpoint=True))
            return _tandem_repeat(n_unit, n_bases, rng)
        case "mosaic":
            return _mosaic(n_bases, rng)
        case "random":
            return _random_bases(n_bases, rng)
        case "shuffled":
            return shuffle_dinucleotides(cellular, rng)
    raise ValueError(f"unknown kind of negatives: {kind!a}")


def _tandem_repeat(n_unit: int, n_bases: int, rng: np.random.Generator) -> Digits:
    """Repeat a random unit of ``n_unit`` bases, and substitute some bases."""
    digits = np.resize(rng.integers(4, size=n_unit), n_bases).astype(np.uint8)
    is_error = rng.random(n_bases) < rng.choice(_ERROR_RATES)
    digits[is_error] = rng.integers(4, size=int(is_error.sum()))
    return digits


def _random_bases(n_bases: int, rng: np.random.Generator) -> Digits:
    gc = rng.uniform(*_GC_RANGE)
    probabilities = [(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]
    return rng.choice(4, size=n_bases, p=probabilities).astype(np.uint8)


def _mosaic(n_bases: int, rng: np.random.Generator) -> Digits:
    """Alternate tandem repeats and random sequence, each of 20 to 199 bases."""
    segments: list[Digits] = []
    while sum(map(len, segments)) < n_bases:
        n_segment = int(rng.integers(20, 200))
        n_unit = int(rng.integers(1, _MAX_UNIT_BASES, endpoint=True))
        segments.append(
            _random_bases(n_segment, rng)
            if len(segments) % 2
            else _tandem_repeat(n_unit, n_segment, rng)
        )
    return np.concatenate(segments)[:n_bases]


def shuffle_dinucleotides(digits: Digits, rng: np.random.Generator) -> Digits:
    """Sample a sequence from the first-order Markov chain of another one. (n,) -> (n,)

    Its dinucleotide frequencies are nearly the same.
    """
    known_bases = digits[digits < 4].astype(np.int64)
    counts = np.bincount(4 * known_bases[:-1] + known_bases[1:], minlength=16).reshape(4, 4) + 0.1
    cumulative = np.cumsum(counts / counts.sum(axis=1, keepdims=True), axis=1)
    cumulative[:, 3] = 1
    base = int(rng.integers(4))
    bases = []
    rows = cumulative.tolist()
    for value in rng.random(len(digits)).tolist():
        row = rows[base]
        base = 0 if value < row[0] else 1 if value < row[1] else 2 if value < row[2] else 3
        bases.append(base)
    return np.array(bases, dtype=np.uint8)
