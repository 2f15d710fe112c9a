"""The outputs of a run that are written record by record, a class each: file name, columns, rows.

The rows of a record are text that is made wherever its result is; a sink writes them, in order.
``SINKS`` lists them by command. The run folder derives from it what is its own, so a new output is
a class here and a line in a list.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TextIO, TypeAlias, TypeGuard
from urllib.parse import quote

import numpy as np

from virnucpro.ground.config import STATUSES, Command, Status
from virnucpro.ground.files import writing
from virnucpro.ground.log import counted, escaped
from virnucpro.ground.records import (
    FRAMES_FAILED,
    Call,
    CalledRecords,
    Identity,
    Region,
    Viruses,
)
from virnucpro.ground.tree import Tree
from virnucpro.scorer.kin import own_kinship
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.translate import GeneticCode
from virnucpro.tables.text import (
    EMPTY,
    SortedLines,
    call_words,
    chunk_rows,
    decimal_texts,
    decimals,
    encoded,
    fasta,
    frame_rows,
    optional_table,
    packed_table,
    record_rows,
    rows_of,
    sorted_lines,
    table,
    texts,
    whole,
)

LENGTH_CLASSES = (0, 1_000, 3_000, 10_000)  # bases or residues from which classes begin
_SYNCED_AT_ONCE = 4  # samples: a disk takes a few syncs in the time of one
_NO_HIT = (-1.0, 0, "")
_SUMS = (  # of a tally
    *("n_viral", "n_proviruses", "n_whole_regions", "n_frames"),
    *("n_failed_frames", "n_failed_records", "n_mendable"),
)
_COUNTERS = ("statuses", "viral_lengths", "kinds", "families")  # of a tally


@dataclass(slots=True)
class Tally:
    """The counts of some records."""

    statuses: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    n_viral: int = 0
    n_proviruses: int = 0  # that count as viruses, in records that are not called
    n_regions: int | None = None  # None: no record was searched for regions
    n_whole_regions: int = 0  # those of kind whole
    n_frames: int = 0  # frames with a vector
    n_failed_frames: int = 0
    n_failed_records: int = 0  # records with a failed frame
    first_failure: str = ""  # the first failed frame, and its reason
    n_mendable: int = 0  # records with a failed frame, by their notes
    viral_lengths: Counter[int] = field(default_factory=Counter)  # of viral records: start of class
    kinds: Counter[str] = field(default_factory=Counter)  # of viruses, where the kind is known
    families: Counter[str] = field(default_factory=Counter)  # of viruses with a name
    best: tuple[float, int, str] = _NO_HIT  # score, length and id of the best viral record

    @property
    def n_records(self) -> int:
        return sum(self.statuses.values())

    @property
    def n_viruses(self) -> int:
        """Rows of the verdict."""
        return self.n_viral + self.n_proviruses

    @property
    def virus_line(self) -> str:
        """The line on all viruses: records and, if they were looked for, proviruses in others."""
        see = f"see {VirusTable.file}"
        n_within = (self.n_regions or 0) - self.n_whole_regions
        if not n_within:
            return f"viruses: {self.n_viruses:,}; {see}"
        return (
            f"viruses: {self.n_viruses:,} = {counted(self.n_viral, 'record')} + "
            f"{self.n_proviruses:,} of {counted(n_within, 'virus-like region')} in other records; "
            f"{see}"
        )

    @classmethod
    def of(cls, results: CalledRecords) -> Tally:
        """The counts of these records."""
        calls, tally = results.calls, cls()
        for status, n_records in Counter(calls.statuses).items():
            tally.statuses[status] = n_records
        tally.n_mendable = sum(FRAMES_FAILED in note for note in calls.notes if note)
        viral = [
            (score or 0.0, length, name)
            for is_virus, score, length, name in zip(
                calls.are_viruses, calls.virus_scores, calls.lengths, calls.record_ids, strict=True
            )
            if is_virus
        ]
        tally.n_viral = len(viral)
        starts = np.digitize([length for _, length, _ in viral], LENGTH_CLASSES[1:]).tolist()
        tally.viral_lengths.update(LENGTH_CLASSES[number] for number in starts)
        tally.best = max(viral, key=itemgetter(0, 1), default=_NO_HIT)  # the first of equals
        for kinds in map(results.region_kinds, results.regions):
            tally.n_regions = (tally.n_regions or 0) + kinds.total()
            tally.n_whole_regions += kinds["whole"]
        viruses = viruses_of(results)
        tally.n_proviruses = len(viruses.places) - len(viral)
        tally.kinds.update(one.virus_kind for one in viruses.identities if one.virus_kind)
        tally.families.update(one.kin for one in viruses.identities if one.kin)
        failures = results.failures
        failed = list(chain.from_iterable(failures.values()))
        tally.n_failed_frames, tally.n_failed_records = len(failed), len(failures)
        tally.n_frames = sum(map(len, results.embedded.values())) - len(failed)
        if failed:
            tally.first_failure = f"{failed[0].orf.id}: {failed[0].failure}"
        return tally

    def include(self, other: Tally) -> None:
        """Count the records of another, which come later."""
        for name in _COUNTERS:
            counts = getattr(self, name)
            for key, n in getattr(other, name).items():
                counts[key] += n
        if other.n_regions is not None:
            self.n_regions = (self.n_regions or 0) + other.n_regions
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_failure = self.first_failure or other.first_failure
        self.best = max(self.best, other.best, key=itemgetter(0, 1))


# text by the file name of a sink, of those that any record adds to
Rows: TypeAlias = Mapping[str, bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Portion:
    """Neighbouring records of one sample, as the outputs have them."""

    sample: str
    rows: Rows
    tally: Tally
    own_rows: Rows | None = None  # by the ids that the records have in their file

    @classmethod
    def of(
        cls,
        sample: str,
        results: CalledRecords,
        sinks: Sequence[type[Sink]],
        *,
        with_own: bool = False,
    ) -> Portion:
        """The records of a sample, with the rows that these sinks have of them."""
        per_file = [sink for sink in sinks if sink.per_file]
        own_rows = _rows(results.by_own_ids(), per_file) if with_own else None
        return cls(sample, _rows(results, sinks), Tally.of(results), own_rows)

    @classmethod
    def of_samples(
        cls,
        results: CalledRecords,
        sinks: Sequence[type[Sink]],
        code: GeneticCode | None,
        *,
        with_own: bool = False,
    ) -> list[Portion]:
        """The records of each sample; their viruses are identified, if a genetic code is known."""
        results.viruses = find_viruses(results, code)
        each = results.by_sample()
        return [cls.of(sample, of, sinks, with_own=with_own) for sample, of in each]

    def joined(self, other: Portion) -> Portion:
        """The same with the records of another, of the same sample, which come later."""
        tally = replace(self.tally, **{name: copy(getattr(self.tally, name)) for name in _COUNTERS})
        tally.include(other.tally)
        own_rows = None
        if self.own_rows is not None or other.own_rows is not None:
            own_rows = _joined(self.own_rows or {}, other.own_rows or {})
        return Portion(self.sample, _joined(self.rows, other.rows), tally, own_rows)

    @property
    def of_file(self) -> Portion:
        """The same records as the outputs of their file have them."""
        return self if self.own_rows is None else replace(self, rows=self.own_rows)


def _joined(rows: Rows, others: Rows) -> Rows:
    return {
        name: _in_order(name, b"".join((rows.get(name, b""), others.get(name, b""))))
        for name in {**rows, **others}
    }


def _rows(results: CalledRecords, sinks: Iterable[type[Sink]]) -> Rows:
    rows = ((sink.file, sink.rows(results)) for sink in sinks)
    return {name: _in_order(name, text) for name, text in rows if text is not None}


def _in_order(name: str, text: bytes) -> bytes:
    return sorted_lines(text) if name == ChunkTable.file else text


_Add = Callable[[Portion], None]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the outputs of a run, or of one sample."""

    folder: Path
    tree: Tree  # that it lies in
    aside: Path  # for lines that wait to be sorted: a folder on a disk that is large enough
    inputs: Sequence[InputFile] = ()
    refused: Sequence[InputFile] = ()  # inputs that could not be read
    samples: Path | None = None  # for a folder of outputs of each sample; None: there is none


