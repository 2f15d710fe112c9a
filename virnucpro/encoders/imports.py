"""Models that the user brings by file, checked and copied to where their names find them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from virnucpro.encoders.bundles import model_names
from virnucpro.encoders.esm2.family import ESM2Model, inspect_esm2, verify_esm2
from virnucpro.encoders.models import (
    bundled_head,
    check_file,
    check_published,
    hub_folder,
    imported_folder,
    is_name,
    locate,
    places_in_use,
)
from virnucpro.encoders.published import BUNDLES, EMBEDDED, FOLDERS, PUBLISHED, RemoteFile
from virnucpro.ground.errors import (
    InputMissingError,
    OutputError,
    StorageError,
    UnavailableError,
    UsageError,
)
from virnucpro.ground.files import TEMPORARY, atomic, temporary_beside, writing
from virnucpro.ground.log import printable


def import_model(source: Path, name: str | None, *, force: bool) -> tuple[str, ESM2Model]:
    """Import a checkpoint under a name, or else that of its file or folder.

    Raises:
        VirnucproError: as ``import_checkpoint``.
    """
    plain = source.name if source.is_dir() else source.stem
    name = plain if name is None else name
    return name, import_checkpoint(source, name, force=force)


def import_checkpoint(source: Path, name: str, *, force: bool) -> ESM2Model:
    """Verify a checkpoint, and copy it to where ``locate`` finds it by its name.

    From a folder, the weights and ``config.json`` are copied.

    Raises:
        UsageError: the name cannot be one.
        UnavailableError: it is not an ESM-2, damaged, holds code, or has another name.
        OutputError: another model has the name, and ``force`` was not given.
    """
    _check_name(name)
    checkpoint = verify_esm2(source)
    in_use, digest = places_in_use(name), checkpoint.sha256()
    try:
        check_published(name, checkpoint, digest)
    except UnavailableError as error:
        raise UnavailableError(str(error), hint="give it another name with --name") from error
    if in_use and not force:
        there = inspect_esm2(in_use[0])
        if there.sha256() == digest:
            return there
        raise OutputError(
            f"another model is called {name} already: {printable(in_use[0])}",
            hint="give another name with --name, or add --force to replace it",
        )
    if source.is_file():
        folder = hub_folder() if name in PUBLISHED else imported_folder()
        target = folder / f"{name}.pt"
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(target) as temporary:
            _copy_file(source, temporary, target)
            _check_copy(replace(checkpoint, path=temporary), digest)
    else:
        target = imported_folder() / name
        _copy_folder(checkpoint, digest, target)
    for path in in_use:
        if path != target:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return inspect_esm2(target)


def _check_name(name: str) -> None:
    """
    Raises:
        UsageError: an imported model cannot have this name.
    """
    is_taken = name == EMBEDDED or name in FOLDERS or name in BUNDLES
    if not is_name(name) or is_taken or name.endswith(".pt"):
        raise UsageError(
            f"{printable(name)!r} cannot be the name of a model",
            hint="give another with --name: letters, digits, '_', '-' and '.'",
        )


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


def import_file(file: RemoteFile, folder: Path, source: Path) -> Path:
    """Copy a published file that the user brought to its folder.

    Raises:
        UnavailableError: it is another file.
        OutputError, StorageError: it cannot be written.
    """
    target = folder / file.name
    try:
        check_file(file, source)
    except UnavailableError as error:
        raise UnavailableError(
            f"{printable(source)} is not the published {file.name}: {error}",
            hint=f"fetch it from {file.url}",
        ) from error
    with writing(target, folder):
        folder.mkdir(parents=True, exist_ok=True)
    with atomic(target) as temporary:
        _copy_file(source, temporary, target)
        check_file(file, temporary)
    return target


def _copy_folder(source: ESM2Model, digest: str, target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}.*{TEMPORARY}"):
        shutil.rmtree(leftover)  # of an import that was killed
    copy, replaced = temporary_beside(target), temporary_beside(target)
    copy.mkdir(parents=True)
    try:
        for file in (source.path / "config.json", *source.files):
            _copy_file(file, copy / file.name, target)
        _check_copy(replace(source, path=copy), digest)
        if target.exists():
            target.rename(replaced)
        copy.rename(target)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        for folder in (copy, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def _copy_file(source: Path, copy: Path, target: Path) -> None:
    with writing(target, source, copy):  # the system's error names these two
        shutil.copyfile(source, copy)


def _check_copy(copy: ESM2Model, digest: str) -> None:
    if copy.sha256() != digest:
        raise StorageError(
            f"the copy in {printable(copy.path.parent)} is not what was copied",
            hint="check the disk, or let the file be written to its end, then import it again",
        )
