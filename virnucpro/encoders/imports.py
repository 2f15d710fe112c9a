"""Models that the user brings by file, checked and copied to where their names find them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from virnucpro.encoders.base import Model, recognise
from virnucpro.encoders.catalogue import (
    bundled_head,
    check_weights,
    find_published,
    imported_folder,
    is_name,
    locate,
    model_names,
    place_of,
    places_in_use,
)
from virnucpro.encoders.families import BUNDLES, EMBEDDED, PUBLISHED, RemoteFile
from virnucpro.encoders.fetch import check_file
from virnucpro.ground.errors import (
    InputMissingError,
    OutputError,
    StorageError,
    UnavailableError,
    UsageError,
)
from virnucpro.ground.files import TEMPORARY, atomic, sha256, temporary_beside, writing
from virnucpro.ground.log import printable


def import_model(source: Path, name: str | None, *, force: bool) -> tuple[str, Model, str]:
    """Import a model under a name, or else that of its file or folder. -> name, model, SHA-256

    Raises:
        VirnucproError: as ``import_checkpoint``.
    """
    plain = source.name if source.is_dir() else source.stem
    name = plain if name is None else name
    return name, *_import(source, name, force=force)


def import_checkpoint(source: Path, name: str, *, force: bool) -> Model:
    """Verify a model, and copy it to where ``locate`` finds it by its name.

    From a folder, the files that belong to the model are copied.

    Raises:
        UsageError: the name cannot be one.
        UnavailableError: it is no model, damaged, holds code, or has another name.
        OutputError: another model has the name, and ``force`` was not given.
    """
    return _import(source, name, force=force)[0]


def _import(source: Path, name: str, *, force: bool) -> tuple[Model, str]:
    _check_name(name)
    model = recognise(source, lambda _: None)
    if not model.files:
        raise UnavailableError(
            f"{printable(source)} is not imported: what it was learned on is found by its place",
            hint=f"name it by its path: --model {printable(source)}",
        )
    hashes, digest = _hashes(model.files), model.verify()
    try:
        _check_is(name, model, digest)
    except UnavailableError as error:
        raise UnavailableError(str(error), hint="give it another name with --name") from error
    in_use = places_in_use(name)
    if in_use and not force:
        return _same(name, in_use[0], hashes), digest
    target = _copy(model, name, hashes)
    for path in in_use:
        if path != target:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return recognise(target, lambda _: None), digest


def _same(name: str, path: Path, hashes: Sequence[str]) -> Model:
    """
    Raises:
        OutputError: the model that has this name has other files.
    """
    there = recognise(path, lambda _: None)
    if _hashes(there.files) != hashes:
        raise OutputError(
            f"another model is called {name} already: {printable(path)}",
            hint="give another name with --name, or add --force to replace it",
        )
    return there


def _copy(model: Model, name: str, hashes: Sequence[str]) -> Path:
    if model.path.is_file():
        found = find_published(name)
        target = place_of(name, found[1]) if found else imported_folder() / f"{name}.pt"
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic(target) as temporary:
            _copy_files(model.files, [temporary], hashes, target)
    else:
        target = imported_folder() / name
        _copy_folder(model.files, hashes, target)
    return target


def _check_is(name: str, model: Model, digest: str) -> None:
    """
    Raises:
        UnavailableError: the name is that of another, published model.
    """
    if found := find_published(name):
        family, published = found
        family.code.open_published(name, published, model.path)
        check_weights(name, model, digest)


def _hashes(files: Sequence[Path]) -> list[str]:
    return [sha256(file) for file in files]


def _check_name(name: str) -> None:
    """
    Raises:
        UsageError: an imported model cannot have this name.
    """
    found = find_published(name)
    is_taken = name == EMBEDDED or name in BUNDLES or (found is not None and not found[1].is_file)
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
    found = find_published(name)
    if name not in BUNDLES and (found is None or found[1].is_file):
        folders = [one for one in PUBLISHED if (it := find_published(one)) and not it[1].is_file]
        raise UsageError(
            f"--from is for {', '.join((*BUNDLES, *folders))}, not for {printable(name)}",
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
        place, found = locate(encoder), find_published(encoder)
        assert found is not None, "what comes in several files is published"
        _, published = found
        for file in published.files:
            if published.is_file:
                yield file.name, place, partial(_import_checkpoint, encoder)
            else:
                yield file.name, place / file.name, partial(import_file, file, place)
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


def _copy_folder(files: Sequence[Path], hashes: Sequence[str], target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}.*{TEMPORARY}"):
        shutil.rmtree(leftover)  # of an import that was killed
    copy, replaced = temporary_beside(target), temporary_beside(target)
    copy.mkdir(parents=True)
    try:
        _copy_files(files, [copy / file.name for file in files], hashes, target)
        if target.exists():
            target.rename(replaced)
        copy.rename(target)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        for folder in (copy, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def _copy_files(
    files: Sequence[Path], copies: Sequence[Path], hashes: Sequence[str], target: Path
) -> None:
    for file, copy in zip(files, copies, strict=True):
        _copy_file(file, copy, target)
    if _hashes(copies) != hashes:
        raise StorageError(
            f"the copy in {printable(target.parent)} is not what was copied",
            hint="check the disk, or let the file be written to its end, then import it again",
        )


def _copy_file(source: Path, copy: Path, target: Path) -> None:
    with writing(target, source, copy):  # the system's error names these two
        shutil.copyfile(source, copy)
