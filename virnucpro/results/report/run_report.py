"""Write a run's ``report.html``, in the order of a reader's questions.

It reads only files in the run folder, so that a regenerated page has the same bytes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from virnucpro.core.events import SCORING, STAGES, STARTING
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import LOGGER, escape_markup, format_count, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import STATUSES
from virnucpro.results.outputs import OUTPUTS, RunOutput, open_run_dir
from virnucpro.results.report.aggregates import RecordRows, RunCounts, length_classes
from virnucpro.results.report.charts import GIB, Chart, device_charts
from virnucpro.results.report.citation import select_works
from virnucpro.results.report.html import MAX_BYTES, compress_data, render_packed
from virnucpro.results.report.page_data import join_lines, scale
from virnucpro.results.report.run_files import NO_SECTIONS, RunFiles, Sections, read_run
from virnucpro.results.report.run_json import RunJson
from virnucpro.results.table_blocks import TableBlock, open_table_reader, split_table
from virnucpro.store.checksums import Outputs
from virnucpro.store.run_dir import RECORD_TABLES, RunDir

_SAMPLE_LABELS = {
    "virus_below_1000": "below 1k",
    "virus_1000_to_2999": "1k to 3k",
    "virus_3000_to_9999": "3k to 10k",
    "virus_from_10000": "from 10k",
    "n_provirus": "proviruses",
    "best_score": "best score",
}
_MAX_LINES = 8  # devices in a chart, starts of a run


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
    max_hashes = 1_000
    max_complaints = 20
    run = read_run(rundir, pool.helpers(None, 1, "figures of the page"))
    sections = _virus_sections(run) if run.command == "predict" else NO_SECTIONS
    works = select_works(run.families)
    warnings = list(_warnings(run))
    samples = _samples(run)
    charts = [device_charts(i, start) for i, start in enumerate(run.starts[-_MAX_LINES:])]
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
        "has_table": run.has_table,
        "files": _written_files(run),
        "warnings": warnings,
        "notes": [text for kind, text in warnings if kind == "note"],
        "complaints": list(run.complaints.items())[:max_complaints],
        "has_samples": samples is not None,
        "machine": _machine(run, charts),
        "provenance": list(_provenance(run)),
        "hashes": [
            (_display_path(file), file.text("sha256")) for file in run.facts.inputs[:max_hashes]
        ],
        "works": works,
        "bibtex": "\n\n".join(work.bibtex for work in works),
        **sections.content,
    }
    frame = render_packed("run.html", {**content, "rows": RecordRows.empty()}, "")
    chart_data = {chart.name: chart.as_data() for chart in chain.from_iterable(charts)}
    fixed = {"charts": chart_data, "samples": samples, **sections.data}
    n_other_bytes = 40_000  # in the page, in addition to the frame and the rows
    max_row_bytes = MAX_BYTES - len(frame) - n_other_bytes
    packed, rows = _pack_data(run, sections, fixed, max_row_bytes)
    page = render_packed("run.html", {**content, "rows": rows}, packed)
    with Outputs(rundir).rewriting([RunDir.page]):
        rundir.write_file(rundir.report, page)


def _virus_sections(run: RunFiles) -> Sections:
    """Make the sections about viruses. The page of an extraction does not import their code."""
    from virnucpro.results.report.virus_sections import make_virus_sections

    return make_virus_sections(run)


def _pack_data(
    run: RunFiles, sections: Sections, fixed: Mapping[str, object], max_bytes: int
) -> tuple[str, RecordRows]:
    """Pack the page data with as many rows as fit. Return the data and the rows."""
    rows = run.rows
    while True:
        packed = compress_data({**fixed, **_columns(run, rows, sections.n_regions)})
        if len(packed) <= max_bytes or not len(rows.table_indices):
            return packed, rows
        n_rows = max(0, int(0.95 * len(rows.table_indices) * max_bytes / len(packed)))
        rows = run.counts.rows(n_rows, run.helpers)


def _display_path(file: RunJson) -> str:
    return file.text("name") or file.text("path")


def _run_name(run: RunFiles) -> str:
    inputs = run.facts.inputs
    return inputs[0].text("sample") if len(inputs) == 1 else format_count(len(inputs), "file")


def _run_state(run: RunFiles) -> tuple[str, str]:
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


def _reconciliation(run: RunFiles) -> dict[str, object]:
    max_files = 60  # input files in the table of files without JavaScript
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
        "files": rows[:max_files],
        "n_more_files": max(0, len(rows) - max_files),
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


def _written_files(run: RunFiles) -> list[tuple[str, str]]:
    """List the outputs to open, each with what it contains."""
    outputs = (output for output in OUTPUTS[run.command] if output.about)
    written = (output for output in outputs if run.rundir.output(output.file).is_file())
    names = [(output.file, output.about) for output in written]
    names.sort(key=lambda name: not name[0].startswith("viruses"))  # these are first
    if run.rundir.feature_index.is_file():
        names.append((run.rundir.feature_index.name, "all vectors, with their ids"))
    return names


def _warnings(run: RunFiles) -> Iterator[tuple[str, str]]:
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
        yield "bad", f"{files} could not be read: see {RunOutput.FAILED_FILES.file}."
    if n_failed:
        yield (
            "bad",
            f"{format_count(n_failed, 'frame')} without a vector: see "
            f"{RunOutput.FAILED_FILES.file}. Correct {RunOutput.FAILED_SEQUENCES.file}, and add it "
            "with --resume --add --input.",
        )
    if not counts.n_records:
        yield "mind", "The input has no records."
    short = 100 if run.is_protein else 500  # letters; shorter records have weak calls
    classes = zip(length_classes(counts.starts), counts.class_counts[:, 0].tolist(), strict=True)
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
    for note, n in counts.notes.most_common(_MAX_LINES):
        yield "note", f"{format_count(n, 'record')} with the note: {escape_markup(note)}"
    if len(counts.notes) > _MAX_LINES:
        n_more = format_count(len(counts.notes) - _MAX_LINES, "more note")
        yield "note", f"and {n_more}: see the column note of {RECORD_TABLES[run.command]}."


def _samples(run: RunFiles) -> dict[str, object] | None:
    """Return columns for the sample table. None: a single file, or no table."""
    not_shown = ("path", "error", "families")  # sample columns
    is_extract = run.command == "extract"
    output = RunOutput.EMBEDDED_SAMPLE_TABLE if is_extract else RunOutput.SAMPLE_TABLE
    shown = [name for name in output.columns if name not in not_shown]
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
    max_samples = 10_000  # in the table that can be sorted and searched
    label = _SAMPLE_LABELS.get(name, name.removeprefix("n_").replace("_", " "))
    if name in ("file", "status", "best_record", "groups"):
        texts = [text for block in blocks for text in block.texts(name)][:max_samples]
        return {"name": label, "values": list(map(printable, texts)), "digits": None}
    numbers = np.concatenate([block.numbers(name) for block in blocks])[:max_samples]
    values = [None if math.isnan(number) else number for number in numbers.tolist()]
    return {"name": label, "values": values, "digits": 6 if name == "best_score" else 0}


def _columns(
    run: RunFiles, rows: RecordRows, n_regions: Mapping[tuple[str, str], int]
) -> dict[str, object]:
    """Convert the rows to columns: scores in millionths, rates in ten-thousandths.

    Args:
        n_regions: per record, by file and id.
    """
    files = {file: i for i, file in enumerate(dict.fromkeys(rows.files))}
    numbers: dict[str, int] = {status: number for number, status in enumerate(STATUSES)}
    keys = zip(rows.files, rows.records, strict=True)
    return {
        "cut": run.facts.cut,
        "letters": run.letters,
        "files": list(map(printable, files)),
        "statuses": list(STATUSES),
        "columns": {
            "gap": np.diff(rows.table_indices, prepend=-1).tolist(),
            "record": join_lines(rows.records.tolist()),
            "file": [files[file] for file in rows.files],
            "length": rows.lengths.tolist(),
            "status": [numbers[status] for status in rows.statuses],
            "viral": rows.are_viral.astype(np.int64).tolist(),
            "score": scale(rows.scores, 1_000_000),
            "fdr": scale(rows.rates, 10_000),
            "chunks": scale(rows.n_chunks, 1),
            "regions": [n_regions.get(key, 0) for key in keys],
            "note": join_lines(rows.notes.tolist()),
        },
    }


def _machine(run: RunFiles, charts: Sequence[Sequence[Chart]]) -> dict[str, object]:
    max_hosts = 100
    facts = run.facts
    hosts = facts.iter_section("hosts")
    names = {STAGES[2]: "tables", SCORING: "scoring and tables"}
    seconds = facts.seconds
    stages = [(names.get(n, n), seconds[n]) for n in (*STAGES, SCORING) if n in seconds]
    starts = []
    for start, start_charts in zip(run.starts[-_MAX_LINES:], charts, strict=True):
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
        "hosts": hosts[:max_hosts],
        "n_more_hosts": max(0, len(hosts) - max_hosts),
        "n_starts": len(run.starts),
        "n_losses": sum(start.n_losses for start in run.starts),
        "lost_devices": [printable(line) for start in run.starts for line in start.lost_devices][
            :_MAX_LINES
        ],
        "n_reductions": sum(start.n_reductions for start in run.starts),
        "n_failed_shards": sum(start.n_failed_shards for start in run.starts),
        "starts": starts,
    }


def _provenance(run: RunFiles) -> Iterator[tuple[str, str]]:
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
