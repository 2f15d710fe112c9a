"""Write a run's ``report.html``, in the order of a reader's questions.

It reads only files in the run folder, so that a regenerated page has the same bytes.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, compress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro.core.events import SCORING, STAGES, STARTING
from virnucpro.core.helper_pool import HelperPool, TaskRunner
from virnucpro.core.logging import LOGGER, escape_markup, format_count, printable
from virnucpro.core.numeric import FloatArray
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import STATUSES, Command
from virnucpro.engine.device_timeline import DeviceTimeline
from virnucpro.results.counts import LENGTH_CLASSES
from virnucpro.results.outputs import (
    EMBEDDED_SAMPLE_TABLE,
    FAILED_FILES,
    FAILED_SEQUENCES,
    GENE_TABLE,
    OUTPUTS,
    REGION_TABLE,
    SAMPLE_TABLE,
    TRACKS,
    VIRUS_TABLE,
    open_run_dir,
)
from virnucpro.results.report.aggregates import (
    GroupCounts,
    RecordRows,
    RunCounts,
    count_groups,
    count_records,
    find_records,
    length_classes,
)
from virnucpro.results.report.charts import GIB, Chart, device_charts, scores_by_length
from virnucpro.results.report.citation import select_works
from virnucpro.results.report.html import MOST_BYTES, compress_data, render_packed
from virnucpro.results.report.run_json import (
    Key,
    ListedRegions,
    RunJson,
    count_bins,
    read_complaints,
    read_page_regions,
    read_tracks,
)
from virnucpro.results.report.virus_rows import (
    ListedVirus,
    best_proviruses,
    count_classes,
    lineage_bars,
    read_gene_maps,
)
from virnucpro.results.table_blocks import TableBlock, open_table_reader, split_table
from virnucpro.store.checksums import Outputs
from virnucpro.store.run_dir import RECORD_TABLES, RunDir

if TYPE_CHECKING:
    from virnucpro.viral.types import Region

_N_TOP = 20  # best viral records in the list
_HIGH_FDR = 0.2  # a length class with this share of false calls is called weak
_MOST_FILES = 60  # input files in the table of files without JavaScript
_MOST_SAMPLES = 10_000  # in the table that can be sorted and searched
_SAMPLE_LABELS = {
    "virus_below_1000": "below 1k",
    "virus_1000_to_2999": "1k to 3k",
    "virus_3000_to_9999": "3k to 10k",
    "virus_from_10000": "from 10k",
    "n_provirus": "proviruses",
    "best_score": "best score",
}
_NOT_SHOWN = ("path", "error", "families")  # sample columns
_MOST_TRACKS = 200  # records with a map
_MOST_BINS = 150_000  # over all maps
_MOST_FIRST = 20  # regions in the list without JavaScript
_MOST_HASHES = 1_000
_MOST_COMPLAINTS = 20
_MOST_LINES = 8  # devices in a chart, starts of a run
_MOST_HOSTS = 100
_SHORT = {"nucleotide": 500, "protein": 100}  # letters; shorter records have weak calls
_MOST_FAMILIES = 20  # bars
# ``printable`` leaves texts of this length unchanged, unless they contain control characters.
_SAFE_LETTERS = 200
_ROOM = 40_000  # page bytes in addition to the rows
_PLACES: Mapping[str, int] = {status: index for index, status in enumerate(STATUSES)}


class _ListedRecords(NamedTuple):
    """A record with regions that the page lists."""

    file: str
    record: str
    run_id: str
    length: int
    score: float
    regions: Sequence[Region]


class _RunFiles(NamedTuple):
    """A run folder's content, as far as the page needs it."""

    rundir: RunDir
    facts: RunJson
    has_table: bool  # False: the run has written no table of records yet
    counts: RunCounts
    n_regions: Counter[tuple[str, str]]  # per record, by file and id
    listed: list[_ListedRecords]  # best first
    starts: list[DeviceTimeline]
    complaints: Mapping[str, int]
    groups: GroupCounts
    identities: Mapping[Key, tuple[str, ...]]  # group and family of the best viral records
    evidences: Mapping[Key, tuple[str, ...]]  # why these are called
    proviruses: list[ListedVirus]  # best first
    classes: Mapping[tuple[str, str], int]  # viruses by file and class
    rows: RecordRows  # the rows for the page, if they fit
    helpers: TaskRunner[None]

    @property
    def command(self) -> Command:
        return "extract" if self.facts.text("recipe", "command") == "extract" else "predict"

    @property
    def families(self) -> set[str]:
        """The encoder families. Empty: only the scorer ran."""
        return {encoder.text("family") for encoder in self.facts.iter_section("recipe", "encoders")}

    @property
    def is_protein(self) -> bool:
        return self.facts.text("recipe", "input_type") == "protein"

    @property
    def letters(self) -> str:
        return "residues" if self.is_protein else "bases"


