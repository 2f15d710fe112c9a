"""Match the files of a resumed run with those that it has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from virnucpro.core.errors import ResumeError
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.option_text import with_options
from virnucpro.sequences.file_scan import hash_inputs, with_text_hash
from virnucpro.sequences.inputs import RUN_FIELDS, InputFile


def join_inputs(recorded: Sequence[InputFile], files: Sequence[InputFile]) -> list[InputFile]:
    """Return the inputs of a resumed run: all recorded ones, then the new ones.

    Raises:
        ResumeError: a file changed since it was recorded.
    """
    recorded_by_path = {file.path: file for file in recorded}
    digests = {digest for file in recorded for digest in file.digests}
    new = []
    for file in files:
        if not digests.isdisjoint(file.digests):
            if file.path not in recorded_by_path:
                LOGGER.warning(
                    "%s has the same content as an input of this run: not added", file.display_name
                )
            continue
        if file.path in recorded_by_path:
            raise ResumeError(
                f"the input {printable(file.path)} changed since this run began: "
                f"its sha256 was {recorded_by_path[file.path].sha256[:12]}, now {file.sha256[:12]}",
                hint=with_options(
                    "put the old file back, choose another {output_dir}, or start again: {force}"
                ),
            )
        new.append(file)
    generation = 1 + max((file.generation for file in recorded), default=-1)
    return find_present(recorded, files) + [replace(file, generation=generation) for file in new]


def find_present(recorded: Sequence[InputFile], files: Sequence[InputFile]) -> list[InputFile]:
    """Return the recorded inputs, each with the path of a hashed file with its content, if any."""
    path_to_file = {file.path: file for file in files}
    digest_to_file = {digest: file for file in files for digest in file.digests}
    joined = []
    for file in recorded:
        present = path_to_file.get(file.path)
        if present is None or not present.has_content_of(file):
            same = (digest_to_file[digest] for digest in file.digests if digest in digest_to_file)
            present = next(same, file)
        run_fields = {name: getattr(file, name) for name in RUN_FIELDS}
        joined.append(replace(present, **run_fields))
    return joined


def check_recorded(
    recorded: Sequence[InputFile], files: Sequence[InputFile] = ()
) -> list[InputFile]:
    """Return the recorded inputs of a run, then the new ones among ``files``.

    A recorded input that is not among ``files`` is hashed at its recorded path.

    Raises:
        InputError: an input is damaged.
        ResumeError: an input changed or is gone.
    """
    checked = []
    for file in join_inputs(recorded, files):
        is_there = file.stamp is not None or Path(file.path).is_file()
        now = file if file.stamp is not None or not is_there else hash_inputs(file)
        if is_there and not now.has_content_of(file):
            now = with_text_hash(now)
        if not is_there or not now.has_content_of(file):
            raise ResumeError(
                f"{printable(file.path)}, an input of this run, is gone or has changed",
                hint=with_options(
                    "put it back; if it was moved, compressed or decompressed, repeat the "
                    "command of this run with {resume} and the new path as {input}"
                ),
            )
        checked.append(now)
    return checked
