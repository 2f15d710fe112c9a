"""Find, name, hash and read run inputs, and check them against each other.

An unreadable file is skipped and recorded. See ``extend_inputs`` for a resumed run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import announce, format_count
from virnucpro.sequences.input_scan import InputScan, rejected_files, warn_of_copies
from virnucpro.sequences.input_search import find_inputs
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.samples import name_samples
from virnucpro.store.manifest import Manifest
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.run_config import RunConfig


def collect_inputs(
    config: RunConfig, rundir: RunDir, recorded: Manifest | None, on_event: EventHandler
) -> Manifest:
    """Find and read the inputs, and check that they match the recorded run, if any.

    Raises:
        InputError, InputMissingError: no input can be read.
        ResumeError: the recorded run is a different one.
    """
    options = config.options
    on_event(Progress("looking for the input", 0, 0, "bytes"))
    named = find_inputs(options.input, rundir.root, rundir.copies, rundir.own_names)
    if recorded is None:
        files = name_samples(named, ())
    else:
        from virnucpro.workflows.extend_inputs import name_inputs  # only where a run is resumed

        recorded, named, files = name_inputs(recorded, named)
    survey = InputScan(
        options.strict or len(files) == 1,
        options.rename_duplicates,
        lambda done: on_event(Progress("reading the input", done, 0, "letters")),
        lambda done: on_event(Progress("hashing the decompressed input", done, 0, "bytes")),
    )
    n_bytes = sum(map(_count_bytes, files))
    files = survey.hash(
        files,
        lambda done: on_event(Progress("hashing the input", done, n_bytes, "bytes")),
        reads_records=recorded is None and (len(files) > 1 or options.rename_duplicates),
    )
    if recorded is None:
        manifest = _start_inputs(config, files, survey)
    else:
        from virnucpro.workflows.extend_inputs import extend_run

        files = survey.hash_texts(file.with_text_hash_of(recorded.inputs) for file in files)
        manifest = extend_run(config, rundir, recorded, files, survey)
    if named and {file.path for file, _ in survey.refused} >= {file.path for file in named}:
        raise survey.refused[0][1]
    return number_taken_names(manifest, on_event)


def _count_bytes(file: InputFile) -> int:
    """Return the size of a file, or 0 if it will be rejected."""
    try:
        status = os.stat(file.path)  # noqa: PTH116 - of many files
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def number_taken_names(manifest: Manifest, on_event: EventHandler) -> Manifest:
    """Find the ids that equal a derived name, and announce that such names get a number.

    Raises:
        InputError, InputMissingError: an input cannot be read.
    """
    on_event(Progress("comparing ids with derived names", 0, 0, "bytes"))
    manifest = manifest.with_taken_names()
    if manifest.taken:
        n_ids = format_count(len(manifest.taken.names), "id")
        announce(
            f"{n_ids} could also be the name of a chunk, piece or region of another record; such a "
            "name gets a number, as in ID_piece_1_2"
        )
    return manifest


def _start_inputs(config: RunConfig, files: Sequence[InputFile], survey: InputScan) -> Manifest:
    """Create the manifest for a new run on these files."""
    options = config.options
    is_qualified = False
    if len(files) > 1 or survey.renames:  # a single file is read once, when it is planned
        files = survey.run(files)
        is_qualified = survey.share_ids(files)
    input_type = options.known_type
    if input_type is None:
        input_type, files = survey.decide_type(files)
    else:
        survey.warn_of_type(files, input_type)
    files = survey.hash_texts(files)
    warn_of_copies(files)
    return Manifest(
        config.recipe_for(input_type),
        tuple(files),
        is_qualified=is_qualified,
        refused=rejected_files(survey),
        models=config.models,
        embed=config.rules,
    )
