"""The outputs of a run that are written record by record, a class each: file name, columns, rows.

The rows of a record are text that is made wherever its result is; a sink writes them, in order.
``SINKS`` lists them by command. The run folder derives from it what is its own, so a new output is
a class here and a line in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain
from math import isnan
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import quote

from virnucpro.callers.calls import chunk_scores, scored_frames
from virnucpro.callers.head import DECIMALS
from virnucpro.ground.config import Command
from virnucpro.ground.log import counted, escaped
from virnucpro.ground.records import (
    STATUSES,
    Call,
    FastaRecord,
    Prediction,
    RecordResult,
    Region,
    Status,
)
from virnucpro.ground.tree import Tree
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.inputs import InputFile
from virnucpro.tables.text import SortedLines, optional_table, packed_table, table


@dataclass(slots=True)
class Tally:
    """The counts of some records."""

    statuses: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    n_viral: int = 0
    n_regions: int | None = None  # None: no record was searched for regions
    n_whole_regions: int = 0  # those of kind whole
    n_frames: int = 0  # frames with a vector
    n_failed_frames: int = 0
    n_failed_records: int = 0  # records with a failed frame
    first_failure: str = ""  # the first failed frame, and its reason

    @property
    def n_records(self) -> int:
        return sum(self.statuses.values())

    def add(self, result: RecordResult) -> None:
        """Count one record."""
        call, failures = result.call, result.failures
        self.statuses[call.status] += 1
        self.n_viral += call.is_virus
        self.n_frames += len(result.frames) - len(failures)
        if result.regions is not None:
            kinds = result.region_kinds
            self.n_regions = (self.n_regions or 0) + kinds.total()
            self.n_whole_regions += kinds["whole"]
        if failures:
            first = failures[0]
            self.first_failure = self.first_failure or f"{first.orf.id}: {first.failure}"
            self.n_failed_records += 1
            self.n_failed_frames += len(failures)

    def include(self, other: Tally) -> None:
        """Count the records of another, which come later."""
        for status, n_records in other.statuses.items():
            self.statuses[status] += n_records
        self.n_viral += other.n_viral
        self.n_frames += other.n_frames
        if other.n_regions is not None:
            self.n_regions = (self.n_regions or 0) + other.n_regions
            self.n_whole_regions += other.n_whole_regions
        self.first_failure = self.first_failure or other.first_failure
        self.n_failed_records += other.n_failed_records
        self.n_failed_frames += other.n_failed_frames


@dataclass(frozen=True, slots=True)
class Portion:
    """Neighbouring records of one sample, as the outputs have them."""

    sample: str
    rows: Mapping[str, str]  # by the file name of a sink, of those that any record adds to
    tally: Tally

    @classmethod
    def of(
        cls, sample: str, results: Iterable[RecordResult], sinks: Sequence[type[Sink]]
    ) -> Portion:
        """The records of a sample, with the rows that these sinks have of them."""
        tally, rows = Tally(), dict[str, list[str]]()
        for result in results:
            tally.add(result)
            for sink in sinks:
                more = sink.rows(result)
                if more is not None:
                    # a text per record: its lines by themselves take thrice the memory
                    rows.setdefault(sink.file, []).append("".join(more))
        return cls(sample, {name: "".join(of_sink) for name, of_sink in rows.items()}, tally)


Add = Callable[[Portion], None]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the outputs of a run, or of one of its files."""

    folder: Path
    tree: Tree  # that it lies in
    aside: Path  # for lines that wait to be sorted: a folder on a disk that is large enough
    inputs: Sequence[InputFile] = ()
    refused: Sequence[InputFile] = ()  # inputs that could not be read


class Sink(Protocol):
    """One output of a run. It is given the rows of every record once, in input order.

    What it opens on the stack appears when that is closed; before, ``finish`` is called, unless an
    error ended the run.
    """

    file: ClassVar[str]
    per_file: ClassVar[bool]  # with --per-file each input file has its own, too

    def __init__(self, place: Place, stack: ExitStack) -> None: ...

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str] | None:
        """The lines that a record adds; None: it does not even ask for the file."""

    def add(self, portion: Portion) -> None: ...

    def finish(self) -> None:
        """Write what had to wait for the last record."""


class TextSink:
    """A sink that is a text file, with or without a line of columns."""

    file: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()
    per_file: ClassVar[bool] = True

    def __init__(self, place: Place, stack: ExitStack) -> None:
        self.out = stack.enter_context(table(place.tree, place.folder / self.file, self.columns))

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str] | None:
        """The lines that a record adds, as ``Sink.rows`` says."""
        raise NotImplementedError

    def add(self, portion: Portion) -> None:
        self.out.write(portion.rows.get(self.file, ""))

    def finish(self) -> None:
        """Write nothing: no line waits."""


class RecordTable(TextSink):
    """One row for every record."""

    file = "predictions.tsv"
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
    def rows(cls, result: RecordResult) -> Iterable[str]:
        return [record_row(result.call)]