class Sink:
    """One output of a run: a text file, with or without a line of columns.

    It is given the rows of every record once, in input order. What it opens on the stack appears
    when that is closed; before, ``finish`` is called, unless an error ended the run.
    """

    file: ClassVar[str]
    about: ClassVar[str] = ""  # what it holds, for the page; without it is not listed there
    columns: ClassVar[tuple[str, ...]] = ()
    per_file: ClassVar[bool] = True  # with --per-file each input file has its own, too
    is_optional: ClassVar[bool] = False  # it appears with its first line; an old one is deleted
    is_packed: ClassVar[bool] = False  # by gzip

    def __init__(self, place: Place, stack: ExitStack) -> None:
        path = place.folder / self.file
        kind = packed_table if self.is_packed else table
        opened = optional_table(place.tree, path, self.columns, kind)
        self.opened = stack.enter_context(opened)
        if not self.is_optional:
            self.opened()

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes | None:
        """The lines that neighbouring records add; None: none, and no need for the file."""
        return None

    def add(self, portion: Portion) -> None:
        if self.file in portion.rows:
            self.opened().write(portion.rows[self.file])

    def write(self, text: str) -> None:
        """Write what is not of a portion."""
        self.opened().write(encoded(text))

    def finish(self) -> None:
        """Write what had to wait for the last record."""


