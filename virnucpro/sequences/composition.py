"""The composition of a frame's coding strand: a second input of a head.

Codons show how a genome spells its amino acids, which the language model cannot see. Frames
come as the bases of whole codons, in the order in which they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from virnucpro.ground.records import Orf
from virnucpro.sequences.translate import reverse_complement

N_CODONS, N_TETRANUCLEOTIDES, N_BORDERS = 64, 256, 16
N_FEATURES = N_CODONS + N_TETRANUCLEOTIDES + N_BORDERS
_GAP = "NNN"  # between two frames, so that no word of four bases and no border spans both

# a letter that is not ACGTU is a digit so large that no word with it is one of those counted
BASE_DIGITS = np.full(256, N_TETRANUCLEOTIDES, dtype=np.uint16)
for _digit, _base in enumerate("ACGT"):
    BASE_DIGITS[[ord(_base), ord(_base.lower())]] = _digit
BASE_DIGITS[[ord("U"), ord("u")]] = BASE_DIGITS[ord("T")]


def frame_bases(orf: Orf, sequence: str) -> str:
    """The bases of a frame on its own strand, cut from the sequence of its record."""
    bases = sequence[orf.start : orf.end]
    return reverse_complement(bases) if orf.strand == "-" else bases


def frame_composition(frames: Sequence[str]) -> NDArray[np.float32]:
    """The frequencies of each frame's codons, tetranucleotides and codon borders. n -> (n, 336)

    The fractions of the 64 codons in frame, of the 256 tetranucleotides at every position, and of
    the 16 pairs of a codon's last base and the next one's first, each in the order AAA, AAC, AAG,
    AAT, ACA ... Words with a letter other than ACGTU, in either case, count nowhere; each of the
    three parts sums to 1, or to 0 where a frame has no such word.
    """
    lengths = np.array([len(bases) for bases in frames], dtype=np.int64)
    assert not (lengths % 3).any(), "a frame is whole codons"
    text = (_GAP.join(frames) + _GAP).encode("ascii", "replace")
    digits = BASE_DIGITS[np.frombuffer(text, dtype=np.uint8)]
    row_of_codon = np.repeat(np.arange(len(frames)), lengths // 3 + 1)
    by_codon = digits[: 3 * len(row_of_codon)].reshape(-1, 3)
    codons = 16 * by_codon[:, 0] + 4 * by_codon[:, 1] + by_codon[:, 2]
    pairs = 4 * digits[:-1] + digits[1:]
    tetranucleotides = 16 * pairs[:-2] + pairs[2:]
    row_of_base = np.repeat(row_of_codon, 3)[:-3]
    borders = pairs[2:-1:3]
    features = np.empty((len(frames), N_FEATURES), dtype=np.float32)
    last = N_CODONS + N_TETRANUCLEOTIDES
    features[:, :N_CODONS] = _fractions(codons, row_of_codon, len(frames), N_CODONS)
    features[:, N_CODONS:last] = _fractions(
        tetranucleotides, row_of_base, len(frames), N_TETRANUCLEOTIDES
    )
    features[:, last:] = _fractions(borders, row_of_codon[:-1], len(frames), N_BORDERS)
    return features


def _fractions(
    words: NDArray[np.uint16], rows: NDArray[np.int64], n_rows: int, n_words: int
) -> NDArray[np.float64]:
    """The share of each word below ``n_words`` among those of a row. -> (n_rows, n_words)"""
    is_counted = words < n_words
    keys = rows[is_counted] * n_words + words[is_counted]
    counts = np.bincount(keys, minlength=n_rows * n_words).reshape(n_rows, n_words)
    totals = counts.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = counts / np.maximum(totals, 1)
    return shares
