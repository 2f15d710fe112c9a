"""Make k-mer tables for a scorer, from all labelled records or without a fold.

A network that reads k-mers counted in its own training records would memorise these records. So the
features of a training fragment are computed with a table that excludes its fold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from feature_extraction import fragment_features
from numpy.typing import NDArray
from sampling import Fragments, RecordSet

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, IntArray
from virnucpro.sequences.open_codes import Digits
from virnucpro.viral.features import (
    NO_RESIDUE,
    RESIDUE_BY_CODON,
    Features,
    KmerClass,
    KmerClassTable,
    Numbers,
    Residues,
)
from virnucpro.viral.windows import Windows, codon_codes, find_stretches, opposite_strand

PIECE_BASES = 1000  # k-mers are counted in its longest stretch and in long ones
MIN_GENE_LIKE_CODONS = 60  # of stretches that are read in addition to the longest
_BATCH_PIECES = 400
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: Knuth's hashing


def look_up_classes(table: KmerClassTable, numbers: Numbers) -> NDArray[np.uint8]:
    """Return the class of each k-mer in a table, or 0. (n,) -> (n,)"""
    classes = np.empty(len(numbers), dtype=np.uint8)
    call("classes_of_kmers", np.ascontiguousarray(numbers), len(numbers), *table.arguments, classes)
    return classes


def kmer_class_table(numbers: Numbers, classes: NDArray[np.uint8]) -> KmerClassTable:
    """Make a table of distinct k-mers and their classes, 1 to 6. (n,), (n,)

    Raises:
        ValueError: one bucket has too many k-mers.
    """
    bucket, rest = _bucket_and_rest(numbers)
    keys = (
        (bucket << (KmerClassTable.REST_BITS + KmerClassTable.CLASS_BITS))
        + (rest << KmerClassTable.CLASS_BITS)
        + classes
    )
    keys.sort()
    bucket_sizes = np.bincount(
        keys >> (KmerClassTable.REST_BITS + KmerClassTable.CLASS_BITS),
        minlength=KmerClassTable.N_BUCKETS,
    )
    if bucket_sizes.max() > np.iinfo(np.uint8).max:
        raise ValueError(f"{bucket_sizes.max()} k-mers in one bucket")
    return KmerClassTable(bucket_sizes.astype(np.uint8), keys.astype(np.uint16))


def is_in_sample(numbers: Numbers) -> BoolArray:
    """Return whether each k-mer is kept even if it occurs in one group. (n,) -> (n,)"""
    return _is_hash_in_sample(_hashes(numbers))


def _is_hash_in_sample(hashes: NDArray[np.uint64]) -> BoolArray:
    is_sampled: BoolArray = hashes & np.uint64(KmerClassTable.SAMPLED_ONE_IN - 1) == 0
    return is_sampled


def _hashes(numbers: Numbers) -> NDArray[np.uint64]:
    hashes: NDArray[np.uint64] = numbers.astype(np.uint64) * _MULTIPLIER
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MULTIPLIER
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _bucket_and_rest(numbers: Numbers) -> tuple[Numbers, NDArray[np.uint16]]:
    """Return the bucket of each k-mer, and the bits that identify it in the bucket."""
    hashes = _hashes(numbers)
    bucket = (hashes >> np.uint64(64 - KmerClassTable.BUCKET_BITS)).astype(np.int64)
    bucket += np.int64(1 << KmerClassTable.BUCKET_BITS) * _is_hash_in_sample(hashes)
    rest = hashes >> np.uint64(64 - KmerClassTable.BUCKET_BITS - KmerClassTable.REST_BITS)
    return bucket, (rest & np.uint64((1 << KmerClassTable.REST_BITS) - 1)).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class KmerGroupCounts:
    """K-mers of several groups or of the sample, with the number of groups that have them."""

    numbers: Numbers  # (n_kmers,) ascending
    n_groups: NDArray[np.uint16]  # (n_kmers, n_folds, 2): cellular, viral

    @property
    def n_folds(self) -> int:
        return int(self.n_groups.shape[1])

    def table(self, left_out: Collection[int] = ()) -> KmerClassTable:
        """Make the table without some folds: k-mers of several groups, and the sample of others."""
        folds = [fold for fold in range(self.n_folds) if fold not in left_out]
        n_cellular, n_viral = self.n_groups[:, folds].sum(axis=1, dtype=np.int32).T
        classes = np.where(
            n_viral > n_cellular, KmerClass.MOSTLY_VIRAL, KmerClass.MOSTLY_CELLULAR
        ).astype(np.uint8)
        classes[n_cellular == 0] = KmerClass.VIRAL
        classes[n_viral == 0] = KmerClass.CELLULAR
        is_alone = n_viral + n_cellular == 1
        classes[is_alone & (n_viral == 1)] = KmerClass.ONE_VIRAL
        classes[is_alone & (n_cellular == 1)] = KmerClass.ONE_CELLULAR
        is_kept = (n_viral + n_cellular > 1) | (is_alone & is_in_sample(self.numbers))
        return kmer_class_table(self.numbers[is_kept], classes[is_kept])


def count_kmer_groups(collection: RecordSet, fold_of_record: IntArray) -> KmerGroupCounts:
    """Count the groups in which each k-mer occurs."""
    names, group = np.unique([record.group for record in collection.records], return_inverse=True)
    is_virus = np.array([record.is_virus for record in collection.records])
    column = np.empty(len(names), dtype=np.int64)
    column[group] = 2 * fold_of_record + is_virus
    n_bits = len(names).bit_length()
    pairs = np.concatenate(
        [(numbers << n_bits) + group[record] for record, numbers in _iter_record_kmers(collection)]
    )
    pairs.sort()
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    numbers = pairs >> n_bits
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    n_kmer_groups = np.diff(first, append=len(numbers))
    is_kept = (n_kmer_groups > 1) | is_in_sample(numbers[first])
    row = np.repeat(np.cumsum(is_kept) - 1, n_kmer_groups)
    is_pair_kept = np.repeat(is_kept, n_kmer_groups)
    n_columns = 2 * (int(fold_of_record.max()) + 1)
    pair_columns = column[pairs[is_pair_kept] & ((1 << n_bits) - 1)]
    cells = row[is_pair_kept] * n_columns + pair_columns
    n_groups = np.bincount(cells, minlength=is_kept.sum() * n_columns)
    return KmerGroupCounts(
        numbers[first[is_kept]], n_groups.astype(np.uint16).reshape(-1, n_columns // 2, 2)
    )


def _iter_record_kmers(collection: RecordSet) -> Iterator[tuple[IntArray, Numbers]]:
    """Yield the record of each k-mer, and the k-mers, for batches of pieces."""
    n_whole, rest = np.divmod(collection.lengths, PIECE_BASES)
    n_pieces = np.maximum(1, n_whole + (2 * rest >= PIECE_BASES))  # no overlap: a k-mer counts once
    owner = np.repeat(np.arange(len(n_pieces)), n_pieces)
    start = PIECE_BASES * (np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner])
    n_bases = np.minimum(PIECE_BASES, collection.lengths[owner] - start)
    start += collection.starts[owner]
    for first in range(0, len(owner), _BATCH_PIECES):
        block = slice(first, first + _BATCH_PIECES)
        low = start[block][0]
        high = start[block][-1] + n_bases[block][-1]
        pieces = Windows(collection.digits[low:high], start[block] - low, n_bases[block])
        kept = np.stack(find_stretches(pieces))
        is_longest = np.diff(kept[0], prepend=-1) != 0
        read = kept[:, is_longest | (kept[3] >= MIN_GENE_LIKE_CODONS)]
        codes, stretch = _gather_codons(pieces, read)
        positions, numbers = encode_kmers(RESIDUE_BY_CODON[codes], stretch)
        yield owner[block][read[0, stretch[positions]]], numbers


def _gather_codons(pieces: Windows, stretches: IntArray) -> tuple[Digits, IntArray]:
    """Return the concatenated codon codes of stretches, and the stretch of each codon.

    (4, n), the columns of ``find_stretches`` -> (n_codons,), (n_codons,)
    """
    piece, strand, start, n_codons = stretches
    starts = pieces.starts[piece]
    ends = (pieces.starts + pieces.lengths)[piece]
    on_reverse = len(pieces.digits) - ends
    first_codon = np.where(strand == 0, starts, on_reverse) + start
    stretch = np.repeat(np.arange(len(piece)), n_codons)
    codon_number = np.arange(len(stretch)) - (np.cumsum(n_codons) - n_codons)[stretch]
    codon_start = first_codon[stretch] + 3 * codon_number
    strands = (pieces.digits, opposite_strand(pieces.digits))
    forward, reverse = (
        codon_codes(digits)[codon_start.clip(0, len(digits) - 3)] for digits in strands
    )
    return np.where(strand[stretch] == 0, forward, reverse), stretch


@dataclass(frozen=True, slots=True, eq=False)
class FoldKmerTables:
    """The table for inference, and for each fold a table that excludes its groups as well."""

    table: KmerClassTable
    held_out: Mapping[int, KmerClassTable]

    @classmethod
    def from_counts(cls, counts: KmerGroupCounts, left_out: Collection[int] = ()) -> FoldKmerTables:
        """Make the tables of all folds except those left out."""
        folds = [fold for fold in range(counts.n_folds) if fold not in left_out]
        return cls(
            counts.table(left_out), {fold: counts.table({*left_out, fold}) for fold in folds}
        )

    def compute_features(
        self,
        fragments: Fragments,
        fold_of_record: IntArray,
        featurize: Callable[[Digits, KmerClassTable], Features] = fragment_features,
    ) -> Features:
        """Compute the features of fragments with ``featurize`` and the k-mers of other folds.

        -> (n, n_features)
        """
        folds = fold_of_record[fragments.record]
        assert np.isin(folds, list(self.held_out)).all(), "a fragment of a fold that is left out"
        rows = {fold: np.flatnonzero(folds == fold) for fold in self.held_out}
        blocks = [
            (fold_rows, featurize(fragments.digits[fold_rows], self.held_out[fold]))
            for fold, fold_rows in rows.items()
            if len(fold_rows)
        ]
        features = np.empty((len(fragments), blocks[0][1].shape[1]), dtype=np.float32)
        for fold_rows, block in blocks:
            features[fold_rows] = block
        return features


def encode_kmers(residues: Residues, owner: IntArray) -> tuple[IntArray, Numbers]:
    """Return positions and numbers of the k-mers in concatenated residues of several owners."""
    numbers = residues.astype(np.int64)
    is_kmer = residues < NO_RESIDUE
    for n in (1, 3):  # three residues, then three times three
        base = NO_RESIDUE**n
        numbers = (numbers[: -2 * n] * base + numbers[n:-n]) * base + numbers[2 * n :]
        is_kmer = is_kmer[: -2 * n] & is_kmer[n:-n] & is_kmer[2 * n :]
    is_kmer &= owner[: len(is_kmer)] == owner[len(owner) - len(is_kmer) :]
    positions = np.flatnonzero(is_kmer)
    return positions, numbers[positions]