class RecordTable(Sink):
    """One row for every record."""

    file = "predictions.tsv"
    about = "every record, with its status, call and score"
    columns = (
        "record",
        "file",
        "length",
        "status",
        "call",
        "virus_score",
        "fdr",
        "n_chunks",
        "n_chunks_scored",
        "n_frames_scored",
        "base_score",
        "note",
    )

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes:
        return record_rows(results.calls)

    @classmethod
    def read(cls, lines: Iterator[str]) -> Iterator[Call]:
        """The rows of a table of records.

        Raises:
            ValueError: it is not as it was written.
        """
        for row in _parsed(lines, cls.columns):
            if not _is_status(status := row["status"]) or row["call"] not in ("virus", "other", ""):
                raise ValueError(f"{status} with the call {row['call']}")
            yield Call(
                row["record"],
                int(row["length"]),
                status,
                row["file"],
                virus_score=_float(row["virus_score"]),
                base_score=_float(row["base_score"]),
                is_virus=row["call"] == "virus",
                false_discovery_rate=_float(row["fdr"]),
                n_chunks=int(row["n_chunks"]),
                n_chunks_scored=int(row["n_chunks_scored"]),
                n_frames_scored=int(row["n_frames_scored"]),
                note=row["note"],
            )

    @classmethod
    def read_mendable(cls, lines: TextIO) -> Iterator[tuple[str, str]]:
        """Sample and id of each record that is invalid or has a failed frame."""
        for row in cls.read(lines):
            if row.status == "invalid" or FRAMES_FAILED in row.note:
                yield row.sample, row.record_id


class _EmbeddedTable(RecordTable):
    """A row for every record of a run that calls nothing."""

    file = "records.tsv"
    about = "every record, with its status"


class FrameTable(Sink):
    """One row for every frame with a score, in the original's format."""

    file = "prediction_results.txt"
    columns = ("Sequence_ID", "Prediction", "score1", "score2")

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes:
        return frame_rows(results.frames)

    @classmethod
    def read(cls, lines: TextIO) -> Iterator[tuple[str, float]]:
        """The frames of a table of frames, and their virus scores."""
        next(lines, None)
        for line in lines:
            frame_id, _, _, score = line.rstrip("\n").split("\t")
            yield frame_id, float(score)


class ChunkTable(Sink):
    """One row for every chunk with a scored frame, sorted by id, in the original's format."""

    file = "prediction_results_highestscore.csv"
    columns = ("Modified_ID", "Is_Virus")

    def __init__(self, place: Place, stack: ExitStack) -> None:
        super().__init__(place, stack)
        self.lines = stack.enter_context(SortedLines(place.aside))

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes:
        return chunk_rows(results.frames)

    def add(self, portion: Portion) -> None:
        self.lines.add(portion.rows.get(self.file, b""))

    def finish(self) -> None:
        self.opened().writelines(self.lines.merged())


class _ViralFasta(Sink):
    """The records that are called viral, with their headers as they were."""

    file = "viral.fasta"
    about = "the records called virus, with their headers as they were"

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes:
        columns = results.records.headers, results.records.sequences
        return fasta(*(list(compress(column, results.calls.are_viruses)) for column in columns))


class FailedSequences(Sink):
    """The records with a failed frame, to be corrected and run again."""

    file = "failed_sequences.fa"
    about = "the sequences that failed, to be corrected and run again"
    per_file, is_optional = False, True

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes | None:
        failed, records = results.failures, results.records
        columns = records.headers, records.sequences
        return fasta(*([column[place] for place in failed] for column in columns)) or None


