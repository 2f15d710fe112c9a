"""Look up named models and bundles: their paths, their download, and the family of a path.

One model is built in, with its head. Other models are in one of these folders:

- torch hub's folder, for a published model in one file, so that one download serves every program
- our own folders next to it, for imported models and published models in several files
- the Hugging Face cache, for a model that those libraries downloaded

A published model is downloaded only if none of these folders has it. ``hugging_face`` is the
Hugging Face cache folder, or None to ignore it: see ``hugging_face.py``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from virnucpro.core.atomic_io import EMBEDDED_FOLDER
from virnucpro.core.errors import DownloadError, OutputError, UnavailableError, UsageError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.option_text import join_texts, with_options
from virnucpro.core.paths import expand_path
from virnucpro.core.recipe import Footprint
from virnucpro.models.base import Model, identify_model, not_published
from virnucpro.models.checkpoint_model import CheckpointModel
from virnucpro.models.esm2.config import CONTACTS_SUFFIX
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.family import ModelFile
from virnucpro.models.hugging_face import find_snapshot
from virnucpro.models.names import (
    DEFAULT_MODEL,
    EARLIER_NAMES,
    TINY_MODEL,
    TINY_NOTICE,
    current_name,
)
from virnucpro.models.registry import (
    BUNDLES,
    FAMILIES,
    NAMES,
    REMOVED_MODELS,
    Family,
    Published,
    RemoteFile,
    installed_families,
    removed_model_hint,
)


def _torch_hub() -> Path:
    from torch import hub

    return Path(hub.get_dir())


def hub_folder() -> Path:
    return _torch_hub() / "checkpoints"


def imported_folder() -> Path:
    return _torch_hub() / "virnucpro_models"


def published_folder() -> Path:
    """Return the folder for bundles and for published models with several files."""
    return _torch_hub() / "virnucpro_published"


def embedded_model() -> Path:
    """Return the path to the built-in ESM-2."""
    return EMBEDDED_FOLDER / TINY_MODEL


def embedded_head() -> Path:
    """Return the path to the head for the built-in ESM-2."""
    return EMBEDDED_FOLDER / ModelFile.HEAD


def bundled_head(bundle: str) -> Path:
    """Return the path to a bundle's published head."""
    return published_folder() / bundle / BUNDLES[bundle].head.name


def model_names(name: str) -> tuple[str, ...]:
    """Return the models that ``--model`` selects by a name or path, in vector order."""
    return BUNDLES[name].encoders if name in BUNDLES else (current_name(name),)


# Published models


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A published model: its path, its missing files, and its expected content."""

    name: str
    family: Family
    published: Published
    snapshot: Path | None = None  # its folder in the Hugging Face cache

    @property
    def home(self) -> Path:
        """Return the file or folder for the download."""
        if self.published.is_file:
            return hub_folder() / self.published.files[0].name
        return published_folder() / self.name

    @property
    def footprint(self) -> Footprint:
        """Return the model's memory and disk space. No download is needed."""
        footprint: Footprint = self.family.implementation.footprint_of(self.published)
        return footprint

    @property
    def files(self) -> list[tuple[RemoteFile, Path]]:
        """List the model's files and their paths."""
        if self.published.is_file:
            return [(self.published.files[0], self.home)]
        return [(file, self.home / file.name) for file in self.published.files]

    @property
    def missing(self) -> list[tuple[RemoteFile, Path]]:
        """List the missing files and their paths. Empty if imported, or found in another cache."""
        if self.snapshot is not None or _imported(self.name):
            return []
        return [(file, path) for file, path in self.files if not path.exists()]

    @property
    def bytes_to_fetch(self) -> int:
        limit = self.footprint.file_bytes
        return sum(file.n_bytes or min(limit, file.max_bytes) for file, _ in self.missing)

    def open(self, path: Path) -> Model:
        """Inspect a path and compare it with the published model.

        The SHA-256 of the weights is compared when they are read. If no SHA-256 is recorded for the
        folder's combined weights, each file is compared now.

        Raises:
            UnavailableError: the path contains another model, or is damaged.
        """
        if not self.published.is_file and not self.published.digests:
            for file, place in self.files:
                _check_published(file, place, self.name)
        model: Model = self.family.implementation.open_published(self.name, self.published, path)
        return model

    def verify(self, model: Model) -> str:
        """Read every weight in this model and return their SHA-256.

        Without a recorded SHA-256, the other recorded properties are compared.

        Raises:
            UnavailableError: the model is damaged, or the weights differ.
        """
        digest = model.verify()
        if self.published.is_file and not self.published.digests:
            _check_published(self.published.files[0], model.files[0], self.name)
        return digest


