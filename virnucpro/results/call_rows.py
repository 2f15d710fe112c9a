"""Make the rows of calls, regions and viruses as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, compress, count
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from virnucpro.core.numeric import DECIMALS, FloatArray
from virnucpro.core.types import FRAMES_FAILED
from virnucpro.results.counts import LENGTH_CLASSES, NO_HIT, RecordCounts
from virnucpro.results.names import bed_chrom, gff3_seqid, gff3_value, tsv_line
from virnucpro.results.outputs import (
    CHUNK_TABLE,
    FAILED_SEQUENCES,
    FRAME_TABLE,
    ORIGIN,
    RECORD_TABLE,
    REGION_BED,
    REGION_FASTA,
    REGION_GFF3,
    REGION_TABLE,
    TRACKS,
    VIRAL_FASTA,
    VIRUS_FASTA,
    VIRUS_TABLE,
    OutputFile,
)
from virnucpro.results.row_batches import RowBatch, Rows, sort_rows
from virnucpro.results.tsv import (
    EMPTY,
    Column,
    decimal_texts,
    encode_texts,
    format_decimals,
    format_fasta,
    format_integers,
    format_rows,
    quoted_texts,
)
from virnucpro.sequences.derived_names import FRAME_ENDINGS
from virnucpro.sequences.taken_names import NONE_TAKEN, TakenNames
from virnucpro.sequences.translate import GeneticCode
from virnucpro.viral.identification import identify_viruses
from virnucpro.viral.types import CalledRecords, Calls, FrameScores, Identity, Region, Viruses

# terms of the Sequence Ontology: SO:0000113, SO:0001041
_GFF3_TERMS = {"provirus": "proviral_region", "whole": "viral_sequence"}
_OVER_ORIGIN = f"crosses {ORIGIN}"


# Counts and batches


def count_called(results: CalledRecords) -> RecordCounts:
    """The counts of these records."""
    calls = results.calls
    counts = RecordCounts()
    for status, n_records in Counter(calls.statuses).items():
        counts.statuses[status] = n_records
    counts.n_mendable = sum(FRAMES_FAILED in note for note in calls.notes if note)
    viral = [
        (score or 0.0, length, name)
        for is_virus, score, length, name in zip(
            calls.are_viruses, calls.virus_scores, calls.lengths, calls.record_ids, strict=True
        )
        if is_virus
    ]
    counts.n_viral = len(viral)
    counts.n_known_only = calls.evidences.count("known")
    starts = np.digitize([length for _, length, _ in viral], LENGTH_CLASSES[1:]).tolist()
    counts.viral_lengths.update(LENGTH_CLASSES[number] for number in starts)
    counts.best = max(viral, key=itemgetter(0, 1), default=NO_HIT)  # the first of equals
    for kinds in map(results.region_kinds, results.regions):
        counts.n_regions = (counts.n_regions or 0) + kinds.total()
        counts.n_whole_regions += kinds["whole"]
    viruses = results.viruses
    counts.n_proviruses = len(viruses.places) - len(viral)
    counts.kinds.update(one.virus_kind for one in viruses.identities if one.virus_kind)
    counts.families.update(one.kin for one in viruses.identities if one.kin)
    failures = results.failures
    failed = list(chain.from_iterable(failures.values()))
    counts.n_failed_frames = len(failed)
    counts.n_failed_records = len(failures)
    counts.n_frames = sum(map(len, results.embedded.values())) - len(failed)
    if failed:
        counts.first_failure = f"{failed[0].orf.id}: {failed[0].failure}"
    return counts


def make_batches(
    results: CalledRecords,
    outputs: Sequence[OutputFile],
    code: GeneticCode | None,
    *,
    with_own: bool = False,
    taken: TakenNames = NONE_TAKEN,
) -> list[RowBatch]:
    """Make a batch per sample. With a genetic code, identify the viruses.

    Args:
        with_own: make the rows of per-file outputs with the ids of the input file, too.
        taken: names of pieces and regions that get a number.
    """
    results.frames = _rename_clashes(results, taken)
    results.region_suffixes = _free_region_suffixes(results, taken)
    results.viruses = find_viruses(results, code)
    per_file = [output for output in outputs if output.per_file]
    return [
        RowBatch(
            sample,
            _make_rows(of_sample, outputs),
            count_called(of_sample),
            _make_rows(of_sample.with_file_ids(), per_file) if with_own else None,
        )
        for sample, of_sample in results.split_by_sample()
    ]


def _make_rows(results: CalledRecords, outputs: Iterable[OutputFile]) -> Rows:
    rows = {}
    for output in outputs:
        make = CALL_ROWS.get(output)
        text = make(results) if make else None
        if text is not None:
            rows[output.file] = sort_rows(output.file, text)
    return rows


# Records, frames and chunks


def format_call(calls: Calls, place: int) -> tuple[str, str]:
    """The label and the score of a call; both are empty without a score."""
    score = calls.virus_scores[place]
    if score is None:
        return "", ""
    return "virus" if calls.are_viruses[place] else "other", f"{score:.6f}"


def record_rows(calls: Calls) -> bytes:
    """A row for each call. A tab in a note becomes a space, since more columns follow."""
    pairs = zip(calls.virus_scores, calls.are_viruses, strict=True)
    labels = [
        "virus" if is_virus else "other" if score is not None else "" for score, is_virus in pairs
    ]
    scores = format_decimals(calls.virus_scores, DECIMALS)
    is_same = calls.base_scores is calls.virus_scores
    return format_rows(
        *(
            quoted_texts(calls.record_ids),
            quoted_texts(calls.samples),
            format_integers(calls.lengths),
        ),
        *(
            quoted_texts(calls.statuses),
            quoted_texts(labels),
            scores,
            format_decimals(calls.rates, 4),
        ),
        *map(format_integers, (calls.n_chunks, calls.n_chunks_scored, calls.n_frames_scored)),
        scores if is_same else format_decimals(calls.base_scores, DECIMALS),
        quoted_texts([note.replace("\t", " ") for note in calls.notes]),
        *(quoted_texts(calls.evidences), quoted_texts(calls.known_families)),
        format_integers([EMPTY if n is None else n for n in calls.n_known_kmers]),
    )


def frame_rows(frames: FrameScores) -> bytes:
    """A row per scored frame; a tie counts as "others"."""
    scores = np.array(frames.scores, dtype=np.float64)
    others = _other_rows(scores)
    labels = ["virus" if is_virus else "others" for is_virus in (scores > others).tolist()]
    of_both = format_decimals(others, DECIMALS), format_decimals(scores, DECIMALS)
    return format_rows(quoted_texts(frames.ids), quoted_texts(labels), *of_both)


def _other_rows(scores: FloatArray) -> FloatArray:
    """The scores of "others", with six decimals."""
    return np.asarray(np.rint((1 - scores) * 10**DECIMALS) / 10**DECIMALS)


def chunk_rows(frames: FrameScores) -> bytes:
    """A row per chunk with a scored frame; frames of one chunk are neighbours.

    A chunk is a virus by VirNucPro's rule: its best virus score is at least its best score of
    "others".
    """
    if not frames.ids:
        return b""
    chunks = np.array(frames.chunk_ids, dtype=object)
    firsts = np.flatnonzero(np.concatenate([[True], chunks[1:] != chunks[:-1]]))
    scores = np.array(frames.scores, dtype=np.float64)
    best, least = np.maximum.reduceat(scores, firsts), np.minimum.reduceat(scores, firsts)
    are_viruses = (best >= _other_rows(least)).tolist()
    return format_rows(
        quoted_texts(chunks[firsts].tolist()), quoted_texts(list(map(str, are_viruses)))
    )


def _viral_fasta(results: CalledRecords) -> bytes:
    columns = results.records.headers, results.records.sequences
    return format_fasta(*(list(compress(column, results.calls.are_viruses)) for column in columns))


def _failed_fasta(results: CalledRecords) -> bytes | None:
    failed, columns = results.failures, (results.records.headers, results.records.sequences)
    return format_fasta(*([column[place] for place in failed] for column in columns)) or None


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
        name = record_id if is_all else region_name(results, place, part)
        yield name, (part,), calls.virus_scores[place] or 0.0
        return
    viral = [region for region in regions if region.is_virus]
    for parts in _join_over_origin(viral):
        around = _wrap_origin(parts)
        yield region_name(results, place, around), parts, around.posterior


def _join_over_origin(regions: Sequence[Region]) -> list[tuple[Region, ...]]:
    """Each region by itself, and last the two parts of one that crosses the origin, in order."""
    crossing = tuple(region for region in reversed(regions) if region.over_origin)
    joined: list[tuple[Region, ...]] = [(one,) for one in regions if not one.over_origin]
    return [*joined, crossing] if crossing else joined


def _wrap_origin(parts: Sequence[Region]) -> Region:
    """The region with these parts; if it crosses the origin, its end precedes its start."""
    return parts[0]._replace(end=parts[-1].end)


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
    viruses = Viruses.from_rows(rows)
    return viruses if code is None else _identity_columns(results, viruses, code)


def _identity_columns(results: CalledRecords, viruses: Viruses, code: GeneticCode) -> Viruses:
    records = results.records
    circles = [
        records.record_at(place).is_circular if name == records.ids[place] else None
        for place, name in zip(viruses.places, viruses.names, strict=True)
    ]
    known = ["" if " " in bases else bases for bases in viruses.letters]
    return viruses._replace(identities=identify_viruses(known, circles, code))


def _virus_rows(results: CalledRecords) -> bytes:
    calls, viruses, names = results.calls, results.viruses, results.records.names
    if not viruses.places:
        return b""
    rates, notes = list[float | None](), list[str]()
    for place, crosses in zip(viruses.places, viruses.cross_origin, strict=True):
        is_virus = calls.are_viruses[place]
        rates.append(calls.rates[place] if is_virus else None)
        notes.append(calls.notes[place] if is_virus else _OVER_ORIGIN if crosses else "")
    return format_rows(
        *(quoted_texts(viruses.names), quoted_texts([names[place] for place in viruses.places])),
        *(
            quoted_texts([calls.samples[place] for place in viruses.places]),
            quoted_texts(viruses.kinds),
        ),
        *(format_integers(np.array(viruses.starts) + 1), format_integers(viruses.ends)),
        *(format_integers(list(map(len, viruses.letters))), format_decimals(viruses.scores, 6)),
        *(format_decimals(rates, 4), quoted_texts(notes)),
        *_format_identities(viruses.identities),
    )


def _format_identities(identities: Sequence[Identity]) -> Iterator[Column]:
    """The columns of the table of viruses that say what each virus is."""
    yield quoted_texts([one.virus_kind for one in identities])
    yield format_decimals([one.kind_probability for one in identities], 3)
    yield quoted_texts([one.kin for one in identities])
    yield format_integers([one.kin_words or EMPTY for one in identities])
    yield format_decimals([one.kin_share for one in identities], 3)
    yield quoted_texts([one.topology for one in identities])
    yield format_integers([one.repeat_length if one.topology else EMPTY for one in identities])
    yield quoted_texts([one.taxonomy for one in identities])
    yield quoted_texts([one.genus for one in identities])
    yield quoted_texts([one.genome_type for one in identities])
    yield quoted_texts([one.host_source for one in identities])
    yield format_decimals([one.completeness for one in identities], 1)
    yield quoted_texts([one.completeness_method for one in identities])


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
    return format_fasta(headers, viruses.letters)


# Regions


def region_name(results: CalledRecords, place: int, region: Region) -> str:
    """The name of a region of the record at an index; no record of the run has it as its id."""
    suffix = _region_suffix(region)
    return results.records.ids[place] + results.region_suffixes.get((place, suffix), suffix)


def _region_suffix(region: Region) -> str:
    """Positions count from 1, and the end is the last base."""
    return f"|{region.kind}_{region.start + 1}_{region.end}"


def _free_region_suffixes(results: CalledRecords, taken: TakenNames) -> dict[tuple[int, str], str]:
    """By index of the record and suffix: the suffix that makes the name of a region unique."""
    suffixes: dict[tuple[int, str], str] = {}
    for place, ids in _find_owners(results, taken):
        regions, _ = results.regions.get(place, ((), None))
        for region in (*regions, *map(_wrap_origin, _join_over_origin(regions))):
            suffix = _region_suffix(region)
            suffixes[place, suffix] = taken.free_suffix(ids, suffix)
    return suffixes


def _rename_clashes(results: CalledRecords, taken: TakenNames) -> FrameScores:
    """The scores of frames and pieces under unique names.

    Chunks and frames with vectors have such names from the plan on.
    """
    frames = results.frames
    owners = _find_owners(results, taken)
    if not owners:
        return frames
    ids, chunk_ids = list(frames.ids), list(frames.chunk_ids)
    firsts = [0, *accumulate(frames.n_of_records)]
    for place, own in owners:
        for i in range(firsts[place], firsts[place + 1]):
            chunk, frame = chunk_ids[i], ids[i]
            suffix = taken.free_suffix(own, chunk[len(own[0]) :], FRAME_ENDINGS)
            chunk_ids[i] = own[0] + suffix
            ids[i] = chunk_ids[i] + frame[len(chunk) :]
    return frames._replace(ids=ids, chunk_ids=chunk_ids)


def _find_owners(results: CalledRecords, taken: TakenNames) -> list[tuple[int, tuple[str, str]]]:
    """The records with derived names that may be taken: index, id in the run and in the file."""
    if not taken:
        return []
    ids, names = results.records.ids, results.records.names
    places = np.flatnonzero(taken.concern(ids) | taken.concern(names)).tolist()
    return [(place, (ids[place], names[place])) for place in places]


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
    return encode_texts("".join(rows))


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
    calls = results.calls
    label, score = format_call(calls, place)
    values = (
        region_name(results, place, region),
        calls.record_ids[place],
        calls.samples[place],
        region.kind,
        region.start + 1,
        region.end,
        region.end - region.start,
        f"{region.posterior:.4f}",
        label,
        score,
        viruses.get((place, region.start), ""),
        region.att,
        region.region_class,
        region.evidence,
        _OVER_ORIGIN if region.over_origin else "",
    )
    return tsv_line(values)


def _bed_row(results: CalledRecords, place: int, region: Region) -> str:
    """BED6: positions count from 0 and are half-open; the score is the posterior times 1,000."""
    record_id, score = results.records.ids[place], round(1000 * region.posterior)
    name = region_name(results, place, region)
    return f"{bed_chrom(record_id)}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n"


def _gff_row(results: CalledRecords, place: int, region: Region) -> str:
    record_id, (label, score) = results.records.ids[place], format_call(results.calls, place)
    attributes = [
        f"ID={gff3_value(region_name(results, place, region))}",
        region.att and f"att={region.att}",
        region.region_class and f"class={region.region_class}",
        region.evidence,
        f"Note={_OVER_ORIGIN}" if region.over_origin else "",
        f"call={label}",
        f"virus_score={score}",
    ]
    bases = f"{region.start + 1}\t{region.end}\t{region.posterior:.4f}\t.\t."
    words = ";".join(filter(None, attributes))
    return f"{gff3_seqid(record_id)}\tvirnucpro\t{_GFF3_TERMS[region.kind]}\t{bases}\t{words}\n"


def _fasta_row(results: CalledRecords, place: int, region: Region) -> str:
    """The sequence of a region, named as geNomad names proviruses."""
    records, (label, score) = results.records, format_call(results.calls, place)
    name = region_name(results, place, region)
    header = f"{name} call={label} virus_score={score} posterior={region.posterior:.4f}"
    letters = records.sequences[place][region.start : region.end]
    return format_fasta([header], [letters]).decode("utf-8", "surrogateescape")


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
    places = format_integers(starts + 1), format_integers(ends)
    return format_rows(
        quoted_texts(ids), *places, format_decimals(odds, 3), format_decimals(posteriors, 4)
    )


_MakeRows: TypeAlias = Callable[[CalledRecords], bytes | None]
# Makes the rows of neighbouring records for an output, or None if they do not need the file.
CALL_ROWS: Mapping[OutputFile, _MakeRows] = {
    RECORD_TABLE: lambda results: record_rows(results.calls),
    FRAME_TABLE: lambda results: frame_rows(results.frames),
    CHUNK_TABLE: lambda results: chunk_rows(results.frames),
    VIRAL_FASTA: _viral_fasta,
    VIRUS_TABLE: _virus_rows,
    VIRUS_FASTA: _virus_fasta,
    REGION_TABLE: _table_rows,
    REGION_BED: partial(_region_rows, _bed_row),
    REGION_GFF3: partial(_region_rows, _gff_row),
    REGION_FASTA: partial(_region_rows, _fasta_row),
    TRACKS: _track_rows,
    FAILED_SEQUENCES: _failed_fasta,
}