class _SampleSink(Sink):
    """An output with lines for samples, whose records are counted to the last."""

    per_file = False

    def __init__(self, place: Place, stack: ExitStack) -> None:
        super().__init__(place, stack)
        self.place = place
        self.tallies: dict[str, Tally] = {}  # by sample

    def add(self, portion: Portion) -> None:
        self.tallies.setdefault(portion.sample, Tally()).include(portion.tally)


class FailedFiles(_SampleSink):
    """Path, stage and error of each file with a failure, separated by ``|``, which no path has."""

    file = "failed_files.txt"
    about = "what failed, by file"
    is_optional = True

    def finish(self) -> None:
        rows = [(file, "read", file.error) for file in self.place.refused]
        for file in self.place.inputs:
            tally = self.tallies.pop(file.sample, Tally())  # mates share one
            if tally.n_failed_frames:
                counts = (
                    f"{counted(tally.n_failed_frames, 'frame')} of "
                    f"{counted(tally.n_failed_records, 'record')} failed"
                )
                rows.append((file, "embed", f"{counts}; {tally.first_failure}"))
        lines = []
        for file, stage, error in rows:
            path = escaped(file.name or file.path).replace("|", r"\x7c")
            lines.append(f"{path}|{stage}|{escaped(error)}\n")
        for line in sorted(lines):
            self.write(line)


class _Virus(NamedTuple):
    """A virus of a record that was searched: the record itself, or a provirus in it."""

    name: str
    parts: tuple[Region, ...]  # in order; two if it crosses the origin of a circular record
    score: float


def _viruses_in(results: CalledRecords, place: int) -> Iterator[_Virus]:
    """The viruses in a record with regions: itself, without the flanks of a host, or proviruses."""
    calls, record_id = results.calls, results.records.ids[place]
    regions = results.regions[place][0]
    if calls.are_viruses[place]:
        whole = Region(0, calls.lengths[place], "whole", 1.0)
        part = regions[0] if regions else whole
        is_all = (part.start, part.end) == (0, calls.lengths[place])
        name = record_id if is_all else region_name(record_id, part)
        yield _Virus(name, (part,), calls.virus_scores[place] or 0.0)
        return
    viral = [region for region in regions if region.is_virus]
    crossing = tuple(region for region in reversed(viral) if region.over_origin)
    each = [(region,) for region in viral if not region.over_origin]
    for parts in (*each, crossing) if crossing else each:
        around = parts[0]._replace(end=parts[-1].end)
        yield _Virus(region_name(record_id, around), parts, around.posterior)


def find_viruses(results: CalledRecords, code: GeneticCode | None) -> Viruses:
    """The viruses in the records, each identified by its bases, if a genetic code is known.

    A virus with unknown letters, which are blanks, gets no identity: see ``recut``.
    """
    records, calls = results.records, results.calls
    plain = [i for i in compress(count(), calls.are_viruses) if i not in results.regions]
    ids, lengths, scores = records.ids, calls.lengths, calls.virus_scores
    rows: list[tuple[int, str, str, int, int, bool, str, float]] = [
        (i, ids[i], "whole", 0, lengths[i], False, records.sequences[i], scores[i] or 0.0)
        for i in plain
    ]
    for place in results.regions:
        sequence = records.sequences[place]
        for name, parts, score in _viruses_in(results, place):
            first, end = parts[0], parts[-1].end
            letters = "".join(sequence[part.start : part.end] for part in parts)
            where = first.kind, first.start, end, first.over_origin
            rows.append((place, name, *where, letters, score))
    rows.sort(key=itemgetter(0))
    columns = list(map(list, zip(*rows, strict=True))) or [list[Any]() for _ in range(8)]
    viruses = Viruses._make([*columns, [Identity()] * len(rows)])
    return (
        viruses if code is None else viruses._replace(identities=_identify(results, viruses, code))
    )


def _identify(results: CalledRecords, viruses: Viruses, code: GeneticCode) -> list[Identity]:
    """What each virus is."""
    records = results.records
    circles = [
        records.at(place).is_circular if name == records.ids[place] else None
        for place, name in zip(viruses.places, viruses.names, strict=True)
    ]
    known = ["" if " " in bases else bases for bases in viruses.letters]
    return own_kinship().identify(known, circles, code)


def viruses_of(results: CalledRecords) -> Viruses:
    """The viruses in the records, found once; not identified, unless they were before."""
    if results.viruses is None:
        results.viruses = find_viruses(results, None)
    return results.viruses


