"""Define the outputs that a run writes record by record: file, columns, rows.

Any process may make the rows of a record, as text; they are written in input order. ``SINKS`` lists
the outputs by command, and the run folder derives its own files from it. So a new output needs a
``Sink`` here and a place in ``SINKS``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from io import TextIOWrapper
from itertools import chain, compress, count
from math import isnan
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast
from urllib.parse import quote

import numpy as np

from virnucpro.core.atomic_io import open_plain, writing
from virnucpro.core.errors import InputError
from virnucpro.core.logging import counted, escaped, printable
from virnucpro.core.recipe import STATUSES, Command, Status
from virnucpro.core.safe_dir import Tree
from virnucpro.core.types import FRAMES_FAILED
from virnucpro.results.tsv import (
    EMPTY,
    SortedLines,
    call_words,
    chunk_rows,
    decimal_texts,
    decimals,
    encoded,
    fasta,
    frame_rows,
    record_rows,
    rows_of,
    sorted_lines,
    table,
    texts,
    whole,
)
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.translate import GeneticCode
from virnucpro.viral.taxonomy import own_kinship
from virnucpro.viral.types import Call, CalledRecords, Identity, Region, Viruses

LENGTH_CLASSES = (0, 1_000, 3_000, 10_000)  # starts of the length classes, in bases or residues
_SYNCED_AT_ONCE = 4  # samples; a disk does a few syncs as fast as one
_NO_HIT = (-1.0, 0, "")
Row = TypeVar("Row")


# Counts of records, and their rows


@dataclass(slots=True)
class Tally:
    """Counts of records."""

    statuses: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    n_viral: int = 0
    n_proviruses: int = 0  # proviruses that count as viruses, in records not called virus
    n_regions: int | None = None  # None: no record was searched for regions
    n_whole_regions: int = 0  # regions of kind whole
    n_frames: int = 0  # frames with a vector
    n_failed_frames: int = 0
    n_failed_records: int = 0  # records with a failed frame
    first_failure: str = ""  # the first failed frame, and its reason
    n_mendable: int = 0  # records with a note of a failed frame
    viral_lengths: Counter[int] = field(default_factory=Counter)  # viral records by length class
    kinds: Counter[str] = field(default_factory=Counter)  # viruses of known kind
    families: Counter[str] = field(default_factory=Counter)  # viruses with a family
    best: tuple[float, int, str] = _NO_HIT  # score, length and id of the best viral record

    @property
    def n_records(self) -> int:
        return sum(self.statuses.values())

    @property
    def n_viruses(self) -> int:
        """The number of rows in the table of viruses."""
        return self.n_viral + self.n_proviruses

    @property
    def virus_line(self) -> str:
        """The summary line of all viruses: records and, if searched for, proviruses in others."""
        see = f"see {VIRUS_TABLE.file}"
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
        viruses = results.viruses
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
        """Add the counts of later records."""
        for name in (one.name for one in fields(self)):
            mine, its = getattr(self, name), getattr(other, name)
            if isinstance(its, dict):
                for key, n in its.items():
                    mine[key] += n
            elif isinstance(its, int):
                setattr(self, name, (mine or 0) + its)
        self.first_failure = self.first_failure or other.first_failure
        self.best = max(self.best, other.best, key=itemgetter(0, 1))


# text by the file name of an output; outputs without text may be missing
Rows: TypeAlias = Mapping[str, bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Portion:
    """The rows of neighbouring records of one sample, for all outputs."""

    sample: str
    rows: Rows
    tally: Tally
    own_rows: Rows | None = None  # the same with the ids in the input file

    @classmethod
    def of_samples(
        cls,
        results: CalledRecords,
        sinks: Sequence[Sink],
        code: GeneticCode | None,
        *,
        with_own: bool = False,
    ) -> list[Portion]:
        """Make a portion per sample; with a genetic code, identify the viruses."""
        results.viruses = find_viruses(results, code)
        per_file = [sink for sink in sinks if sink.per_file]
        return [
            cls(
                sample,
                _rows(of_sample, sinks),
                Tally.of(of_sample),
                _rows(of_sample.by_own_ids(), per_file) if with_own else None,
            )
            for sample, of_sample in results.by_sample()
        ]

    def joined(self, other: Portion) -> Portion:
        """Append later records of the same sample."""
        tally, own_rows = Tally(), None
        tally.include(self.tally)
        tally.include(other.tally)
        if self.own_rows is not None:
            own_rows = _joined(self.own_rows, other.own_rows or {})
        return Portion(self.sample, _joined(self.rows, other.rows), tally, own_rows)


def _joined(rows: Rows, others: Rows) -> Rows:
    return {
        name: _in_order(name, b"".join((rows.get(name, b""), others.get(name, b""))))
        for name in {**rows, **others}
    }


def _rows(results: CalledRecords, sinks: Iterable[Sink]) -> Rows:
    rows = ((sink.file, sink.rows(results)) for sink in sinks if sink.rows)
    return {name: _in_order(name, text) for name, text in rows if text is not None}


def _in_order(name: str, text: bytes) -> bytes:
    return sorted_lines(text) if name == CHUNK_TABLE.file else text


# What an output is


@dataclass(frozen=True, slots=True)
class Place:
    """Where the outputs of a run or of one sample go."""

    folder: Path
    tree: Tree  # the tree with the folder
    aside: Path  # folder for lines to be sorted, on a disk with enough space
    inputs: Sequence[InputFile] = ()
    refused: Sequence[InputFile] = ()  # inputs that could not be read
    samples: Path | None = None  # each sample gets a folder of outputs in it; None: no such folders


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """One output of a run: a text file, with or without a header line.

    ``rows`` makes the lines of neighbouring records, or None if they do not need the file.
    ``last_lines`` makes the last lines from the counts of each sample.
    """

    file: str
    about: str = ""  # description on the page; "": not listed there
    columns: tuple[str, ...] = ()
    rows: Callable[[CalledRecords], bytes | None] | None = None
    last_lines: Callable[[Place, Mapping[str, Tally]], str] | None = None
    per_file: bool = True  # --per-file also writes it for each input file
    is_optional: bool = False  # written only if it has a line; else an old file is deleted
    is_packed: bool = False  # compressed with gzip

    def rows_at(
        self, path: Path, parse: Callable[[dict[str, str]], Row], hint: str
    ) -> Iterator[Row]:
        """Open a table with these columns now, and yield its rows later; it closes at its end.

        Raises:
            OSError: it cannot be opened.
            InputError: it is damaged; the hint says what to do.
        """

        def rows() -> Iterator[Any]:
            with TextIOWrapper(open_plain(path), "utf-8", "surrogateescape", newline="\n") as lines:
                yield None
                try:
                    yield from map(parse, self.values_in(lines))
                except ValueError as error:
                    raise InputError(
                        f"{printable(path)} is damaged, or of another version of VirNucPro: "
                        f"{printable(error)}",
                        hint,
                    ) from error

        opened = rows()
        next(opened)
        return opened

    def values_in(self, lines: Iterator[str]) -> Iterator[dict[str, str]]:
        """Yield the values of each row by column; lines may end as on Windows.

        Raises:
            ValueError: the table is damaged.
        """
        if tuple(next(lines, "").rstrip("\r\n").split("\t")) != self.columns:
            raise ValueError("its columns have other names")
        for number, line in enumerate(lines, 2):
            if not line.endswith("\n"):
                raise ValueError("its end is missing")
            values = line[:-1].removesuffix("\r").split("\t", len(self.columns) - 1)
            if len(values) != len(self.columns):
                raise ValueError(f"line {number} is not of the columns {', '.join(self.columns)}")
            yield dict(zip(self.columns, values, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Table(Sink, Generic[Row]):
    """An output that VirNucPro can also read."""

    parse: Callable[[dict[str, str]], Row] = field(kw_only=True)

    def open(self, path: Path, hint: str) -> Iterator[Row]:
        """Open the table now, and yield its rows later: see ``rows_at``."""
        return self.rows_at(path, self.parse, hint)


def _float(text: str) -> float | None:
    return float(text) if text else None


# Records, frames and chunks


def _call_in(row: dict[str, str]) -> Call:
    status = cast(Status, row["status"])
    if status not in STATUSES or row["call"] not in ("virus", "other", ""):
        raise ValueError(f"a record has the status {status} and the call {row['call']}")
    return Call(
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


def _viral_fasta(results: CalledRecords) -> bytes:
    columns = results.records.headers, results.records.sequences
    return fasta(*(list(compress(column, results.calls.are_viruses)) for column in columns))


def _failed_fasta(results: CalledRecords) -> bytes | None:
    failed, columns = results.failures, (results.records.headers, results.records.sequences)
    return fasta(*([column[place] for place in failed] for column in columns)) or None


RECORD_TABLE = _Table(
    "predictions.tsv",
    "every record, with its status, call and score",
    (
        *("record", "file", "length", "status", "call", "virus_score", "fdr", "n_chunks"),
        *("n_chunks_scored", "n_frames_scored", "base_score", "note"),
    ),
    rows=lambda results: record_rows(results.calls),
    parse=_call_in,
)
# for a run that calls nothing
_EMBEDDED = replace(RECORD_TABLE, file="records.tsv", about="every record, with its status")
# every frame with a score, and every chunk with such a frame, sorted by id; the formats are those
# of the original VirNucPro
FRAME_TABLE = _Table(
    "prediction_results.txt",
    columns=("Sequence_ID", "Prediction", "score1", "score2"),
    rows=lambda results: frame_rows(results.frames),
    parse=lambda row: (row["Sequence_ID"], float(row["score2"])),
)
CHUNK_TABLE = Sink(
    "prediction_results_highestscore.csv",
    columns=("Modified_ID", "Is_Virus"),
    rows=lambda results: chunk_rows(results.frames),
)
_VIRAL_FASTA = Sink(
    "viral.fasta", "the records called virus, with their original headers", rows=_viral_fasta
)
FAILED_SEQUENCES = Sink(
    "failed_sequences.fa",
    "the failed sequences, to correct and run again",
    rows=_failed_fasta,
    per_file=False,
    is_optional=True,
)


# Viruses


def _viruses_in(
    results: CalledRecords, place: int
) -> Iterator[tuple[str, tuple[Region, ...], float]]:
    """Yield the name, the parts in order, and the score of each virus in a record.

    A virus is the record itself, without host flanks, or a provirus. A provirus that crosses the
    origin of a circular record has two parts.
    """
    calls, record_id = results.calls, results.records.ids[place]
    regions, _ = results.regions.get(place, ((), None))
    if calls.are_viruses[place]:
        whole = Region(0, calls.lengths[place], "whole", 1.0)
        part = regions[0] if regions else whole
        is_all = (part.start, part.end) == (0, calls.lengths[place])
        name = record_id if is_all else region_name(record_id, part)
        yield name, (part,), calls.virus_scores[place] or 0.0
        return
    viral = [region for region in regions if region.is_virus]
    crossing = tuple(region for region in reversed(viral) if region.over_origin)
    each = [(region,) for region in viral if not region.over_origin]
    for parts in (*each, crossing) if crossing else each:
        around = parts[0]._replace(end=parts[-1].end)
        yield region_name(record_id, around), parts, around.posterior


def find_viruses(results: CalledRecords, code: GeneticCode | None) -> Viruses:
    """Find the viruses in the records; with a genetic code, identify each by its bases.

    A virus with missing letters (blanks) gets no identity: see ``recut``.
    """
    records, calls, unknown, rows = results.records, results.calls, Identity(), []
    for place in sorted({*compress(count(), calls.are_viruses), *results.regions}):
        sequence = records.sequences[place]
        for name, parts, score in _viruses_in(results, place):
            first, end = parts[0], parts[-1].end
            letters = "".join(sequence[part.start : part.end] for part in parts)
            where = first.kind, first.start, end, first.over_origin
            rows.append((place, name, *where, letters, score, unknown))
    viruses = Viruses.of(rows)
    return viruses if code is None else _identified(results, viruses, code)


def _identified(results: CalledRecords, viruses: Viruses, code: GeneticCode) -> Viruses:
    records = results.records
    circles = [
        records.at(place).is_circular if name == records.ids[place] else None
        for place, name in zip(viruses.places, viruses.names, strict=True)
    ]
    known = ["" if " " in bases else bases for bases in viruses.letters]
    return viruses._replace(identities=own_kinship().identify(known, circles, code))


def _virus_rows(results: CalledRecords) -> bytes:
    calls, viruses, names = results.calls, results.viruses, results.records.names
    if not viruses.places:
        return b""
    rates, notes = list[float | None](), list[str]()
    for place, crosses in zip(viruses.places, viruses.cross_origin, strict=True):
        is_virus = calls.are_viruses[place]
        rates.append(calls.rates[place] if is_virus else None)
        notes.append(calls.notes[place] if is_virus else _OVER_ORIGIN if crosses else "")
    kinds, chances, kin, n_words, shares, topologies, lengths = zip(
        *viruses.identities, strict=True
    )
    repeats = zip(lengths, topologies, strict=True)
    return rows_of(
        *(texts(viruses.names), texts([names[place] for place in viruses.places])),
        *(texts([calls.samples[place] for place in viruses.places]), texts(viruses.kinds)),
        *(whole(np.array(viruses.starts) + 1), whole(viruses.ends)),
        *(whole(list(map(len, viruses.letters))), decimals(viruses.scores, 6)),
        *(decimals(rates, 4), texts(notes)),
        *(texts(kinds), decimals(chances, 3), texts(kin)),
        *(whole([n or EMPTY for n in n_words]), decimals(shares, 3), texts(topologies)),
        whole([n if topology else EMPTY for n, topology in repeats]),
    )


def _identity_in(row: dict[str, str]) -> tuple[tuple[str, str], Identity]:
    """The sample and the id of a record, and the identity of its virus."""
    identity = Identity(
        virus_kind=row["virus_kind"],
        kind_probability=_float(row["kind_probability"]),
        kin=row["kin"],
        kin_words=int(row["kin_words"] or 0),
        kin_share=_float(row["kin_share"]),
        topology=row["topology"],
        repeat_length=int(row["repeat_length"] or 0),
    )
    return (row["file"], row["record"]), identity


def _virus_fasta(results: CalledRecords) -> bytes:
    """The sequences of all viruses. A whole record keeps its header."""
    records, calls, viruses = results.records, results.calls, results.viruses
    rates = [calls.rates[i] if calls.are_viruses[i] else None for i in viruses.places]
    words = zip(
        *(viruses.places, viruses.names, viruses.kinds),
        *(decimal_texts(viruses.scores, 6), decimal_texts(rates, 4)),
        strict=True,
    )
    headers = [
        f"{records.headers[place] if name == records.ids[place] else name} "
        f"kind={kind} score={score}{rate and f' fdr={rate}'}"
        for place, name, kind, score, rate in words
    ]
    return fasta(headers, viruses.letters)


# a row per virus; its name is also the id of its sequence in the FASTA file
VIRUS_TABLE = _Table(
    "viruses.tsv",
    "every virus: records and proviruses, with score, fdr, position, kind and family",
    (
        *("virus", "record", "file", "kind", "start", "end", "length", "score", "fdr"),
        *("note", "virus_kind", "kind_probability", "kin", "kin_words", "kin_share"),
        *("topology", "repeat_length"),
    ),
    rows=_virus_rows,
    parse=_identity_in,
)
_VIRUS_FASTA = Sink("viruses.fasta", "their sequences", rows=_virus_fasta)


# Samples


def _sample_lines(place: Place, tallies: Mapping[str, Tally]) -> str:
    """A row per sample, and one for each unreadable file."""
    samples: dict[tuple[str, str], list[InputFile]] = {}  # mates share a row
    for file in (*_files_read(place, tallies), *place.refused):
        samples.setdefault((file.sample, file.error), []).append(file)
    halves = {file.sample for file in place.refused if file.mate}  # an unreadable mate's sample
    lines = []
    for (sample, error), files in samples.items():
        tally = Tally() if error else tallies.get(sample, Tally())
        score, _, record_id = tally.best
        values = (
            sample,
            "unreadable" if error else _sample_status(tally, is_half=sample in halves),
            tally.n_records,
            tally.statuses["scored"],
            tally.n_viral,
            *(tally.viral_lengths[start] for start in LENGTH_CLASSES),
            tally.n_proviruses,
            "" if tally.n_regions is None else tally.n_regions,
            record_id,
            f"{score:.6f}" if record_id else "",
            tally.n_mendable,
            "; ".join(
                escaped(file.name or file.path) for file in sorted(files, key=attrgetter("mate"))
            ),
            escaped(error),
            _counts_text(tally.kinds),
            _counts_text(tally.families),
        )
        lines.append("\t".join(map(str, values)) + "\n")
    return "".join(lines)


def _files_read(place: Place, tallies: Mapping[str, Tally]) -> list[InputFile]:
    """The files that were read, except added ones with every record replaced by later files."""
    return [one for one in place.inputs if one.sample in tallies or _is_due(one)]


def _is_due(file: InputFile) -> bool:
    """Whether a file has outputs even if no record is written: one of the first run, or empty.

    An added file that no longer exists counts as one with records.
    """
    return not file.generation or (Path(file.path).is_file() and not any(file.read()))


def _counts_text(counts: Counter[str]) -> str:
    """
    >>> _counts_text(Counter({"ssDNA": 1, "RNA+": 2, "phage": 2}))
    'RNA+: 2; phage: 2; ssDNA: 1'
    """
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return "; ".join(f"{name}: {n}" for name, n in pairs)


def _sample_status(tally: Tally, *, is_half: bool) -> str:
    if not tally.n_records:
        return "empty"
    if tally.n_mendable and not (tally.statuses["scored"] or tally.statuses["embedded"]):
        return "failed"
    return "partial" if tally.n_mendable or is_half else "complete"


def _multiqc_lines(place: Place, tallies: Mapping[str, Tally]) -> str:
    lines = [_MULTIQC_COLUMNS]
    for sample in dict.fromkeys(file.sample for file in _files_read(place, tallies)):
        tally = tallies.get(sample, Tally())
        counts = tally.n_records, tally.statuses["scored"], tally.n_viral, tally.n_proviruses
        lines.append("\t".join(map(str, (sample, *counts))) + "\n")
    return "".join(lines)


# YAML comments describe the table to MultiQC: docs.seqera.io/multiqc/custom_content
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


def _failure_lines(place: Place, tallies: Mapping[str, Tally]) -> str:
    """Path, stage and error of each file with a failure, separated by ``|``; sorted."""
    rows = [(file, "read", file.error) for file in place.refused]
    firsts = {file.sample: file for file in reversed(place.inputs)}  # mates share a sample
    for sample, file in firsts.items():
        tally = tallies.get(sample, Tally())
        if tally.n_failed_frames:
            counts = (
                f"{counted(tally.n_failed_frames, 'frame')} of "
                f"{counted(tally.n_failed_records, 'record')} failed"
            )
            rows.append((file, "embed", f"{counts}; {tally.first_failure}"))
    paths = (escaped(file.name or file.path).replace("|", r"\x7c") for file, _, _ in rows)
    words = zip(paths, rows, strict=True)
    return "".join(
        sorted(f"{path}|{stage}|{escaped(error)}\n" for path, (_, stage, error) in words)
    )


SAMPLE_TABLE = Sink(
    "samples.tsv",
    "one row per input file, or pair of read files",
    # the columns virus_* are ``LENGTH_CLASSES``
    (
        *("file", "status", "n_records", "n_scored", "n_virus", "virus_below_1000"),
        *("virus_1000_to_2999", "virus_3000_to_9999", "virus_from_10000", "n_provirus"),
        *("n_regions", "best_record", "best_score", "n_failed", "path", "error", "kinds"),
        *("families",),
    ),
    last_lines=_sample_lines,
    per_file=False,
)
_MULTIQC = Sink(
    "virnucpro_mqc.tsv",
    "counts of every sample, for MultiQC",
    last_lines=_multiqc_lines,
    per_file=False,
)
FAILED_FILES = Sink(
    "failed_files.txt",
    "what failed in each file",
    last_lines=_failure_lines,
    per_file=False,
    is_optional=True,
)


# Regions

_ORIGIN = "the origin"  # in a note; its other words differ between versions
_OVER_ORIGIN = f"crosses {_ORIGIN}"
_MOST_BASES = 10**15
_GFF3_SEQID = ".:^*$@!+_?-|"  # unescaped in a sequence id, besides letters and digits
# terms of the Sequence Ontology: SO:0000113, SO:0001041
_GFF3_TERMS = {"provirus": "proviral_region", "whole": "viral_sequence"}


def region_name(record_id: str, region: Region) -> str:
    """Positions count from 1, and the end is the last base."""
    return f"{record_id}|{region.kind}_{region.start + 1}_{region.end}"


# makes the text for a region of the record at an index; region positions count from 0, half-open
_RegionRow: TypeAlias = Callable[[CalledRecords, int, Region], str]


def _region_rows(row: _RegionRow, results: CalledRecords) -> bytes | None:
    """The regions of all searched records; None if no record was searched.

    All files of regions have the same regions under the same names.
    """
    if not results.regions:
        return None
    each = sorted(results.regions.items(), key=itemgetter(0))
    rows = (row(results, place, region) for place, (regions, _) in each for region in regions)
    return encoded("".join(rows))


def _table_rows(results: CalledRecords) -> bytes | None:
    """The table of regions: positions count from 1, and the end is the last base."""
    viruses, names = results.viruses, dict[tuple[int, int], str]()
    columns = viruses.places, viruses.starts, viruses.cross_origin, viruses.names
    for place, start, crosses, name in zip(*columns, strict=True):
        names[place, start] = name
        if crosses:  # the other part begins at the origin
            names[place, 0] = name
    return _region_rows(partial(_table_row, names), results)


def _table_row(
    viruses: Mapping[tuple[int, int], str], results: CalledRecords, place: int, region: Region
) -> str:
    name, calls = region_name(results.records.ids[place], region), results.calls
    bases = f"{region.start + 1}\t{region.end}\t{region.end - region.start}"
    record = f"{calls.record_ids[place]}\t{calls.samples[place]}"
    note = _OVER_ORIGIN if region.over_origin else ""
    call = "\t".join(call_words(calls, place))
    why = f"{region.att}\t{region.region_class}\t{region.evidence}"
    virus = viruses.get((place, region.start), "")
    words = f"{region.posterior:.4f}\t{call}\t{virus}\t{why}\t{note}"
    return f"{name}\t{record}\t{region.kind}\t{bases}\t{words}\n"


def _region_in(row: dict[str, str]) -> tuple[tuple[str, str], Region]:
    """The sample and the id of a record, and its region; tables of any version can be read."""
    start, end, posterior = int(row["start"]) - 1, int(row["end"]), float(row["posterior"] or "nan")
    if not (0 <= start < end <= _MOST_BASES and (isnan(posterior) or 0 <= posterior <= 1)):
        raise ValueError(f"{row['record']} has no region such as {row['region']}")
    if row["kind"] not in _GFF3_TERMS:
        raise ValueError(f"{row['region']} is a {row['kind']}")
    if row["class"] not in ("prophage", "uncertain", ""):
        raise ValueError(f"{row['region']} is of the class {row['class']}")
    kind = cast(Literal["provirus", "whole"], row["kind"])
    judged = cast(Literal["prophage", "uncertain", ""], row["class"])
    is_part, is_virus = _ORIGIN in row["note"], bool(row["virus"])
    facts = row["att"], is_part, is_virus, row["evidence"], judged
    return (row["file"], row["record"]), Region(start, end, kind, posterior, *facts)


def _bed_row(results: CalledRecords, place: int, region: Region) -> str:
    """BED6: positions count from 0 and are half-open; the score is the posterior times 1,000."""
    record_id, score = results.records.ids[place], round(1000 * region.posterior)
    name = region_name(record_id, region)
    return f"{record_id}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n"


def _gff_row(results: CalledRecords, place: int, region: Region) -> str:
    record_id, (label, score) = results.records.ids[place], call_words(results.calls, place)
    seqid, name = (
        quote(text, safe=_GFF3_SEQID, errors="surrogateescape")
        for text in (record_id, region_name(record_id, region))
    )
    attributes = [
        f"ID={name}",
        region.att and f"att={region.att}",
        region.region_class and f"class={region.region_class}",
        region.evidence,
        f"Note={_OVER_ORIGIN}" if region.over_origin else "",
        f"call={label}",
        f"virus_score={score}",
    ]
    bases = f"{region.start + 1}\t{region.end}\t{region.posterior:.4f}\t.\t."
    words = ";".join(filter(None, attributes))
    return f"{seqid}\tvirnucpro\t{_GFF3_TERMS[region.kind]}\t{bases}\t{words}\n"


def _fasta_row(results: CalledRecords, place: int, region: Region) -> str:
    """The sequence of a region, named as geNomad names proviruses."""
    records, (label, score) = results.records, call_words(results.calls, place)
    name = region_name(records.ids[place], region)
    header = f"{name} call={label} virus_score={score} posterior={region.posterior:.4f}"
    letters = records.sequences[place][region.start : region.end]
    return fasta([header], [letters]).decode("utf-8", "surrogateescape")


def _track_rows(results: CalledRecords) -> bytes | None:
    """The evidence for regions, by piece, of each searched record."""
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


REGION_TABLE = _Table(
    "regions.tsv",
    "virus-like regions, also as .bed, .gff3 and .fasta",
    (
        *("region", "record", "file", "kind", "start", "end", "length", "posterior"),
        *("call", "virus_score", "virus", "att", "class", "evidence", "note"),
    ),
    rows=_table_rows,
    is_optional=True,
    parse=_region_in,
)
_REGION_FASTA = Sink("regions.fasta", rows=partial(_region_rows, _fasta_row), is_optional=True)
TRACKS = Sink(
    "tracks.tsv.gz",
    columns=("record", "start", "end", "log_odds", "posterior"),
    rows=_track_rows,
    is_optional=True,
    is_packed=True,
)


# The outputs of each command

# the sequences of viral records and of regions
LETTERS = (_VIRAL_FASTA.file, _REGION_FASTA.file)
# what ``virnucpro regions`` writes besides the table of records
REGION_SINKS: tuple[Sink, ...] = (
    *(VIRUS_TABLE, _VIRUS_FASTA, SAMPLE_TABLE, _MULTIQC, REGION_TABLE),
    Sink("regions.bed", rows=partial(_region_rows, _bed_row), is_optional=True),
    Sink(
        "regions.gff3",
        columns=("##gff-version 3",),
        rows=partial(_region_rows, _gff_row),
        is_optional=True,
    ),
    *(_REGION_FASTA, TRACKS),
)
_FAILURES = FAILED_SEQUENCES, FAILED_FILES
# the table of records comes first: it is opened first, and appears last
SINKS: dict[Command, tuple[Sink, ...]] = {
    "predict": (RECORD_TABLE, FRAME_TABLE, CHUNK_TABLE, _VIRAL_FASTA, *REGION_SINKS, *_FAILURES),
    "extract": (_EMBEDDED, SAMPLE_TABLE, *_FAILURES),
}


def all_sinks() -> list[Sink]:
    """The outputs of all commands, each once."""
    return list(dict.fromkeys(chain.from_iterable(SINKS.values())))


# Writing

_Add = Callable[[Portion], None]


@contextmanager
def open_outputs(sinks: Sequence[Sink], place: Place) -> Iterator[_Add]:
    """Yield a function that adds a portion to the outputs of a run and, if wanted, of its sample.

    Pass it every record once, in input order. Files appear when the ``with`` block succeeds.
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
def _open_sinks_of_samples(sinks: Iterable[Sink], place: Place, folder: Path) -> Iterator[_Add]:
    """Yield a function that adds a portion to the outputs in the folder of its sample.

    Portions come in the order of samples. Every sample of the inputs gets outputs, even without
    records, and so does any other sample with records. One sample is written while a few others
    are synced to disk; one to which a resume added a mate comes twice, and is open all the time.
    """
    sinks = [sink for sink in sinks if sink.per_file]
    once, twice = _samples_by_visits(place.inputs)
    queue = deque(once)
    closing = deque[Future[None]]()
    current: str | None = None
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool, ExitStack() as whole, ExitStack() as stack:
        add_to: _Add | None = None

        def opened(sample: str, stack: ExitStack) -> _Add:
            of_sample = Place(folder / sample, place.tree, place.aside)
            with writing(of_sample.folder):
                place.tree.make_folder(of_sample.folder)
            return stack.enter_context(_open_sinks(sinks, of_sample))

        def close() -> None:
            closing.append(pool.submit(stack.pop_all().close))
            while len(closing) > _SYNCED_AT_ONCE:
                closing.popleft().result()

        def begin(sample: str) -> None:
            nonlocal current, add_to
            close()
            current, add_to = sample, opened(sample, stack)

        lasting = {sample: opened(sample, whole) for sample in twice}

        def add(portion: Portion) -> None:
            while current != portion.sample and portion.sample not in lasting:
                begin(queue.popleft() if portion.sample in queue else portion.sample)
            add_here = lasting.get(portion.sample, add_to)
            assert add_here is not None
            own = portion.own_rows
            add_here(portion if own is None else replace(portion, rows=own))

        yield add
        for sample in queue:
            begin(sample)
        close()
        for closed in closing:
            closed.result()


