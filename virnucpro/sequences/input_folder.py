"""Choose the input files in a folder, and announce what is not read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from virnucpro.core.errors import InputMissingError
from virnucpro.core.logging import announce, format_count, printable
from virnucpro.sequences.fasta import (
    list_folders,
    list_other_files,
)
from virnucpro.sequences.inputs import RUN_FILE, InputFile, list_inputs

MAX_NAMED_FILES = 5  # in a message


def folder_inputs(
    folder: Path, files: Iterable[InputFile], skipped: Collection[str]
) -> list[InputFile]:
    """Return the input files in a folder, each once. Announce the other files.

    Raises:
        InputMissingError: all of them are skipped.
    """
    inputs = _unique(file for file in files if file.path.rpartition(os.sep)[2] not in skipped)
    if unread := [printable(name) for name in list_other_files(folder) if name not in skipped]:
        announce(
            f"skipped {format_count(len(unread), 'file')} without a FASTA or FASTQ suffix in "
            f"{printable(folder)}: {list_inputs(unread, MAX_NAMED_FILES)}"
        )
    if not inputs:
        raise InputMissingError(
            f"{printable(folder)}: no FASTA or FASTQ file in this folder except results of a run",
            hint="name the input files of that run; to read a result, name that file itself",
        )
    return inputs


def announce_folders(folder: Path, run_folder: Path) -> None:
    """Announce the sub-folders, which are not searched, except run folders."""
    names = [
        printable(name)
        for name in list_folders(folder)
        if (folder / name).resolve() != run_folder.resolve()
        and not os.path.exists(folder / name / RUN_FILE)  # noqa: PTH110 - False without permission
    ]
    if names:
        announce(
            f"{printable(folder)}: sub-folders are not searched "
            f"({list_inputs(names, MAX_NAMED_FILES)}); name each with --input"
        )


def _unique(files: Iterable[InputFile]) -> list[InputFile]:
    """Return the files in a folder, keeping one of a file and its links."""
    unique_files: dict[str, InputFile] = {}
    for file in files:
        if same_file := unique_files.get(file.path):
            file, link = sorted((same_file, file), key=lambda candidate: bool(candidate.name))
            announce(f"skipped: {link.display_name} is the same file as {file.display_name}")
        unique_files[file.path] = file
    return list(unique_files.values())
