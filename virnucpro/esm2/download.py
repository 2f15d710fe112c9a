"""Named checkpoints: where they lie, and how they get there.

One lies in this package, with a head for it. The published ones are fair-esm's, kept in the folder
that torch hub uses, so that one download serves every program. Others are brought by file, and
lie in a folder of ours beside it. Nothing is fetched unless a name was asked for and is not there.
"""

from __future__ import annotations

import http.client
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from virnucpro.errors import OutputError, StorageError, UnavailableError, UsageError
from virnucpro.esm2.model import ESM2Shape
from virnucpro.esm2.weights import Checkpoint, inspect_checkpoint, verify_checkpoint
from virnucpro.files import TEMPORARY, atomic, expanded, temporary_beside, writing
from virnucpro.log import printable

PUBLISHED = {
    "esm2_t6_8M_UR50D": ESM2Shape(6, 320, 20),
    "esm2_t12_35M_UR50D": ESM2Shape(12, 480, 20),
    "esm2_t30_150M_UR50D": ESM2Shape(30, 640, 20),
    "esm2_t33_650M_UR50D": ESM2Shape(33, 1280, 20),
    "esm2_t36_3B_UR50D": ESM2Shape(36, 2560, 40),
    "esm2_t48_15B_UR50D": ESM2Shape(48, 5120, 40),
}
EMBEDDED = "esm2_virnucpro"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"
BASE_URL = "https://dl.fbaipublicfiles.com/fair-esm/models"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_BLOCK = 1 << 20
_TIMEOUT = 30  # seconds without a byte

OnBytes = Callable[[int, int], None]  # bytes so far, bytes in all (0: unknown)


def hub_folder() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints"


def imported_folder() -> Path:
    return Path(torch.hub.get_dir()) / "virnucpro_models"


def converted_folder() -> Path:
    """For what is made of large checkpoints; it may be deleted at any time."""
    return Path(torch.hub.get_dir()) / "virnucpro"


def embedded_model() -> Path:
    return EMBEDDED_FOLDER / EMBEDDED


def embedded_head() -> Path:
    """Made for the embedded model."""
    return EMBEDDED_FOLDER / "head.safetensors"


def locate(model: str) -> Path:
    """Where the checkpoint lies that a user means by ``--model``, or, once fetched, would lie.

    A file, a folder, or a name.

    Raises:
        UnavailableError: it is none of these.
    """
    path = expanded(model)
    if path.exists():
        return path
    if here := _places_in_use(model):
        return here[0]
    if model in PUBLISHED:
        return hub_folder() / f"{model}.pt"
    if model != EMBEDDED:
        raise UnavailableError(
            f"{printable(model)} is neither a file, nor a folder, nor a published ESM-2",
            hint=f"by name there are {', '.join((EMBEDDED, *PUBLISHED, *imported_names()))}",
        )
    if not embedded_model().exists():
        raise UnavailableError(
            f"{EMBEDDED} is not in {printable(EMBEDDED_FOLDER)}: the installation is not whole",
            hint="install virnucpro again, or name another model with --model",
        )
    return embedded_model()


def find_checkpoint(
    model: str, on_bytes: OnBytes = lambda *_: None, base_url: str = BASE_URL
) -> Checkpoint:
    """The checkpoint a user means by ``--model``, fetched if need be.

    Raises:
        UnavailableError: there is none, or it cannot be fetched.
    """
    path = locate(model)
    if model in PUBLISHED and not path.exists():
        download(model, path, on_bytes, base_url)
    return inspect_checkpoint(path)


def imported_names() -> list[str]:
    """Of the models that were brought by file and have no published name."""
    folder = imported_folder()
    files = [path for path in folder.glob("*") if not path.name.startswith(".")]
    names = {path.name if path.is_dir() else path.stem for path in files}
    return sorted(names.difference(PUBLISHED))


def _places_in_use(name: str) -> list[Path]:
    """Where a checkpoint of this name lies: a file, or a Hugging Face folder."""
    if not _NAME.fullmatch(name):
        return []
    folder = imported_folder()
    places = [hub_folder() / f"{name}.pt"] if name in PUBLISHED else [folder / f"{name}.pt"]
    return [path for path in (*places, folder / name) if path.exists()]


def import_checkpoint(source: Path, name: str, *, force: bool) -> Checkpoint:
    """Copy a checkpoint to where ``locate`` finds it by its name, once all of it was looked at.

    Of a folder the weights and ``config.json`` are taken.

    Raises:
        UsageError: the name cannot be one.
        UnavailableError: it is no ESM-2, is damaged, holds code, or is not the one of that name.
        OutputError: another model has the name, and ``force`` was not given.
    """
    if not _NAME.fullmatch(name) or name == EMBEDDED or name.endswith(".pt"):
        raise UsageError(
            f"{printable(name)!r} cannot be the name of a model",
            hint="give another with --name: letters, digits, '_', '-' and '.'",
        )
    found = verify_checkpoint(source)
    if name in PUBLISHED and found.shape != PUBLISHED[name]:
        raise UnavailableError(
            f"{printable(source)} is not {name}: it has {found.shape}",
            hint="give it another name with --name",
        )
    in_use, digest = _places_in_use(name), found.sha256()
    if in_use and not force:
        there = inspect_checkpoint(in_use[0])
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
            _check_copy(replace(found, path=temporary), digest)
    else:
        target = imported_folder() / name
        _copy_folder(found, digest, target)
    for path in in_use:
        if path != target:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return inspect_checkpoint(target)


def _copy_folder(source: Checkpoint, digest: str, target: Path) -> None:
    for left in target.parent.glob(f".{target.name}.*{TEMPORARY}"):
        shutil.rmtree(left)  # of an import that was killed
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


def _check_copy(copy: Checkpoint, digest: str) -> None:
    if copy.sha256() != digest:
        raise StorageError(
            f"the copy in {printable(copy.path.parent)} is not what was copied",
            hint="check the disk, or let the file be written to its end, then import it again",
        )


def download(model: str, path: Path, on_bytes: OnBytes, base_url: str = BASE_URL) -> None:
    """Fetch a published checkpoint; ``path`` appears only when it is whole and what it says.

    Raises:
        UnavailableError: it cannot be fetched, or is not the model of that name.
    """
    url = f"{base_url}/{model}.pt"
    hint = (
        f"on a machine without network, fetch {url} elsewhere; `virnucpro models import` "
        f"puts it in {path.parent}"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            _fetch(url, temporary, on_bytes)
            found = inspect_checkpoint(temporary).shape
            if found != PUBLISHED[model]:
                raise UnavailableError(f"it has {found}")
    except UnavailableError as error:
        raise UnavailableError(f"what {url} gave is not {model}: {error}", hint=hint) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"cannot fetch {url}: {printable(reason)}", hint=hint) from error


def _fetch(url: str, path: Path, on_bytes: OnBytes) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer, path.open("wb") as out:
        total, done = int(answer.headers.get("Content-Length") or 0), 0
        while block := answer.read(_BLOCK):
            out.write(block)
            done += len(block)
            on_bytes(done, total)
    if total and done != total:
        raise OSError(f"the connection ended after {done} of {total} bytes")
