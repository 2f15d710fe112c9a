"""Training data is recognised in any piece of it, on either strand. Other sequences are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.core.types import reverse_complement
from virnucpro.sequences.kmers import Sketch


def random_bases(n_bases: int, seed: int) -> str:
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), n_bases))


def mutated(bases: str, share: float, seed: int) -> str:
    rng = np.random.default_rng(seed)
    letters = np.array(list(bases))
    places = rng.choice(len(bases), round(share * len(bases)), replace=False)
    letters[places] = rng.choice(list("ACGT"), len(places))
    return "".join(letters)


def test_known_sequence_on_both_strands() -> None:
    genome = random_bases(60_000, seed=1)
    known = Sketch.from_sequences(genome)
    for start in range(0, 60_000, 4_000):
        piece = genome[start : start + 4_000]
        spellings = (piece, reverse_complement(piece), piece.lower(), piece.replace("T", "U"))
        assert [Sketch.from_sequences(one).containment(known) for one in spellings] == [1.0] * 4


def test_relative_is_known_by_shared_words() -> None:
    genome = random_bases(200_000, seed=2)
    known = Sketch.from_sequences(genome)
    assert Sketch.from_sequences(random_bases(200_000, seed=3)).containment(known) < 0.01
    # one base in 50 is redrawn and three in four of these differ. A word is unchanged with
    # probability (1 - 0.015) ** 31 = 0.63. In 2,000 sampled words the share is within 0.05 of it.
    relative = Sketch.from_sequences(mutated(genome, 0.02, seed=4))
    assert relative.containment(known) == pytest.approx((1 - 0.015) ** Sketch.K, abs=0.05)


def test_one_word_in_a_hundred_is_sampled() -> None:
    n_words = 1_000_000 - Sketch.K + 1
    n_sampled = Sketch.from_sequences(random_bases(1_000_000, seed=5)).hashes.size
    # a binomial count: six standard deviations of 100
    assert n_sampled == pytest.approx(n_words / Sketch.ONE_IN, abs=600)


def test_words_with_unknown_bases_are_ignored() -> None:
    genome = random_bases(40_000, seed=6)
    with_gaps = "N".join(genome[i : i + 30] for i in range(0, 40_000, 30))
    assert not Sketch.from_sequences(with_gaps).hashes.size
    assert not Sketch.from_sequences("").hashes.size and not Sketch.from_sequences("").containment(
        Sketch.from_sequences(genome)
    )
    assert not Sketch.from_sequences(genome).containment(Sketch.from_sequences(""))


@given(st.sets(st.integers(0, 2**32 - 1)))
def test_sketch_is_read_back_as_packed(hashes: set[int]) -> None:
    sketch = Sketch(np.array(sorted(hashes), dtype=np.uint32))
    assert Sketch.unpack(sketch.pack()).hashes.tolist() == sketch.hashes.tolist()


def test_damaged_sketch_is_refused() -> None:
    packed = Sketch(np.array([2**32 - 1], dtype=np.uint32)).pack()
    for damaged in (np.append(packed, np.uint16(0)), packed.astype(np.int64), packed[None]):
        with pytest.raises(ValueError, match="gaps"):
            Sketch.unpack(damaged)
