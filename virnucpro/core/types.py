"""The nouns. Each object is immutable and checks itself once, when it is made.

FastaRecord > Chunk > Orf > Shard > (PackedBatch) > Embeddings > Prediction > Call

A child names its parent in a field; an id is never taken apart. Coordinates are bases,
0-based and half-open, on the forward strand of the record. Those that are made by the million
are tuples: making one takes a third of the time.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, compress, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.recipe import Reads, Status

Values = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]

DECIMALS = 6  # of scores
FRAMES_FAILED = "frames failed"  # in the note of a record that may be run again
PROTEIN = "."  # the strand of an ORF that came as a protein


# how assemblers (Unicycler, metaMDBG) and NCBI mark a circular sequence after the id
_CIRCULAR = re.compile(
    r"[\s\[;,|](circular\s*=\s*(true|yes|y|1)|topology\s*=\s*circular)\b", re.IGNORECASE
)
_COMPLEMENT = str.maketrans("ACGTU", "TGCAA")


class FastaRecord(NamedTuple):
    """One sequence of an input file."""

    id: str  # id in the run: no other record has it
    header: str  # the whole line after '>' or '@', as in the file but for the id
    sequence: str  # no white space and no gaps; the case is kept
    line: int = 0  # line of the header, counted from 1
    n_gaps: int = 0  # gaps of an alignment, left out
    sample: str = ""  # name of the file in the tables
    own_id: str = ""  # id in the file, where that differs

    @property
    def name(self) -> str:
        """The id of the record in its file."""
        return self.own_id or self.id

    @property
    def protein(self) -> str:
        """The sequence in upper case, without the final stop that gene callers write."""
        return self.sequence.upper().removesuffix("*")

    @property
    def is_circular(self) -> bool:
        """True if the header says that the sequence is circular.

        >>> FastaRecord("1", "1 length=5000 circular=true", "").is_circular
        True
        """
        return _CIRCULAR.search(self.header) is not None


class Records(NamedTuple):
    """Neighbouring records in columns, in step: the fields of ``FastaRecord``, in its order."""

    ids: list[str]
    headers: list[str]
    sequences: list[str]
    lines: list[int]
    n_gaps: list[int]
    samples: list[str]
    own_ids: list[str]

    @classmethod
    def of(cls, records: Iterable[FastaRecord]) -> Records:
        columns = list(zip(*records, strict=True)) or [()] * len(cls._fields)
        return cls._make(map(list, columns))

    @classmethod
    def joined(cls, each: Sequence[Records]) -> Records:
        return each[0] if len(each) == 1 else cls._make(_end_to_end(each or [cls.of(())]))

    def each(self) -> Iterator[FastaRecord]:
        return map(FastaRecord, *self)

    def at(self, place: int) -> FastaRecord:
        return FastaRecord._make(column[place] for column in self)

    def rows(self, rows: slice) -> Records:
        return Records._make(column[rows] for column in self)

    def kept(self, mask: Sequence[bool]) -> Records:
        return Records._make(list(compress(column, mask)) for column in self)

    @property
    def names(self) -> list[str]:
        """The ids of the records in their files."""
        return [own or name for own, name in zip(self.own_ids, self.ids, strict=True)]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.sequences), np.int64, len(self.sequences))

    @property
    def n_letters(self) -> int:
        return sum(map(len, self.sequences))

    def with_ids(self, ids: list[str]) -> Records:
        """The same records with other ids, in their headers too."""
        headers = [
            header if new == old else new + header.lstrip()[len(old) :]
            for header, old, new in zip(self.headers, self.ids, ids, strict=True)
        ]
        return self._replace(ids=ids, headers=headers)

    def with_mate(self, mate: int) -> Records:
        """Add ``/1`` or ``/2`` to the ids, unless they end so."""
        return self.with_ids(
            [name if name.endswith(("/1", "/2")) else f"{name}/{mate}" for name in self.ids]
        )

    def qualified(self, prefix: str, unprefixed: Container[str]) -> Records:
        """Prefix the ids, except those in ``unprefixed``; ``own_id`` keeps the original."""
        ids = [name if name in unprefixed else prefix + name for name in self.ids]
        own = ["" if new == old else old for new, old in zip(ids, self.ids, strict=True)]
        return self.with_ids(ids)._replace(own_ids=own)


def reverse_complement(bases: str) -> str:
    """The reverse complement in upper case; only A, C, G, T and U are complemented."""
    return bases.upper().translate(_COMPLEMENT)[::-1]


class Orf(NamedTuple):
    """A translated reading frame of a chunk without a stop codon.

    A protein of the input is an Orf too: its own chunk and its own record, with strand ``.``. So is
    a whole chunk, if the encoder reads chunks: its bases take the place of the protein.
    """

    id: str
    chunk_id: str
    record_id: str
    start: int
    end: int
    strand: str
    protein: str
    bases: str = ""  # bases of its strand in upper case, and the next one, if any
    copy_of: int | None = None  # ordinal of the embedded ORF of this sequence; see ``run.shards``

    def text(self, reads: Reads) -> str:
        """The sequence that an encoder reads."""
        return self.bases if reads is Reads.DNA else self.protein

    def codons_in(self, sequence: str) -> str:
        """Its complete codons, on its own strand; ``sequence`` is that of the record."""
        bases = sequence[self.start : self.end]
        return reverse_complement(bases) if self.strand == "-" else bases


SHARD_NAME = r"\d{6,}"  # names of shards, as a pattern


def shard_name(index: int) -> str:
    return f"{index:06d}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A FASTA file of ORFs: the unit of work, failure and resume."""

    index: int
    path: Path = field(compare=False)  # a plan is made elsewhere, then moved here
    n_orfs: int
    n_embedded: int  # ORFs that are not copies
    n_residues: int  # residues of these
    sha256: str  # hash of the file

    def __post_init__(self) -> None:
        check_counts(self.index, self.n_orfs, self.n_embedded, self.n_residues)
        if self.n_embedded > min(self.n_orfs, self.n_residues):
            raise ValueError(f"{self.n_embedded} of {self.n_orfs} ORFs, {self.n_residues} residues")
        if not isinstance(self.sha256, str):
            raise TypeError("a shard is known by its hash")

    @property
    def name(self) -> str:
        return shard_name(self.index)


