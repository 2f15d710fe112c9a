"""Write the tables with a row per sample or file, once all records are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

from virnucpro.core.logging import escape_markup, format_count
from virnucpro.core.safe_dir import SafeDir
from virnucpro.results.counts import LENGTH_CLASSES, RecordCounts
from virnucpro.results.names import tsv_line
from virnucpro.results.outputs import OutputFile, RunOutput
from virnucpro.sequences.inputs import InputFile


@dataclass(frozen=True, slots=True, eq=False)
class OutputDir:
    """Output destination for a run or for one sample."""

    folder: Path
    tree: SafeDir  # the tree with the folder
    aside: Path  # folder for lines to be sorted, on a disk with enough space
    inputs: Sequence[InputFile] = ()
    refused: Sequence[InputFile] = ()  # inputs that could not be read
    samples: Path | None = None  # parent of one output folder per sample; None: no such folders


@dataclass(frozen=True, slots=True, eq=False)
class _SampleRow:
    """Facts behind a row in the sample table."""

    sample: str
    status: str
    counts: RecordCounts
    path: str  # paths of its files, in mate order
    error: str  # why its file could not be read


def _sample_rows(
    output_dir: OutputDir, counts_by_sample: Mapping[str, RecordCounts]
) -> Iterator[_SampleRow]:
    """Yield a row per sample, and one for each unreadable file."""
    samples: dict[tuple[str, str], list[InputFile]] = {}  # mates share a row
    for file in (*_list_input_files(output_dir, counts_by_sample), *output_dir.refused):
        samples.setdefault((file.sample, file.error), []).append(file)
    half_read = {
        file.sample for file in output_dir.refused if file.mate
    }  # an unreadable mate's sample
    for (sample, error), files in samples.items():
        counts = RecordCounts() if error else counts_by_sample.get(sample, RecordCounts())
        status = "unreadable" if error else _sample_status(counts, is_half=sample in half_read)
        mate_order = sorted(files, key=attrgetter("mate"))
        path = "; ".join(escape_markup(file.name or file.path) for file in mate_order)
        yield _SampleRow(sample, status, counts, path, escape_markup(error))


def _sample_lines(output_dir: OutputDir, counts_by_sample: Mapping[str, RecordCounts]) -> str:
    """Format the sample table for ``predict``."""
    lines = []
    for row in _sample_rows(output_dir, counts_by_sample):
        counts = row.counts
        score, _, record_id = counts.best
        values = (
            row.sample,
            row.status,
            counts.n_records,
            counts.statuses["scored"],
            counts.n_viral,
            *(counts.viral_lengths[start] for start in LENGTH_CLASSES),
            counts.n_proviruses,
            "" if counts.n_regions is None else counts.n_regions,
            record_id,
            f"{score:.6f}" if record_id else "",
            counts.n_mendable,
            row.path,
            row.error,
            _counts_text(counts.groups),
            _counts_text(counts.families),
        )
        lines.append(tsv_line(values))
    return "".join(lines)


def _embedded_sample_lines(
    output_dir: OutputDir, counts_by_sample: Mapping[str, RecordCounts]
) -> str:
    """Format the sample table for ``extract``."""
    lines = []
    for row in _sample_rows(output_dir, counts_by_sample):
        counts = row.counts
        values = (
            row.sample,
            row.status,
            counts.n_records,
            counts.statuses["embedded"],
            counts.n_mendable,
            row.path,
            row.error,
        )
        lines.append(tsv_line(values))
    return "".join(lines)


def _list_input_files(
    output_dir: OutputDir, counts_by_sample: Mapping[str, RecordCounts]
) -> list[InputFile]:
    """List the files that were read, except added ones whose records were all replaced."""
    return [file for file in output_dir.inputs if file.sample in counts_by_sample or is_due(file)]


def is_due(file: InputFile) -> bool:
    """Return whether a file has outputs even if no record is written.

    This is the case for files from the first run and for empty files. An added file that no longer
    exists counts as one with records.
    """
    return not file.generation or (Path(file.path).is_file() and not any(file.read()))


def _counts_text(counts: Counter[str]) -> str:
    """Format counts in descending order.

    >>> _counts_text(Counter({"ssDNA": 1, "RNA+": 2, "phage": 2}))
    'RNA+: 2; phage: 2; ssDNA: 1'
    """
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return "; ".join(f"{name}: {n}" for name, n in pairs)


def _sample_status(tally: RecordCounts, *, is_half: bool) -> str:
    if not tally.n_records:
        return "empty"
    if tally.n_mendable and not (tally.statuses["scored"] or tally.statuses["embedded"]):
        return "failed"
    return "partial" if tally.n_mendable or is_half else "complete"


def _multiqc_lines(output_dir: OutputDir, counts_by_sample: Mapping[str, RecordCounts]) -> str:
    lines = [_MULTIQC_COLUMNS]
    for sample in dict.fromkeys(
        file.sample for file in _list_input_files(output_dir, counts_by_sample)
    ):
        tally = counts_by_sample.get(sample, RecordCounts())
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


def _family_lines(output_dir: OutputDir, counts_by_sample: Mapping[str, RecordCounts]) -> str:
    """Format the viruses of each sample by family, for a bar graph. "" if no family is named."""
    files = _list_input_files(output_dir, counts_by_sample)
    samples = list(dict.fromkeys(file.sample for file in files))
    by_sample = [counts_by_sample.get(sample, RecordCounts()).families for sample in samples]
    totals = Counter[str]()
    for families in by_sample:
        totals.update(families)
    if not totals:
        return ""
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    max_families = 20  # bars, besides the others
    shown = ranked[:max_families]
    others = ranked[max_families:]
    rows = [("Sample", *shown, *(["others"] if others else []))]
    for sample, families in zip(samples, by_sample, strict=True):
        counts = [families[name] for name in shown]
        n_others = [families.total() - sum(counts)] if others else []
        rows.append((sample, *map(str, (*counts, *n_others))))
    return _MULTIQC_FAMILY_GRAPH + "".join("\t".join(row) + "\n" for row in rows)


_MULTIQC_FAMILY_GRAPH = """\
# id: virnucpro_families
# section_name: 'VirNucPro: families of viruses'
# description: 'viruses with a named family, or with a cluster of viruses without a family'
# plot_type: bargraph
# pconfig: {id: virnucpro_families_plot, title: 'VirNucPro: families of viruses', ylab: viruses}
"""


def _failure_lines(output_dir: OutputDir, counts_by_sample: Mapping[str, RecordCounts]) -> str:
    """Format path, stage and error for each file with a failure, separated by ``|`` and sorted."""
    rows = [(file, "read", file.error) for file in output_dir.refused]
    firsts = {file.sample: file for file in reversed(output_dir.inputs)}  # mates share a sample
    for sample, file in firsts.items():
        tally = counts_by_sample.get(sample, RecordCounts())
        if tally.n_failed_frames:
            counts = (
                f"{format_count(tally.n_failed_frames, 'frame')} of "
                f"{format_count(tally.n_failed_records, 'record')} failed"
            )
            rows.append((file, "embed", f"{counts}; {tally.first_failure}"))
    paths = (escape_markup(file.name or file.path).replace("|", r"\x7c") for file, _, _ in rows)
    words = zip(paths, rows, strict=True)
    return "".join(
        sorted(f"{path}|{stage}|{escape_markup(error)}\n" for path, (_, stage, error) in words)
    )


_LastLines: TypeAlias = Callable[[OutputDir, Mapping[str, RecordCounts]], str]
# Output -> function that makes its last lines from the counts of each sample.
LAST_LINES: Mapping[OutputFile, _LastLines] = {
    RunOutput.SAMPLE_TABLE: _sample_lines,
    RunOutput.EMBEDDED_SAMPLE_TABLE: _embedded_sample_lines,
    RunOutput.MULTIQC: _multiqc_lines,
    RunOutput.MULTIQC_FAMILIES: _family_lines,
    RunOutput.FAILED_FILES: _failure_lines,
}
