"""Count words of bases: the composition of a frame's coding strand, and sketches of k-mers.

Codon usage is invisible to a protein language model, so a head may read it as a second input. A
frame is passed as the bases of its whole codons, in coding direction.

A sketch is a sample of the k-mers of sequences, to recognise pieces of training data. FracMinHash
(Irber et al. 2022, doi:10.1101/2022.01.11.475838) samples the k-mers with the lowest hashes, so it
samples the same k-mers in every sequence. A k-mer and its reverse complement count as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.numeric import mix_hashes
from virnucpro.sequences.base_digits import BASE_DIGITS, N_TETRANUCLEOTIDES

N_CODONS = 64
N_BORDERS = 16
N_FEATURES = N_CODONS + N_TETRANUCLEOTIDES + N_BORDERS
_GAP = "NNN"  # separates frames, so that no word of four bases and no border spans two

K = 31
ONE_IN = 100  # one in this many k-mers is sampled

_Hashes = NDArray[np.uint32]
_Gaps = NDArray[np.uint16]
_SPAN = 1_000_000  # words at once: memory does not grow with the sequence
_FULL_GAP = np.iinfo(np.uint16).max  # continues a gap that is too long for 16 bits


# Composition


def frame_composition(frames: Sequence[str]) -> NDArray[np.float32]:
    """The frequencies of codons, tetranucleotides and codon borders of each frame. n -> (n, 336)

    In order: 64 codons in frame; 256 tetranucleotides at every position; 16 pairs of a codon's last
    base and the next codon's first base. Each part is sorted AAA, AAC, AAG, AAT, ACA ... Words with
    a letter other than ACGTU, in either case, are not counted. Each part sums to 1, or to 0 if a
    frame has no such word.
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
    """The share of each word below ``n_words`` among these words of a row. -> (n_rows, n_words)"""
    is_counted = words < n_words
    keys = rows[is_counted] * n_words + words[is_counted]
    counts = np.bincount(keys, minlength=n_rows * n_words).reshape(n_rows, n_words)
    totals = counts.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = counts / np.maximum(totals, 1)
    return shares


# Sketches


def _no_hashes() -> _Hashes:
    return np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """The hashes of the sampled k-mers of some sequences."""

    hashes: _Hashes = field(default_factory=_no_hashes)  # sorted, each once

    @classmethod
    def from_sequences(cls, sequence: str) -> Sketch:
        """Sample the 31-mers of A, C, G, T and U, in either case: about one per 100 bases.

        >>> Sketch.from_sequences("ACGT" * 7).hashes.size  # shorter than a word
        0
        """
        spans = range(0, len(sequence) - K + 1, _SPAN)
        return cls.merge(cls(_hash_kmers(sequence[i : i + _SPAN + K - 1])) for i in spans)

    @classmethod
    def merge(cls, sketches: Iterable[Sketch]) -> Sketch:
        """Merge some sketches into one."""
        each = [sketch.hashes for sketch in sketches]
        return cls(np.unique(np.concatenate([_no_hashes(), *each])))

    @classmethod
    def unpack(cls, gaps: _Gaps) -> Sketch:
        """
        Raises:
            ValueError: these are not gaps between hashes.
        """
        if gaps.dtype != np.uint16 or gaps.ndim != 1:
            raise ValueError("gaps between hashes are a row of uint16")
        is_hash = gaps != _FULL_GAP
        hashes = np.cumsum(gaps.astype(np.int64) + is_hash)[is_hash] - 1
        if len(hashes) and hashes[-1] > np.iinfo(np.uint32).max:
            raise ValueError("gaps lead beyond the largest hash")
        return cls(hashes.astype(np.uint32))

    def pack(self) -> _Gaps:
        """The gaps between hashes, the first from -1; if many, most fit into two bytes."""
        gaps = np.diff(self.hashes.astype(np.int64), prepend=-1) - 1
        n_full, rest = np.divmod(gaps, _FULL_GAP)
        packed = np.full(int((n_full + 1).sum()), _FULL_GAP, dtype=np.uint16)
        packed[np.cumsum(n_full + 1) - 1] = rest
        return packed

    def containment(self, other: Sketch) -> float:
        """The share of these k-mers that another sketch also has; 0 if either is empty."""
        if not len(self.hashes) or not len(other.hashes):
            return 0.0
        places = np.minimum(np.searchsorted(other.hashes, self.hashes), len(other.hashes) - 1)
        return float((other.hashes[places] == self.hashes).mean())


def _hash_kmers(sequence: str) -> _Hashes:
    digits = BASE_DIGITS[np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8)]
    n_words = len(digits) - K + 1
    n_others = np.concatenate([[0], np.cumsum(digits > 3)])
    is_whole = n_others[K:] == n_others[:-K]
    bases = (digits & 3).astype(np.uint64)
    forward, backward = np.zeros((2, n_words), dtype=np.uint64)
    for place in range(K):
        base = bases[place : place + n_words]
        forward |= base << np.uint64(2 * (K - 1 - place))
        backward |= (np.uint64(3) - base) << np.uint64(2 * place)
    hashes = mix_hashes(np.minimum(forward, backward)[is_whole])
    return np.unique(hashes[hashes < np.uint64(2**64 // ONE_IN)].astype(np.uint32))