def check_counts(*counts: object) -> None:
    """Raise TypeError or ValueError for anything but counts that fit into 64 bits."""
    for count in counts:
        if type(count) is not int:  # a bool is not a count
            raise TypeError(f"{count!r} is not a count")
        if not 0 <= count < 2**63:
            raise ValueError(f"{count} is not a count")


class Failure(NamedTuple):
    """An ORF without an embedding, and the reason."""

    orf_id: str
    record_id: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The vectors of a shard's ORFs. Ids and rows travel together or not at all.

    ``vectors`` is (n_orfs, dim), or, ``per_residue``, (sum of lengths, dim), ORF after ORF.
    ``failures`` names the ORFs without vectors.
    """

    ids: tuple[str, ...]
    lengths: NDArray[np.int32]  # (n_orfs,), residues
    vectors: NDArray[np.float32]
    per_residue: bool = False
    failures: tuple[Failure, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.lengths.dtype != np.int32 or self.vectors.dtype != np.float32:
            raise ValueError(f"{self.lengths.dtype} lengths, {self.vectors.dtype} vectors")
        n_rows = int(self.lengths.sum()) if self.per_residue else len(self.ids)
        if self.vectors.ndim != 2 or len(self.vectors) != n_rows:
            raise ValueError(f"{n_rows} rows expected for vectors of shape {self.vectors.shape}")
        if self.lengths.shape != (len(self.ids),):
            raise ValueError(f"{len(self.ids)} ids for lengths of shape {self.lengths.shape}")
        if len({*self.ids, *(f.orf_id for f in self.failures)}) != self.n_orfs:
            raise ValueError("an ORF id occurs twice")
        if not np.isfinite(self.vectors).all():
            raise ValueError("a vector is not finite")

    @property
    def n_orfs(self) -> int:
        """Number of ORFs, failed ones included."""
        return len(self.ids) + len(self.failures)

    def without(self, hidden: Collection[str]) -> Embeddings:
        """The embeddings without the ORFs of these ids."""
        if not hidden:
            return self
        mask = np.array([orf_id not in hidden for orf_id in self.ids], dtype=np.bool_)
        of_rows = np.repeat(mask, self.lengths) if self.per_residue else mask
        ids = tuple(compress(self.ids, mask))
        return replace(self, ids=ids, lengths=self.lengths[mask], vectors=self.vectors[of_rows])


class Prediction(NamedTuple):
    """The score of one ORF, or the reason why it has none."""

    orf: Orf
    virus_score: float | None  # in [0, 1], 6 decimals
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """The answer for one record."""

    record_id: str  # id in its file
    length: int  # bases, or residues of a protein
    status: Status
    sample: str = ""
    virus_score: float | None = None
    base_score: float | None = None  # the scorer's; equals virus_score unless a head changes that
    is_virus: bool = False
    false_discovery_rate: float | None = None  # share of false calls at this score and above
    n_chunks: int = 0
    n_chunks_scored: int = 0
    n_frames_scored: int = 0
    note: str = ""
    regions: tuple[Region, ...] = ()  # filled when read from the tables of a finished run
    identities: tuple[Identity, ...] = ()  # of its rows in the table of viruses, in order

    def __post_init__(self) -> None:
        if (self.status == "scored") != (self.virus_score is not None):
            raise ValueError(f"{self.record_id!r}: {self.status} with score {self.virus_score}")
        if self.virus_score is not None and not 0 <= self.virus_score <= 1:
            raise ValueError(f"{self.record_id!r}: a score of {self.virus_score}")

    @property
    def is_mendable(self) -> bool:
        """True if a new copy of the record may replace it: it is invalid, or a frame failed."""
        return self.status == "invalid" or FRAMES_FAILED in self.note


class Identity(NamedTuple):
    """What one virus is, by its sequence; empty if unknown."""

    virus_kind: str = ""  # one of the kinds of ``scorer.kin``
    kind_probability: float | None = None
    kin: str = ""  # family, or else cluster, that it shares most words with; empty: thin evidence
    kin_words: int = 0
    kin_share: float | None = None  # of its words with a known owner
    topology: str = ""  # of a whole record
    repeat_length: int = 0  # bases of its terminal repeat


class Region(NamedTuple):
    """A viral interval of a record: a provirus, or a viral record without the host's flanks.

    Its bases are ``sequence[start:end]``.
    """

    start: int
    end: int
    kind: Literal["provirus", "whole"]  # whole: of a record that is called a virus
    posterior: float  # probability of being viral, the mean over its pieces
    att: str = ""  # bases of the direct repeat at both ends
    over_origin: bool = False  # one of two parts: it crosses the origin of a circular record
    is_virus: bool = False  # by the cut, of the record or of proviruses
    evidence: str = ""  # for a provirus, beside its posterior: attributes of GFF3
    # of a provirus: whether it has the genes of a whole tailed phage; "" for others
    region_class: Literal["prophage", "uncertain", ""] = ""


class Track(NamedTuple):
    """The evidence for the regions of a record: one value per piece in each column, (n_pieces,)."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]  # before the start if a piece crosses the origin of a circle
    log_odds: NDArray[np.float64]  # NaN: no base of the piece is known
    posterior: NDArray[np.float64]  # probability of being viral, by all pieces of the record


