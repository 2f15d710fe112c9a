"""Read the paths that users write."""

from __future__ import annotations

import re
from pathlib import Path

from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")  # as in s3://bucket/reads.fa


def expand_path(path: str | Path) -> Path:
    """Expand a leading ``~`` or ``~user`` to the home folder.

    Raises:
        UsageError: the user does not exist, the path has a NUL byte, or it is a URL.
    """
    if _ADDRESS.match(str(path)):
        raise UsageError(
            f"{printable(path)} is a URL, not a path",
            hint="download it first, or pipe it into `--input -`; write into a folder, then copy "
            "it there, for example with `aws s3 sync`",
        )
    if "\0" in str(path):
        raise UsageError(f"the path {printable(path)} has a NUL byte", hint="check the name")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        raise UsageError(
            f"{printable(path)}: no home folder is known for {printable(user)}",
            hint=f"write the path in full, or ./{printable(user)} for a file of that name",
        ) from error