class EmbeddedTable(RecordTable):
    """A row for every record of a run that calls nothing."""

    file = "records.tsv"


class FrameTable(TextSink):
    """One row for every frame with a score, in the original's format."""

    file = "prediction_results.txt"
    columns = ("Sequence_ID", "Prediction", "score1", "score2")

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str]:
        return frame_rows(result.predictions)


class ChunkTable(TextSink):
    """One row for every chunk with a scored frame, sorted by id, in the original's format."""

    file = "prediction_results_highestscore.csv"
    columns = ("Modified_ID", "Is_Virus")

    def __init__(self, place: Place, stack: ExitStack) -> None:
        super().__init__(place, stack)
        self.lines = stack.enter_context(SortedLines(place.aside))

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str]:
        return chunk_rows(result.predictions)

    def add(self, portion: Portion) -> None:
        self.lines.add(portion.rows.get(self.file, ""))

    def finish(self) -> None:
        self.out.writelines(self.lines.merged())


class ViralFasta(TextSink):
    """The records that are called viral, with their headers as they were."""

    file = "viral.fasta"

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str]:
        return [record_text(result.record)] if result.call.is_virus else []


class OptionalTable(TextSink):
    """A text file that appears with its first line. Without one, an old file is deleted."""

    per_file = False

    def __init__(self, place: Place, stack: ExitStack) -> None:
        path = place.folder / self.file
        self.opened = stack.enter_context(optional_table(place.tree, path, self.columns))

    def add(self, portion: Portion) -> None:
        if self.file in portion.rows:
            self.opened().write(portion.rows[self.file])


class FailedSequences(OptionalTable):
    """The records with a failed frame, to be corrected and run again."""

    file = "failed_sequences.fa"

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str] | None:
        return [record_text(result.record)] if result.failures else None


class FailedFiles(OptionalTable):
    """Path, stage and error of each file with a failure, separated by ``|``, which no path has."""

    file = "failed_files.txt"

    def __init__(self, place: Place, stack: ExitStack) -> None:
        super().__init__(place, stack)
        self.place = place
        self.tallies: dict[str, Tally] = {}  # by sample, of those with a failed frame

    @classmethod
    def rows(cls, result: RecordResult) -> None:
        """None: a row is of a whole file."""

    def add(self, portion: Portion) -> None:
        if portion.tally.n_failed_frames:
            self.tallies.setdefault(portion.sample, Tally()).include(portion.tally)

    def finish(self) -> None:
        rows = [(file, "read", file.error) for file in self.place.refused]
        for file in self.place.inputs:
            if tally := self.tallies.pop(file.sample, None):  # mates share one
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
            self.opened().write(line)


class RegionSink(OptionalTable):
    """The virus-like regions, if they were looked for in any record; a line or more for each.

    All files of regions are made of the same rows, and name a region alike.
    """

    per_file = True

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str] | None:
        if result.regions is None:
            return None
        return [
            cls.row(result, region, region_name(result.record, region)) for region in result.regions
        ]

    @classmethod
    def row(cls, result: RecordResult, region: Region, name: str) -> str:
        """A region as it is written. Inside VirNucPro starts count from 0, and ends are open."""
        raise NotImplementedError


class RegionTable(RegionSink):
    """The table of regions: positions count from 1, and the end is the last base."""

    file = "regions.tsv"
    columns = (
        "region",
        "record",
        "file",
        "kind",
        "start",
        "end",
        "length",
        "posterior",
        "att",
        "note",
    )

    @classmethod
    def row(cls, result: RecordResult, region: Region, name: str) -> str:
        place = f"{region.start + 1}\t{region.end}\t{region.end - region.start}"
        record = f"{result.record.name}\t{result.record.sample}"
        note = OVER_ORIGIN if region.over_origin else ""
        words = f"{region.posterior:.4f}\t{region.att}\t{note}"
        return f"{name}\t{record}\t{region.kind}\t{place}\t{words}\n"


class RegionBed(RegionSink):
    """BED6: positions count from 0, the end is behind the region, and the score is in 1,000ths."""

    file = "regions.bed"

    @classmethod
    def row(cls, result: RecordResult, region: Region, name: str) -> str:
        score = int(1000 * region.posterior)
        return f"{result.record.id}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n"


class RegionGff(RegionSink):
    """GFF3, with terms of the Sequence Ontology: SO:0000113, SO:0001041."""

    file = "regions.gff3"
    columns = ("##gff-version 3",)
    terms: ClassVar = {"provirus": "proviral_region", "whole": "viral_sequence"}

    @classmethod
    def row(cls, result: RecordResult, region: Region, name: str) -> str:
        seqid = quote(result.record.id, safe=GFF3_SEQID, errors="surrogateescape")
        place = f"{region.start + 1}\t{region.end}\t{region.posterior:.4f}\t.\t."
        attributes = f"ID={quote(name, safe=GFF3_SEQID, errors='surrogateescape')}"
        if region.att:
            attributes += f";att={region.att}"
        if region.over_origin:
            attributes += f";Note={OVER_ORIGIN}"
        term = cls.terms[region.kind]
        return f"{seqid}\tvirnucpro\t{term}\t{place}\t{attributes}\n"