# the regions of a record, in order and without overlap, and the evidence for them
Found: TypeAlias = tuple[tuple[Region, ...], Track]


class Calls(NamedTuple):
    """The calls of neighbouring records in columns, in step: fields of ``Call``, in its order."""

    record_ids: list[str]
    lengths: list[int]
    statuses: list[Status]
    samples: list[str]
    virus_scores: list[float | None]
    base_scores: list[float | None]
    are_viruses: list[bool]
    rates: list[float | None]
    n_chunks: list[int]
    n_chunks_scored: list[int]
    n_frames_scored: list[int]
    notes: list[str]

    @classmethod
    def of(cls, calls: Iterable[Call]) -> Calls:
        rows = map(attrgetter(*[one.name for one in fields(Call)[: len(cls._fields)]]), calls)
        columns = list(zip(*rows, strict=True)) or [()] * len(cls._fields)
        return cls(*map(list, columns))

    def rows(self, rows: slice) -> Calls:
        return Calls._make(column[rows] for column in self)


class FrameScores(NamedTuple):
    """The scored frames, or pieces, of neighbouring records, in columns in step."""

    n_of_records: list[int]  # of each record
    ids: list[str]
    chunk_ids: list[str]
    scores: list[float]

    @classmethod
    def of(cls, predictions: Iterable[Sequence[Prediction]]) -> FrameScores:
        """Make columns from the predictions of each record."""
        of_records = [[one for one in each if one.virus_score is not None] for each in predictions]
        frames = list(chain.from_iterable(of_records))
        return cls(
            list(map(len, of_records)),
            [frame.orf.id for frame in frames],
            [frame.orf.chunk_id for frame in frames],
            [frame.virus_score for frame in frames if frame.virus_score is not None],
        )

    def rows(self, rows: slice) -> FrameScores:
        first = sum(self.n_of_records[: rows.start])
        n_of_records = self.n_of_records[rows]
        some = slice(first, first + sum(n_of_records))
        ids, chunk_ids, scores = self.ids[some], self.chunk_ids[some], self.scores[some]
        return FrameScores(n_of_records, ids, chunk_ids, scores)

    def renamed(self, before: Sequence[str], now: Sequence[str]) -> FrameScores:
        """Rename the records; the ids of frames and chunks begin with the id of the record."""
        pairs = zip(before, now, self.n_of_records, strict=True)
        names = [(len(old), new) for old, new, n in pairs for _ in range(n)]
        ids, chunk_ids = (
            [new + name[n:] for (n, new), name in zip(names, column, strict=True)]
            for column in (self.ids, self.chunk_ids)
        )
        return self._replace(ids=ids, chunk_ids=chunk_ids)