def _check_published(file: RemoteFile, path: Path, name: str) -> None:
    """Compare a file with the published one.

    Raises:
        UnavailableError: the file differs from the published one.
    """
    from virnucpro.models.download import check_file

    try:
        check_file(file, path)
    except UnavailableError as error:
        raise not_published(path, name, error) from error


# Names


def is_name(text: str) -> bool:
    """Return True if the text is a possible model name."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", text, flags=re.ASCII) is not None


def find_published(name: str, hugging_face: Path | None = None) -> NamedModel | None:
    """Find the published model with a name, first in this program and then in other packages."""
    families = list(FAMILIES.values())
    if is_name(name) and name not in NAMES and not _imported(name):
        families += installed_families().values()
    for family in families:
        if name in family.published:
            published = family.published[name]
            snapshot = None
            if hugging_face is not None and published.repository:
                files = published.hub_files
                snapshot = find_snapshot(hugging_face, published.repository, files)
            return NamedModel(name, family, published, snapshot)
    return None


def published_files(name: str) -> list[tuple[RemoteFile, Path]]:
    """List the files and paths for a published model or bundle. Empty for other models."""
    models = map(find_published, model_names(name))
    files = [part for model in models if model for part in model.files]
    if name in BUNDLES:
        files.append((BUNDLES[name].head, bundled_head(name)))
    return files


def model_paths(name: str, hugging_face: Path | None = None) -> list[Path]:
    """List the existing paths for a model name: downloaded, imported, or in another cache."""
    found = find_published(name, hugging_face)
    homes = [found.home] if found and found.home.exists() else []
    elsewhere = [found.snapshot] if found and found.snapshot else []
    return [*homes, *_imported(name), *elsewhere]


def _imported(name: str) -> list[Path]:
    folder = imported_folder()
    places = (folder / f"{name}.pt", folder / name) if is_name(name) else ()
    return [path for path in places if path.exists()]


def imported_names() -> list[str]:
    """Name the imported models that are not published."""
    files = [path for path in imported_folder().glob("*") if not path.name.startswith(".")]
    heads = [path for path in files if path.stem.endswith(CONTACTS_SUFFIX)]
    models = [path for path in files if path.is_dir() or path.suffix == ".pt"]
    models = [path for path in models if path not in heads]
    names = {path.name if path.is_dir() else path.stem for path in models}
    return sorted(names.difference(NAMES))


def all_model_names() -> list[str]:
    """Name all models: published, bundles, built-in and imported.

    This program's published models come before those of other packages.
    """
    families = (*FAMILIES.values(), *installed_families().values())
    published = [name for family in families for name in family.published if is_name(name)]
    return list(dict.fromkeys((*published, *BUNDLES, TINY_MODEL, *imported_names())))


def has_model_name(model: str) -> bool:
    """Return True if later commands find this model by name, without the Hugging Face cache."""
    return find_model(model).exists()


def find_model(model: str, hugging_face: Path | None = None) -> Path:
    """Return the path to the model that ``--model`` names. It need not be downloaded.

    ``model`` is a name, or a path with a separator. A file ``esm2_t6_8M_UR50D`` in the current
    folder is never mistaken for the model with that name.

    Raises:
        UnavailableError: the path or the name does not exist.
        UsageError: the path begins with ``~`` and an unknown user.
    """
    if Path(model).name != model:
        path = expand_path(model)
        if not path.exists():
            raise UnavailableError(
                f"{printable(path)}: no such file or folder", hint=_suggest_name(path.name)
            )
        return path.absolute()  # an absolute path is never read as a name
    if current_name(model) == TINY_MODEL:
        return embedded_model()
    if model in BUNDLES:
        names = " and ".join(BUNDLES[model].encoders)
        raise UsageError(
            f"{model} is not one model, but {names} with a head",
            hint="it is for predict, extract and evaluate; here name one of these models",
        )
    if here := model_paths(model, hugging_face):
        return here[0]
    if found := find_published(model):
        return found.home
    if model in REMOVED_MODELS.values():
        raise UnavailableError(
            f"VirNucPro no longer has the model {model}", hint=removed_model_hint()
        )
    hint = _suggest_name(model)
    if Path(model).exists():
        name = printable(model)
        hint = f"if you mean {name} in the current folder, write ./{name}"
    raise UnavailableError(f"there is no model named {printable(model)}", hint=hint)


def _suggest_name(word: str) -> str:
    """Suggest names similar to this one, or all names."""
    names = {name.lower(): name for name in all_model_names()} | EARLIER_NAMES
    word = word.lower().removesuffix(".pt")
    close = [name for name in names if word in name] if word else []
    close = close if len(close) == 1 else difflib.get_close_matches(word, names, n=1)
    if close:
        return f"did you mean {names[close[0]]}? `virnucpro models list` shows all names"
    present = ", ".join(dict.fromkeys(names.values()))
    return f"the names are {present}; a path has a separator: ./model.pt"


# Models


def open_model(model: str, on_event: EventHandler, hugging_face: Path | None = None) -> Model:
    """Find the model for ``--model``, by path or published name, in any family.

    Raises:
        DownloadError: the model is not on this machine and cannot be downloaded.
        UnavailableError: the model does not exist, or fails its check.
    """
    path = find_model(model, hugging_face)
    if path == embedded_model():
        return replace(inspect_esm2(path), head=embedded_head(), notice=TINY_NOTICE)
    found = find_published(model, hugging_face)
    if found is None:
        return identify_model(path, on_event)
    if missing := found.missing:
        from virnucpro.models.download import fetch_file

        for file, place in missing:
            fetch_file(file, place, on_event)
    return found.open(path)


def open_default(on_event: EventHandler, hugging_face: Path | None = None) -> Model:
    """Find the model for runs that need one but name none.

    Raises:
        UnavailableError: the model is not on this machine and cannot be downloaded, or fails its
            check.
    """
    without_download = with_options(
        "choose one of these:\n"
        "  virnucpro models download {name}  where there is a network\n"
        "  virnucpro models import FILE                   with {name}.pt from another machine\n"
        "  {model:{tiny}}                         {notice}",
        name=DEFAULT_MODEL,
        tiny=TINY_MODEL,
        notice=TINY_NOTICE,
    )
    try:
        return open_model(DEFAULT_MODEL, on_event, hugging_face)
    except (DownloadError, OutputError) as error:
        first = [error.hint] if isinstance(error, OutputError) else []
        raise UnavailableError(
            f"{DEFAULT_MODEL}, the default model, is not on this machine, and the download "
            f"failed: {error}",
            hint=join_texts(", or ", [*first, without_download]),
        ) from error


# Downloads


def fetch_contact_head(name: str, model: Model, on_event: EventHandler) -> None:
    """Download the contact head of a named model, if it is published as a file of its own.

    It is saved next to a model in one file. Nobody publishes its hash, so it is read as a check.

    Raises:
        DownloadError: it cannot be downloaded.
        UnavailableError: it is not a contact head.
        OutputError, StorageError: it cannot be written.
    """
    found = find_published(name)
    head = found.published.contact_head if found else None
    if head is None or not isinstance(model, CheckpointModel):
        return
    if not model.path.is_file() or "contacts" in model.includes:
        return
    from virnucpro.models.download import fetch_file

    path = model.path.with_name(head.name)
    fetch_file(head, path, on_event)
    try:
        model.read_heads()
    except UnavailableError:
        path.unlink()
        raise


def bytes_to_fetch(model: str, hugging_face: Path | None = None) -> int:
    """Count the bytes to download before a named model or bundle can be used."""
    head_bytes = 6_800_000  # approximate size of a published head
    models = [find_published(name, hugging_face) for name in model_names(model)]
    n_bytes = sum(found.bytes_to_fetch for found in models if found)
    if model in BUNDLES and not bundled_head(model).exists():
        n_bytes += head_bytes
    return n_bytes


def fetch_head(bundle: str, on_event: EventHandler) -> tuple[Path, int]:
    """Return a bundle's published head and its chunk length. Download it if missing.

    Raises:
        UnavailableError: the head cannot be downloaded, or is another file.
    """
    head = BUNDLES[bundle].head
    path = bundled_head(bundle)
    if not path.exists():
        from virnucpro.models.download import fetch_file

        fetch_file(head, path, on_event)
    _check_published(head, path, f"head of {bundle}")
    return path, BUNDLES[bundle].chunk_size
