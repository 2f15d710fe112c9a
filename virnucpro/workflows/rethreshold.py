"""Apply another cut to a finished run when its input no longer exists.

All tables are made from the stored scores. A FASTA output needs sequences, and only those of
viral records and regions are in the earlier outputs. A stricter cut finds all it needs there; a
more sensitive one may not, and then the FASTA is not written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import InputMissingError, VirnucproError
from virnucpro.core.events import STAGES
from virnucpro.core.logging import printable
from virnucpro.core.types import FastaRecord, Records
from virnucpro.results.outputs import SEQUENCE_FILES, open_run_dir
from virnucpro.results.row_batches import RowBatch
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.taken_names import find_taken_names
from virnucpro.store.checksums import Outputs
from virnucpro.store.manifest import Manifest
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.predict_rows import CallRowBuilder
from virnucpro.workflows.run_context import RunContext
from virnucpro.workflows.run_steps import finish_run
from virnucpro.workflows.score_cache import ScoreStore
from virnucpro.workflows.summary import Summary
from virnucpro.workflows.write_tables import open_tables

# of a region in its record, by the name of the region
_PLACE = re.compile(r"(.*)\|[a-z]+_([0-9]+)_([0-9]+)(?:_[0-9]+)?", re.DOTALL)
_UNKNOWN_LINE = re.compile(rf"^[^>\n]*{ScoreStore.unknown}".encode(), re.MULTILINE)  # of a sequence


def find_lost_inputs(options: RunOptions, recorded: Manifest | None) -> list[str]:
    """The missing inputs of a run, if it can be cut again without them.

    That needs complete scores, and no named input that is new or has changed.
    """
    rundir = open_run_dir(options.output_dir)
    if not options.resume or recorded is None or not rundir.scores.is_dir():
        return []
    there = {file.path: file for file in recorded.inputs if Path(file.path).is_file()}
    gone = [file.display_name for file in recorded.inputs if file.path not in there]
    is_enough = (
        gone
        and all(_is_known(path, recorded) for path in options.input)
        and all(hash_file(Path(file.path)) == file.sha256 for file in there.values())
        and Outputs(rundir).read_kept()
    )
    return gone if is_enough else []


def _is_known(path: Path, recorded: Manifest) -> bool:
    """True if a path is an input of the run, or a folder of nothing but inputs of the run."""
    known = [Path(name) for file in recorded.inputs for name in (file.path, file.name) if name]
    files = list[InputFile]()
    if path.exists():
        with suppress(VirnucproError):  # a folder that has none of them any more
            files = InputFile.complete(path)
    if files:
        return all(Path(file.path) in known for file in files)
    return any(path.absolute() in (one, *one.parents) for one in known)


class _PeekedIterator:
    """The records of an earlier output, in order; ``next`` is the one to be taken next."""

    def __init__(self, records: Iterator[FastaRecord]) -> None:
        self._records = records
        self.next = next(records, None)

    def take(self) -> str:
        """Advance to the next record; returns the sequence of the one before."""
        assert self.next is not None
        sequence, self.next = self.next.sequence, next(self._records, None)
        return sequence


def rethreshold(
    context: RunContext, builder: CallRowBuilder, store: ScoreStore, lost: str, summary: Summary
) -> None:
    """Call the records of a finished run by another threshold, without its input ``lost``.

    Raises:
        InputMissingError: its scores are of another version, or do not have the regions that are
            wanted; or an output needs sequences of the input, and the other tables are written.
    """
    run_dir = context.run_dir
    with summary.stage(STAGES[0]):
        _check_scores(store, lost, needs_regions=context.searches_regions)
        before = Outputs(run_dir).read_kept(SEQUENCE_FILES)
        # they stay open, so replacing the files changes nothing
        viral, regions = (
            _PeekedIterator(read_fasta(run_dir.root / name) if name in before else iter(()))
            for name in SEQUENCE_FILES
        )
    lacking = set[str]()
    with summary.stage(summary.stages[-1]):
        context.record.write("unfinished", **{Outputs.field: before})
        run_dir.delete(run_dir.report)
        with open_tables(context) as add:
            numbering = _with_taken_names(builder, store)
            for batch in _make_batches(numbering, store, viral, regions):
                summary.records.include(batch.counts)
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
            "the new cut needs sequences of the input",
            hint="put the input back and run the same command again; all other tables are written",
        )


def _check_scores(store: ScoreStore, lost: str, *, needs_regions: bool) -> None:
    """
    Raises:
        InputMissingError: the scores are of another version, or lack the regions that are needed.
    """
    finders = [label.attributes.get("finder") for _, label in store.labels()]
    if len(finders) < len(store.files()) or (needs_regions and {*finders} - {store.finder}):
        raise InputMissingError(
            f"{printable(lost)} is gone, and the scores of this run come from another version "
            "of VirNucPro, or from other options for regions",
            hint="put the input back, or leave the options for regions as they were",
        )


def _with_taken_names(builder: CallRowBuilder, store: ScoreStore) -> CallRowBuilder:
    """The builder with the names that ids take, which are found in the scores, not the inputs."""
    manifest = builder.manifest
    is_protein = manifest.recipe.input_type == "protein"
    if is_protein or not any(file.may_take_names for file in manifest.inputs):
        return builder
    each = (store.read(path, None)[0] for path in store.files())
    taken = find_taken_names(scored.records for scored in each if scored is not None)
    return replace(builder, manifest=replace(manifest, taken=taken))


def _make_batches(
    builder: CallRowBuilder, store: ScoreStore, viral: _PeekedIterator, regions: _PeekedIterator
) -> Iterator[RowBatch]:
    """Yield the outputs of all records of a run without its inputs, in order."""
    for path in store.files():
        if (scored := store.read(path, None)[0]) is not None:
            records = Records.from_records(
                _add_sequences(one, viral, regions) for one in scored.records.iter_records()
            )
            yield from builder.make_batches(builder.call(replace(scored, records=records)))


def _add_sequences(
    record: FastaRecord, viral: _PeekedIterator, regions: _PeekedIterator
) -> FastaRecord:
    """The record with as much of its sequence as the earlier outputs have."""
    letters = record.sequence
    if viral.next is not None and viral.next.id == record.id:
        letters = viral.take()
    while regions.next is not None:
        place = _PLACE.fullmatch(regions.next.id)
        if place is None or place[1] != record.id:
            break
        start, end = int(place[2]) - 1, int(place[3])
        letters = letters[:start] + regions.take() + letters[end:]
    return record._replace(sequence=letters)


def _missing_columns(name: str, rows: bytes | memoryview) -> bool:
    """True if the rows of an output are sequences with unknown letters."""
    is_fasta = name.endswith((".fasta", ".fa"))
    return is_fasta and _UNKNOWN_LINE.search(rows) is not None