class Viruses(NamedTuple):
    """The viruses in neighbouring records, in columns in step; each is a row of the table."""

    places: list[int]  # indices of their records, in order; a record may have several
    names: list[str]  # of their sequences
    kinds: list[str]  # of regions
    starts: list[int]
    ends: list[int]
    cross_origin: list[bool]  # the end lies before the start
    letters: list[str]
    scores: list[float]
    identities: list[Identity]

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]]) -> Viruses:
        columns = list(zip(*rows, strict=True)) or [()] * len(cls._fields)
        return cls._make(map(list, columns))

    def rows(self, first: int, end: int) -> Viruses:
        """The viruses of records ``first:end``; their places count from ``first``."""
        rows = slice(bisect_left(self.places, first), bisect_left(self.places, end))
        some = Viruses._make(column[rows] for column in self)
        return some._replace(places=[place - first for place in some.places])

    def renamed(self, before: Sequence[str], now: Sequence[str]) -> Viruses:
        """Rename the records; names of viruses begin with the id of the record."""
        pairs = zip(self.places, self.names, strict=True)
        return self._replace(names=[now[i] + name[len(before[i]) :] for i, name in pairs])


@dataclass(slots=True, eq=False)
class CalledRecords:
    """Neighbouring records, their calls, and the evidence for these, in columns in step."""

    records: Records
    calls: Calls
    frames: FrameScores
    # by index of the record: if it was searched for regions; if it has frames to embed
    regions: dict[int, Found] = field(default_factory=dict)
    embedded: dict[int, Sequence[Prediction]] = field(default_factory=dict)
    viruses: Viruses = field(default_factory=lambda: Viruses.of(()))  # empty before the search

    @classmethod
    def joined(cls, each: Sequence[CalledRecords]) -> CalledRecords:
        """Concatenate the results of neighbouring records."""
        firsts = accumulate((len(one.records.ids) for one in each), initial=0)
        placed = list(zip(firsts, each, strict=False))
        return cls(
            Records.joined([one.records for one in each]),
            Calls._make(_end_to_end(one.calls for one in each)),
            FrameScores._make(_end_to_end(one.frames for one in each)),
            {n + i: of for n, one in placed for i, of in one.regions.items()},
            {n + i: of for n, one in placed for i, of in one.embedded.items()},
        )

    @property
    def failures(self) -> dict[int, list[Prediction]]:
        """The frames without a vector, by the index of their record."""
        each = {i: [one for one in of if one.failure] for i, of in self.embedded.items()}
        return {i: failed for i, failed in each.items() if failed}

    def region_kinds(self, place: int) -> Counter[str]:
        """Count regions by kind; the two parts of one that crosses the origin count once."""
        return Counter(
            region.kind
            for region in self.regions[place][0]
            if not (region.over_origin and region.start == 0)
        )

    def by_sample(self) -> Iterator[tuple[str, CalledRecords]]:
        """Split the results by sample."""
        first = 0
        for sample, group in groupby(self.records.samples):
            end = first + len(list(group))
            yield sample, self.rows(first, end)
            first = end

    def rows(self, first: int, end: int) -> CalledRecords:
        if (first, end) == (0, len(self.records.ids)):
            return self
        rows = slice(first, end)
        places = range(first, end)
        regions = {i - first: of for i, of in self.regions.items() if i in places}
        embedded = {i - first: of for i, of in self.embedded.items() if i in places}
        columns = self.records.rows(rows), self.calls.rows(rows), self.frames.rows(rows)
        return CalledRecords(*columns, regions, embedded, self.viruses.rows(first, end))

    def by_own_ids(self) -> CalledRecords:
        """The results with the ids of records and frames in their file."""
        ids, names = self.records.ids, self.records.names
        return replace(
            self,
            records=self.records.with_ids(names)._replace(own_ids=[""] * len(names)),
            frames=self.frames.renamed(ids, names),
            viruses=self.viruses.renamed(ids, names),
        )


def _end_to_end(each: Iterable[Sequence[list[Any]]]) -> list[list[Any]]:
    """Concatenate several tables, column by column."""
    return [list(chain.from_iterable(columns)) for columns in zip(*each, strict=True)]


# Functions of arrays that several rooms use


def sigmoid(log_odds: Values) -> Values:
    """The probability for these log-odds; no overflow, however large they are. (n,) -> (n,)"""
    return np.asarray(0.5 * (1 + np.tanh(log_odds / 2)))


def runs_of(mask: Mask) -> list[tuple[int, int]]:
    """The runs of true values in a mask, as (first, one after the last)."""
    bounds = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert the bits of bfloat16 numbers to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
