"""Every error that VirNucPro raises on purpose.

VirnucproError            exit 1    nothing usable came out, or an internal error
├── UsageError            exit 64   options that contradict each other or make no sense
├── InputError            exit 65   the content of an input file is wrong
├── InputMissingError     exit 66   an input file does not exist or cannot be opened
├── UnavailableError      exit 69   a device, a model or a head cannot be used
│   └── DownloadError               a published file is not here, and cannot be downloaded
├── OutputError           exit 73   the run folder cannot be created or used
│   └── ResumeError                 it holds another run; the message names the difference
├── StorageError          exit 74   disk full or another I/O error
└── FeatureFileError      exit 1    a feature file is incomplete (--resume makes it again)

A message says what happened and where; ``hint`` says what to do next. Both may mention options as
an ``OptionText``, so that the command line writes ``--force`` and Python ``force=True``. ``option``
is the field name of the option at fault, if one is. Errors never cross a process boundary: workers
send events with text, and helpers send class, message and hint (``events.ErrorText``).
"""

from __future__ import annotations

import re
from pathlib import Path

from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options

_ACCESSION = re.compile(r"[A-Z]{1,6}_?\d{5,}(\.\d+)?")  # of NCBI, as in NC_001416.1


class VirnucproError(Exception):
    """The base class, and the one class that the command line catches."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "", *, option: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        self.option = option

    @property
    def message(self) -> str:
        """The message as it was raised: an ``OptionText`` if it mentions options."""
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
        """The error for a file that cannot be opened; ``name`` is the user's name for it."""
        where = name or error.filename or path
        hint = "check the path and its permissions"
        if isinstance(error, FileNotFoundError) and "," in path.name:
            hint = with_options("{hint}; several files are given as {input:A} {input:B}", hint=hint)
        elif isinstance(error, FileNotFoundError) and _ACCESSION.fullmatch(str(path)):
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