class VirusTable(Sink):
    """The verdict: a row for every virus, with the name of its sequence in ``_VirusFasta``."""

    file = "viruses.tsv"
    about = "every virus: records and proviruses, with score, fdr, place, kind and family"
    columns = (
        "virus",
        "record",
        "file",
        "kind",
        "start",
        "end",
        "length",
        "score",
        "fdr",
        "note",
        "virus_kind",
        "kind_probability",
        "kin",
        "kin_words",
        "kin_share",
        "topology",
        "repeat_length",
    )

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes:
        calls, viruses, names = results.calls, viruses_of(results), results.records.names
        if not viruses.places:
            return b""
        rates, notes = list[float | None](), list[str]()
        for place, crosses in zip(viruses.places, viruses.cross_origin, strict=True):
            is_virus = calls.are_viruses[place]
            rates.append(calls.rates[place] if is_virus else None)
            notes.append(calls.notes[place] if is_virus else OVER_ORIGIN if crosses else "")
        samples = [calls.samples[place] for place in viruses.places]
        kinds, chances, kin, n_words, shares, topologies, lengths = zip(
            *viruses.identities, strict=True
        )
        repeats = zip(lengths, topologies, strict=True)
        return rows_of(
            *(texts(viruses.names), texts([names[place] for place in viruses.places])),
            *(texts(samples), texts(viruses.kinds)),
            *(whole(np.array(viruses.starts) + 1), whole(viruses.ends)),
            *(whole(list(map(len, viruses.letters))), decimals(viruses.scores, 6)),
            *(decimals(rates, 4), texts(notes)),
            *(texts(kinds), decimals(chances, 3), texts(kin)),
            *(whole([n or EMPTY for n in n_words]), decimals(shares, 3), texts(topologies)),
            whole([n if topology else EMPTY for n, topology in repeats]),
        )

    @classmethod
    def read(cls, lines: Iterator[str]) -> Iterator[tuple[tuple[str, str], Identity]]:
        """The identities in a table of viruses, each after the sample and the id of its record.

        Raises:
            ValueError: it is not as it was written.
        """
        for row in _parsed(lines, cls.columns):
            yield (
                (row["file"], row["record"]),
                Identity(
                    virus_kind=row["virus_kind"],
                    kind_probability=_float(row["kind_probability"]),
                    kin=row["kin"],
                    kin_words=int(row["kin_words"] or 0),
                    kin_share=_float(row["kin_share"]),
                    topology=row["topology"],
                    repeat_length=int(row["repeat_length"] or 0),
                ),
            )


class _VirusFasta(Sink):
    """The sequences of the verdict. A record that is there as a whole keeps its header."""

    file = "viruses.fasta"
    about = "their sequences"

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes:
        records, calls, viruses = results.records, results.calls, viruses_of(results)
        are_called = [calls.are_viruses[place] for place in viruses.places]
        pairs = zip(viruses.places, are_called, strict=True)
        rates = decimal_texts(
            [calls.rates[place] if called else None for place, called in pairs], 4
        )
        words = zip(
            *(viruses.places, viruses.names, viruses.kinds),
            *(decimal_texts(viruses.scores, 6), rates),
            strict=True,
        )
        headers = [
            f"{records.headers[place] if name == records.ids[place] else name} "
            f"kind={kind} score={score}{rate and f' fdr={rate}'}"
            for place, name, kind, score, rate in words
        ]
        return fasta(headers, viruses.letters)


class SampleTable(_SampleSink):
    """One row for every sample, also for a file that could not be read."""

    file = "samples.tsv"
    about = "one row for every input file, or pair of files of reads"
    columns = (
        "file",
        "status",
        "n_records",
        "n_scored",
        "n_virus",
        "virus_below_1000",  # the classes of ``LENGTH_CLASSES``
        "virus_1000_to_2999",
        "virus_3000_to_9999",
        "virus_from_10000",
        "n_provirus",
        "n_regions",
        "best_record",
        "best_score",
        "n_failed",
        "path",
        "error",
        "kinds",
        "families",
    )

    def finish(self) -> None:
        files = [file for file in self.place.inputs if not self._only_mends(file)]
        samples: dict[tuple[str, str], list[InputFile]] = {}  # the mates of a sample are one
        for file in (*files, *self.place.refused):
            samples.setdefault((file.sample, file.error), []).append(file)
        for (sample, error), of_sample in samples.items():
            tally = self.tallies.get(sample, Tally())
            score, _, record_id = tally.best
            values = (
                sample,
                "unreadable" if error else _sample_status(tally),
                tally.n_records,
                tally.statuses["scored"],
                tally.n_viral,
                *(tally.viral_lengths[start] for start in LENGTH_CLASSES),
                tally.n_proviruses,
                "" if tally.n_regions is None else tally.n_regions,
                record_id,
                f"{score:.6f}" if record_id else "",
                tally.n_mendable,
                "; ".join(escaped(file.name or file.path) for file in of_sample),
                escaped(error),
                _counts_text(tally.kinds),
                _counts_text(tally.families),
            )
            self.write("\t".join(map(str, values)) + "\n")

    def _only_mends(self, file: InputFile) -> bool:
        """Whether its records stand in the places of failed ones of other files."""
        return file.generation > 0 and file.sample not in self.tallies


