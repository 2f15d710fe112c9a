"""Find evidence that a record is a known virus: k-mers shared with the virus index.

A k-mer is nine residues from any of the six frames. The index, ``embedded/known.safetensors``,
contains a k-mer sample from known viruses. Each has a node: the lowest common taxon of all
viruses with this k-mer, and their family, or the cluster of related genomes if they have no family.
Entries that also occur in cells are evidence for a cell. The lookup is ``native/known.c``.
``scripts/weights/build_known_index.py`` builds and measures the index.

A record is judged in windows of at most 15,000 bases. A window is known if both are true:

- It shares enough k-mers with viruses from one family, given how many k-mers were looked
  up. For viruses from several families, it needs 1.5 times as many.
- It shares more than twice as many k-mers with viruses as with cells.

A record is known if more than half of its windows are. So a chromosome with a prophage is not
known, but a virus with an unknown part is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import EMBEDDED_FOLDER
from virnucpro.core.builtin_hashes import hash_weights
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.option_text import with_options
from virnucpro.viral.features import RESIDUE_BY_CODON
from virnucpro.viral.networks import load_tensors
from virnucpro.viral.proteins import Proteins
from virnucpro.viral.windows import Windows

FORMAT = 3
BUCKET_BITS = 22
REST_BITS = 12
NODE_BITS = 12
BUCKETS_PER_GROUP = 32  # buckets that share the index of their first entry
MAX_BUCKET_ENTRIES = 15  # entries
PADDING = 12  # zero bytes after the last entry, since four entries are read together
CELLULAR = (1 << NODE_BITS) - 1  # node of k-mers that cells have, too
NEEDED_PER_FAMILY_HIT = 1.5  # hits in several families that count as one hit in a single family
MAX_CELLULAR_PER_VIRAL = 0.5  # cellular hits per viral hit in a known window are below this
_BASES_AT_ONCE = 1_000_000  # for counting hits by node
# Filters are made for blocks of this size. They take as long to make as they save in lookups of a
# million bases, and serve smaller blocks once they exist.
_MIN_BASES_FOR_FILTERS = 300_000
MIN_FAMILY_SHARE = 0.5  # viral hit share in known windows that a family needs to be named
MIN_FAMILY_HITS = 2  # hits that a family needs to be named
ENDOGENOUS = ("Retroviridae", "Caulimoviridae")  # families with copies in host genomes
MAY_BE_ENDOGENOUS = "may be an endogenous copy in a host genome"


class WindowHits(NamedTuple):
    """The hits in each window, in record order, in columns, (n_windows,).

    Equal k-mers in a window count as one hit, but as several k-mers.
    """

    record: IntArray  # record index
    n_kmers: IntArray  # k-mers that were looked up
    n_viral: IntArray
    n_cellular: IntArray
    owner: IntArray  # family or cluster with the most hits, or 0
    n_owner: IntArray  # hits for this owner

    @classmethod
    def from_rows(cls, n_windows: IntArray, rows: IntArray) -> WindowHits:
        """Split the rows into columns. (n_records,), (n_windows, 5)"""
        return cls(np.repeat(np.arange(len(n_windows)), n_windows), *rows.T.copy())

    @classmethod
    def empty(cls) -> WindowHits:
        return cls(*np.zeros((len(cls._fields), 0), dtype=np.int64))


class NodeHits(NamedTuple):
    """The hits by record and node, in record order, in columns, (n,)."""

    record: IntArray  # record index
    node: IntArray
    n_hits: IntArray


class Nodes(NamedTuple):
    """The common properties by node, for all viruses with a k-mer, in columns, (n_nodes,)."""

    owners: NDArray[np.uint16]  # family or cluster: an index in ``KnownIndex.owners``. 0: several
    taxa: NDArray[np.uint16]  # index of the lowest common taxon in ``Lineages.taxa``, or 0
    # number of ranks, from realm down, at which the k-mer determines the taxon, which may be
    # unnamed
    depths: NDArray[np.uint8]


class KnownRecords(NamedTuple):
    """The evidence for each record, in columns, (n_records,)."""

    is_known: BoolArray
    n_viral: IntArray  # hits in all windows
    owner: IntArray  # named family or cluster, or 0
    n_known_windows: IntArray
    n_windows: IntArray
    strength: FloatArray  # hits divided by the required hits, the median over windows


@dataclass(frozen=True, slots=True)
class FalseCalls:
    """How often the index calls records with this length, counted when it was built.

    Index i counts records whose strength is at least ``KnownIndex.strengths[i]``.
    """

    n_bases: int
    false_per_true: tuple[float, ...]  # share of cells, per share of viruses from unknown species


@dataclass(frozen=True, eq=False)
class KnownIndex:
    """The known virus index."""

    firsts: NDArray[np.int32]  # (2**22 / 32,) first entry of each group of buckets
    sizes: NDArray[np.uint8]  # (2**22 / 2,) entries of two buckets, four bits each
    entries: NDArray[np.uint8]  # (3 n + PADDING,) bits of the hash, and the node
    nodes: Nodes
    limit: int  # highest hash of a k-mer that is looked up
    owners: tuple[str, ...]  # names of families, then clusters. Index 0 is empty
    # for a known window, hits in one family: the minimum, an offset, and k-mers per further hit
    needed: tuple[int, float, float]
    strengths: tuple[float, ...]
    false_calls: tuple[FalseCalls, ...]  # by length
    lineages_sha256: str = ""  # of the file with the taxa for the nodes
    sha256: str = ""

    _columns: ClassVar = len(WindowHits._fields) - 1

    def __post_init__(self) -> None:
        n_buckets = 1 << BUCKET_BITS
        if len(self.sizes) != n_buckets // 2 or len(self.firsts) != n_buckets // BUCKETS_PER_GROUP:
            raise ValueError(f"{2 * len(self.sizes)} buckets in {len(self.firsts)} groups")
        last = self.sizes[-BUCKETS_PER_GROUP // 2 :]
        n_entries = int(self.firsts[-1]) + int((last & 15).sum() + (last >> 4).sum())
        if len(self.entries) != 3 * n_entries + PADDING:
            raise ValueError(f"{len(self.entries)} bytes of {n_entries} entries")
        n_nodes = len(self.nodes.owners)
        if n_nodes > CELLULAR or not n_nodes == len(self.nodes.taxa) == len(self.nodes.depths):
            raise ValueError(f"{n_nodes} nodes")

    def __reduce__(self) -> tuple[Callable[..., KnownIndex], tuple[str]]:
        """Pickle the built-in index by its hash, so that each process maps the same file."""
        if self is not KnownIndex.load_builtin():
            raise TypeError("only the built-in index can be sent to another process")
        return KnownIndex.load_builtin_with, (self.sha256,)

    @staticmethod
    @cache
    def load_builtin() -> KnownIndex:
        """Return the built-in index, which each process reads once.

        Raises:
            UnavailableError: as ``load_known_index``.
        """
        return load_known_index(EMBEDDED_FOLDER / "known.safetensors")

    @staticmethod
    def load_builtin_with(sha256: str) -> KnownIndex:
        """Return the built-in index, as another process has read it.

        Raises:
            UnavailableError: the file was replaced since then, or as ``load_known_index``.
        """
        if (index := KnownIndex.load_builtin()).sha256 != sha256:
            raise UnavailableError(
                "the index of known viruses was replaced during the run",
                hint=with_options("run the command again with {force}"),
            )
        return index

    @cached_property
    def _filters(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Return the hints and the filter that save most searches."""
        buckets_per_word = 8  # of the filter
        hints = np.zeros(len(self.sizes), dtype=np.uint8)
        words = np.zeros(2 * len(self.sizes) // buckets_per_word, dtype=np.uint64)
        call("known_filters", self.sizes, self.entries, hints, words)
        return hints, words

    def _table(self, n_bases: int) -> tuple[Any, ...]:
        """Return the arguments for library functions that look up this many bases."""
        no_filters = np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.uint64)
        has_filters = n_bases >= _MIN_BASES_FOR_FILTERS or "_filters" in vars(self)
        filters = self._filters if has_filters else no_filters
        return self.limit, self.firsts, self.sizes, self.entries, *filters, int(has_filters)

    @cached_property
    def _owner_by_node(self) -> NDArray[np.uint16]:
        """Return the owner for every node number, including numbers without a node."""
        owners = np.zeros(1 << NODE_BITS, dtype=np.uint16)
        owners[: len(self.nodes.owners)] = self.nodes.owners
        return owners

    def look_up(self, sequences: Sequence[str]) -> WindowHits:
        """Look up the k-mers in each nucleotide sequence."""
        pieces = Windows.from_sequences(sequences)
        n_windows = count_windows(pieces.lengths)
        rows = np.empty((int(n_windows.sum()), self._columns), dtype=np.int64)
        where = pieces.digits, pieces.starts, pieces.lengths, n_windows, len(pieces)
        table = self._table(int(pieces.lengths.sum()))
        call("known_hits", *where, RESIDUE_BY_CODON, *table, self._owner_by_node, rows)
        return WindowHits.from_rows(n_windows, rows)

    def look_up_proteins(self, proteins: Proteins) -> WindowHits:
        """Look up the k-mers in each protein. A window has at most 15,000 residues."""
        n_windows = count_windows(proteins.lengths)
        rows = np.empty((int(n_windows.sum()), self._columns), dtype=np.int64)
        where = proteins.residues, proteins.lengths, n_windows, len(proteins)
        table = self._table(3 * int(proteins.lengths.sum()))
        call("known_protein_hits", *where, *table, self._owner_by_node, rows)
        return WindowHits.from_rows(n_windows, rows)

    def count_nodes(self, pieces: Windows) -> tuple[NodeHits, IntArray]:
        """Count each sequence's hits by node, and the k-mers that were looked up.

        Equal k-mers count once in a window.
        n -> hits, (n,)
        """
        blocks = []
        n_kmers = np.empty(len(pieces), dtype=np.int64)
        for first, end in _blocks_of(pieces.lengths):
            block = pieces.select(pieces.starts[first:end], pieces.lengths[first:end])
            rows = self._node_rows(block, n_kmers[first:end])
            rows[:, 0] += first
            blocks.append(rows)
        rows = np.concatenate([np.empty((0, 3), dtype=np.int64), *blocks])
        keys, place = np.unique(rows[:, 0] << NODE_BITS | rows[:, 1], return_inverse=True)
        n_hits = np.bincount(place, rows[:, 2], minlength=len(keys)).astype(np.int64)
        return NodeHits(keys >> NODE_BITS, keys & CELLULAR, n_hits), n_kmers

    def _node_rows(self, pieces: Windows, n_kmers: IntArray) -> IntArray:
        """Return each window's hits by node, and fill in the k-mers.

        -> (n_rows, 3): window, node, hits
        """
        n_windows = count_windows(pieces.lengths)
        max_rows = np.minimum(n_windows << NODE_BITS, 2 * pieces.lengths)
        rows = np.empty((int(max_rows.sum()), 3), dtype=np.int32)
        n_rows = np.zeros(1, dtype=np.int64)
        where = pieces.digits, pieces.starts, pieces.lengths, n_windows, len(pieces)
        table = self._table(int(pieces.lengths.sum()))
        call("known_nodes", *where, RESIDUE_BY_CODON, *table, n_kmers, rows, n_rows)
        return rows[: n_rows[0]].astype(np.int64)

    def classify(self, hits: WindowHits, n_records: int) -> KnownRecords:
        """Decide which records are known viruses."""
        min_hits, offset, kmers_per_hit = self.needed
        needed = np.maximum(min_hits, offset + hits.n_kmers / kmers_per_hit)
        strength = np.maximum(hits.n_owner, hits.n_viral / NEEDED_PER_FAMILY_HIT) / needed
        is_window = (strength >= 1) & (hits.n_cellular < MAX_CELLULAR_PER_VIRAL * hits.n_viral)
        n_windows = np.bincount(hits.record, minlength=n_records)
        n_known = np.bincount(hits.record[is_window], minlength=n_records)
        return KnownRecords(
            is_known=2 * n_known > n_windows,
            n_viral=_sums(hits.record, hits.n_viral, n_records),
            owner=_assign_species(hits, is_window, n_records),
            n_known_windows=n_known,
            n_windows=n_windows,
            strength=_medians(hits.record, np.where(is_window, strength, 0), n_records),
        )

    def false_discovery_rates(
        self, strength: FloatArray, lengths: IntArray, prevalence: float
    ) -> FloatArray:
        """Return the share of cells among records with this length and at least this strength.

        P is the ``prevalence``, the share of viral records in the sample, and R the ratio of false
        to true calls: (1 - P) R / ((1 - P) R + P). R comes from the nearest length on the
        logarithmic scale. (n,), (n,) -> (n,)
        """
        knots = np.log([one.n_bases for one in self.false_calls])
        row = np.searchsorted((knots[1:] + knots[:-1]) / 2, np.log(np.maximum(1, lengths)))
        column = np.searchsorted(self.strengths, strength, side="right") - 1
        ratios = np.array([one.false_per_true for one in self.false_calls])
        odds = ratios[row, np.maximum(0, column)] * (1 - prevalence) / prevalence
        return np.asarray(odds / (1 + odds))


