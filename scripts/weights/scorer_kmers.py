"""Make tables of k-mers for a scorer, counted in all labelled records or without a fold.

If a net read k-mers counted in its own training records, it would memorise these records. So nets
are fitted to features from tables without the fold of the fragment, and learn what the k-mers of
other groups are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Collection as Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from reading import fragment_features
from sampling import Collection, Fragments

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, IntArray
from virnucpro.sequences.open_codes import Digits
from virnucpro.viral.features import (
    BUCKET_BITS,
    CLASS_BITS,
    N_BUCKETS,
    NO_RESIDUE,
    RARITY,
    RESIDUE_BY_CODON,
    REST_BITS,
    Features,
    KmerClass,
    KmerClassTable,
    Numbers,
    Residues,
)
from virnucpro.viral.windows import Windows, codon_codes, find_stretches, opposite_strand

_STEP = 3  # a k-mer has this many times this many residues
PIECE = 1000  # bases; k-mers are read in its longest stretch and in long ones
GENE_LIKE = 60  # codons of the shortest stretch that is read in addition to the longest
_PIECES_AT_ONCE = 400
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: Knuth's hashing


def classes_of(table: KmerClassTable, numbers: Numbers) -> NDArray[np.uint8]:
    """The owner of each k-mer in a table; 0: none. (n,) -> (n,)"""
    owners = np.empty(len(numbers), dtype=np.uint8)
    call("classes_of_kmers", np.ascontiguousarray(numbers), len(numbers), *table.arguments, owners)
    return owners


def kmer_class_table(numbers: Numbers, owners: NDArray[np.uint8]) -> KmerClassTable:
    """A table of distinct k-mers and their owners, 1 to 6. (n,), (n,)

    Raises:
        ValueError: one bucket has too many k-mers.
    """
    bucket, rest = _address(numbers)
    keys = (bucket << (REST_BITS + CLASS_BITS)) + (rest << CLASS_BITS) + owners
    keys.sort()
    bucket_sizes = np.bincount(keys >> (REST_BITS + CLASS_BITS), minlength=N_BUCKETS)
    if bucket_sizes.max() > np.iinfo(np.uint8).max:
        raise ValueError(f"{bucket_sizes.max()} k-mers in one bucket")
    return KmerClassTable(bucket_sizes.astype(np.uint8), keys.astype(np.uint16))


def is_in_sample(numbers: Numbers) -> BoolArray:
    """Whether each k-mer is kept even if only one group has it. (n,) -> (n,)"""
    return _are_in_sample(_hashes(numbers))


def _are_in_sample(hashes: NDArray[np.uint64]) -> BoolArray:
    is_inside: BoolArray = hashes & np.uint64(RARITY - 1) == 0
    return is_inside


def _hashes(numbers: Numbers) -> NDArray[np.uint64]:
    hashes: NDArray[np.uint64] = numbers.astype(np.uint64) * _MULTIPLIER
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MULTIPLIER
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _address(numbers: Numbers) -> tuple[Numbers, NDArray[np.uint16]]:
    """The bucket of each k-mer, and the bits that distinguish it from others there."""
    hashes = _hashes(numbers)
    bucket = (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
    bucket += np.int64(1 << BUCKET_BITS) * _are_in_sample(hashes)
    rest = hashes >> np.uint64(64 - BUCKET_BITS - REST_BITS)
    return bucket, (rest & np.uint64((1 << REST_BITS) - 1)).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class KmerGroupCounts:
    """K-mers that several groups have or that are in the sample, with their numbers of groups."""

    numbers: Numbers  # (n_words,) ascending
    n_groups: NDArray[np.uint16]  # (n_words, n_folds, 2): cellular, viral

    @property
    def n_folds(self) -> int:
        return int(self.n_groups.shape[1])

    def table(self, left_out: Container[int] = ()) -> KmerClassTable:
        """The table without some folds: k-mers of several groups, and the sample of the others."""
        folds = [fold for fold in range(self.n_folds) if fold not in left_out]
        n_cellular, n_viral = self.n_groups[:, folds].sum(axis=1, dtype=np.int32).T
        owners = np.where(
            n_viral > n_cellular, KmerClass.RATHER_VIRAL, KmerClass.RATHER_CELLULAR
        ).astype(np.uint8)
        owners[n_cellular == 0] = KmerClass.VIRAL
        owners[n_viral == 0] = KmerClass.CELLULAR
        is_alone = n_viral + n_cellular == 1
        owners[is_alone & (n_viral == 1)] = KmerClass.ONE_VIRAL
        owners[is_alone & (n_cellular == 1)] = KmerClass.ONE_CELLULAR
        is_kept = (n_viral + n_cellular > 1) | (is_alone & is_in_sample(self.numbers))
        return kmer_class_table(self.numbers[is_kept], owners[is_kept])


def count_kmer_groups(collection: Collection, fold_of_record: IntArray) -> KmerGroupCounts:
    """Count the groups that have each k-mer, however often."""
    names, group = np.unique([one.group for one in collection.records], return_inverse=True)
    is_virus = np.array([one.is_virus for one in collection.records])
    column = np.empty(len(names), dtype=np.int64)
    column[group] = 2 * fold_of_record + is_virus
    n_bits = len(names).bit_length()
    pairs = np.concatenate(
        [(numbers << n_bits) + group[record] for record, numbers in _kmers_of_records(collection)]
    )
    pairs.sort()
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    numbers = pairs >> n_bits
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    n_owners = np.diff(first, append=len(numbers))
    is_kept = (n_owners > 1) | is_in_sample(numbers[first])
    row = np.repeat(np.cumsum(is_kept) - 1, n_owners)
    inside = np.repeat(is_kept, n_owners)
    n_columns = 2 * (int(fold_of_record.max()) + 1)
    owner = column[pairs[inside] & ((1 << n_bits) - 1)]
    n_groups = np.bincount(row[inside] * n_columns + owner, minlength=is_kept.sum() * n_columns)
    return KmerGroupCounts(
        numbers[first[is_kept]], n_groups.astype(np.uint16).reshape(-1, n_columns // 2, 2)
    )


def _kmers_of_records(collection: Collection) -> Iterator[tuple[IntArray, Numbers]]:
    """Yield records and k-mers, for blocks of pieces."""
    n_whole, rest = np.divmod(collection.lengths, PIECE)
    n_pieces = np.maximum(1, n_whole + (2 * rest >= PIECE))  # no overlap: a k-mer counts once
    owner = np.repeat(np.arange(len(n_pieces)), n_pieces)
    place = PIECE * (np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner])
    n_bases = np.minimum(PIECE, collection.lengths[owner] - place)
    place += collection.starts[owner]
    for first in range(0, len(owner), _PIECES_AT_ONCE):
        block = slice(first, first + _PIECES_AT_ONCE)
        low = place[block][0]
        high = place[block][-1] + n_bases[block][-1]
        pieces = Windows(collection.digits[low:high], place[block] - low, n_bases[block])
        kept = np.stack(find_stretches(pieces))
        is_longest = np.diff(kept[0], prepend=-1) != 0
        read = kept[:, is_longest | (kept[3] >= GENE_LIKE)]
        codes, stretch = _codons_of(pieces, read)
        places, numbers = kmers_in(RESIDUE_BY_CODON[codes], stretch)
        yield owner[block][read[0, stretch[places]]], numbers


def _codons_of(pieces: Windows, stretches: IntArray) -> tuple[Digits, IntArray]:
    """The concatenated codon codes of these stretches, and the stretch of each codon.

    (4, n), the columns of ``find_stretches`` -> (n_codons,), (n_codons,)
    """
    piece, strand, start, n_codons = stretches
    starts = pieces.starts[piece]
    ends = (pieces.starts + pieces.lengths)[piece]
    on_reverse = len(pieces.digits) - ends
    place = np.where(strand == 0, starts, on_reverse) + start
    stretch = np.repeat(np.arange(len(piece)), n_codons)
    place = place[stretch] + 3 * (
        np.arange(len(stretch)) - (np.cumsum(n_codons) - n_codons)[stretch]
    )
    strands = (pieces.digits, opposite_strand(pieces.digits))
    forward, reverse = (codon_codes(digits)[place.clip(0, len(digits) - 3)] for digits in strands)
    return np.where(strand[stretch] == 0, forward, reverse), stretch


@dataclass(frozen=True, slots=True, eq=False)
class KmersByFold:
    """The table for nets in use, and for each fold a table without its groups as well."""

    table: KmerClassTable
    without: Mapping[int, KmerClassTable]

    @classmethod
    def of(cls, counts: KmerGroupCounts, left_out: Container[int] = ()) -> KmersByFold:
        """The tables of all folds except those left out."""
        folds = [fold for fold in range(counts.n_folds) if fold not in left_out]
        return cls(
            counts.table(left_out), {fold: counts.table({*left_out, fold}) for fold in folds}
        )

    def features(
        self,
        fragments: Fragments,
        fold_of_record: IntArray,
        read: Callable[[Digits, KmerClassTable], Features] = fragment_features,
    ) -> Features:
        """The features of fragments, computed by ``read`` with the k-mers of other folds.

        -> (n, n_features)
        """
        folds = fold_of_record[fragments.record]
        assert np.isin(folds, list(self.without)).all(), "a fragment of a fold that is left out"
        rows = {fold: np.flatnonzero(folds == fold) for fold in self.without}
        blocks = [
            (some, read(fragments.digits[some], self.without[fold]))
            for fold, some in rows.items()
            if len(some)
        ]
        features = np.empty((len(fragments), blocks[0][1].shape[1]), dtype=np.float32)
        for some, block in blocks:
            features[some] = block
        return features


def kmers_in(residues: Residues, owner: IntArray) -> tuple[IntArray, Numbers]:
    """The k-mers in concatenated residues, none across two owners: places, numbers."""
    numbers = residues.astype(np.int64)
    is_kmer = residues < NO_RESIDUE
    for n in (1, _STEP):  # three residues, then three times three
        base = NO_RESIDUE**n
        numbers = (numbers[: -2 * n] * base + numbers[n:-n]) * base + numbers[2 * n :]
        is_kmer = is_kmer[: -2 * n] & is_kmer[n:-n] & is_kmer[2 * n :]
    is_kmer &= owner[: len(is_kmer)] == owner[len(owner) - len(is_kmer) :]
    places = np.flatnonzero(is_kmer)
    return places, numbers[places]
