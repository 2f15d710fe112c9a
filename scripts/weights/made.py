"""Make synthetic negatives: sequences that users have, but no collection.

They are homopolymers, tandem repeats, mixtures of both with random sequence, random sequence with a
GC of 0.2 to 0.8, and shuffled cellular sequences with the same dinucleotide frequencies.
"""

from __future__ import annotations

import numpy as np

from virnucpro.sequences.open_codes import Digits

KINDS = ("homopolymer", "tandem repeat", "patchwork", "random", "shuffled")
_LONGEST_UNIT = 12  # bases of a tandem repeat
_ERRORS = (0.0, 0.01, 0.05, 0.15)  # of the bases of a repeat
_GC = (0.2, 0.8)


def make_sequence(kind: str, n_bases: int, cells: Digits, rng: np.random.Generator) -> Digits:
    """Make one sequence of a kind; ``cells`` is the sequence to shuffle. (n_bases,)"""
    match kind:
        case "homopolymer":
            return _repeat(1, n_bases, rng)
        case "tandem repeat":
            n_unit = int(rng.integers(2, _LONGEST_UNIT, endpoint=True))
            return _repeat(n_unit, n_bases, rng)
        case "patchwork":
            return _patchwork(n_bases, rng)
        case "random":
            return _random(n_bases, rng)
        case "shuffled":
            return shuffle_dinucleotides(cells, rng)
    raise ValueError(f"made sequences of the kind {kind!a}")


def _repeat(n_unit: int, n_bases: int, rng: np.random.Generator) -> Digits:
    """Repeat a random unit of ``n_unit`` bases, with or without errors."""
    digits = np.resize(rng.integers(4, size=n_unit), n_bases).astype(np.uint8)
    is_error = rng.random(n_bases) < rng.choice(_ERRORS)
    digits[is_error] = rng.integers(4, size=int(is_error.sum()))
    return digits


def _random(n_bases: int, rng: np.random.Generator) -> Digits:
    gc = rng.uniform(*_GC)
    chances = [(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]
    return rng.choice(4, size=n_bases, p=chances).astype(np.uint8)


def _patchwork(n_bases: int, rng: np.random.Generator) -> Digits:
    """Stretches of 20 to 199 bases, alternately repeats and random sequence."""
    parts: list[Digits] = []
    while sum(map(len, parts)) < n_bases:
        n_part = int(rng.integers(20, 200))
        n_unit = int(rng.integers(1, _LONGEST_UNIT, endpoint=True))
        parts.append(_random(n_part, rng) if len(parts) % 2 else _repeat(n_unit, n_part, rng))
    return np.concatenate(parts)[:n_bases]


def shuffle_dinucleotides(digits: Digits, rng: np.random.Generator) -> Digits:
    """A random sequence with nearly the same frequencies of dinucleotides. (n,) -> (n,)

    A Markov chain draws each base by how often it follows the previous one.
    """
    known = digits[digits < 4].astype(np.int64)
    counts = np.bincount(4 * known[:-1] + known[1:], minlength=16).reshape(4, 4) + 0.1
    limits = np.cumsum(counts / counts.sum(axis=1, keepdims=True), axis=1)
    limits[:, 3] = 1
    base = int(rng.integers(4))
    bases = []
    rows = limits.tolist()
    for draw in rng.random(len(digits)).tolist():
        row = rows[base]
        base = 0 if draw < row[0] else 1 if draw < row[1] else 2 if draw < row[2] else 3
        bases.append(base)
    return np.array(bases, dtype=np.uint8)