def count_windows(lengths: IntArray) -> IntArray:
    """Count the windows in each record: odd, so that both strands have the same windows.

    >>> count_windows(np.array([0, 14_999, 15_000, 30_000, 30_001, 4_641_652])).tolist()
    [1, 1, 3, 3, 5, 465]
    """
    longest_window = 15_000  # bases
    n_pairs = -(-(lengths - 10_000) // 20_000)
    return np.where(lengths < longest_window, 1, 2 * n_pairs + 1)


def _blocks_of(lengths: IntArray) -> Iterator[tuple[int, int]]:
    """Yield the first and one past the last index for neighbouring windows to look up together."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        limit = ends[first] - lengths[first] + _BASES_AT_ONCE
        end = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        yield first, end
        first = end


def _sums(record: IntArray, values: IntArray, n_records: int) -> IntArray:
    return np.bincount(record, values, minlength=n_records).astype(np.int64)


def _medians(record: IntArray, values: FloatArray, n_records: int) -> FloatArray:
    """Return each record's median, or 0. A record has an odd number of values."""
    order = np.lexsort((values, record))
    n_values = np.bincount(record, minlength=n_records)
    middle = np.cumsum(n_values) - n_values + n_values // 2
    medians = np.zeros(n_records)
    has_values = n_values > 0
    medians[has_values] = values[order[middle[has_values]]]
    return medians


def _assign_species(hits: WindowHits, is_window: BoolArray, n_records: int) -> IntArray:
    """Return the family or cluster with enough viral hits in the known windows, or 0."""
    chosen = is_window & (hits.owner > 0)
    key = hits.record[chosen] << NODE_BITS | hits.owner[chosen]
    pairs, place = np.unique(key, return_inverse=True)
    n_hits = np.bincount(place, hits.n_owner[chosen], minlength=len(pairs))
    record = pairs >> NODE_BITS
    total = np.bincount(hits.record[is_window], hits.n_viral[is_window], minlength=n_records)
    is_enough = (n_hits >= MIN_FAMILY_HITS) & (n_hits > MIN_FAMILY_SHARE * total[record])
    owners = np.zeros(n_records, dtype=np.int64)
    owners[record[is_enough]] = pairs[is_enough] & CELLULAR
    return owners


def load_known_index(path: Path) -> KnownIndex:
    """Read an index from its safetensors file.

    Raises:
        UnavailableError: the file is missing, damaged, or in another format.
    """
    try:
        content, facts, tensors = load_tensors(path)
        if facts["format"] != FORMAT:
            raise ValueError(f"its format is {facts['format']}")
        return KnownIndex(
            firsts=tensors["firsts"],
            sizes=tensors["sizes"],
            entries=tensors["entries"],
            nodes=Nodes(*(tensors[f"nodes.{name}"] for name in Nodes._fields)),
            limit=int(facts["limit"]),
            owners=tuple(facts["owners"]),
            needed=tuple(facts["needed"]),
            strengths=tuple(facts["strengths"]),
            false_calls=tuple(
                FalseCalls(one["n_bases"], tuple(one["false_per_true"]))
                for one in facts["false_calls"]
            ),
            lineages_sha256=facts["lineages_sha256"],
            sha256=hash_weights(path.name, content),
        )
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not the index of known viruses: {printable(error)}",
            hint="reinstall VirNucPro: this file is part of it",
        ) from error
