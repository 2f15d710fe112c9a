"""``virnucpro regions``: find regions in a finished run, and write them as ``predict`` does.

Nothing is embedded or called. Records come from the inputs, and calls from the table of records,
which is rewritten because its notes change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from virnucpro._version import __version__
from virnucpro.core.errors import InputError, UsageError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.helper_pool import HelperPool
from virnucpro.core.logging import LOGGER, announce, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.types import FastaRecord, Records
from virnucpro.results.call_rows import make_batches
from virnucpro.results.counts import RecordCounts
from virnucpro.results.output_writer import open_outputs
from virnucpro.results.outputs import REGION_OUTPUTS, RunOutput, open_run_dir
from virnucpro.results.report.run_report import write_run_page
from virnucpro.results.table_readers import read_calls
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.recorded_inputs import check_recorded
from virnucpro.store.checksums import Outputs
from virnucpro.store.manifest import Manifest
from virnucpro.store.run_dir import RunDir
from virnucpro.viral.provirus import ProvirusFinder
from virnucpro.viral.types import Call, CalledRecords, Calls, FrameScores
from virnucpro.workflows.collect_inputs import number_taken_names
from virnucpro.workflows.options import record_options, restore_options
from virnucpro.workflows.predict_model_config import find_region_model
from virnucpro.workflows.predict_options import PredictOptions, RegionsOptions
from virnucpro.workflows.write_tables import locate_outputs

TABLE = RunOutput.REGION_TABLE.file


def find_regions(asked: RegionsOptions, on_event: EventHandler) -> RecordCounts:
    """Find regions in a finished run's records, and return the record counts.

    Raises:
        VirnucproError: the folder has no finished ``predict`` run on nucleotides, or an input is
            missing or has changed. See ``errors``.
    """
    rundir = open_run_dir(asked.folder)
    _finished_run(rundir)  # before a lock is created: the folder may not be a run folder
    written = tuple(sink.file for sink in REGION_OUTPUTS)
    with rundir.locked_for_run():
        manifest = _finished_run(rundir)
        # Logged without starting a new run, so that the page keeps the warnings of the run.
        LOGGER.info("virnucpro %s regions: %s", __version__, printable(" ".join(asked.argv)))
        Outputs(rundir).check(but=(RunDir.page, *written))
        inputs = check_recorded(manifest.inputs)
        present = number_taken_names(replace(manifest, inputs=tuple(inputs)), on_event)
        options = _add_regions(rundir, asked.region_model)
        finder = ProvirusFinder.load_builtin(
            manifest.recipe.genetic_code, None, options.region_model, options.min_posterior
        )
        announce(f"regions: by a model that was trained on {finder.model.training}")
        with Outputs(rundir).rewriting((RunOutput.RECORD_TABLE.file, *written)):
            tally = _write_files(
                rundir,
                replace(manifest, taken=present.taken),
                inputs,
                finder,
                on_event,
                finds_genes=options.genes,
            )
            _note_in_manifest(rundir, manifest, tally, options)
        if rundir.report.exists():
            write_run_page(rundir, HelperPool())
        LOGGER.info("%s", tally.virus_line())
    return tally


def _write_files(
    rundir: RunDir,
    manifest: Manifest,
    inputs: Sequence[InputFile],
    finder: ProvirusFinder,
    on_event: EventHandler,
    *,
    finds_genes: bool,
) -> RecordCounts:
    """Write the table of viruses, the region files, and the table of records with new notes."""
    tally = RecordCounts()
    n_letters = 0
    total = InputFile.total_letters(inputs)
    sinks = (RunOutput.RECORD_TABLE, *REGION_OUTPUTS)
    per_file = rundir.samples.is_dir()
    with_own = manifest.is_qualified and per_file
    with open_outputs(sinks, locate_outputs(rundir, rundir, manifest, per_file=per_file)) as add:
        for record, call in _records_and_calls(rundir, manifest, inputs):
            results = CalledRecords(
                Records.from_records([record]),
                Calls.from_calls([call]),
                FrameScores.from_predictions([[]]),
            )
            finder.add_regions(results, 0)
            [batch] = make_batches(
                results,
                sinks,
                finder.code,
                per_file=per_file,
                with_own=with_own,
                taken=manifest.taken,
                finds_genes=finds_genes,
            )
            add(batch)
            tally.include(batch.total)
            n_letters += len(record.sequence)
            work = (n_letters, total - n_letters) if total else None
            on_event(Progress("looking for regions", n_letters, total, "letters", work))
    return tally


def _add_regions(rundir: RunDir, region_model: Path | None) -> PredictOptions:
    """Switch regions on in the recorded options. The run's own model is the default.

    Raises:
        ResumeError: ``run.json`` lacks the options.
        UnavailableError: the run's model no longer exists.
    """
    options = restore_options(PredictOptions, rundir.root, rundir.read_facts())
    region_model = region_model or options.region_model
    if region_model is None and not options.regions and options.model is not None:
        region_model = find_region_model(options.model)
    return replace(options, regions=True, region_model=region_model)


def _finished_run(rundir: RunDir) -> Manifest:
    manifest = rundir.read_run(
        with_options("name the {output_dir} of a finished `virnucpro predict`")
    )
    recipe = manifest.recipe
    if recipe.command != "predict" or recipe.input_type != "nucleotide":
        raise UsageError(
            f"{printable(rundir.root)} contains a run of {recipe.command} on "
            f"{recipe.input_type}s: only called nucleotide records are searched for regions",
            hint="run `virnucpro predict` on nucleotides",
        )
    rundir.check_finished(recipe.command)
    return manifest


def _records_and_calls(
    rundir: RunDir, manifest: Manifest, inputs: Sequence[InputFile]
) -> Iterator[tuple[FastaRecord, Call]]:
    """Yield each record with its call. Table rows are in record order.

    Raises:
        InputError: a row belongs to another record.
    """
    path = rundir.output(RunOutput.RECORD_TABLE.file)
    hint = with_options("write it again: run its command with {resume}")
    calls = read_calls(path, hint)
    for record, call in zip_longest(manifest.records(inputs), calls):
        if record is None or call is None or not _belongs_to(call, record):
            name = printable(record.name if record else call.record_id)
            raise InputError(
                f"{printable(path)} is not the table of this run: {name} is in the inputs only, or "
                "in the table only",
                hint,
            )
        yield record, call


def _belongs_to(call: Call, record: FastaRecord) -> bool:
    expected = (record.sample, record.name, len(record.sequence))
    return (call.sample, call.record_id, call.length) == expected


def _note_in_manifest(
    rundir: RunDir, manifest: Manifest, tally: RecordCounts, options: PredictOptions
) -> None:
    """Record in ``run.json`` that regions were searched for, as ``predict`` does."""
    stored = rundir.read_facts()
    counts = {
        **stored.get("counts", {}),
        "n_proviruses": tally.n_proviruses,
        "n_regions": tally.n_regions or 0,
        "n_whole_regions": tally.n_whole_regions,
    }
    rundir.write_manifest(
        manifest, {**stored, "cut": record_options(options)["cut"], "counts": counts}
    )