def _counts_text(counts: Counter[str]) -> str:
    """
    >>> _counts_text(Counter({"ssDNA": 1, "RNA+": 2, "phage": 2}))
    'RNA+: 2; phage: 2; ssDNA: 1'
    """
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return "; ".join(f"{name}: {n}" for name, n in pairs)


def _sample_status(tally: Tally) -> str:
    if not tally.n_records:
        return "empty"
    if not tally.n_mendable:
        return "complete"
    return "partial" if tally.statuses["scored"] or tally.statuses["embedded"] else "failed"


class _MultiqcTable(_SampleSink):
    """The counts of every sample, for the general statistics of MultiQC."""

    file = "virnucpro_mqc.tsv"
    about = "counts of every sample, for MultiQC"

    def finish(self) -> None:
        self.write(_MULTIQC_COLUMNS)
        for sample, tally in self.tallies.items():
            counts = tally.n_records, tally.statuses["scored"], tally.n_viral, tally.n_proviruses
            self.write("\t".join(map(str, (sample, *counts))) + "\n")


# comments of a table in YAML tell MultiQC what it is: docs.seqera.io/multiqc/custom_content
_MULTIQC_COLUMNS = """\
# id: virnucpro
# plot_type: generalstats
# headers:
#   n_records: {title: Records, description: records of the input, format: '{:,.0f}'}
#   n_scored: {title: Scored, description: records with a score, format: '{:,.0f}'}
#   n_virus: {title: Viral, description: records called virus, format: '{:,.0f}'}
#   n_provirus: {title: Proviruses, description: proviruses in other records, format: '{:,.0f}'}
Sample\tn_records\tn_scored\tn_virus\tn_provirus
"""


class _RegionSink(Sink):
    """The virus-like regions, if they were looked for in any record; a line or more for each.

    All files of regions are made of the same rows, and name a region alike.
    """

    is_optional = True

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes | None:
        if not results.regions:
            return None
        rows = list[str]()
        for place in sorted(results.regions):
            each = _viruses_in(results, place)
            viruses = {part: virus.name for virus in each for part in virus.parts}
            for region in results.regions[place][0]:
                rows.append(cls.row(results, place, region, viruses.get(region, "")))
        return encoded("".join(rows))

    @classmethod
    def row(cls, results: CalledRecords, place: int, region: Region, virus: str) -> str:
        """A region as it is written, of the record in a place and of the virus of that name.

        Inside VirNucPro starts count from 0, and ends are open.
        """
        raise NotImplementedError


class RegionTable(_RegionSink):
    """The table of regions: positions count from 1, and the end is the last base."""

    file = "regions.tsv"
    about = "virus-like regions, also as .bed, .gff3 and .fasta"
    columns = (
        "region",
        "record",
        "file",
        "kind",
        "start",
        "end",
        "length",
        "posterior",
        "call",
        "virus_score",
        "virus",
        "att",
        "class",
        "evidence",
        "note",
    )

    @classmethod
    def row(cls, results: CalledRecords, place: int, region: Region, virus: str) -> str:
        name, calls = region_name(results.records.ids[place], region), results.calls
        bases = f"{region.start + 1}\t{region.end}\t{region.end - region.start}"
        record = f"{calls.record_ids[place]}\t{calls.samples[place]}"
        note = OVER_ORIGIN if region.over_origin else ""
        call = "\t".join(call_words(calls, place))
        why = f"{region.att}\t{region.region_class}\t{region.evidence}"
        words = f"{region.posterior:.4f}\t{call}\t{virus}\t{why}\t{note}"
        return f"{name}\t{record}\t{region.kind}\t{bases}\t{words}\n"

    @classmethod
    def read(cls, lines: Iterator[str]) -> Iterator[tuple[tuple[str, str], Region]]:
        """The regions in their table, each after the sample and the id of its record.

        Raises:
            ValueError: it is not as it was written.
        """
        for row in _parsed(lines, cls.columns):
            start, end, posterior = int(row["start"]) - 1, int(row["end"]), float(row["posterior"])
            if not (0 <= start < end and 0 <= posterior <= 1):
                raise ValueError(f"{row['record']} has no region such as {row['region']}")
            if (kind := _KINDS.get(row["kind"])) is None:
                raise ValueError(f"{row['region']} is a {row['kind']}")
            is_part = row["note"] == OVER_ORIGIN
            is_virus = bool(row["virus"])
            if (judged := _CLASSES.get(row["class"])) is None:
                raise ValueError(f"{row['region']} is of the class {row['class']}")
            facts = row["att"], is_part, is_virus, row["evidence"], judged
            yield (row["file"], row["record"]), Region(start, end, kind, posterior, *facts)


