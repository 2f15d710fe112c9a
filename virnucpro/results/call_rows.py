"""Make rows for calls, regions and viruses as text."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, compress, count
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from virnucpro.core.numeric import DECIMALS, FloatArray
from virnucpro.core.types import FRAMES_FAILED
from virnucpro.results.counts import LENGTH_CLASSES, NO_HIT, RecordCounts, sample_ranges, sum_counts
from virnucpro.results.gene_rows import gene_gff3, gene_table, protein_fasta
from virnucpro.results.miuvig import miuvig_rows
from virnucpro.results.names import bed_chrom, gff3_seqid, gff3_value, tsv_line
from virnucpro.results.outputs import ORIGIN, OutputFile, RunOutput
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
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.taken_names import NO_TAKEN_NAMES, TakenNames
from virnucpro.viral.genes import find_genes
from virnucpro.viral.identification import identify_viruses
from virnucpro.viral.types import (
    CalledRecords,
    Calls,
    FrameScores,
    Identity,
    Prediction,
    Region,
    Viruses,
)

# Sequence Ontology terms: SO:0000113, SO:0001041.
_GFF3_TERMS = {"provirus": "proviral_region", "whole": "viral_sequence"}
_OVER_ORIGIN = f"crosses {ORIGIN}"


# Counts and batches


def count_called(results: CalledRecords) -> dict[str, RecordCounts]:
    """Count these records by sample."""
    failures = results.failures
    counts: dict[str, RecordCounts] = {}
    for sample, first, end in sample_ranges(results.records.samples):
        row_counts = _count_rows(results, failures, range(first, end))
        counts[sample] = (
            sum_counts([counts[sample], row_counts]) if sample in counts else row_counts
        )
    return counts


def _count_rows(
    results: CalledRecords, failures: Mapping[int, Sequence[Prediction]], indices: range
) -> RecordCounts:
    """Count the neighbouring records with these indices."""
    calls = results.calls
    rows = slice(indices.start, indices.stop)
    counts = RecordCounts()
    for status, n_records in Counter(calls.statuses[rows]).items():
        counts.statuses[status] = n_records
    counts.n_mendable = sum(FRAMES_FAILED in note for note in calls.notes[rows] if note)
    viral = [
        (calls.virus_scores[index] or 0.0, calls.lengths[index], calls.record_ids[index])
        for index in compress(indices, calls.are_viruses[rows])
    ]
    counts.n_viral = len(viral)
    counts.n_known_only = calls.evidences[rows].count("known")
    starts = [bisect_right(LENGTH_CLASSES, length) - 1 for _, length, _ in viral]
    counts.viral_lengths.update(LENGTH_CLASSES[number] for number in starts)
    counts.best = max(viral, key=itemgetter(0, 1), default=NO_HIT)  # the first of equals
    for extents in map(results.region_extents, _in_range(results.regions, indices)):
        counts.n_regions = (counts.n_regions or 0) + extents.total()
        counts.n_whole_regions += extents["whole"]
    viruses = results.viruses.slice_rows(indices.start, indices.stop)
    counts.n_proviruses = len(viruses.record_indices) - len(viral)
    counts.groups.update(identity.group for identity in viruses.identities if identity.group)
    counts.families.update(identity.family for identity in viruses.identities if identity.family)
    failed_rows = [failures[index] for index in _in_range(failures, indices)]
    failed = list(chain.from_iterable(failed_rows))
    counts.n_failed_frames = len(failed)
    counts.n_failed_records = len(failed_rows)
    n_frames = sum(len(results.embedded[index]) for index in _in_range(results.embedded, indices))
    counts.n_frames = n_frames - len(failed)
    if failed:
        counts.first_failure = f"{failed[0].orf.id}: {failed[0].failure}"
    return counts


def _in_range(by_index: Collection[int], indices: range) -> Iterable[int]:
    """Return the indices that a mapping has, in order, without a search of an empty one."""
    return filter(by_index.__contains__, indices) if by_index else ()


def make_batches(
    results: CalledRecords,
    outputs: Sequence[OutputFile],
    code: GeneticCode | None,
    *,
    per_file: bool = False,
    with_own: bool = False,
    taken: TakenNames = NO_TAKEN_NAMES,
    finds_genes: bool = True,
) -> list[RowBatch]:
    """Make one batch, or one per sample. With a genetic code, identify the viruses.

    Args:
        per_file: make a batch per sample, for outputs per file.
        with_own: also make the rows of per-file outputs with ids from the input file.
        taken: piece and region names that get a number.
        finds_genes: find the genes of viruses, if there is a genetic code.
    """
    results.frames = _rename_clashes(results, taken)
    results.region_suffixes = _free_region_suffixes(results, taken)
    results.viruses = find_viruses(results, code, finds_genes=finds_genes)
    own_outputs = [output for output in outputs if output.per_file]
    parts = results.split_by_sample() if per_file else iter([results] * bool(results.records.ids))
    return [
        RowBatch(
            count_called(part),
            _make_rows(part, outputs),
            _make_rows(part.with_file_ids(), own_outputs) if with_own else None,
        )
        for part in parts
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


def format_call(calls: Calls, index: int) -> tuple[str, str]:
    """Return label and score for a call, both empty without a score."""
    score = calls.virus_scores[index]
    if score is None:
        return "", ""
    return "virus" if calls.are_viruses[index] else "other", f"{score:.6f}"


def record_rows(calls: Calls) -> bytes:
    """Make a row per call. A tab in a note becomes a space, since more columns follow."""
    pairs = zip(calls.virus_scores, calls.are_viruses, strict=True)
    labels = [
        "virus" if is_virus else "other" if score is not None else "" for score, is_virus in pairs
    ]
    scores = format_decimals(calls.virus_scores, DECIMALS)
    is_same = calls.base_scores is calls.virus_scores
    return format_rows(
        quoted_texts(calls.record_ids),
        quoted_texts(calls.samples),
        format_integers(calls.lengths),
        quoted_texts(calls.statuses),
        quoted_texts(labels),
        scores,
        format_decimals(calls.rates, 4),
        format_integers(calls.n_chunks),
        format_integers(calls.n_chunks_scored),
        format_integers(calls.n_frames_scored),
        scores if is_same else format_decimals(calls.base_scores, DECIMALS),
        quoted_texts([note.replace("\t", " ") for note in calls.notes]),
        quoted_texts(calls.evidences),
        quoted_texts(calls.known_families),
        format_integers([EMPTY if n is None else n for n in calls.n_known_kmers]),
    )


def frame_rows(frames: FrameScores) -> bytes:
    """Make a row per scored frame. A tie counts as "others"."""
    scores = np.array(frames.scores, dtype=np.float64)
    other_scores = _other_rows(scores)
    labels = ["virus" if is_virus else "others" for is_virus in (scores > other_scores).tolist()]
    return format_rows(
        quoted_texts(frames.ids),
        quoted_texts(labels),
        format_decimals(other_scores, DECIMALS),
        format_decimals(scores, DECIMALS),
    )


def _other_rows(scores: FloatArray) -> FloatArray:
    """Return the scores for "others", with six decimals."""
    return np.asarray(np.rint((1 - scores) * 10**DECIMALS) / 10**DECIMALS)


def chunk_rows(frames: FrameScores) -> bytes:
    """Make a row per chunk with a scored frame. Frames from one chunk are neighbours.

    A chunk is a virus by VirNucPro's rule: its best virus score is at least its best score for
    "others".
    """
    if not frames.ids:
        return b""
    chunks = np.array(frames.chunk_ids, dtype=object)
    firsts = np.flatnonzero(np.concatenate([[True], chunks[1:] != chunks[:-1]]))
    scores = np.array(frames.scores, dtype=np.float64)
    best = np.maximum.reduceat(scores, firsts)
    least = np.minimum.reduceat(scores, firsts)
    are_viruses = (best >= _other_rows(least)).tolist()
    return format_rows(
        quoted_texts(chunks[firsts].tolist()), quoted_texts(list(map(str, are_viruses)))
    )


def _viral_fasta(results: CalledRecords) -> bytes:
    are_viruses = results.calls.are_viruses
    headers = list(compress(results.records.headers, are_viruses))
    sequences = list(compress(results.records.sequences, are_viruses))
    return format_fasta(headers, sequences)


def _failed_fasta(results: CalledRecords) -> bytes | None:
    headers = [results.records.headers[index] for index in results.failures]
    sequences = [results.records.sequences[index] for index in results.failures]
    return format_fasta(headers, sequences) or None


# Viruses


def _viruses_in(
    results: CalledRecords, index: int
) -> Iterator[tuple[str, tuple[Region, ...], float]]:
    """Yield the name, the parts in order, and the score for each virus in a record.

    A virus is the record itself, without host flanks, or a provirus. A provirus that crosses the
    origin in a circular record has two parts.
    """
    calls = results.calls
    record_id = results.records.ids[index]
    regions, _ = results.regions.get(index, ((), None))
    if calls.are_viruses[index]:
        entire = Region(0, calls.lengths[index], "whole", 1.0)
        part = regions[0] if regions else entire
        is_all = (part.start, part.end) == (0, calls.lengths[index])
        name = record_id if is_all else region_name(results, index, part)
        yield name, (part,), calls.virus_scores[index] or 0.0
        return
    viral = [region for region in regions if region.is_virus]
    for parts in _join_over_origin(viral):
        wrapped = _wrap_origin(parts)
        yield region_name(results, index, wrapped), parts, wrapped.posterior


def _join_over_origin(regions: Sequence[Region]) -> list[tuple[Region, ...]]:
    """Return each region alone, and last the two parts of one that crosses the origin, in order."""
    crossing = tuple(region for region in reversed(regions) if region.over_origin)
    single: list[tuple[Region, ...]] = [(region,) for region in regions if not region.over_origin]
    return [*single, crossing] if crossing else single


def _wrap_origin(parts: Sequence[Region]) -> Region:
    """Join a region's parts. If it crosses the origin, its end precedes its start."""
    return parts[0]._replace(end=parts[-1].end)


