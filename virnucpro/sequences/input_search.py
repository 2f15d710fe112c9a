"""Find the input files that the user named."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.sequences.inputs import RUN_FILE, STDIN, InputFile


def find_inputs(
    paths: Sequence[Path], run_folder: Path, copies: Path, own_names: Collection[str] = ()
) -> list[InputFile]:
    """List the input files at the user's ``paths``, in order.

    In a run folder, files named in ``own_names`` are results of that run, and are skipped.

    Raises:
        InputError: a sample sheet is invalid, or a file is named twice.
        InputMissingError: a file is missing, or a pipe cannot be read.
        OutputError, StorageError: a file cannot be copied.
    """
    inputs: dict[str, InputFile] = {}
    folder_prefix = os.path.join(run_folder.resolve(), "")  # noqa: PTH118 - the start of paths in it
    for path in paths:
        files = InputFile.complete(path)
        if path.is_dir():
            from virnucpro.sequences.input_folder import announce_folders, folder_inputs

            is_run = run_folder.resolve() == path.resolve() or (path / RUN_FILE).exists()
            files = folder_inputs(path, files, own_names if is_run else ())
            if not is_run:
                announce_folders(path, run_folder)
        for file in files:
            if file.path in inputs:
                raise InputError(
                    f"the input {file.display_name} is named twice"
                    + (f": it is {printable(file.path)}" if file.name else ""),
                    hint=with_options(
                        "name it once: {input} takes files, folders and sample sheets"
                    ),
                )
            inputs[file.path] = _spool_stream(file, folder_prefix, copies)
    return list(inputs.values())


def _spool_stream(file: InputFile, folder_prefix: str, copies: Path) -> InputFile:
    """Return the file itself, or a copy if it can be read only once.

    ``folder_prefix`` is the start of every path in the run folder.
    """
    is_file = os.path.isfile(file.path)  # noqa: PTH113 - of many files
    is_plain = is_file or not (file.path == str(STDIN) or Path(file.path).exists())
    if is_plain and not file.path.startswith(folder_prefix):
        return file
    from virnucpro.sequences.input_copies import copy_input

    return copy_input(file, copies)
