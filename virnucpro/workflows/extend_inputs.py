"""Match the inputs of a resumed run with those that it has recorded, and add new ones.

A resume retries unreadable files, unless the command names every other file without them. A file
that was read stays in the run, unchanged. A resume adds new files only with ``--add``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from virnucpro.core.errors import InputError, InputMissingError, ResumeError
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.option_text import with_options
from virnucpro.results.mendable import find_mendable
from virnucpro.sequences.file_scan import hash_inputs, with_text_hash
from virnucpro.sequences.input_scan import InputScan, rejected_files, warn_of_copies
from virnucpro.sequences.inputs import InputFile, list_inputs
from virnucpro.sequences.recorded_inputs import check_recorded, find_present
from virnucpro.sequences.samples import name_samples
from virnucpro.store.manifest import Manifest
from virnucpro.store.recipe_changes import check_same_recipe
from virnucpro.store.run_dir import RunDir
from virnucpro.workflows.run_config import RunConfig


def name_inputs(
    recorded: Manifest, named: Sequence[InputFile]
) -> tuple[Manifest, list[InputFile], list[InputFile]]:
    """Name the samples of a resumed run.

    Returns:
        The run with the present paths of its inputs, the files that this command names, and these
        files with those to be read again.
    """
    recorded, named = _follow_moved(recorded, _without_empty_stdin(named))
    again = _without_names(recorded, named)
    return recorded, named, name_samples([*named, *again], _name_inputs(recorded))


def _without_empty_stdin(files: Sequence[InputFile]) -> list[InputFile]:
    """Drop standard input if it is empty: an earlier start read the pipe to its end."""
    if any(file.is_empty_stdin for file in files):
        announce("standard input is empty: the run continues with what it has read")
    return [file for file in files if not file.is_empty_stdin]


def _refuse_other_inputs(recorded: Manifest, files: Iterable[InputFile], rundir: RunDir) -> None:
    """Reject files that are new to the recorded run. Content identifies a file that was read.

    Raises:
        ResumeError: a file is new.
    """
    shown = 3  # names in a message
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
        [file.display_name for file in (*recorded.inputs, *recorded.refused)], shown
    )
    raise ResumeError(
        f"{list_inputs([file.display_name for file in new_files], shown)}: not in the run that "
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


def extend_run(
    config: RunConfig,
    rundir: RunDir,
    recorded: Manifest,
    files: Sequence[InputFile],
    survey: InputScan,
) -> Manifest:
    """Extend the recorded run by files that are new, or readable for the first time."""
    options = config.options
    if not options.add:
        _refuse_other_inputs(recorded, [*files, *(file for file, _ in survey.refused)], rundir)
    run_type = recorded.recipe.input_type
    check_same_recipe(recorded, config.recipe_for(options.known_type or run_type))
    _refuse_lost(recorded, survey)
    inputs = check_recorded(recorded.inputs, files)
    n_recorded = len(recorded.inputs)
    old = inputs[:n_recorded]
    new = inputs[n_recorded:]
    if new:
        warn_of_copies(new)
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
        refused=rejected_files(survey),
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
