"""Compute window features: composition, and shared k-mers.

A window has 1,229 features, in seven blocks:

- codons in its longest open reading frame (ORF, stop to stop), and in all long ORFs
- codon junctions in the long ORFs: the four bases around the border between two codons
- pairs of neighbouring residues in the longest ORF
- palindromes
- plain statistics, such as GC and ORF lengths
- shares of k-mers that viruses and cells in the training data have
- the codons again, as log ratios to the counts expected from the GC content

Codon, junction, pair and k-mer shares are square roots. A long window may be read in
parts. Its features are then the means over the parts, with 12 more for the layout of its gene-like
ORFs.

A k-mer is nine residues. Composition does not identify a protein, but a k-mer from a known protein
does. Unrelated proteins rarely share a k-mer by chance: there are 5e11 k-mers. The table contains
all k-mers that occur in several groups in the training data. For k-mers that occur in only one
group, it contains a sample: one in eight, selected by hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.native import call
from virnucpro.core.numeric import FloatArray
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.open_codes import N_CODES, Digits, genetic_code
from virnucpro.viral.windows import Windows, is_stop

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
NO_RESIDUE = len(AMINO_ACIDS)  # stops, and codons with an unknown base

Residues = NDArray[np.uint8]
Numbers = NDArray[np.int64]

RESIDUE_BY_CODON = np.full(N_CODES, NO_RESIDUE, dtype=np.uint8)
for _codon, _residue in STANDARD.meanings.items():
    if _codon not in STANDARD.stops:
        RESIDUE_BY_CODON[genetic_code(_codon)] = AMINO_ACIDS.index(_residue)

GENE_LIKE = 30  # codons in the shortest ORF that may be a gene
CLIP = 6.0  # standard deviations from the mean, where networks clip a feature

Features = NDArray[np.float32]


# K-mers


class KmerClass(IntEnum):
    """Which groups in the training data have a k-mer. A k-mer without a class has the number 0."""

    VIRAL = 1  # several groups, all viral
    ONE_VIRAL = 2
    CELLULAR = 3
    ONE_CELLULAR = 4
    MOSTLY_VIRAL = 5  # several groups, most of them viral
    MOSTLY_CELLULAR = 6


@dataclass(frozen=True, eq=False)
class KmerClassTable:
    """K-mers and their classes.

    A k-mer is stored as 33 bits of its hash: a bucket, and the remainder.
    The second half of the buckets contains only k-mers from the sample, so that searches for other
    k-mers skip it. About one in 1e3 sampled k-mers matches by chance, and one in 1e4 of the others.
    """

    K = 9  # residues in a k-mer
    SAMPLED_ONE_IN = 8  # a power of two: rarity of the k-mers in the sample
    BUCKET_BITS = 20  # of a hash
    REST_BITS = 13  # of a hash, in an entry
    CLASS_BITS = 3  # of an entry
    N_BUCKETS = 2 << BUCKET_BITS

    bucket_sizes: NDArray[np.uint8]  # (N_BUCKETS,)
    entries: NDArray[np.uint16]  # (n,) by bucket, ascending: hash remainder, then class

    def __post_init__(self) -> None:
        if self.bucket_sizes.shape != (self.N_BUCKETS,) or self.entries.ndim != 1:
            raise ValueError(f"the shape of the buckets is {self.bucket_sizes.shape}")
        if self.bucket_sizes.sum() != len(self):
            raise ValueError(f"{len(self)} k-mers, but {self.bucket_sizes.sum()} in the buckets")
        if len(self):
            _ = self.arguments  # checks the classes

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def arguments(self) -> tuple[NDArray[Any] | int, ...]:
        """Return the arguments for library functions: hints, table, and bucket group starts.

        A hint is one bit per hash prefix. It is set if a k-mer outside the sample has this prefix.
        The hints fit into a processor's cache and save the search for six in seven k-mers without a
        class. They do not cover the sample, where nearly all prefixes occur.

        Raises:
            ValueError: a k-mer has an unknown class.
        """
        hint_bits = 2  # remainder bits that a hint covers
        hints = np.zeros(self.N_BUCKETS >> 1 << hint_bits >> 3, dtype=np.uint8)
        buckets_per_group = 16  # buckets that share an index of their first entry
        first = np.zeros(self.N_BUCKETS // buckets_per_group, dtype=np.int32)
        n_strange = np.zeros(1, np.int64)
        table_arguments = self.bucket_sizes, self.entries, len(self)
        if len(self):
            call("index_kmer_table", *table_arguments, first, hints, n_strange)
        if n_strange[0]:
            raise ValueError("k-mers have unknown classes")
        return hints, self.bucket_sizes, first, self.entries, len(self)


NO_KMERS = KmerClassTable(
    np.zeros(KmerClassTable.N_BUCKETS, dtype=np.uint8), np.empty(0, dtype=np.uint16)
)


# Features


class WindowFeatures:
    """The columns of the blocks of a window's features, in order."""

    CODONS = slice(0, 2 * 64)
    JUNCTIONS = slice(CODONS.stop, CODONS.stop + 2 * 4**4)
    PAIRS = slice(JUNCTIONS.stop, JUNCTIONS.stop + len(AMINO_ACIDS) ** 2)
    # each one of four bases, and the totals for two, four and six
    PALINDROMES = slice(PAIRS.stop, PAIRS.stop + 4**2 + 3)
    STATISTICS = slice(PALINDROMES.stop, PALINDROMES.stop + 36)
    GC = STATISTICS.start  # the first statistic
    KMERS = slice(STATISTICS.stop, STATISTICS.stop + len(KmerClass))
    CODON_RATIOS = slice(KMERS.stop, KMERS.stop + 2 * 64)
    N_FEATURES = CODON_RATIOS.stop
    N_LAYOUT = 12  # columns that windows read in parts have in addition, after the k-mers
    SHARES_VIEW = slice(0, KMERS.stop - N_FEATURES)  # all except codon ratios, from either end
    RATIOS_VIEW = slice(CODONS.stop, None)  # all except codons as shares


def library_input(
    pieces: Windows, kmers: KmerClassTable, code: GeneticCode
) -> tuple[NDArray[Any] | int, ...]:
    """Return the arguments for library functions that read windows."""
    classes = pieces.classes(code, kmers)
    return *pieces.arguments(code), _code_tables(code), *kmers.arguments, classes


@cache
def _code_tables(code: GeneticCode) -> Digits:
    """Return for each codon: whether it is a stop, its standard synonym, its residue. (3, 125)"""
    synonyms = np.arange(N_CODES, dtype=np.uint8)
    for codon, synonym in code.standard_synonyms.items():
        synonyms[genetic_code(codon)] = genetic_code(synonym)
    return np.stack([is_stop(code), synonyms, RESIDUE_BY_CODON])


def layout_features(pieces: Windows, code: GeneticCode = STANDARD) -> FloatArray:
    """Describe how gene-like ORFs are arranged in each window. -> (n, 12)

    In order:

    - their number per kilobase, and the share of bases in them
    - logarithms of their median, mean and longest length, and of the root of the mean length over
      covered bases
    - for ORFs as long as a gene: number and share as above, how often they change strand, and the
      share of the more common strand
    - the share of short gaps between neighbours, and the mean gap in kilobases
    """
    layout = np.empty((len(pieces), WindowFeatures.N_LAYOUT))
    call("layout_features", *pieces.arguments(code), layout)
    return layout
