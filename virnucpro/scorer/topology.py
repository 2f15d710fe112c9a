"""The ends of a sequence: terminal repeats that are direct or inverted, or a circle by its header.

A direct repeat is what an assembler leaves of a circle, and what many linear genomes end in: the
sequence alone does not say which. CheckV and geNomad ask for more than 20 bases that agree
exactly (Nayfach et al. 2021, doi:10.1038/s41587-020-00774-7; Camargo et al. 2024,
doi:10.1038/s41587-023-01953-y), and so does this module; behind those, one base in fifty may
differ. Repeats of low complexity are left out: CheckV's limits are a fifth of unknown bases,
three quarters of one base, and eight places in the sequence. Tandem repeats of short units count
as such, too.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from virnucpro.scorer.pieces import UNKNOWN, Digits, encode, opposite_strand

Topology: TypeAlias = Literal["linear", "DTR", "ITR", "circular"]

SHORTEST = 21  # bases of a terminal repeat
BASES_PER_MISMATCH = 50
MOST_UNKNOWN, MOST_OF_ONE_BASE = 0.2, 0.75  # shares of a repeat
MOST_PLACES = 8  # of its first bases in the sequence
LONGEST_UNIT = 6  # bases of a unit of a tandem repeat
MOST_TANDEM = 0.8  # share of a repeat that agrees with itself, moved by a unit


def topology_of(sequence: str, *, is_circle: bool) -> tuple[Topology, int]:
    """The topology of a whole record, and the bases of its terminal repeat; 0 without one.

    ``is_circle``: its header says so, and then it is.
    """
    digits = encode(sequence)
    n_direct = direct_repeat(digits)
    if is_circle:
        return "circular", n_direct
    if n_direct:
        return "DTR", n_direct
    n_inverted = inverted_repeat(digits)
    return ("ITR", n_inverted) if n_inverted else ("linear", 0)


def direct_repeat(digits: Digits) -> int:
    """Bases of the longest repeat of the first half that ends the sequence; 0: none. (n,)"""
    text, seed = digits.tobytes(), digits[:SHORTEST].tobytes()
    if 2 * len(seed) > len(text) or is_plain(digits[:SHORTEST]) or text.count(seed) > MOST_PLACES:
        return 0
    place = text.find(seed, (len(text) + 1) // 2)
    while place >= 0:
        first, last = digits[: len(text) - place], digits[place:]
        if _agree(first, last) and not is_plain(first):
            return len(first)
        place = text.find(seed, place + 1)
    return 0


def inverted_repeat(digits: Digits) -> int:
    """Bases from the start that the other strand starts with, too; 0 for too few. (n,)"""
    half = len(digits) // 2
    first, other = digits[:half], opposite_strand(digits)[:half]
    differs = np.flatnonzero(first != other)
    n_bases = int(differs[0]) if len(differs) else half
    return 0 if n_bases < SHORTEST or is_plain(first[:n_bases]) else n_bases


def _agree(first: Digits, last: Digits) -> bool:
    n_different = int(np.count_nonzero(first != last))
    return n_different <= len(first) // BASES_PER_MISMATCH


def is_plain(repeat: Digits) -> bool:
    """Whether a repeat is of low complexity: unknown, of one base, or of a short unit. (n,)"""
    counts = np.bincount(repeat, minlength=UNKNOWN + 1)
    if counts[UNKNOWN] > MOST_UNKNOWN * len(repeat):
        return True
    if counts[:UNKNOWN].max() > MOST_OF_ONE_BASE * len(repeat):
        return True
    units = range(1, min(LONGEST_UNIT, len(repeat) - 1) + 1)
    same = (np.count_nonzero(repeat[unit:] == repeat[:-unit]) for unit in units)
    return any(n / (len(repeat) - unit) > MOST_TANDEM for n, unit in zip(same, units, strict=True))
