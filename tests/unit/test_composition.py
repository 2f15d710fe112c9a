"""Composition features of a frame's bases: fractions that can be counted by hand."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.core.types import Orf
from virnucpro.sequences.kmers import (
    N_FEATURES,
    frame_composition,
)

PARTS = {  # the words of each part, in order
    "codons": ["".join(word) for word in product("ACGT", repeat=3)],
    "tetranucleotides": ["".join(word) for word in product("ACGT", repeat=4)],
    "borders": ["".join(word) for word in product("ACGT", repeat=2)],
}
frames = st.lists(st.text("ACGTacgtNnURY-", min_size=3, max_size=3), max_size=40).map("".join)


def words_of(bases: str, part: str) -> list[str]:
    match part:
        case "codons":
            return [bases[i : i + 3] for i in range(0, len(bases), 3)]
        case "tetranucleotides":
            return [bases[i : i + 4] for i in range(len(bases) - 3)]
    return [bases[i : i + 2] for i in range(2, len(bases) - 3, 3)]


def naive_composition(bases: str) -> list[float]:
    """Count one word at a time."""
    values: list[float] = []
    for part, names in PARTS.items():
        counts = Counter(
            word for word in words_of(bases.upper().replace("U", "T"), part) if word in set(names)
        )
        values += [counts[name] / max(1, counts.total()) for name in names]
    return values


@given(st.lists(frames, max_size=8))
def test_frame_has_fractions_of_its_words(given_frames: list[str]) -> None:
    found = frame_composition(given_frames)
    assert found.shape == (len(given_frames), N_FEATURES) and found.dtype == np.float32
    for row, bases in zip(found, given_frames, strict=True):
        expected = np.array(naive_composition(bases), dtype=np.float64).astype(np.float32)
        assert np.array_equal(row, expected)


def test_words_are_in_order_of_bases() -> None:
    (row,) = frame_composition(["AACGTTTTT"])
    expected = {
        **{f"codon {word}": 1 / 3 for word in ("AAC", "GTT", "TTT")},
        **{f"tetra {word}": 1 / 6 for word in ("AACG", "ACGT", "CGTT", "GTTT")},
        "tetra TTTT": 2 / 6,
        "border CG": 1 / 2,
        "border TT": 1 / 2,
    }
    names = [
        *(f"codon {word}" for word in PARTS["codons"]),
        *(f"tetra {word}" for word in PARTS["tetranucleotides"]),
        *(f"border {word}" for word in PARTS["borders"]),
    ]
    found = {name: float(value) for name, value in zip(names, row, strict=True) if value}
    assert found == pytest.approx(expected, rel=1e-7)  # float32


def test_reverse_frame_is_complemented() -> None:
    orf = Orf("r_chunk_1R1", "r_chunk_1", "r", 2, 8, "-", "MK")
    assert orf.coding_sequence("GGttNCATGG") == "ATGNAA"
