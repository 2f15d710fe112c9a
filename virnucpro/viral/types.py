"""Scores, calls, regions and viruses in records.

Objects are immutable and checked once, at construction. High-volume types are NamedTuples, which
are three times faster to construct.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.recipe import Status
from virnucpro.core.types import FRAMES_FAILED, Orf, Records, concatenate_columns


class Prediction(NamedTuple):
    """The score for one ORF, or the reason why it has none."""

    orf: Orf
    virus_score: float | None  # in [0, 1], 6 decimals
    failure: str = ""


def failure_note(frames: Sequence[Prediction]) -> str:
    """Report how many frames have no vector, and the first reason, or return ""."""
    failures = [frame.failure for frame in frames if frame.failure]
    if not failures:
        return ""
    return f"{len(failures)} of {len(frames)} {FRAMES_FAILED}: {failures[0]}"


@dataclass(frozen=True, slots=True)
class Call:
    """The call for one record."""

    record_id: str  # id in its file
    length: int  # bases, or residues in a protein
    status: Status
    sample: str = ""
    virus_score: float | None = None
    base_score: float | None = None  # by the scorer. Equals virus_score unless a head changes it
    is_virus: bool = False
    false_discovery_rate: float | None = None  # share that is false at this score and above
    n_chunks: int = 0
    n_chunks_scored: int = 0
    n_frames_scored: int = 0
    note: str = ""
    evidence: Literal["score", "known", "both", ""] = ""  # the reason to call it a virus
    known_family: str = ""  # family of the known viruses that it resembles, or their cluster
    n_known_kmers: int | None = None  # shared with known viruses. None: not looked up
    regions: tuple[Region, ...] = ()  # filled when read from a finished run's tables
    identities: tuple[Identity, ...] = ()  # from its rows in the virus table, in order

    def __post_init__(self) -> None:
        if (self.status == "scored") != (self.virus_score is not None):
            raise ValueError(f"{self.record_id!r}: {self.status} with score {self.virus_score}")
        if self.virus_score is not None and not 0 <= self.virus_score <= 1:
            raise ValueError(f"{self.record_id!r}: a score of {self.virus_score}")

    @property
    def is_mendable(self) -> bool:
        """Return whether a new copy may replace the record: it is invalid, or a frame failed."""
        return self.status == "invalid" or FRAMES_FAILED in self.note


class Identity(NamedTuple):
    """The identity of one virus, by its sequence, empty if unknown."""

    group: str = ""  # one of ``taxonomy.KINDS``
    group_probability: float | None = None
    family: str = ""  # family, or else cluster, that shares most k-mers. Empty: too few
    family_kmers: int = 0
    family_share: float | None = None  # their share among its k-mers with a known taxon
    topology: str = ""  # for a complete record
    repeat_length: int = 0  # bases in its terminal repeat
    taxonomy: str = ""  # names from the root to the family, as geNomad writes them
    genus: str = ""
    genome_type: str = ""  # of the lowest named taxon, as ICTV writes it
    host_source: str = ""  # the same
    host_genus: str = ""  # of phages, by genus or family
    completeness: float | None = None  # percent of a genome, or of a molecule with closed ends
    completeness_method: str = ""  # as in ``completeness.Completeness``


class Genes(NamedTuple):
    """The genes in some viruses, in parallel columns, by virus and first base.

    The bases of a gene are ``sequence[start:end]``, with the stop codon.
    """

    n_per_virus: NDArray[np.int64]  # (n_viruses,) number for each virus
    start: NDArray[np.int64]  # (n,)
    end: NDArray[np.int64]  # (n,) in a circle, past the length if the gene crosses the origin
    is_reverse: NDArray[np.bool_]  # (n,)
    lacks_start: NDArray[np.bool_]  # (n,) it lies outside the sequence
    lacks_end: NDArray[np.bool_]  # (n,)
    start_codons: list[str]  # "": outside the sequence
    proteins: list[str]
    coding_score: NDArray[np.float64]  # (n,) log-odds of a gene
    log_odds: NDArray[np.float64]  # (n,) of a viral protein over a cellular one. NaN: too short
    n_known_kmers: NDArray[np.int64]  # (n,) that known viruses have and cells do not
    known_families: list[str]  # family or cluster of most of them

    @property
    def virus(self) -> NDArray[np.int64]:
        """Return each gene's virus. (n,)"""
        return np.repeat(np.arange(len(self.n_per_virus)), self.n_per_virus)

    def slice_viruses(self, first: int, end: int) -> Genes:
        """Return the genes in viruses ``first:end``."""
        n_before = int(self.n_per_virus[:first].sum())
        n_per_virus = self.n_per_virus[first:end]
        rows = slice(n_before, n_before + int(n_per_virus.sum()))
        return Genes._make([n_per_virus, *(column[rows] for column in self[1:])])


