"""Compute protein features: composition, k-mers, and patterns enriched in viruses.

A protein is a row of residue numbers. Proteins are concatenated. U counts as C, and O as K. A stop,
or any other letter without a residue, is ``NO_RESIDUE``. No pair, k-mer or pattern includes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import IntArray
from virnucpro.viral.features import (
    AMINO_ACIDS,
    NO_RESIDUE,
    KmerClass,
    KmerClassTable,
    Residues,
)

SHORTEST = 50  # residues in the shortest protein that is scored
N_RESIDUES = len(AMINO_ACIDS)
# similar residues count as one in pairs with a gap
_RESIDUE_CLASSES = ("AG", "C", "DE", "FWY", "H", "ILMV", "KR", "NQ", "P", "ST")
PATTERNS = ((0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 4), (0, 2, 3, 5))  # offsets of their residues
RATIO_STEP = 1 / 32  # log ratios are integer multiples of it

Features = NDArray[np.float32]
Ratios = NDArray[np.int8]


class ProteinFeatures:
    """The columns of the blocks of a protein's features, in order."""

    RESIDUES = slice(0, N_RESIDUES)
    PAIRS = slice(RESIDUES.stop, RESIDUES.stop + N_RESIDUES**2)
    # with one, two or three residues in between
    CLASS_PAIRS = slice(PAIRS.stop, PAIRS.stop + 3 * len(_RESIDUE_CLASSES) ** 2)
    STATISTICS = slice(CLASS_PAIRS.stop, CLASS_PAIRS.stop + 12)
    KMERS = slice(STATISTICS.stop, STATISTICS.stop + len(KmerClass))
    PATTERN_RATIOS = slice(KMERS.stop, KMERS.stop + 3 * len(PATTERNS))  # three of each pattern
    N_COMPOSITION = CLASS_PAIRS.stop
    N_FEATURES = PATTERN_RATIOS.stop


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
    letters = sequence.encode("ascii", "replace")
    return np.frombuffer(letters.translate(_residue_by_letter()), np.uint8)


@cache
def _residue_by_letter() -> bytes:
    """Return a translation table from letters in either case to residue numbers. (256,)"""
    table = bytearray([NO_RESIDUE]) * 256
    similar = {"U": "C", "O": "K"}
    for letter in (*AMINO_ACIDS, *similar):
        number = AMINO_ACIDS.index(similar.get(letter, letter))
        table[ord(letter)] = number
        table[ord(letter.lower())] = number
    return bytes(table)


def protein_features(
    proteins: Proteins, kmers: KmerClassTable, ratios: Sequence[Ratios]
) -> Features:
    """Return each protein's features. n -> (n, 750)"""
    shared = kmer_features(proteins, kmers, ratios)
    return np.hstack([features_without_kmers(proteins), shared])


def features_without_kmers(proteins: Proteins) -> Features:
    """Return composition and statistics of each protein. n -> (n, 732)"""
    return np.hstack([composition(proteins), protein_statistics(proteins)])


def kmer_features(proteins: Proteins, kmers: KmerClassTable, ratios: Sequence[Ratios]) -> Features:
    """Return the k-mers shared with viruses and cells, and log ratios of patterns. n -> (n, 18)

    In order: square roots of k-mer shares, by class; then three statistics for the log
    ratios of each pattern: the mean, the mean of the positive parts, and the root mean square.
    """
    n_columns = ProteinFeatures.N_FEATURES - ProteinFeatures.KMERS.start
    figures = np.empty((len(proteins), n_columns), dtype=np.float32)
    rows = proteins.residues, proteins.lengths, len(proteins)
    call("protein_shared", *rows, *kmers.arguments, *ratios, RATIO_STEP, figures)
    return figures


def composition(proteins: Proteins) -> Features:
    """Return square roots of shares: residues, pairs, and class pairs. -> (n, 720)"""
    shares = np.empty((len(proteins), ProteinFeatures.N_COMPOSITION), dtype=np.float32)
    rows = proteins.residues, proteins.lengths, len(proteins)
    call("protein_composition", *rows, _class_by_residue(), shares)
    return shares


@cache
def _class_by_residue() -> NDArray[np.uint8]:
    """Return the class of each residue. That of ``NO_RESIDUE`` is not used. (21,)"""
    classes = [
        next(number for number, letters in enumerate(_RESIDUE_CLASSES) if letter in letters)
        for letter in AMINO_ACIDS
    ]
    return np.array([*classes, 0], dtype=np.uint8)


def protein_statistics(proteins: Proteins) -> Features:
    """Return each protein's plain statistics. -> (n, 12)"""
    n = len(proteins)
    residues = proteins.residues
    lengths = proteins.lengths
    windows = np.empty((n, 6), dtype=np.int64)
    counts = np.empty((n, N_RESIDUES + 1), dtype=np.int64)
    helix = 19  # residues in a transmembrane helix
    helix_hydropathy = 15  # the mean in a helix, in tenths
    simple = 12  # residues in a low-complexity window
    max_distinct = 5  # residues in such a window
    values = _residue_values()
    hydropathy, charge = values[:N_RESIDUES].T
    sizes = helix, helix_hydropathy * helix, simple, max_distinct
    call("protein_windows", residues, lengths, n, values, *sizes, windows, counts)
    shares = counts[:, :N_RESIDUES] / np.maximum(1, lengths)[:, None]
    highest, lowest, most_charged, least_charged = (windows[:, :4] / helix).T
    n_windows, n_simple = (np.maximum(1, lengths - size + 1) for size in (helix, simple))
    first = np.cumsum(lengths) - lengths
    return np.stack(
        [
            np.log(lengths),
            -(shares * np.log(np.maximum(shares, 1e-9))).sum(axis=1),
            windows[:, 5] / n_simple,
            (shares * hydropathy).sum(axis=1) / 10,
            (shares * charge).sum(axis=1),
            (shares * abs(charge)).sum(axis=1),
            highest / 10,
            lowest / 10,
            windows[:, 4] / n_windows,
            most_charged,
            least_charged,
            residues[first] == AMINO_ACIDS.index("M"),
        ],
        axis=1,
    ).astype(np.float32)


@cache
def _residue_values() -> IntArray:
    """Return hydropathy in tenths, and charge, of each residue. ``NO_RESIDUE`` has 0. (21, 2)

    The hydropathy is that of Kyte and Doolittle 1982, doi:10.1016/0022-2836(82)90515-0.
    """
    hydropathy = {
        **{"A": 18, "C": 25, "D": -35, "E": -35, "F": 28, "G": -4, "H": -32, "I": 45, "K": -39},
        **{"L": 38, "M": 19, "N": -35, "P": -16, "Q": -35, "R": -45, "S": -8, "T": -7, "V": 42},
        **{"W": -9, "Y": -13},
    }
    charge = {"D": -1, "E": -1, "K": 1, "R": 1}
    values = [(hydropathy[letter], charge.get(letter, 0)) for letter in AMINO_ACIDS]
    return np.array([*values, (0, 0)])
