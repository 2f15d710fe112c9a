"""Say how to make a missing or damaged file of a finished run again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from virnucpro.core.errors import FeatureFileError, VirnucproError
from virnucpro.core.json_checksum import read_facts
from virnucpro.core.logging import printable


@contextmanager
def explain_remedy(root: Path) -> Iterator[None]:
    """Add the remedy to errors about the files of a run in folder ``root``.

    It is the hint of the error, and a note, because Python prints no hint.
    """
    try:
        yield
    except FeatureFileError as error:
        if not hasattr(error, "__notes__"):
            error.hint = describe_remedy(root)
            error.add_note(error.hint)
        raise


def describe_remedy(root: Path) -> str:
    """Return the command of a run with ``--resume``, which makes what is missing or damaged."""
    command = _read_command(root)
    if command:
        return f"to make it again, run in the folder where the run was started: {command}"
    folder = repr(printable(root))
    return (
        f"to make it again, repeat the run with its inputs and options, {folder} as --output-dir, "
        f"and --resume; in Python: virnucpro.extract(..., output_dir={folder}, resume=True)"
    )


def _read_command(root: Path) -> str:
    """Return the command line of a run with ``--resume``, or "" if it was started from Python.

    The folder may have been moved since then, so the command gets its present path.
    """
    try:
        words = read_facts(root / "run.json").get("argv")
    except (OSError, VirnucproError):
        return ""
    if not isinstance(words, list) or len(words) <= 1:
        return ""
    folder = printable(root.absolute())
    # without the path of the program, and without what would delete the results
    options = [printable(word) for word in words[1:] if word != "--force"]
    for position, option in enumerate(options):
        if option.startswith("--output-dir="):
            options[position] = f"--output-dir={folder}"
        elif option in ("-o", "--output-dir") and position + 1 < len(options):
            options[position + 1] = folder
    resume = [] if "--resume" in options else ["--resume"]
    return shlex.join(["virnucpro", *options, *resume])
