"""Find sequences that seem to use another genetic code, by their long open stretches.

Sequences are read as digits: A, C, G and T (or U), in either case, are 0 to 3. Any other letter is
4.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cache
from math import exp, prod

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import IntArray
from virnucpro.core.recipe import Recipe
from virnucpro.core.types import Records, reverse_complement
from virnucpro.sequences.genetic_code import STANDARD

Digits = NDArray[np.uint8]

UNKNOWN = 4
N_CODES = 125  # codon codes: 25 a + 5 b + c for three digits, including unknown letters
_ENCODED_AT_ONCE = 1_000_000  # letters
OPEN_CODONS = 100  # codons in the shortest open stretch that indicates another code
_OPEN_RATIO = 2.5  # minimum ratio of the longest open stretches, other code to bacterial code
_MAX_GC = 0.45  # at higher GC, wrong frames in genes are open too
# genetic code -> bacterial stops that it reads as residues, for codes whose open stretches are
# compared. Codes with fewer such stops come first
_READ_ON: Mapping[int, tuple[str, ...]] = {
    STANDARD.number: (),
    4: ("TGA",),
    15: ("TAG",),
    6: ("TAA", "TAG"),
}


def find_alternative_codes(
    records: Records, indices: Sequence[int], recipe: Recipe
) -> dict[int, str]:
    """Return notes on the records that seem to use another genetic code, by index."""
    if recipe.input_type != "nucleotide" or recipe.genetic_code not in (1, 11):
        return {}
    codes = find_open_codes([records.sequences[index] for index in indices])
    return {
        index: f"open in genetic code {number}, not in {recipe.genetic_code}"
        for index, number in zip(indices, codes, strict=True)
        if number
    }


def find_open_codes(sequences: Sequence[str]) -> list[int | None]:
    """Find the code under which each sequence has a long stretch that the bacterial code closes.

    The longest stretch in any frame must be unlikely in a random sequence with these bases, and 2.5
    times as long as the longest one under the bacterial code. If no code qualifies, the result is
    None. Short sequences always get None.
    """
    shortest_coded = 2000  # bases
    codes: list[int | None] = [None] * len(sequences)
    indices = [i for i, sequence in enumerate(sequences) if len(sequence) >= shortest_coded]
    counts, longest = _longest_open([sequences[index] for index in indices])
    lengths = np.array([len(sequences[index]) for index in indices], dtype=np.int64)
    shares = counts / lengths[:, None]
    least = np.maximum(OPEN_CODONS, _OPEN_RATIO * longest[:, :1])
    is_open = (shares[:, 1] + shares[:, 2] <= _MAX_GC) & (longest[:, 1:] >= least).any(axis=1)
    for row in np.flatnonzero(is_open).tolist():
        base_shares = dict(zip("ACGT", shares[row].tolist(), strict=True))
        codons = dict(zip(_READ_ON, longest[row].tolist(), strict=True))
        codes[indices[row]] = _best_open_code(codons, base_shares, int(lengths[row]))
    return codes


def _longest_open(sequences: Sequence[str]) -> tuple[IntArray, IntArray]:
    """Count the bases, and measure the longest open stretch under each code, in codons.

    All six frames are searched. The stretch is 0 if GC exceeds ``_MAX_GC``.

    Returns:
        (n, 4) base counts and (n, n_codes) codons.
    """
    n = len(sequences)
    lengths = np.array(list(map(len, sequences)), dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    digits = encode("".join(sequences))
    counts = np.empty((n, 4), dtype=np.int64)
    longest = np.empty((n, len(_READ_ON)), dtype=np.int64)
    call(
        "longest_open",
        digits,
        starts,
        lengths,
        n,
        _stop_by_code(),
        _ends_by_code(),
        len(_READ_ON),
        _MAX_GC,
        counts,
        longest,
    )
    return counts, longest


def _best_open_code(
    open_codons: Mapping[int, int], shares: Mapping[str, float], n_bases: int
) -> int | None:
    """Return the genetic code of a sequence, given its longest open stretch under each code.

    For the bacterial code, return None.
    """
    max_by_chance = 1e-3  # such stretches in a random sequence with these bases
    same_length = 0.8  # a code with fewer reassigned stops needs this share of the longest stretch
    closed = open_codons[STANDARD.number]
    lengths = {}
    for number, stops in _READ_ON.items():
        if not stops:
            continue
        longest = open_codons[number]
        chances = _stop_chances(shares, read_on=stops)
        n_by_chance = n_bases * sum(chance * exp(-longest * chance) for chance in chances)
        if longest >= max(OPEN_CODONS, _OPEN_RATIO * closed) and n_by_chance < max_by_chance:
            lengths[number] = longest
    longest = max(lengths.values(), default=0)
    return next((number for number in lengths if lengths[number] >= same_length * longest), None)


def _stop_chances(shares: Mapping[str, float], read_on: Container[str]) -> tuple[float, float]:
    """Return the probability that a random codon closes a stretch, for each strand.

    Stops in ``read_on`` do not close a stretch.
    """
    closing = [stop for stop in STANDARD.stops if stop not in read_on]
    opposite = {base: shares[reverse_complement(base)] for base in "ACGT"}
    forward = sum(prod(shares[base] for base in stop) for stop in closing)
    return forward, sum(prod(opposite[base] for base in stop) for stop in closing)


@cache
def _ends_by_code() -> Digits:
    """Return whether a codon ends a stretch under each code, by its kind in ``_stop_by_code``."""
    ends = np.zeros((len(_READ_ON), 1 + 2 * len(STANDARD.stops)), dtype=np.uint8)
    for row, read_on in enumerate(_READ_ON.values()):
        is_stop = [stop not in read_on for stop in STANDARD.stops]
        ends[row, 1:] = is_stop + is_stop
    return ends


@cache
def _stop_by_code() -> Digits:
    """Classify each codon: 0 no stop, 1 to 3 a stop, 4 to 6 a stop on the other strand. (125,)"""
    stops = np.zeros(N_CODES, dtype=np.uint8)
    for number, stop in enumerate(STANDARD.stops, 1):
        stops[genetic_code(stop)] = number
        stops[genetic_code(reverse_complement(stop))] = 3 + number
    return stops


def encode(sequence: str) -> Digits:
    """Encode a sequence as digits, in parts to save memory. (n_bases,)"""
    digits = np.empty(len(sequence), dtype=np.uint8)
    for first in range(0, len(sequence), _ENCODED_AT_ONCE):
        part = sequence[first : first + _ENCODED_AT_ONCE].encode("ascii", "replace")
        call("encode_bases", np.frombuffer(part, np.uint8), len(part), digits[first:])
    return digits


def genetic_code(codon: str) -> int:
    """Return the number of a codon.

    >>> genetic_code("AAA"), genetic_code("TTT"), genetic_code("NNN")
    (0, 93, 124)
    """
    a, b, c = ("ACGTN".index(base) for base in codon)
    return 25 * a + 5 * b + c