def report_folder(folder: Path) -> Path:
    """Write the page for an idle run folder, and return its path.

    Raises:
        InputMissingError: the folder has no run.
        OutputError: another process is using it.
        VirnucproError: as ``write_run_page``.
    """
    rundir = open_run_dir(folder)
    if not rundir.manifest.is_file():
        raise rundir.missing_run_error(with_options("give the {output_dir} of one"))
    with rundir.locked():
        rundir.remove_leftovers()
        Outputs(rundir).check(but=[RunDir.page])
        write_run_page(rundir, HelperPool())
    return rundir.report


def write_run_page(rundir: RunDir, pool: HelperPool) -> None:
    """Write a run's page into its folder, with the help of pool processes.

    Raises:
        InputMissingError: the folder has no run.
        ResumeError: ``run.json`` is damaged.
        InputError: a table is damaged.
        OutputError, StorageError: as ``SafeDir.atomic_write``.
    """
    run = _read_run(rundir, pool.helpers(None, 1, "figures of the page"))
    works = select_works(run.families)
    warnings = list(_warnings(run))
    classes = _length_rows(run)
    samples = _samples(run)
    charts = [device_charts(i, start) for i, start in enumerate(run.starts[-_MOST_LINES:])]
    state, state_text = _run_state(run)
    if state == "unfinished":
        LOGGER.warning("%s", state_text)
    content = {
        "name": _run_name(run),
        "state": state,
        "state_text": state_text,
        "letters": run.letters,
        "is_predict": run.command == "predict",
        "facts": run.facts,
        "number": partial(run.facts.number, "counts"),  # from the counts of ``run.json``
        "counts": run.counts,
        "adds_up": _reconciliation(run) if run.has_table else None,
        "answer": _headline(run) if run.has_table else None,
        "warnings": warnings,
        "notes": [text for kind, text in warnings if kind == "note"],
        "complaints": list(run.complaints.items())[:_MOST_COMPLAINTS],
        "classes": classes,
        "has_fdr": not all(math.isnan(rate) for _, rate in run.counts.lowest),
        "groups": _group_rows(run) if run.has_table else None,
        "lineages": lineage_bars(run.classes),
        "scores": scores_by_length(run.counts, run.rows, run.facts.cut, run.letters),
        "regions": _first_regions(run),
        "has_samples": samples is not None,
        "machine": _machine(run, charts),
        "provenance": list(_provenance(run)),
        "hashes": [
            (_display_path(file), file.text("sha256")) for file in run.facts.inputs[:_MOST_HASHES]
        ],
        "works": works,
        "bibtex": "\n\n".join(work.bibtex for work in works),
    }
    frame = render_packed("run.html", {**content, "rows": RecordRows.empty()}, "")
    chart_data = {chart.name: chart.as_data() for chart in chain.from_iterable(charts)}
    fixed = {"charts": chart_data, "samples": samples, **_regions(run)}
    packed, rows = _pack_data(run, fixed, MOST_BYTES - len(frame) - _ROOM)
    page = render_packed("run.html", {**content, "rows": rows}, packed)
    with Outputs(rundir).rewriting([RunDir.page]):
        rundir.write_file(rundir.report, page)