class _RegionBed(_RegionSink):
    """BED6: positions count from 0, the end is after the region, and the score is in 1,000ths."""

    file = "regions.bed"

    @classmethod
    def row(cls, results: CalledRecords, place: int, region: Region, virus: str) -> str:
        record_id, score = results.records.ids[place], int(1000 * region.posterior)
        name = region_name(record_id, region)
        return f"{record_id}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n"


class _RegionGff(_RegionSink):
    """GFF3, with terms of the Sequence Ontology: SO:0000113, SO:0001041."""

    file = "regions.gff3"
    columns = ("##gff-version 3",)
    terms: ClassVar = {"provirus": "proviral_region", "whole": "viral_sequence"}

    @classmethod
    def row(cls, results: CalledRecords, place: int, region: Region, virus: str) -> str:
        record_id = results.records.ids[place]
        seqid, name = (
            quote(text, safe=_GFF3_SEQID, errors="surrogateescape")
            for text in (record_id, region_name(record_id, region))
        )
        bases = f"{region.start + 1}\t{region.end}\t{region.posterior:.4f}\t.\t."
        attributes = f"ID={name}"
        if region.att:
            attributes += f";att={region.att}"
        if region.region_class:
            attributes += f";class={region.region_class}"
        if region.evidence:
            attributes += f";{region.evidence}"
        if region.over_origin:
            attributes += f";Note={OVER_ORIGIN}"
        label, score = call_words(results.calls, place)
        attributes += f";call={label};virus_score={score}"
        term = cls.terms[region.kind]
        return f"{seqid}\tvirnucpro\t{term}\t{bases}\t{attributes}\n"


class _RegionFasta(_RegionSink):
    """The sequences of the regions, named as geNomad names proviruses."""

    file = "regions.fasta"

    @classmethod
    def row(cls, results: CalledRecords, place: int, region: Region, virus: str) -> str:
        records, (label, score) = results.records, call_words(results.calls, place)
        name = region_name(records.ids[place], region)
        header = f"{name} call={label} virus_score={score} posterior={region.posterior:.4f}"
        letters = records.sequences[place][region.start : region.end]
        return fasta([header], [letters]).decode("utf-8", "surrogateescape")


class RegionTracks(Sink):
    """The evidence for regions, by piece, of each record that was searched; packed by gzip."""

    file = "tracks.tsv.gz"
    columns = ("record", "start", "end", "log_odds", "posterior")
    is_optional, is_packed = True, True

    @classmethod
    def rows(cls, results: CalledRecords) -> bytes | None:
        if not results.regions:
            return None
        searched = sorted(results.regions)
        tracks = [(results.records.ids[place], results.regions[place][1]) for place in searched]
        ids = [name for name, track in tracks for _ in range(len(track.start))]
        starts, ends, odds, posteriors = map(
            np.concatenate, zip(*(track for _, track in tracks), strict=True)
        )
        places = whole(starts + 1), whole(ends)
        return rows_of(texts(ids), *places, decimals(odds, 3), decimals(posteriors, 4))


OVER_ORIGIN = "crosses the origin"
_GFF3_SEQID = ".:^*$@!+_?-|"  # what stands for itself in a sequence id, beside letters and digits


def region_name(record_id: str, region: Region) -> str:
    """Positions count from 1, and the end is the last base."""
    return f"{record_id}|{region.kind}_{region.start + 1}_{region.end}"


