"""Compute protein features: composition, k-mers, and patterns enriched in viruses.

A protein is a row of residue numbers. Proteins are concatenated. U counts as C, and O as K. A stop,
or any other letter without a residue, is ``NO_RESIDUE``. No pair, k-mer or pattern includes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import IntArray
from virnucpro.viral.features import (
    AMINO_ACIDS,
    N_KMER_FEATURES,
    NO_RESIDUE,
    KmerClassTable,
    Residues,
)

SHORTEST = 50  # residues in the shortest protein that is scored
N_RESIDUES = len(AMINO_ACIDS)
N_PAIRS = len(AMINO_ACIDS) ** 2
# similar residues count as one in pairs with a gap
CLASSES = ("AG", "C", "DE", "FWY", "H", "ILMV", "KR", "NQ", "P", "ST")
N_CLASSES = len(CLASSES)
GAPS = (1, 2, 3)  # residues between the two
PATTERNS = ((0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 4), (0, 2, 3, 5))  # offsets of their residues
N_FIGURES = 12
N_PATTERN_FIGURES = 3
N_COMPOSITION = N_RESIDUES + N_PAIRS + len(GAPS) * N_CLASSES**2
N_FEATURES = N_COMPOSITION + N_FIGURES + N_KMER_FEATURES + N_PATTERN_FIGURES * len(PATTERNS)
RATIO_STEP = 1 / 32  # log ratios are integer multiples of it

_NUMBERS = bytearray([NO_RESIDUE]) * 256
for _number, _letter in enumerate(AMINO_ACIDS):
    _NUMBERS[ord(_letter)] = _NUMBERS[ord(_letter.lower())] = _number
for _letter, _like in ("UC", "OK"):
    _NUMBERS[ord(_letter)] = _NUMBERS[ord(_letter.lower())] = AMINO_ACIDS.index(_like)
_CLASS_OF = np.array(
    [[letter in like for like in CLASSES].index(True) for letter in AMINO_ACIDS] + [0], np.uint8
)
# Kyte and Doolittle 1982, doi:10.1016/0022-2836(82)90515-0, in tenths
_HYDROPATHY = np.array(
    [18, 25, -35, -35, 28, -4, -32, 45, -39, 38, 19, -35, -16, -35, -45, -8, -7, 42, -9, -13, 0]
)
_CHARGE = np.array([(letter in "KR") - (letter in "DE") for letter in AMINO_ACIDS] + [0])
_VALUES = np.stack([_HYDROPATHY, _CHARGE], axis=1)
_WINDOW = 19  # residues in a transmembrane helix
_IN_MEMBRANE = 15  # its hydropathy, in tenths
_SIMPLE = 12  # residues in a low-complexity window
_MAX_KINDS = 5  # different residues in it

Features = NDArray[np.float32]
Ratios = NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class Proteins:
    """Concatenated proteins. None is empty."""

    residues: Residues  # (n_residues,)
    lengths: IntArray  # (n,)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def owner(self) -> IntArray:
        """Return each residue's protein index. (n_residues,)"""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def count_known_residues(self) -> IntArray:
        """Count the known residues in each protein. (n,)"""
        n_before = np.zeros(len(self.residues) + 1, dtype=np.int64)
        np.cumsum(self.residues < NO_RESIDUE, out=n_before[1:])
        ends = np.cumsum(self.lengths)
        counts: IntArray = n_before[ends] - n_before[ends - self.lengths]
        return counts

    @classmethod
    def from_sequences(cls, sequences: Sequence[str]) -> Proteins:
        return cls(
            encode_protein("".join(sequences)),
            np.array([len(sequence) for sequence in sequences], dtype=np.int64),
        )


def encode_protein(sequence: str) -> Residues:
    """Convert a sequence to residue numbers. (n_residues,)"""
    return np.frombuffer(sequence.encode("ascii", "replace").translate(bytes(_NUMBERS)), np.uint8)


def protein_features(
    proteins: Proteins, kmers: KmerClassTable, ratios: Sequence[Ratios]
) -> Features:
    """Return each protein's features. n -> (n, 750)"""
    parts = composition(proteins), protein_statistics(proteins)
    return np.hstack([*parts, kmer_features(proteins, kmers, ratios)])


def spelling(proteins: Proteins) -> Features:
    """Return each protein's features that need no table. n -> (n, 732)"""
    return np.hstack([composition(proteins), protein_statistics(proteins)])


def kmer_features(proteins: Proteins, kmers: KmerClassTable, ratios: Sequence[Ratios]) -> Features:
    """Return the k-mers shared with viruses and cells, and log ratios of patterns. n -> (n, 18)

    In order: square roots of k-mer shares, by class; then three statistics for the log
    ratios of each pattern: the mean, the mean of the positive parts, and the root mean square.
    """
    figures = np.empty((len(proteins), N_FEATURES - N_COMPOSITION - N_FIGURES), dtype=np.float32)
    rows = proteins.residues, proteins.lengths, len(proteins)
    call("protein_shared", *rows, *kmers.arguments, *ratios, RATIO_STEP, figures)
    return figures


def composition(proteins: Proteins) -> Features:
    """Return square roots of shares: residues, pairs, and class pairs. -> (n, 720)"""
    shares = np.empty((len(proteins), N_COMPOSITION), dtype=np.float32)
    rows = proteins.residues, proteins.lengths, len(proteins)
    call("protein_composition", *rows, _CLASS_OF, shares)
    return shares


def protein_statistics(proteins: Proteins) -> Features:
    """Return each protein's plain statistics. -> (n, 12)"""
    n = len(proteins)
    residues = proteins.residues
    lengths = proteins.lengths
    windows = np.empty((n, 6), dtype=np.int64)
    counts = np.empty((n, N_RESIDUES + 1), dtype=np.int64)
    sizes = _WINDOW, _IN_MEMBRANE * _WINDOW, _SIMPLE, _MAX_KINDS
    call("protein_windows", residues, lengths, n, _VALUES, *sizes, windows, counts)
    shares = counts[:, :N_RESIDUES] / np.maximum(1, lengths)[:, None]
    highest, lowest, most_charged, least_charged = (windows[:, :4] / _WINDOW).T
    n_windows, n_simple = (np.maximum(1, lengths - size + 1) for size in (_WINDOW, _SIMPLE))
    first = np.cumsum(lengths) - lengths
    return np.stack(
        [
            np.log(lengths),
            -(shares * np.log(np.maximum(shares, 1e-9))).sum(axis=1),
            windows[:, 5] / n_simple,
            (shares * _HYDROPATHY[:N_RESIDUES]).sum(axis=1) / 10,
            (shares * _CHARGE[:N_RESIDUES]).sum(axis=1),
            (shares * abs(_CHARGE[:N_RESIDUES])).sum(axis=1),
            highest / 10,
            lowest / 10,
            windows[:, 4] / n_windows,
            most_charged,
            least_charged,
            residues[first] == AMINO_ACIDS.index("M"),
        ],
        axis=1,
    ).astype(np.float32)