def _pack_data(
    run: _RunFiles, fixed: Mapping[str, object], most_bytes: int
) -> tuple[str, RecordRows]:
    """Pack the page data with as many rows as fit. Return the data and the rows."""
    rows = run.rows
    while True:
        packed = compress_data({**fixed, **_columns(run, rows)})
        if len(packed) <= most_bytes or not len(rows.places):
            return packed, rows
        n_rows = max(0, int(0.95 * len(rows.places) * most_bytes / len(packed)))
        rows = run.counts.rows(n_rows, run.helpers)


def _read_run(rundir: RunDir, helpers: TaskRunner[None]) -> _RunFiles:
    """Read what the page needs from a run folder.

    Raises:
        InputMissingError, ResumeError, InputError: as ``write_run_page``.
    """
    facts = RunJson.read(rundir.manifest)
    is_extract = facts.text("recipe", "command") == "extract"
    table = rundir.record_table("extract" if is_extract else "predict")
    n_regions = Counter[tuple[str, str]]()
    listed: ListedRegions = {}
    if not is_extract:
        n_regions, listed = read_page_regions(rundir.output(REGION_TABLE.file))
    input_type = facts.text("recipe", "input_type")
    has_table = table.is_file()
    counts = count_records(table, input_type, helpers)
    rows = counts.rows(counts.n_records, helpers)
    viruses = rundir.output(VIRUS_TABLE.file)
    top = rows.best(_N_TOP)
    best = set(zip(top.files, top.records, strict=True))
    sizes = find_records(table, set(listed), ("length", "virus_score"), helpers)
    return _RunFiles(
        rundir,
        facts,
        has_table,
        counts,
        n_regions,
        list(_listed(listed, sizes)) if has_table else [],
        DeviceTimeline.read_all(rundir.machine),
        read_complaints(rundir.log),
        count_groups(viruses, helpers),
        find_records(viruses, best, ("group", "family"), helpers, VIRUS_TABLE.old_names),
        find_records(table, best, ("evidence",), helpers),
        best_proviruses(viruses, _N_TOP, helpers),
        count_classes(viruses, helpers),
        rows,
        helpers,
    )


def _listed(
    regions: ListedRegions, sizes: Mapping[Key, tuple[str, ...]]
) -> Iterator[_ListedRecords]:
    """Yield the records with regions that the page lists.

    The region in a record that is viral throughout is omitted, because it adds nothing to the call.
    """
    for (file, record), (run_id, record_regions) in regions.items():
        n_letters, score = sizes.get((file, record), ("", ""))
        length = max(int(float(n_letters or 0)), *(region.end for region in record_regions))
        is_part = [
            region.extent != "whole" or (region.start, region.end) != (0, length)
            for region in record_regions
        ]
        if parts := list(compress(record_regions, is_part)):
            yield _ListedRecords(file, record, run_id, length, float(score or math.nan), parts)


def _display_path(file: RunJson) -> str:
    return file.text("name") or file.text("path")


def _run_name(run: _RunFiles) -> str:
    inputs = run.facts.inputs
    return inputs[0].text("sample") if len(inputs) == 1 else format_count(len(inputs), "file")


def _run_state(run: _RunFiles) -> tuple[str, str]:
    """Describe the run state: a word and a sentence."""
    facts = run.facts
    state = facts.text("state")
    n_failed, n_refused = _failures(facts)
    if state == "planned":
        return (
            "unfinished",
            "The run is only planned: run virnucpro work, then continue with --resume.",
        )
    if state not in ("complete", "partial"):
        text = "The run is not finished: continue with --resume."
        if run.has_table:
            text += " The figures come from tables that were written earlier."
        return "unfinished", text
    if facts.section("counts") and n_failed and not facts.number("counts", "n_frames"):
        return "failed", "Every frame failed: no record has a score."
    if state == "partial":
        words = [f"{format_count(n_failed, 'frame')} failed"] if n_failed else []
        words += [f"{format_count(n_refused, 'file')} could not be read"] if n_refused else []
        return "partial", f"{' and '.join(words)}: everything else is complete."
    return "complete", "Every record of the input is accounted for."