# the sequences of records that were called viral, and of regions
LETTERS = (_ViralFasta.file, _RegionFasta.file)
# what ``virnucpro regions`` writes beside the table of records
REGION_SINKS: tuple[type[Sink], ...] = (
    VirusTable,
    _VirusFasta,
    SampleTable,
    _MultiqcTable,
    RegionTable,
    _RegionBed,
    _RegionGff,
    _RegionFasta,
    RegionTracks,
)
# the table of the records comes first: it is opened first, and appears last
SINKS: dict[Command, tuple[type[Sink], ...]] = {
    "predict": (
        RecordTable,
        FrameTable,
        ChunkTable,
        _ViralFasta,
        *REGION_SINKS,
        FailedSequences,
        FailedFiles,
    ),
    "extract": (_EmbeddedTable, SampleTable, FailedSequences, FailedFiles),
}


def all_sinks() -> list[type[Sink]]:
    """The sinks of all commands, each once."""
    return list(dict.fromkeys(chain.from_iterable(SINKS.values())))


def record_table(command: Command) -> type[Sink]:
    """The sink of a command that has a row for every record."""
    return next(sink for sink in SINKS[command] if issubclass(sink, RecordTable))


@contextmanager
def open_outputs(sinks: Sequence[type[Sink]], place: Place) -> Iterator[_Add]:
    """Yield a function that adds a portion to the outputs of a run and, if asked, of its sample.

    Files appear when the block succeeds.
    """
    with ExitStack() as stack:
        adds = [stack.enter_context(_open_sinks(sinks, place))]
        if place.samples is not None:
            adds.append(stack.enter_context(_open_sinks_of_samples(sinks, place, place.samples)))

        def add(portion: Portion) -> None:
            for each in adds:
                each(portion)

        yield add


@contextmanager
def _open_sinks_of_samples(
    sinks: Iterable[type[Sink]], place: Place, folder: Path
) -> Iterator[_Add]:
    """Yield a function that adds a portion to the outputs of its sample, in a folder of its name.

    Portions come in the order of their samples. Each sample of the inputs gets its outputs, with or
    without records, and so does every other that has any. One sample is written at a time, and a
    few are being synced to disk.
    """
    sinks = [sink for sink in sinks if sink.per_file]
    # mates share a sample
    queue = deque(dict.fromkeys(file.sample for file in place.inputs if not file.generation))
    closing = deque[Future[None]]()
    current: str | None = None
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool, ExitStack() as stack:
        add_to: _Add | None = None

        def close() -> None:
            closing.append(pool.submit(stack.pop_all().close))
            while len(closing) > _SYNCED_AT_ONCE:
                closing.popleft().result()

        def begin(sample: str) -> None:
            nonlocal current, add_to
            close()
            of_sample = Place(folder / sample, place.tree, place.aside)
            with writing(of_sample.folder):
                place.tree.make_folder(of_sample.folder)
            current, add_to = sample, stack.enter_context(_open_sinks(sinks, of_sample))

        def add(portion: Portion) -> None:
            while current != portion.sample:
                begin(queue.popleft() if portion.sample in queue else portion.sample)
            assert add_to is not None
            add_to(portion.of_file)

        yield add
        for sample in queue:
            begin(sample)
        close()
        for closed in closing:
            closed.result()


@contextmanager
def _open_sinks(sinks: Iterable[type[Sink]], place: Place) -> Iterator[_Add]:
    """Yield a function that adds a portion to each sink; files appear when the block succeeds."""
    with ExitStack() as stack:
        outputs = [sink(place, stack) for sink in sinks]

        def add(portion: Portion) -> None:
            for sink in outputs:
                sink.add(portion)

        yield add
        for sink in outputs:
            sink.finish()


# Rows that are read again


_KINDS: dict[str, Literal["provirus", "whole"]] = {"provirus": "provirus", "whole": "whole"}
_CLASSES: dict[str, Literal["prophage", "uncertain", ""]] = {
    "prophage": "prophage",
    "uncertain": "uncertain",
    "": "",
}


def _parsed(lines: Iterator[str], columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """
    Raises:
        ValueError: the table has other columns, or a line is cut short.
    """
    if tuple(next(lines, "").rstrip("\n").split("\t")) != columns:
        raise ValueError("its columns have other names")
    for line in lines:
        if not line.endswith("\n"):
            raise ValueError("its end is missing")
        values = line[:-1].split("\t", len(columns) - 1)
        yield dict(zip(columns, values, strict=True))


def _float(text: str) -> float | None:
    return float(text) if text else None


def _is_status(text: str) -> TypeGuard[Status]:
    return text in STATUSES
