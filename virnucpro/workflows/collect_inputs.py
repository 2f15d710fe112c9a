"""Find, name, hash and read run inputs, and check them against each other.

An unreadable file is skipped and recorded. Each resume retries it, unless the command names every
other file without it. A file that was read stays in the run, unchanged. A resume adds new files
only with ``--add``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from virnucpro.core.errors import InputError, InputMissingError, ResumeError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.option_text import with_options
from virnucpro.results.mendable import find_mendable
from virnucpro.sequences.input_scan import InputScan
from virnucpro.sequences.inputs import (
    InputFile,
    check_recorded,
    find_inputs,
    find_present,
    hash_inputs,
    list_inputs,
    with_text_hash,
)
from virnucpro.sequences.samples import name_samples
from virnucpro.store.manifest import Manifest
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.run_config import RunConfig

_SHOWN = 3  # names in a message


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
        recorded, named = _follow_moved(recorded, _without_empty_stdin(named))
        again = _without_names(recorded, named)
        files = name_samples([*named, *again], _name_inputs(recorded))
    survey = InputScan(
        options.strict or len(files) == 1,
        options.rename_duplicates,
        lambda done: on_event(Progress("reading the input", done, 0, "letters")),
        lambda done: on_event(Progress("hashing the decompressed input", done, 0, "bytes")),
    )
    paths = [Path(file.path) for file in files]
    n_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    files = survey.hash(
        files, lambda done: on_event(Progress("hashing the input", done, n_bytes, "bytes"))
    )
    if recorded is None:
        manifest = _start_inputs(config, files, survey)
    else:
        files = survey.hash_texts(file.with_text_hash_of(recorded.inputs) for file in files)
        manifest = _extend_run(config, rundir, recorded, files, survey)
    if named and {file.path for file, _ in survey.refused} >= {file.path for file in named}:
        raise survey.refused[0][1]
    return number_taken_names(manifest, on_event)


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


def _without_empty_stdin(files: Sequence[InputFile]) -> list[InputFile]:
    """Drop standard input if it is empty: an earlier start read the pipe to its end."""
    if any(file.is_empty_stdin for file in files):
        announce("standard input is empty: the run continues with what it has read")
    return [file for file in files if not file.is_empty_stdin]


def _refuse_others(recorded: Manifest, files: Iterable[InputFile], rundir: RunDir) -> None:
    """Reject files that are new to the recorded run. Content identifies a file that was read.

    Raises:
        ResumeError: a file is new.
    """
    digests = {digest for file in recorded.inputs for digest in file.digests}
    locations = {file.path for file in recorded.inputs}
    locations.update(text for file in recorded.refused for text in (file.path, file.name) if text)
    new_files = [
        file
        for file in files
        if digests.isdisjoint(file.digests) and locations.isdisjoint((file.path, file.name))
    ]
    if not new_files:
        return
    inputs = list_inputs(
        [file.display_name for file in (*recorded.inputs, *recorded.refused)], _SHOWN
    )
    raise ResumeError(
        f"{list_inputs([file.display_name for file in new_files], _SHOWN)}: not in the run that "
        f"{printable(rundir.root)} contains, which has {inputs}",
        hint=with_options(
            "add {add} to include it in that run, or choose another {output_dir} for a new run"
        ),
    )


def _follow_moved(
    recorded: Manifest, named: Sequence[InputFile]
) -> tuple[Manifest, list[InputFile]]:
    """Find inputs that were moved, renamed, compressed or decompressed since they were recorded.

    If a recorded path no longer exists, its file is looked up by content among the named files.

    Returns:
        The run with the present paths, and the named files. Named files with new paths are hashed.
    """
    paths = {file.path for file in recorded.inputs}
    if all(Path(path).is_file() for path in paths):
        return recorded, list(named)
    files = [file if file.path in paths else _hash_readable(file) for file in named]
    present = find_present(recorded.inputs, [file for file in files if file.path not in paths])
    for before, now in zip(recorded.inputs, present, strict=True):
        if now.path != before.path:
            announce(
                f"{now.display_name} has the content of {before.display_name}, and is read "
                f"in its place"
            )
    return replace(recorded, inputs=tuple(present)), files


def _hash_readable(file: InputFile) -> InputFile:
    """Return the file with its hashes, or without them if it is unreadable (reported later)."""
    try:
        return with_text_hash(hash_inputs(file))
    except (InputError, InputMissingError):
        return file


def _name_inputs(recorded: Manifest) -> list[InputFile]:
    """List the files that keep their sample: those that were read, and unreadable mates."""
    return [*recorded.inputs, *(file for file in recorded.refused if file.mate)]


def _without_names(recorded: Manifest, files: Sequence[InputFile]) -> list[InputFile]:
    """List existing files that an earlier start could not read and this command does not name.

    A command that names every other file omits them on purpose. Files once read stay in the run.
    """
    names = {text for file in files for text in (file.path, file.name) if text}

    def is_named(file: InputFile) -> bool:
        return file.path in names or file.name in names

    kept_files = [file for file in recorded.inputs if not file.generation and not is_named(file)]
    if kept_files:
        verb = (
            f" and {format_count(len(kept_files) - 1, 'other file')} stay"
            if len(kept_files) > 1
            else " stays"
        )
        announce(f"{kept_files[0].display_name}{verb} in this run although not named again")
    return [
        InputFile(file.path, name=file.name, sample=file.sample, mate=file.mate)
        for file in recorded.refused
        if not is_named(file) and _is_retried(file, is_kept=bool(kept_files))
    ]


def _is_retried(file: InputFile, *, is_kept: bool) -> bool:
    """Return whether to read a rejected file again. If not, log the reason."""
    if not any(map(os.path.lexists, (file.path, file.name))):
        LOGGER.warning("%s no longer exists; dropped from this run", file.display_name)
        return False
    if not is_kept:
        LOGGER.warning("%s was not named again; dropped from this run", file.display_name)
    return is_kept


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
    _warn_of_copies(files)
    return Manifest(
        config.recipe_for(input_type),
        tuple(files),
        is_qualified=is_qualified,
        refused=_rejected_files(survey),
        models=config.models,
        embed=config.rules,
    )


def _rejected_files(survey: InputScan) -> tuple[InputFile, ...]:
    return tuple(file for file, _ in survey.refused)


def _warn_of_copies(files: Iterable[InputFile]) -> None:
    first_with: dict[str, InputFile] = {}
    for file in files:
        if (first := first_with.setdefault(file.identity, file)) is not file:
            LOGGER.warning(
                "%s and %s have the same content: each record counts twice",
                first.display_name,
                file.display_name,
            )


def _extend_run(
    config: RunConfig,
    rundir: RunDir,
    recorded: Manifest,
    files: Sequence[InputFile],
    survey: InputScan,
) -> Manifest:
    """Extend the recorded run by files that are new, or readable for the first time."""
    options = config.options
    if not options.add:
        _refuse_others(recorded, [*files, *(file for file, _ in survey.refused)], rundir)
    run_type = recorded.recipe.input_type
    recorded.check_same_recipe(config.recipe_for(options.known_type or run_type))
    _refuse_lost(recorded, survey)
    inputs = check_recorded(recorded.inputs, files)
    n_recorded = len(recorded.inputs)
    old = inputs[:n_recorded]
    new = inputs[n_recorded:]
    if new:
        _warn_of_copies(new)
        new = survey.run(new)
    reselected = _reselected_inputs(rundir, recorded, new)
    if options.known_type is None:
        ordinary = [file for file in new if not reselected[file.path]]
        _, ordinary = survey.decide_type(ordinary, run_type)
        new = [file for file in new if reselected[file.path] or file in ordinary]
    for file in new:
        LOGGER.warning("added to this run: %s", file.display_name)
    announce(f"resuming the run in {printable(rundir.root)}; finished work is kept")
    replaced = set(recorded.replaced).union(*(reselected[file.path] for file in new))
    return replace(
        recorded,
        inputs=(*old, *new),
        replaced=tuple(sorted(replaced)),
        refused=_rejected_files(survey),
        models=config.models,
        embed=config.rules,
    )


def _refuse_lost(recorded: Manifest, survey: InputScan) -> None:
    """Check that every recorded input can still be read.

    Raises:
        InputError, InputMissingError: a recorded file can no longer be read.
    """
    paths = {file.path for file in recorded.inputs}
    for file, error in survey.refused:
        if file.path in paths:
            raise error


def _reselected_inputs(
    rundir: RunDir, recorded: Manifest, files: Sequence[InputFile]
) -> dict[str, set[str]]:
    """Find the failed or invalid records that each file replaces.

    Returns:
        File path -> record ids.

    Raises:
        InputError: the table of records is damaged.
    """
    command = recorded.recipe.command
    mendable = set[str]()
    table = rundir.record_table(command)
    if files and table.exists():
        hint = with_options("run with {resume} alone to rewrite it, then repeat this command")
        pairs = find_mendable(command, table, hint)
        mendable = {recorded.ids.from_inputs(sample, record_id) for sample, record_id in pairs}
    return {
        file.path: {record.id for record in file.read() if record.id in mendable} for file in files
    }