def find_viruses(
    results: CalledRecords, code: GeneticCode | None, *, finds_genes: bool = True
) -> Viruses:
    """Find the viruses in the records. With a genetic code, identify each by its bases.

    A virus with missing letters (blanks) gets no identity: see ``rethreshold``.
    """
    records = results.records
    calls = results.calls
    unknown = Identity()
    rows = []
    for index in sorted({*compress(count(), calls.are_viruses), *results.regions}):
        sequence = records.sequences[index]
        for name, parts, score in _viruses_in(results, index):
            first = parts[0]
            letters = "".join(sequence[part.start : part.end] for part in parts)
            location = (first.extent, first.start, parts[-1].end, first.over_origin)
            rows.append((index, name, *location, letters, score, unknown))
    viruses = Viruses.from_rows(rows)
    if code is None:
        return viruses
    return _identity_columns(results, viruses, code, finds_genes=finds_genes)


def _identity_columns(
    results: CalledRecords, viruses: Viruses, code: GeneticCode, *, finds_genes: bool
) -> Viruses:
    records = results.records
    circles = [
        records.record_at(index).is_circular if name == records.ids[index] else None
        for index, name in zip(viruses.record_indices, viruses.names, strict=True)
    ]
    sequences = ["" if " " in bases else bases for bases in viruses.letters]
    identities = identify_viruses(sequences, circles, code)
    if not finds_genes:
        return viruses._replace(identities=identities)
    groups = [identity.group for identity in identities]
    genes = find_genes(sequences, list(map(bool, circles)), groups, code)
    return viruses._replace(identities=identities, genes=genes)