def _failures(facts: RunJson) -> tuple[int, int]:
    """Count frames without a vector and unreadable files."""
    return facts.number("counts", "n_failed_frames"), len(facts.sequence("refused"))


def _reconciliation(run: _RunFiles) -> dict[str, object]:
    counts = run.counts
    facts = run.facts
    parts = [(status, counts.statuses[status], STATUSES[status]) for status in STATUSES]
    inputs = {file.text("sample"): file for file in facts.inputs}
    names = dict.fromkeys([*inputs, *(file for file, _ in counts.files)])
    rows = [_file_row(name, counts, inputs.get(name, RunJson({}))) for name in names]
    rows.sort(key=lambda row: not row["error"])  # unreadable files first
    return {
        "parts": [part for part in parts if part[1]] or parts[:1],
        "bars": list(_bar_rows(counts)),
        "is_right": facts.n_counted in (None, counts.n_records),
        "statuses": [status for status in STATUSES if counts.statuses[status]],
        "files": rows[:_MOST_FILES],
        "n_more_files": max(0, len(rows) - _MOST_FILES),
    }


def _bar_rows(counts: RunCounts) -> Iterator[tuple[str, float, float]]:
    """Yield start and width of the bar for each status, in thousandths of all records."""
    start = 0.0
    for status in STATUSES:
        if n := counts.statuses[status]:
            width = 1000 * n / counts.n_records
            yield status, start, width
            start += width


def _file_row(name: str, counts: RunCounts, file: RunJson) -> dict[str, object]:
    numbers = {status: counts.files[name, status] for status in STATUSES}
    return {
        "name": printable(name),
        "path": printable(_display_path(file)),
        "n": sum(numbers.values()),
        "numbers": numbers,
        "n_viral": counts.files[name, "viral"],
        "error": printable(file.text("error")),
    }


def _headline(run: _RunFiles) -> dict[str, object]:
    has_regions = run.rundir.output(REGION_TABLE.file).is_file()
    outputs = (output for output in OUTPUTS[run.command] if output.about)
    written = (output for output in outputs if run.rundir.output(output.file).is_file())
    names = [(output.file, output.about) for output in written]
    names.sort(key=lambda name: not name[0].startswith("viruses"))  # these are first
    if run.rundir.feature_index.is_file():
        names.append((run.rundir.feature_index.name, "all vectors, with their ids"))
    top = _best_viruses(run)
    return {
        "n_within": run.n_regions.total(),
        "looked_for_regions": has_regions or run.facts.section("counts").get("n_regions") == 0,
        "top": top,
        "n_viruses": run.counts.n_viral + run.facts.number("counts", "n_proviruses"),
        "has_fdr": not all(math.isnan(virus.rate) for virus in top),
        "has_groups": any(virus.group for virus in top),
        "has_evidence": any(virus.evidence for virus in top),
        "has_proviruses": any(virus.extent == "provirus" for virus in top),
        "gene_maps": read_gene_maps(run.rundir.output(GENE_TABLE.file), top, run.helpers),
        "files": names,
    }


def _best_viruses(run: _RunFiles) -> list[ListedVirus]:
    """Return the records and proviruses with the highest scores, those of proviruses posteriors."""
    top = run.rows.best(_N_TOP)
    columns = (top.records, top.files, top.lengths, top.scores, top.rates, top.notes)
    viruses = []
    for record, file, length, score, rate, note in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        group, family = run.identities.get((file, record), ("", ""))
        (evidence,) = run.evidences.get((file, record), ("",))
        whole = ListedVirus(
            record=record,
            file=file,
            extent="whole",
            length=length,
            score=score,
            rate=rate,
            evidence=evidence,
            group=group,
            family=family,
            note=note,
        )
        viruses.append(whole)
    both = [*viruses, *run.proviruses]
    return sorted(both, key=attrgetter("score"), reverse=True)[:_N_TOP]