class RegionFasta(RegionSink):
    """The sequences of the regions, named as geNomad names proviruses."""

    file = "regions.fasta"

    @classmethod
    def row(cls, result: RecordResult, region: Region, name: str) -> str:
        text = StringIO()
        write_record(text, name, result.record.sequence[region.start : region.end])
        return text.getvalue()


class RegionTracks(OptionalTable):
    """The pieces that regions are told by, of each record that was searched, packed by gzip."""

    file = "tracks.tsv.gz"
    columns = ("record", "start", "end", "log_odds", "posterior")
    per_file = True

    def __init__(self, place: Place, stack: ExitStack) -> None:
        path = place.folder / self.file
        self.opened = stack.enter_context(
            optional_table(place.tree, path, self.columns, packed_table)
        )

    @classmethod
    def rows(cls, result: RecordResult) -> Iterable[str] | None:
        if result.track is None:
            return None
        return (
            f"{result.record.id}\t{start + 1}\t{end}\t"
            f"{'' if isnan(log_odds) else f'{log_odds:.3f}'}\t{posterior:.4f}\n"
            for start, end, log_odds, posterior in zip(*result.track, strict=True)
        )


OVER_ORIGIN = "crosses the origin"
GFF3_SEQID = ".:^*$@!+_?-|"  # what stands for itself in a sequence id, beside letters and digits


def region_name(record: FastaRecord, region: Region) -> str:
    """Positions count from 1, and the end is the last base."""
    return f"{record.id}|{region.kind}_{region.start + 1}_{region.end}"


REGION_SINKS: tuple[type[Sink], ...] = (
    RegionTable,
    RegionBed,
    RegionGff,
    RegionFasta,
    RegionTracks,
)
# the table of the records comes first: it is opened first, and appears last
SINKS: dict[Command, tuple[type[Sink], ...]] = {
    "predict": (
        RecordTable,
        FrameTable,
        ChunkTable,
        ViralFasta,
        *REGION_SINKS,
        FailedSequences,
        FailedFiles,
    ),
    "extract": (EmbeddedTable, FailedSequences, FailedFiles),
}


def all_sinks() -> list[type[Sink]]:
    """The sinks of all commands, each once."""
    return list(dict.fromkeys(chain.from_iterable(SINKS.values())))


def record_table(command: Command) -> type[Sink]:
    """The sink of a command that has a row for every record."""
    return next(sink for sink in SINKS[command] if issubclass(sink, RecordTable))


@contextmanager
def open_sinks(sinks: Iterable[type[Sink]], place: Place) -> Iterator[Add]:
    """Yield a function that adds a portion to each sink; files appear when the block succeeds."""
    with ExitStack() as stack:
        outputs = [sink(place, stack) for sink in sinks]

        def add(portion: Portion) -> None:
            for sink in outputs:
                sink.add(portion)

        yield add
        for sink in outputs:
            sink.finish()


# Rows


def record_text(record: FastaRecord) -> str:
    """A record as it stood in its file, 60 letters a line."""
    text = StringIO()
    write_record(text, record.header, record.sequence)
    return text.getvalue()


def record_row(call: Call) -> str:
    label = "" if call.virus_score is None else "virus" if call.is_virus else "other"
    score, base = (
        "" if value is None else f"{value:.6f}" for value in (call.virus_score, call.base_score)
    )
    rate = "" if call.false_discovery_rate is None else f"{call.false_discovery_rate:.4f}"
    values = (
        call.record_id,
        call.sample,
        call.length,
        call.status,
        label,
        score,
        rate,
        call.n_chunks,
        call.n_chunks_scored,
        call.n_frames_scored,
        base,
        call.note,
    )
    return "\t".join(map(str, values)) + "\n"


def frame_rows(predictions: Iterable[Prediction]) -> Iterator[str]:
    """A row for each scored frame; a tie is "others", as the first of two equals."""
    for prediction, score in scored_frames(predictions):
        others = round(1 - score, DECIMALS)
        label = "virus" if score > others else "others"
        yield f"{prediction.orf.id}\t{label}\t{others:.6f}\t{score:.6f}\n"


def chunk_rows(predictions: Sequence[Prediction]) -> Iterator[str]:
    """A row for each chunk with a scored frame.

    A chunk is a virus if its surest frame is, by VirNucPro's rule: the best virus score is at least
    the best score of "others".
    """
    for chunk_id, scores in chunk_scores(predictions):
        others = round(1 - min(scores), DECIMALS)
        yield f"{chunk_id}\t{max(scores) >= others}\n"