def _virus_rows(results: CalledRecords) -> bytes:
    calls = results.calls
    viruses = results.viruses
    names = results.records.names
    if not viruses.record_indices:
        return b""
    notes = [
        _virus_note(calls, index, crosses)
        for index, crosses in zip(viruses.record_indices, viruses.cross_origin, strict=True)
    ]
    return format_rows(
        quoted_texts(viruses.names),
        quoted_texts([names[index] for index in viruses.record_indices]),
        quoted_texts([calls.samples[index] for index in viruses.record_indices]),
        quoted_texts(viruses.extents),
        format_integers(np.array(viruses.starts) + 1),
        format_integers(viruses.ends),
        format_integers(list(map(len, viruses.letters))),
        format_decimals(viruses.scores, 6),
        format_decimals(_virus_rates(calls, viruses), 4),
        quoted_texts(notes),
        *_format_identities(viruses.identities),
    )


def _format_identities(identities: Sequence[Identity]) -> Iterator[Column]:
    """Format the virus table columns that identify each virus."""
    yield quoted_texts([identity.group for identity in identities])
    yield format_decimals([identity.group_probability for identity in identities], 3)
    yield quoted_texts([identity.family for identity in identities])
    yield format_integers([identity.family_kmers or EMPTY for identity in identities])
    yield format_decimals([identity.family_share for identity in identities], 3)
    yield quoted_texts([identity.topology for identity in identities])
    yield format_integers(
        [identity.repeat_length if identity.topology else EMPTY for identity in identities]
    )
    yield quoted_texts([identity.taxonomy for identity in identities])
    yield quoted_texts([identity.genus for identity in identities])
    yield quoted_texts([identity.genome_type for identity in identities])
    yield quoted_texts([identity.host_source for identity in identities])
    yield quoted_texts([identity.host_genus for identity in identities])
    yield format_decimals([identity.completeness for identity in identities], 1)
    yield quoted_texts([identity.completeness_method for identity in identities])