def _warnings(run: _RunFiles) -> Iterator[tuple[str, str]]:
    """Yield warnings for the page top: kind (``bad`` or ``mind``) and text."""
    facts = run.facts
    counts = run.counts
    n_failed, n_refused = _failures(facts)
    if not run.has_table:
        yield "bad", "There are no tables yet: the run ended before it wrote them."
        return
    if facts.n_counted not in (None, counts.n_records):
        yield (
            "bad",
            f"The table has {counts.n_records:,} records, but the run counted "
            f"{facts.n_counted:,}: the table or run.json was changed afterwards.",
        )
    if n_refused:
        files = format_count(n_refused, "input file")
        yield "bad", f"{files} could not be read: see {FAILED_FILES.file}."
    if n_failed:
        yield (
            "bad",
            f"{format_count(n_failed, 'frame')} without a vector: see {FAILED_FILES.file}. Correct "
            f"{FAILED_SEQUENCES.file}, and add it with --resume --add --input.",
        )
    if not counts.n_records:
        yield "mind", "The input has no records."
    short = _SHORT["protein" if run.is_protein else "nucleotide"]
    classes = zip(length_classes(counts.starts), counts.of_classes[:, 0].tolist(), strict=True)
    n_short = sum(n for (_, end, _), n in classes if end and end <= short)
    if 2 * n_short > counts.n_records:
        yield (
            "mind",
            f"{n_short:,} of {format_count(counts.n_records, 'record')} are shorter than {short:,} "
            f"{run.letters}. Calls of short records are less reliable.",
        )
    n_renamed = sum(file.number("n_renamed") for file in facts.inputs)
    if n_renamed:
        yield (
            "mind",
            f"{format_count(n_renamed, 'record')} had the id of an earlier record, "
            "and got a number.",
        )
    for note, n in counts.notes.most_common(_MOST_LINES):
        yield "note", f"{format_count(n, 'record')} with the note: {escape_markup(note)}"
    if len(counts.notes) > _MOST_LINES:
        n_more = format_count(len(counts.notes) - _MOST_LINES, "more note")
        yield "note", f"and {n_more}: see the column note of {RECORD_TABLES[run.command]}."


def _length_rows(run: _RunFiles) -> list[tuple[object, ...]]:
    """Make a row for each length class that has records.

    Columns: name, records, scored records, viral records and their letters, the lowest viral score,
    the false call share down to it, and whether that share is high.
    """
    classes = zip(
        length_classes(run.counts.starts),
        run.counts.of_classes.tolist(),
        run.counts.lowest,
        strict=True,
    )
    return [
        (name, *numbers, score, rate, rate >= _HIGH_FDR)
        for (_, _, name), numbers, (score, rate) in classes
        if numbers[0]
    ]


