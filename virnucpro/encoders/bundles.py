"""Bundles: encoders whose vectors stand side by side, and the file of the head that reads them.

A bundle has a name, as a model has, and ``--model`` takes either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from virnucpro.encoders.models import (
    bundled_head,
    check_file,
    fetch_file,
    import_checkpoint,
    import_file,
    locate,
)
from virnucpro.encoders.published import BUNDLES, FOLDERS
from virnucpro.errors import InputMissingError, UnavailableError, UsageError
from virnucpro.events import OnEvent
from virnucpro.log import printable


def model_names(name: str) -> tuple[str, ...]:
    """The models that ``--model`` means by a name or path, in the order of their vectors."""
    return BUNDLES[name].encoders if name in BUNDLES else (name,)


def fetch_head(name: str, on_event: OnEvent) -> tuple[Path, int]:
    """The published head of a bundle, fetched if need be, and the length of its chunks.

    Raises:
        UnavailableError: it cannot be fetched, or is another one.
    """
    head, path = BUNDLES[name].head, bundled_head(name)
    if not path.exists():
        fetch_file(head, path.parent, on_event)
    try:
        check_file(head, path)
    except UnavailableError as error:
        raise UnavailableError(
            f"{printable(path)} is not the published head of {name}: {error}",
            hint="delete it to fetch it again",
        ) from error
    return path, BUNDLES[name].chunk_size


def import_files(name: str, folder: Path) -> list[Path]:
    """Take the files of a published model or bundle from a folder, by their names; all are checked.

    A file that is in its place already need not be in the folder. Nothing is fetched.

    Raises:
        UsageError: no such model comes in several files.
        InputMissingError: files are missing.
        UnavailableError: one is not the published file.
    """
    if name not in BUNDLES and name not in FOLDERS:
        raise UsageError(
            f"--from is for {', '.join((*BUNDLES, *FOLDERS))}, not for {printable(name)}",
            hint="to import one checkpoint: `virnucpro models import PATH --name NAME`",
        )
    parts = list(_parts(name))
    absent = [part for part, place, _ in parts if not place.exists()]
    if missing := [part for part in absent if not (folder / part).exists()]:
        raise InputMissingError(
            f"{printable(folder)} lacks {', '.join(missing)}",
            hint=f"`virnucpro models info {name}` says where each file is published",
        )
    return [bring(folder / part) for part, _, bring in parts if (folder / part).exists()]


def _parts(name: str) -> Iterator[tuple[str, Path, Callable[[Path], Path]]]:
    """Each file of a model or bundle: its name, its place, and what brings it there from a path."""
    for encoder in model_names(name):
        place = locate(encoder)
        if encoder in FOLDERS:
            for file in FOLDERS[encoder].files:
                yield file.name, place / file.name, partial(import_file, file, place)
        else:
            yield f"{encoder}.pt", place, partial(_import_checkpoint, encoder)
    if name in BUNDLES:
        head = bundled_head(name)
        yield head.name, head, partial(import_file, BUNDLES[name].head, head.parent)


def _import_checkpoint(name: str, source: Path) -> Path:
    return import_checkpoint(source, name, force=False).path