def _virus_note(calls: Calls, index: int, crosses_origin: bool) -> str:
    if calls.are_viruses[index]:
        return calls.notes[index]
    return _OVER_ORIGIN if crosses_origin else ""


def _virus_rates(calls: Calls, viruses: Viruses) -> list[float | None]:
    """Return the false discovery rates of viral records, and None for proviruses."""
    return [calls.rates[i] if calls.are_viruses[i] else None for i in viruses.record_indices]


def _virus_fasta(results: CalledRecords) -> bytes:
    """Format all virus sequences. A complete record keeps its header."""
    records = results.records
    calls = results.calls
    viruses = results.viruses
    words = zip(
        viruses.record_indices,
        viruses.names,
        viruses.extents,
        decimal_texts(viruses.scores, 6),
        decimal_texts(_virus_rates(calls, viruses), 4),
        strict=True,
    )
    headers = [
        f"{records.headers[index] if name == records.ids[index] else name} "
        f"extent={extent} score={score}{rate and f' fdr={rate}'}"
        for index, name, extent, score, rate in words
    ]
    return format_fasta(headers, viruses.letters)


def _miuvig_rows(results: CalledRecords) -> bytes:
    columns = list(zip(*miuvig_rows(results), strict=True))
    return format_rows(*map(quoted_texts, columns)) if columns else b""


# Regions


def region_name(results: CalledRecords, index: int, region: Region) -> str:
    """Name a region in the record at an index. No record in the run has this name as its id."""
    suffix = _region_suffix(region)
    return results.records.ids[index] + results.region_suffixes.get((index, suffix), suffix)


def _region_suffix(region: Region) -> str:
    """Format a region's position, counted from 1, with the last base as its end."""
    return f"|{region.extent}_{region.start + 1}_{region.end}"


def _free_region_suffixes(results: CalledRecords, taken: TakenNames) -> dict[tuple[int, str], str]:
    """Map (record index, suffix) to the suffix that makes the region name unique."""
    suffixes: dict[tuple[int, str], str] = {}
    for index, ids in _find_owners(results, taken):
        regions, _ = results.regions.get(index, ((), None))
        for region in (*regions, *map(_wrap_origin, _join_over_origin(regions))):
            suffix = _region_suffix(region)
            suffixes[index, suffix] = taken.free_suffix(ids, suffix)
    return suffixes


def _rename_clashes(results: CalledRecords, taken: TakenNames) -> FrameScores:
    """Return frame and piece scores under unique names.

    Chunks and frames with vectors have unique names since planning.
    """
    frames = results.frames
    owners = _find_owners(results, taken)
    if not owners:
        return frames
    ids = list(frames.ids)
    chunk_ids = list(frames.chunk_ids)
    firsts = [0, *accumulate(frames.n_per_record)]
    for index, own in owners:
        for i in range(firsts[index], firsts[index + 1]):
            chunk = chunk_ids[i]
            frame = ids[i]
            suffix = taken.free_suffix(own, chunk[len(own[0]) :], FRAME_ENDINGS)
            chunk_ids[i] = own[0] + suffix
            ids[i] = chunk_ids[i] + frame[len(chunk) :]
    return frames._replace(ids=ids, chunk_ids=chunk_ids)


def _find_owners(results: CalledRecords, taken: TakenNames) -> list[tuple[int, tuple[str, str]]]:
    """List records with derived names that may be taken: index, id in the run and in the file."""
    if not taken:
        return []
    ids = results.records.ids
    names = results.records.names
    indices = np.flatnonzero(taken.concern(ids) | taken.concern(names)).tolist()
    return [(index, (ids[index], names[index])) for index in indices]


# Makes the text for a region of the record at an index. Positions count from 0, half-open.
_RegionRow: TypeAlias = Callable[[CalledRecords, int, Region], str]


def _region_rows(row: _RegionRow, results: CalledRecords) -> bytes | None:
    """Format the regions in all searched records. None: no record was searched.

    All region files list the same regions under the same names.
    """
    if not results.regions:
        return None
    searched = sorted(results.regions.items(), key=itemgetter(0))
    rows = (row(results, index, region) for index, (regions, _) in searched for region in regions)
    return encode_texts("".join(rows))