class Region(NamedTuple):
    """A viral interval in a record: a provirus, or a viral record without the host flanks.

    Its bases are ``sequence[start:end]``.
    """

    start: int
    end: int
    extent: Literal["provirus", "whole"]  # whole: the record itself is called a virus
    posterior: float  # probability of being viral, the mean over its windows
    att: str = ""  # bases in the direct repeat at both ends
    over_origin: bool = False  # one of two parts: it crosses a circular record's origin
    is_virus: bool = False  # by the threshold for the record or for proviruses
    evidence: str = ""  # for a provirus, in addition to its posterior: attributes of GFF3
    # for a provirus: whether it has the genes of a complete tailed phage, else ""
    region_class: Literal["prophage", "uncertain", ""] = ""


class Track(NamedTuple):
    """The evidence for a record's regions, one value per window in each column, (n_windows,)."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]  # before the start if a window crosses a circle's origin
    log_odds: NDArray[np.float64]  # NaN: no base in the window is known
    posterior: NDArray[np.float64]  # probability of being viral, given all windows in the record


# a record's regions, in order and without overlap, and their evidence
FoundRegions: TypeAlias = tuple[tuple[Region, ...], Track]


class Calls(NamedTuple):
    """The calls for neighbouring records in parallel columns: ``Call`` fields, in order."""

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
    evidences: list[str]
    known_families: list[str]
    n_known_kmers: list[int | None]

    @classmethod
    def from_calls(cls, calls: Iterable[Call]) -> Calls:
        rows = map(attrgetter(*[one.name for one in fields(Call)[: len(cls._fields)]]), calls)
        columns = list(zip(*rows, strict=True)) or [()] * len(cls._fields)
        return cls(*map(list, columns))

    def slice_rows(self, rows: slice) -> Calls:
        return Calls._make(column[rows] for column in self)


class FrameScores(NamedTuple):
    """The scored frames, or windows, in neighbouring records, in parallel columns."""

    n_per_record: list[int]  # number for each record
    ids: list[str]
    chunk_ids: list[str]
    scores: list[float]

    @classmethod
    def from_predictions(cls, predictions: Iterable[Sequence[Prediction]]) -> FrameScores:
        """Build columns from the predictions for each record."""
        scored_frames = [
            [frame for frame in frames_of_record if frame.virus_score is not None]
            for frames_of_record in predictions
        ]
        frames = list(chain.from_iterable(scored_frames))
        return cls(
            list(map(len, scored_frames)),
            [frame.orf.id for frame in frames],
            [frame.orf.chunk_id for frame in frames],
            [frame.virus_score for frame in frames if frame.virus_score is not None],
        )

    def slice_rows(self, rows: slice) -> FrameScores:
        first = sum(self.n_per_record[: rows.start])
        n_per_record = self.n_per_record[rows]
        sliced = slice(first, first + sum(n_per_record))
        ids = self.ids[sliced]
        chunk_ids = self.chunk_ids[sliced]
        scores = self.scores[sliced]
        return FrameScores(n_per_record, ids, chunk_ids, scores)

    def with_ids(self, before: Sequence[str], now: Sequence[str]) -> FrameScores:
        """Rename the records. The ids of frames and chunks begin with the record id."""
        pairs = zip(before, now, self.n_per_record, strict=True)
        names = [(len(old), new) for old, new, n in pairs for _ in range(n)]
        ids, chunk_ids = (
            [new + name[n:] for (n, new), name in zip(names, column, strict=True)]
            for column in (self.ids, self.chunk_ids)
        )
        return self._replace(ids=ids, chunk_ids=chunk_ids)


class Viruses(NamedTuple):
    """The viruses in neighbouring records, in parallel columns. Each is a table row."""

    record_indices: list[int]  # in order. A record may have several viruses
    names: list[str]  # of their sequences
    extents: list[str]  # of regions
    starts: list[int]
    ends: list[int]
    cross_origin: list[bool]  # the end comes before the start
    letters: list[str]
    scores: list[float]
    identities: list[Identity]
    genes: Genes | None = None  # None: they were not searched

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[Any, ...]]) -> Viruses:
        """Build columns from the rows of viruses, without their genes."""
        n_columns = len(cls._fields) - 1
        columns = list(zip(*rows, strict=True)) or [()] * n_columns
        return cls._make([*map(list, columns), None])

    def slice_rows(self, first: int, end: int) -> Viruses:
        """Return the viruses in records ``first:end``. Record indices count from ``first``."""
        first_row = bisect_left(self.record_indices, first)
        end_row = bisect_left(self.record_indices, end)
        genes = None if self.genes is None else self.genes.slice_viruses(first_row, end_row)
        sliced = Viruses._make([*(column[first_row:end_row] for column in self[:-1]), genes])
        return sliced._replace(record_indices=[index - first for index in sliced.record_indices])

    def with_ids(self, before: Sequence[str], now: Sequence[str]) -> Viruses:
        """Rename the records. Virus names begin with the record id."""
        pairs = zip(self.record_indices, self.names, strict=True)
        return self._replace(names=[now[i] + name[len(before[i]) :] for i, name in pairs])


@dataclass(slots=True, eq=False)
class CalledRecords:
    """Neighbouring records, their calls and the evidence for them, in parallel columns."""

    records: Records
    calls: Calls
    frames: FrameScores
    # by record index: if it was searched for regions, or if it has frames to embed
    regions: dict[int, FoundRegions] = field(default_factory=dict)
    embedded: dict[int, Sequence[Prediction]] = field(default_factory=dict)
    viruses: Viruses = field(
        default_factory=lambda: Viruses.from_rows(())
    )  # empty before the search
    # by record index, and suffix of a region's name: the replacement for that suffix
    region_suffixes: dict[tuple[int, str], str] = field(default_factory=dict)

    @classmethod
    def concatenate(cls, parts: Sequence[CalledRecords]) -> CalledRecords:
        """Concatenate the results for neighbouring records."""
        firsts = accumulate((len(part.records.ids) for part in parts), initial=0)
        numbered = list(zip(firsts, parts, strict=False))
        return cls(
            Records.concatenate([part.records for part in parts]),
            Calls._make(concatenate_columns(part.calls for part in parts)),
            FrameScores._make(concatenate_columns(part.frames for part in parts)),
            {first + i: regions for first, part in numbered for i, regions in part.regions.items()},
            {first + i: frames for first, part in numbered for i, frames in part.embedded.items()},
        )

    @property
    def failures(self) -> dict[int, list[Prediction]]:
        """Return the frames without a vector, by record index."""
        failed = {
            index: [prediction for prediction in predictions if prediction.failure]
            for index, predictions in self.embedded.items()
        }
        return {index: predictions for index, predictions in failed.items() if predictions}

    def region_extents(self, index: int) -> Counter[str]:
        """Count regions by extent. The two parts of a region that crosses the origin count once."""
        return Counter(
            region.extent
            for region in self.regions[index][0]
            if not (region.over_origin and region.start == 0)
        )

    def split_by_sample(self) -> Iterator[CalledRecords]:
        """Split the results by sample."""
        first = 0
        for _, group in groupby(self.records.samples):
            end = first + len(list(group))
            yield self.slice_rows(first, end)
            first = end

    def slice_rows(self, first: int, end: int) -> CalledRecords:
        if (first, end) == (0, len(self.records.ids)):
            return self
        rows = slice(first, end)
        indices = range(first, end)
        regions = {i - first: regions for i, regions in self.regions.items() if i in indices}
        embedded = {i - first: frames for i, frames in self.embedded.items() if i in indices}
        columns = (
            self.records.slice_rows(rows),
            self.calls.slice_rows(rows),
            self.frames.slice_rows(rows),
        )
        suffixes = {
            (i - first, suffix): free
            for (i, suffix), free in self.region_suffixes.items()
            if i in indices
        }
        viruses = self.viruses.slice_rows(first, end)
        return CalledRecords(*columns, regions, embedded, viruses, suffixes)

    def with_file_ids(self) -> CalledRecords:
        """Return the results with original file ids for records and frames."""
        ids = self.records.ids
        names = self.records.names
        return replace(
            self,
            records=self.records.with_ids(names)._replace(own_ids=[""] * len(names)),
            frames=self.frames.with_ids(ids, names),
            viruses=self.viruses.with_ids(ids, names),
        )