def _group_rows(run: _RunFiles) -> dict[str, object] | None:
    """Count viruses by group and length, and list the most frequent families and clusters."""
    groups, named = run.groups
    totals: Counter[str] = Counter()
    for (group, _), n in groups.items():
        totals[group] += n
    del totals[""]  # proteins, and viruses without bases
    if not totals:
        return None
    families = sorted(named.items(), key=lambda pair: (-pair[1], pair[0]))
    return {
        "lengths": [name for _, _, name in length_classes(LENGTH_CLASSES)],
        "rows": [
            (group, n, [groups[group, start] for start in LENGTH_CLASSES])
            for group, n in sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
        "families": [(name, n, 100 * n / families[0][1]) for name, n in families[:_MOST_FAMILIES]],
        "n_families": len(families),
        "n_named": named.total(),
        "n": totals.total(),
    }


def _first_regions(run: _RunFiles) -> dict[str, object]:
    """Count regions and their records, and list the first regions, for a printed page."""
    rows = [(record, region) for record in run.listed for region in record.regions]
    first = [
        (printable(record.record), printable(record.file), region)
        for record, region in rows[:_MOST_FIRST]
    ]
    return {"n": len(rows), "first": first}


def _regions(run: _RunFiles) -> dict[str, object]:
    """Return columns for the region list, and the evidence along the best records."""
    if not run.listed:
        return {}
    rows = [(record, region) for record in run.listed for region in record.regions]
    file_names = dict.fromkeys(record.file for record in run.listed)
    files = {file: i for i, file in enumerate(file_names)}
    columns = {
        "record": _lines([record.record for record, _ in rows]),
        "file": [files[record.file] for record, _ in rows],
        "start": [region.start + 1 for _, region in rows],
        "end": [region.end for _, region in rows],
        "posterior": _scaled([region.posterior for _, region in rows], 10_000),
        "verdict": [int(region.is_virus) for _, region in rows],
        "judged": [region.region_class for _, region in rows],
        "score": _scaled([record.score for record, _ in rows], 10**6),
        "evidence": _lines([region.evidence for _, region in rows]),
    }
    return {
        "regions": {"files": list(map(printable, files)), "columns": columns},
        "tracks": list(_tracks(run)),
    }


def _tracks(run: _RunFiles) -> Iterator[dict[str, object]]:
    """Yield the evidence along the best records, as many as fit."""
    ends = accumulate(count_bins(record.length) for record in run.listed)
    drawn = [record for record, end in zip(run.listed, ends, strict=True) if end <= _MOST_BINS]
    drawn = drawn[:_MOST_TRACKS]
    nothing = np.full(1, np.nan)
    lengths = {record.run_id: record.length for record in drawn}
    tracks = read_tracks(run.rundir.output(TRACKS.file), lengths)
    for record in drawn:
        posterior, log_odds = tracks.get(record.run_id, (nothing, nothing))
        yield {
            "record": printable(record.record),
            "file": printable(record.file),
            "length": record.length,
            "posterior": _scaled(posterior, 100),
            "odds": _scaled(log_odds, 2),
            "regions": [
                {
                    "extent": escape_markup(region.extent),
                    "start": region.start + 1,
                    "end": region.end,
                    "posterior": 0.0 if math.isnan(region.posterior) else region.posterior,
                    "verdict": int(region.is_virus),
                }
                for region in sorted(record.regions)
            ],
        }


def _samples(run: _RunFiles) -> dict[str, object] | None:
    """Return columns for the sample table. None: a single file, or no table."""
    is_extract = run.command == "extract"
    output = EMBEDDED_SAMPLE_TABLE if is_extract else SAMPLE_TABLE
    shown = [name for name in output.columns if name not in _NOT_SHOWN]
    table = run.rundir.output(output.file)
    with open_table_reader(table):
        blocks = [span.read() for span in split_table(table, output.old_names)]
        if sum(map(len, blocks)) < 2:
            return None
        return {
            "columns": [_sample_column(name, blocks) for name in shown],
            "sorted": {"key": "file" if is_extract else "virus", "falling": True},
        }


def _sample_column(name: str, blocks: Sequence[TableBlock]) -> dict[str, object]:
    """Return one column of the sample table.

    Raises:
        ValueError: a value is not a number.
    """
    label = _SAMPLE_LABELS.get(name, name.removeprefix("n_").replace("_", " "))
    if name in ("file", "status", "best_record", "groups"):
        texts = [text for block in blocks for text in block.texts(name)][:_MOST_SAMPLES]
        return {"name": label, "values": list(map(printable, texts)), "digits": None}
    numbers = np.concatenate([block.numbers(name) for block in blocks])[:_MOST_SAMPLES]
    values = [None if math.isnan(number) else number for number in numbers.tolist()]
    return {"name": label, "values": values, "digits": 6 if name == "best_score" else 0}


def _columns(run: _RunFiles, rows: RecordRows) -> dict[str, object]:
    """Convert the rows to columns: scores in millionths, rates in ten-thousandths."""
    files = {file: i for i, file in enumerate(dict.fromkeys(rows.files))}
    keys = zip(rows.files, rows.records, strict=True)
    return {
        "cut": run.facts.cut,
        "letters": run.letters,
        "files": list(map(printable, files)),
        "statuses": list(STATUSES),
        "columns": {
            "gap": np.diff(rows.places, prepend=-1).tolist(),
            "record": _lines(rows.records.tolist()),
            "file": [files[file] for file in rows.files],
            "length": rows.lengths.tolist(),
            "status": [_PLACES[status] for status in rows.statuses],
            "viral": rows.are_viral.astype(np.int64).tolist(),
            "score": _scaled(rows.scores, 1_000_000),
            "fdr": _scaled(rows.rates, 10_000),
            "chunks": _scaled(rows.n_chunks, 1),
            "regions": [run.n_regions.get(key, 0) for key in keys],
            "note": _lines(rows.notes.tolist()),
        },
    }


def _lines(texts: Sequence[str]) -> str:
    """Join texts, made ``printable``, with line breaks."""
    joined = "".join(texts)
    is_safe = joined.isprintable() and max(map(len, texts), default=0) <= _SAFE_LETTERS
    return "\n".join(texts if is_safe else map(printable, texts))


def _scaled(values: Sequence[float] | FloatArray, scale: int) -> list[int | None]:
    """Round to integers. NaN becomes None."""
    scaled = np.rint(np.array(values, np.float64) * scale)
    is_known = ~np.isnan(scaled)
    integers: list[int] = np.where(is_known, scaled, 0).astype(np.int64).tolist()
    if is_known.all():
        return [*integers]
    return [n if is_set else None for n, is_set in zip(integers, is_known.tolist(), strict=True)]


def _machine(run: _RunFiles, charts: Sequence[Sequence[Chart]]) -> dict[str, object]:
    facts = run.facts
    hosts = facts.iter_section("hosts")
    names = {STAGES[2]: "tables", SCORING: "scoring and tables"}
    seconds = facts.seconds
    stages = [(names.get(n, n), seconds[n]) for n in (*STAGES, SCORING) if n in seconds]
    starts = []
    for start, start_charts in zip(run.starts[-_MOST_LINES:], charts, strict=True):
        devices = [
            (name, device, sum(device.tokens), max(device.memory, default=0) / GIB)
            for name, device in sorted(start.devices.items())
        ]
        starts.append({"start": start, "devices": devices, "charts": start_charts})
    return {
        "stages": stages,
        "longest": max((value for _, value in stages), default=0.0) or 1.0,
        "starting": seconds.get(STARTING, 0.0),
        "encoders": facts.sequence("recipe", "encoders"),
        "hosts": hosts[:_MOST_HOSTS],
        "n_more_hosts": max(0, len(hosts) - _MOST_HOSTS),
        "n_starts": len(run.starts),
        "n_losses": sum(start.n_losses for start in run.starts),
        "lost_devices": [printable(line) for start in run.starts for line in start.lost_devices][
            :_MOST_LINES
        ],
        "n_reductions": sum(start.n_reductions for start in run.starts),
        "n_failed_shards": sum(start.n_failed_shards for start in run.starts),
        "starts": starts,
    }


def _provenance(run: _RunFiles) -> Iterator[tuple[str, str]]:
    facts = run.facts
    words = [word for word in facts.sequence("argv") if isinstance(word, str)]
    yield "Command", escape_markup(shlex.join(words))
    yield "VirNucPro", facts.text("virnucpro_version")
    yield "Run", " on ".join(filter(None, [facts.text("time"), facts.text("host")]))
    for text in _texts(facts.sequence("announced")):
        yield "Messages", text
    yield "Threshold", facts.text("counts", "cut")
    for encoder in facts.iter_section("recipe", "encoders"):
        yield "Encoder", _key_values(encoder.content)
    for label, name in (("Head", "head_sha256"), ("Scorer", "scorer_sha256")):
        digest = facts.text("recipe", name)
        yield label, f"SHA-256 {digest}" if digest else ""
    recipe = ("input_type", "chunk_size", "min_length", "genetic_code")
    yield "Recipe", _key_values({name: facts.section("recipe").get(name) for name in recipe})
    yield "Recipe fingerprint", facts.text("fingerprint")
    yield "Devices", ", ".join(_texts(facts.sequence("resources", "devices")))
    yield "Versions", _key_values(facts.section("versions"))


def _key_values(values: Mapping[str, object]) -> str:
    return escape_markup(", ".join(f"{name} {value}" for name, value in values.items()))


def _texts(values: Sequence[object]) -> list[str]:
    return [escape_markup(value) for value in values if isinstance(value, str)]