def _table_rows(results: CalledRecords) -> bytes | None:
    """Format the region table. Positions count from 1, and the end is the last base."""
    viruses = results.viruses
    names: dict[tuple[int, int], str] = {}
    columns = (viruses.record_indices, viruses.starts, viruses.cross_origin, viruses.names)
    for index, start, crosses, name in zip(*columns, strict=True):
        names[index, start] = name
        if crosses:  # the other part begins at the origin
            names[index, 0] = name
    return _region_rows(partial(_table_row, names), results)


def _table_row(
    viruses: Mapping[tuple[int, int], str], results: CalledRecords, index: int, region: Region
) -> str:
    calls = results.calls
    label, score = format_call(calls, index)
    values = (
        region_name(results, index, region),
        calls.record_ids[index],
        calls.samples[index],
        region.extent,
        region.start + 1,
        region.end,
        region.end - region.start,
        f"{region.posterior:.4f}",
        label,
        score,
        viruses.get((index, region.start), ""),
        region.att,
        region.region_class,
        region.evidence,
        _OVER_ORIGIN if region.over_origin else "",
    )
    return tsv_line(values)


def _bed_row(results: CalledRecords, index: int, region: Region) -> str:
    """Format a BED6 row: half-open positions from 0, posterior times 1,000 as the score."""
    record_id = results.records.ids[index]
    score = round(1000 * region.posterior)
    name = region_name(results, index, region)
    return f"{bed_chrom(record_id)}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n"


def _gff_row(results: CalledRecords, index: int, region: Region) -> str:
    record_id = results.records.ids[index]
    label, score = format_call(results.calls, index)
    attributes = [
        f"ID={gff3_value(region_name(results, index, region))}",
        region.att and f"att={region.att}",
        region.region_class and f"class={region.region_class}",
        region.evidence,
        f"Note={_OVER_ORIGIN}" if region.over_origin else "",
        f"call={label}",
        f"virus_score={score}",
    ]
    bases = f"{region.start + 1}\t{region.end}\t{region.posterior:.4f}\t.\t."
    words = ";".join(filter(None, attributes))
    return f"{gff3_seqid(record_id)}\tvirnucpro\t{_GFF3_TERMS[region.extent]}\t{bases}\t{words}\n"


def _fasta_row(results: CalledRecords, index: int, region: Region) -> str:
    """Format a region's sequence, named as geNomad names proviruses."""
    records = results.records
    label, score = format_call(results.calls, index)
    name = region_name(results, index, region)
    header = f"{name} call={label} virus_score={score} posterior={region.posterior:.4f}"
    letters = records.sequences[index][region.start : region.end]
    return format_fasta([header], [letters]).decode("utf-8", "surrogateescape")


def _track_rows(results: CalledRecords) -> bytes | None:
    """Format the evidence for regions in each searched record, by piece."""
    if not results.regions:
        return None
    searched = sorted(results.regions)
    tracks = [(results.records.ids[index], results.regions[index][1]) for index in searched]
    ids = [name for name, track in tracks for _ in range(len(track.start))]
    starts, ends, odds, posteriors = map(
        np.concatenate, zip(*(track for _, track in tracks), strict=True)
    )
    return format_rows(
        quoted_texts(ids),
        format_integers(starts + 1),
        format_integers(ends),
        format_decimals(odds, 3),
        format_decimals(posteriors, 4),
    )


_MakeRows: TypeAlias = Callable[[CalledRecords], bytes | None]
# Makes the rows of neighbouring records for an output, or None if they do not need the file.
CALL_ROWS: Mapping[OutputFile, _MakeRows] = {
    RunOutput.RECORD_TABLE: lambda results: record_rows(results.calls),
    RunOutput.FRAME_TABLE: lambda results: frame_rows(results.frames),
    RunOutput.CHUNK_TABLE: lambda results: chunk_rows(results.frames),
    RunOutput.VIRAL_FASTA: _viral_fasta,
    RunOutput.VIRUS_TABLE: _virus_rows,
    RunOutput.VIRUS_FASTA: _virus_fasta,
    RunOutput.MIUVIG_TABLE: _miuvig_rows,
    RunOutput.GENE_TABLE: gene_table,
    RunOutput.GENE_GFF3: gene_gff3,
    RunOutput.PROTEIN_FASTA: protein_fasta,
    RunOutput.REGION_TABLE: _table_rows,
    RunOutput.REGION_BED: partial(_region_rows, _bed_row),
    RunOutput.REGION_GFF3: partial(_region_rows, _gff_row),
    RunOutput.REGION_FASTA: partial(_region_rows, _fasta_row),
    RunOutput.TRACKS: _track_rows,
    RunOutput.FAILED_SEQUENCES: _failed_fasta,
}