def _samples_by_visits(inputs: Sequence[InputFile]) -> tuple[list[str], list[str]]:
    """The samples of neighbouring files only, without those that may have no outputs; the others.

    Mates share a sample; one that was added later is not a neighbour of the other.
    """
    pairs = dict.fromkeys((file.sample, file.generation) for file in inputs)
    n_visits = Counter(sample for sample, _ in pairs)
    due = dict.fromkeys(file.sample for file in inputs if _is_due(file))
    once = [sample for sample in due if n_visits[sample] == 1]
    return once, [sample for sample, n in n_visits.items() if n > 1]


@contextmanager
def _open_sinks(sinks: Iterable[Sink], place: Place) -> Iterator[_Add]:
    """Yield a function that adds a portion to each output. Files appear if the block succeeds."""
    tallies: dict[str, Tally] = {}
    with ExitStack() as stack:
        tables = []
        for sink in sinks:
            path = place.folder / sink.file
            opened = table(place.tree, path, sink.columns, is_packed=sink.is_packed)
            tables.append((sink, stack.enter_context(opened)))
            if not sink.is_optional:
                tables[-1][1]()
        chunks = stack.enter_context(SortedLines(place.aside))

        def add(portion: Portion) -> None:
            tallies.setdefault(portion.sample, Tally()).include(portion.tally)
            for sink, open_table in tables:
                if sink is CHUNK_TABLE:
                    chunks.add(portion.rows.get(sink.file, b""))
                elif sink.file in portion.rows:
                    open_table().write(portion.rows[sink.file])

        yield add
        for sink, open_table in tables:
            if sink is CHUNK_TABLE:
                open_table().writelines(chunks.merged())
            if sink.last_lines and (text := sink.last_lines(place, tallies)):
                open_table().write(encoded(text))
