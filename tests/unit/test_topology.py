"""Terminal repeats are found where they were inserted, and nothing else counts as one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.core.types import reverse_complement
from virnucpro.viral.taxonomy import topologies
from virnucpro.viral.windows import Windows

SHORTEST = 21  # bases of a repeat


def topology_of(sequence: str) -> tuple[str, int]:
    return topologies(Windows.from_sequences([sequence]), [False])[0]


def bases(n: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=n))


def different_from(base: str) -> str:
    return "C" if base == "A" else "A"


@pytest.mark.parametrize("kind", ["DTR", "ITR"])
@given(n=st.integers(SHORTEST, 900), seed=st.integers(0, 10**6))
def test_terminal_repeat_from_21_bases(kind: str, n: int, seed: int) -> None:
    repeat = bases(n, seed)
    inner = "A" + bases(2_000, seed + 1) + "A"  # A is not the complement of A
    last = repeat if kind == "DTR" else reverse_complement(repeat)
    assert topology_of(repeat + inner + last) == (kind, n)


@given(n=st.integers(0, SHORTEST - 1), seed=st.integers(0, 10**6))
def test_shorter_repeat_does_not_count(n: int, seed: int) -> None:
    repeat = bases(n, seed)
    direct = repeat + "A" + bases(2_000, seed + 1) + repeat
    inverted = repeat + "A" + bases(2_000, seed + 1) + "A" + reverse_complement(repeat)
    # by chance the base before the second copy may prolong it, but not the start of the sequence
    assert topology_of(direct) == ("linear", 0)
    assert topology_of(inverted) == ("linear", 0)


@given(seed=st.integers(0, 10**6))
def test_both_strands_have_the_same_topology(seed: int) -> None:
    choose = random.Random(seed)
    repeat = bases(choose.randrange(10, 200), seed)
    end = choose.choice([repeat, reverse_complement(repeat), ""])
    sequence = repeat + bases(choose.randrange(300, 3_000), seed + 1) + end
    forward = topology_of(sequence)
    assert topology_of(reverse_complement(sequence)) == forward


@pytest.mark.parametrize(
    "repeat", ["A" * 60, "AC" * 30, "GGT" * 20, "AATTCG" * 10, "N" * 60, "ACGTTGCAAG" + "N" * 50]
)
def test_low_complexity_repeat_does_not_count(repeat: str) -> None:
    for end in (repeat, repeat[::-1], reverse_complement(repeat)):
        sequence = repeat + bases(3_000, 1) + end
        assert topology_of(sequence) == ("linear", 0), repeat


def test_repeat_everywhere_does_not_count() -> None:
    repeat = bases(40, 1)
    sequence = "".join(repeat + bases(200, i) for i in range(2, 12)) + repeat
    assert topology_of(sequence) == ("linear", 0)


def test_repeat_may_differ_in_one_of_fifty() -> None:
    repeat = bases(200, 1)
    inner = bases(2_000, 2)
    changed = list(repeat)
    for place in (50, 100, 150, 199):
        changed[place] = different_from(changed[place])
    assert topology_of(repeat + inner + "".join(changed)) == ("DTR", 200)
    changed[75] = different_from(changed[75])
    assert topology_of(repeat + inner + "".join(changed)) == ("linear", 0)
