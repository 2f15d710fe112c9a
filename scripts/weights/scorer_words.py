"""Make tables of words for a scorer, counted in all labelled records or without a fold.

If a net read words counted in its own training records, it would memorise these records. So nets
are fitted to features from tables without the fold of the fragment, and learn what the words of
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
    N_BUCKETS,
    NO_RESIDUE,
    OWNER_BITS,
    RARITY,
    RESIDUE_BY_CODON,
    REST_BITS,
    Features,
    KmerClass,
    Numbers,
    Residues,
    WordTable,
)
from virnucpro.viral.windows import Windows, codon_codes, find_stretches, opposite_strand

_STEP = 3  # a word has this many times this many residues
PIECE = 1000  # bases; words are read in its longest stretch and in long ones
GENE_LIKE = 60  # codons of the shortest stretch that is read in addition to the longest
_PIECES_AT_ONCE = 400
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: Knuth's hashing


def owners_of(table: WordTable, numbers: Numbers) -> NDArray[np.uint8]:
    """The owner of each word in a table; 0: none. (n,) -> (n,)"""
    owners = np.empty(len(numbers), dtype=np.uint8)
    call("owners_of", np.ascontiguousarray(numbers), len(numbers), *table.arguments, owners)
    return owners


def word_table(numbers: Numbers, owners: NDArray[np.uint8]) -> WordTable:
    """A table of distinct words and their owners, 1 to 6. (n,), (n,)

    Raises:
        ValueError: one bucket has too many words.
    """
    bucket, rest = _address(numbers)
    keys = (bucket << (REST_BITS + OWNER_BITS)) + (rest << OWNER_BITS) + owners
    keys.sort()
    bucket_sizes = np.bincount(keys >> (REST_BITS + OWNER_BITS), minlength=N_BUCKETS)
    if bucket_sizes.max() > np.iinfo(np.uint8).max:
        raise ValueError(f"{bucket_sizes.max()} words in one bucket")
    return WordTable(bucket_sizes.astype(np.uint8), keys.astype(np.uint16))


def is_in_sample(numbers: Numbers) -> BoolArray:
    """Whether each word is kept even if only one group has it. (n,) -> (n,)"""
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
    """The bucket of each word, and the bits that distinguish it from others there."""
    hashes = _hashes(numbers)
    bucket = (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
    bucket += np.int64(1 << BUCKET_BITS) * _are_in_sample(hashes)
    rest = hashes >> np.uint64(64 - BUCKET_BITS - REST_BITS)
    return bucket, (rest & np.uint64((1 << REST_BITS) - 1)).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class WordCounts:
    """Words that several groups have or that are in the sample, with their numbers of groups."""

    numbers: Numbers  # (n_words,) ascending
    n_groups: NDArray[np.uint16]  # (n_words, n_folds, 2): cellular, viral

    @property
    def n_folds(self) -> int:
        return int(self.n_groups.shape[1])

    def table(self, left_out: Container[int] = ()) -> WordTable:
        """The table without some folds: words of several groups, and the sample of the others."""
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
        return word_table(self.numbers[is_kept], owners[is_kept])


def count_words(collection: Collection, fold_of_record: IntArray) -> WordCounts:
    """Count the groups that have each word, however often."""
    names, group = np.unique([one.group for one in collection.records], return_inverse=True)
    is_virus = np.array([one.is_virus for one in collection.records])
    column = np.empty(len(names), dtype=np.int64)
    column[group] = 2 * fold_of_record + is_virus
    n_bits = len(names).bit_length()
    pairs = np.concatenate(
        [(numbers << n_bits) + group[record] for record, numbers in _words_of_records(collection)]
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
    return WordCounts(
        numbers[first[is_kept]], n_groups.astype(np.uint16).reshape(-1, n_columns // 2, 2)
    )


def _words_of_records(collection: Collection) -> Iterator[tuple[IntArray, Numbers]]:
    """Yield records and words, for blocks of pieces."""
    n_whole, rest = np.divmod(collection.lengths, PIECE)
    n_pieces = np.maximum(1, n_whole + (2 * rest >= PIECE))  # no overlap: a word counts once
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
        places, numbers = words_in(RESIDUE_BY_CODON[codes], stretch)
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
class Words:
    """The table for nets in use, and for each fold a table without its groups as well."""

    table: WordTable
    without: Mapping[int, WordTable]

    @classmethod
    def of(cls, counts: WordCounts, left_out: Container[int] = ()) -> Words:
        """The tables of all folds except those left out."""
        folds = [fold for fold in range(counts.n_folds) if fold not in left_out]
        return cls(
            counts.table(left_out), {fold: counts.table({*left_out, fold}) for fold in folds}
        )

    def features(
        self,
        fragments: Fragments,
        fold_of_record: IntArray,
        read: Callable[[Digits, WordTable], Features] = fragment_features,
    ) -> Features:
        """The features of fragments, computed by ``read`` with the words of other folds.

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


def words_in(residues: Residues, owner: IntArray) -> tuple[IntArray, Numbers]:
    """The words in concatenated residues, none across two owners: places, numbers."""
    numbers = residues.astype(np.int64)
    is_word = residues < NO_RESIDUE
    for n in (1, _STEP):  # three residues, then three times three
        base = NO_RESIDUE**n
        numbers = (numbers[: -2 * n] * base + numbers[n:-n]) * base + numbers[2 * n :]
        is_word = is_word[: -2 * n] & is_word[n:-n] & is_word[2 * n :]
    is_word &= owner[: len(is_word)] == owner[len(owner) - len(is_word) :]
    places = np.flatnonzero(is_word)
    return places, numbers[places]
