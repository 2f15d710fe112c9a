"""Apply another threshold to a finished run whose input no longer exists.

All tables are made from the stored scores. A FASTA output also needs sequences. Earlier outputs
contain only those of viral records and regions. This suffices for a stricter threshold. A more
sensitive one may need others, and then the FASTA is not written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from virnucpro.core.errors import InputMissingError
from virnucpro.core.events import STAGES
from virnucpro.core.logging import printable
from virnucpro.core.types import FastaRecord, Records
from virnucpro.results.outputs import RunOutput
from virnucpro.results.row_batches import RowBatch
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.taken_names import find_taken_names
from virnucpro.store.checksums import Outputs
from virnucpro.workflows.predict_rows import CallRowBuilder
from virnucpro.workflows.run_context import RunContext
from virnucpro.workflows.run_steps import finish_run
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.summary import Summary
from virnucpro.workflows.write_tables import open_tables

_UNKNOWN_LINE = re.compile(
    rf"^[^>\n]*{ScoreStore.unknown}".encode(), re.MULTILINE
)  # a sequence line with unknown letters


class _PeekedIterator:
    """Records from an earlier output, in order. ``next`` is the record that ``take`` returns."""

    def __init__(self, records: Iterator[FastaRecord]) -> None:
        self._records = records
        self.next = next(records, None)

    def take(self) -> str:
        """Return the next record's sequence, and advance."""
        assert self.next is not None
        sequence = self.next.sequence
        self.next = next(self._records, None)
        return sequence


def rethreshold(
    context: RunContext, builder: CallRowBuilder, store: ScoreStore, lost: str, summary: Summary
) -> None:
    """Call a finished run's records by another threshold, without its input ``lost``.

    Raises:
        InputMissingError: the scores are from another version, or lack the requested regions. Also
            raised, after all other tables are written, if an output needs input sequences.
    """
    run_dir = context.run_dir
    with summary.stage(STAGES[0]):
        _check_scores(store, lost, needs_regions=context.searches_regions)
        sequence_files = (RunOutput.VIRAL_FASTA.file, RunOutput.REGION_FASTA.file)
        before = Outputs(run_dir).read_kept(sequence_files)
        # Opened files stay readable after they are replaced.
        viral, regions = (
            _PeekedIterator(read_fasta(run_dir.root / name) if name in before else iter(()))
            for name in sequence_files
        )
    lacking = set[str]()
    with summary.stage(summary.stages[-1]):
        context.record.write("unfinished", **{Outputs.field: before})
        run_dir.delete(run_dir.report)
        with open_tables(context) as add:
            numbering = _with_taken_names(builder, store)
            for batch in _make_batches(numbering, store, viral, regions):
                summary.records.include(batch.total)
                lacking |= {
                    name for name, rows in batch.rows.items() if _missing_columns(name, rows)
                }
                add(batch)
    for folder in (run_dir.root, *run_dir.sample_folders()):
        for name in lacking:
            run_dir.delete(folder / name)
    finish_run(context, summary, is_complete=not lacking)
    if lacking:
        raise InputMissingError(
            f"{printable(lost)} is missing, so these were deleted: {', '.join(sorted(lacking))}: "
            "the new threshold needs sequences from the input",
            hint="put the input back and run the same command again; all other tables are written",
        )


def _check_scores(store: ScoreStore, lost: str, *, needs_regions: bool) -> None:
    """Check that the stored scores fit this version and the region options.

    Raises:
        InputMissingError: the scores are from another version, or lack the requested regions.
    """
    finders = [label.attributes.get("finder") for _, label in store.labels()]
    if len(finders) < len(store.files()) or (needs_regions and {*finders} - {store.finder}):
        raise InputMissingError(
            f"{printable(lost)} is gone, and the scores of this run come from another version "
            "of VirNucPro, or from other options for regions",
            hint="put the input back, or leave the options for regions as they were",
        )


def _with_taken_names(builder: CallRowBuilder, store: ScoreStore) -> CallRowBuilder:
    """Return the builder with taken names, which are found in the scores, not in the inputs."""
    manifest = builder.manifest
    is_protein = manifest.recipe.input_type == "protein"
    if is_protein or not any(file.may_take_names for file in manifest.inputs):
        return builder
    score_files = (store.read(path, None)[0] for path in store.files())
    taken = find_taken_names(scored.records for scored in score_files if scored is not None)
    return replace(builder, manifest=replace(manifest, taken=taken))


def _make_batches(
    builder: CallRowBuilder, store: ScoreStore, viral: _PeekedIterator, regions: _PeekedIterator
) -> Iterator[RowBatch]:
    """Yield the outputs for all records in order, without reading the inputs."""
    for path in store.files():
        if (scored := store.read(path, None)[0]) is not None:
            records = Records.from_records(
                _add_sequences(record, viral, regions) for record in scored.records.iter_records()
            )
            yield from builder.make_batches(builder.call(replace(scored, records=records)))


def _add_sequences(
    record: FastaRecord, viral: _PeekedIterator, regions: _PeekedIterator
) -> FastaRecord:
    """Return the record with as much of its sequence as earlier outputs contain."""
    letters = record.sequence
    if viral.next is not None and viral.next.id == record.id:
        letters = viral.take()
    while regions.next is not None:
        # The name of a region has the id, start and end of its record.
        location = re.fullmatch(
            r"(.*)\|[a-z]+_([0-9]+)_([0-9]+)(?:_[0-9]+)?", regions.next.id, flags=re.DOTALL
        )
        if location is None or location[1] != record.id:
            break
        start = int(location[2]) - 1
        end = int(location[3])
        letters = letters[:start] + regions.take() + letters[end:]
    return record._replace(sequence=letters)


def _missing_columns(name: str, rows: bytes | memoryview) -> bool:
    """Return True if an output is FASTA and has sequences with unknown letters."""
    is_fasta = name.endswith((".fasta", ".fa"))
    return is_fasta and _UNKNOWN_LINE.search(rows) is not None
