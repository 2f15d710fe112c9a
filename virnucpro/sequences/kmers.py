"""Count k-mers of bases: frame composition on the coding strand, and k-mer sketches.

Protein language models cannot see codon usage, so a head may read it as a second input. A frame is
passed as the bases of its complete codons, in coding direction.

A sketch is a sample of k-mers, used to recognise pieces of training data. FracMinHash (Irber et al.
2022, doi:10.1101/2022.01.11.475838) samples the k-mers with the lowest hashes, so it samples the
same k-mers in every sequence. A k-mer and its reverse complement count as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import mix_hashes
from virnucpro.sequences.base_digits import BASE_DIGITS

N_FEATURES = 64 + 256 + 16  # codons, tetranucleotides and codon borders

_Hashes = NDArray[np.uint32]
_Gaps = NDArray[np.uint16]


# Composition


def frame_composition(frames: Sequence[str]) -> NDArray[np.float32]:
    """Return the codon, tetranucleotide and codon border frequencies of each frame.

    The columns are 64 codons in frame, 256 tetranucleotides at every position, and 16 pairs (a
    codon's last base and the next codon's first base). Each part is sorted AAA, AAC, AAG, AAT, ACA
    ... K-mers with a letter other than ACGTU, in either case, are not counted. Each part sums to 1,
    or to 0 if a frame has no valid k-mer.

    Args:
        frames: n strings of complete codons.

    Returns:
        (n, 336) float32.
    """
    lengths = np.array([len(bases) for bases in frames], dtype=np.int64)
    assert not (lengths % 3).any(), "a frame is whole codons"
    text = np.frombuffer("".join(frames).encode("ascii", "replace"), dtype=np.uint8)
    shares = np.empty((len(frames), N_FEATURES), dtype=np.float32)
    call("frame_composition", text, lengths, len(frames), BASE_DIGITS, shares)
    return shares


# Sketches


def _no_hashes() -> _Hashes:
    return np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Hashes of the sampled k-mers in some sequences."""

    K = 31
    ONE_IN = 100  # sample one in this many k-mers
    _FULL_GAP = np.iinfo(np.uint16).max  # continues a gap that is too long for 16 bits

    hashes: _Hashes = field(default_factory=_no_hashes)  # sorted and unique

    @classmethod
    def from_sequences(cls, sequence: str) -> Sketch:
        """Sample the 31-mers of A, C, G, T and U, in either case: about one per 100 bases.

        >>> Sketch.from_sequences("ACGT" * 7).hashes.size  # shorter than a k-mer
        0
        """
        span = 1_000_000  # k-mers per step, so that memory does not grow with the sequence
        spans = range(0, len(sequence) - cls.K + 1, span)
        return cls.merge(cls(_hash_kmers(sequence[i : i + span + cls.K - 1])) for i in spans)

    @classmethod
    def merge(cls, sketches: Iterable[Sketch]) -> Sketch:
        """Merge sketches into one."""
        hashes = [sketch.hashes for sketch in sketches]
        return cls(np.unique(np.concatenate([_no_hashes(), *hashes])))

    @classmethod
    def unpack(cls, gaps: _Gaps) -> Sketch:
        """Restore a sketch from the gaps between its hashes.

        Raises:
            ValueError: the array does not contain gaps between hashes.
        """
        if gaps.dtype != np.uint16 or gaps.ndim != 1:
            raise ValueError("gaps between hashes are a row of uint16")
        is_hash = gaps != cls._FULL_GAP
        hashes = np.cumsum(gaps.astype(np.int64) + is_hash)[is_hash] - 1
        if len(hashes) and hashes[-1] > np.iinfo(np.uint32).max:
            raise ValueError("gaps lead beyond the largest hash")
        return cls(hashes.astype(np.uint32))

    def pack(self) -> _Gaps:
        """Return the gaps between hashes, the first counted from -1. In large sketches, most gaps
        fit into two bytes.
        """
        gaps = np.diff(self.hashes.astype(np.int64), prepend=-1) - 1
        n_full, remainder = np.divmod(gaps, self._FULL_GAP)
        packed = np.full(int((n_full + 1).sum()), self._FULL_GAP, dtype=np.uint16)
        packed[np.cumsum(n_full + 1) - 1] = remainder
        return packed

    def containment(self, other: Sketch) -> float:
        """Return the share of these k-mers that ``other`` also has, or 0 if a sketch is empty."""
        if not len(self.hashes) or not len(other.hashes):
            return 0.0
        positions = np.minimum(np.searchsorted(other.hashes, self.hashes), len(other.hashes) - 1)
        return float((other.hashes[positions] == self.hashes).mean())


def _hash_kmers(sequence: str) -> _Hashes:
    digits = BASE_DIGITS[np.frombuffer(sequence.encode("ascii", "replace"), dtype=np.uint8)]
    k = Sketch.K
    n_kmers = len(digits) - k + 1
    n_unknown = np.concatenate([[0], np.cumsum(digits > 3)])
    is_valid = n_unknown[k:] == n_unknown[:-k]
    bases = (digits & 3).astype(np.uint64)
    forward, backward = np.zeros((2, n_kmers), dtype=np.uint64)
    for position in range(k):
        base = bases[position : position + n_kmers]
        forward |= base << np.uint64(2 * (k - 1 - position))
        backward |= (np.uint64(3) - base) << np.uint64(2 * position)
    hashes = mix_hashes(np.minimum(forward, backward)[is_valid])
    return np.unique(hashes[hashes < np.uint64(2**64 // Sketch.ONE_IN)].astype(np.uint32))
