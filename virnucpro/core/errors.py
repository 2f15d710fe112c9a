"""Define every error that VirNucPro raises on purpose.

VirnucproError            exit 1    no usable output, or an internal error
├── UsageError            exit 64   contradictory or meaningless options
├── InputError            exit 65   invalid content in an input file
├── InputMissingError     exit 66   an input file is missing or cannot be opened
├── UnavailableError      exit 69   a device, a model or a head cannot be used
│   └── DownloadError               a published file is missing and cannot be downloaded
├── OutputError           exit 73   the run folder cannot be created or used
│   └── ResumeError                 it contains another run (the message says which)
├── StorageError          exit 74   disk full or another I/O error
└── FeatureFileError      exit 1    a feature file is incomplete (--resume recomputes it)

The message says what happened and where. ``hint`` says what to do next. Both may be an
``OptionText``, so that the command line prints ``--force`` and Python prints ``force=True``.
``option`` is the field name of the option at fault, if any. Errors never cross a process boundary:
workers send events with text, and helpers send class, message and hint (``events.ErrorText``).
"""

from __future__ import annotations

import re
from pathlib import Path

from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options


def _is_accession(text: str) -> bool:
    """Recognise an accession of NCBI, such as NC_001416.1."""
    return re.fullmatch(r"[A-Z]{1,6}_?\d{5,}(\.\d+)?", text) is not None


class VirnucproError(Exception):
    """Base class of all errors, and the only class that the command line catches."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "", *, option: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.option = option

    @property
    def message(self) -> str:
        """Return the message as it was raised: an ``OptionText`` if it mentions options."""
        message: str = self.args[0]
        return message


class UsageError(VirnucproError):
    exit_code = 64


class InputError(VirnucproError):
    exit_code = 65


class InputMissingError(VirnucproError):
    exit_code = 66

    @classmethod
    def cannot_open(cls, path: Path, error: OSError, name: str = "") -> InputMissingError:
        """Make the error for a file that cannot be opened, which the user called ``name``."""
        where = name or error.filename or path
        hint = "check the path and its permissions"
        if isinstance(error, FileNotFoundError) and "," in path.name:
            hint = with_options("{hint}; several files are given as {input:A} {input:B}", hint=hint)
        elif isinstance(error, FileNotFoundError) and _is_accession(str(path)):
            hint += "; if it is an accession, download its sequence first"
        return cls(f"{printable(where)}: {error.strerror}", hint)


class UnavailableError(VirnucproError):
    exit_code = 69


class DownloadError(UnavailableError):
    pass


class OutputError(VirnucproError):
    exit_code = 73


class ResumeError(OutputError):
    pass


class StorageError(VirnucproError):
    exit_code = 74


class FeatureFileError(VirnucproError):
    pass


class AbandonedError(Exception):
    """The work was stopped early, so the awaited result never comes."""
