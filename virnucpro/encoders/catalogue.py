"""Named models and bundles: where they lie, how they get there, and which family a path is of.

One lies in this package, with a head for it. A published model of one file is kept in the folder
that torch hub uses, so that one download serves every program; one of several files in a folder
beside it. Others are brought by file, and lie in a folder of ours there. Nothing is fetched unless
a name was asked for and is not there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from virnucpro.encoders.base import Model, not_published, recognise
from virnucpro.encoders.esm2.family import inspect_esm2
from virnucpro.encoders.families import (
    BUNDLES,
    EMBEDDED,
    FAMILIES,
    NAMES,
    Family,
    Published,
    RemoteFile,
    installed_families,
)
from virnucpro.encoders.fetch import check_file, download
from virnucpro.ground.errors import UnavailableError, UsageError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.files import EMBEDDED_FOLDER, expanded
from virnucpro.ground.log import printable

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_MOST_BYTES_PER_PARAMETER = 5  # bound for a file whose size is not on record; float32 takes 4
_HEAD_BYTES = 6_800_000  # of a published head, about

BeforeFetching = Callable[[str, frozenset[str]], None]  # given the name, and SHA-256 it may have


def _torch_hub() -> Path:
    from torch import hub

    return Path(hub.get_dir())


def hub_folder() -> Path:
    return _torch_hub() / "checkpoints"


def imported_folder() -> Path:
    return _torch_hub() / "virnucpro_models"


def published_folder() -> Path:
    """The folder of published models that are folders, and of bundles."""
    return _torch_hub() / "virnucpro_published"


def embedded_model() -> Path:
    return EMBEDDED_FOLDER / EMBEDDED


def embedded_head() -> Path:
    """The head for the embedded model."""
    return EMBEDDED_FOLDER / "head.safetensors"


def bundled_head(bundle: str) -> Path:
    """The place of the published head of a bundle."""
    return published_folder() / bundle / BUNDLES[bundle].head.name


def model_names(name: str) -> tuple[str, ...]:
    """The models that ``--model`` means by a name or path, in the order of their vectors."""
    return BUNDLES[name].encoders if name in BUNDLES else (name,)


# Names


def is_name(text: str) -> bool:
    """True if a model could be called so."""
    return _NAME.fullmatch(text) is not None


def find_published(name: str) -> tuple[Family, Published] | None:
    """A published model and its family; other packages are asked for a name that is not ours."""
    for family in FAMILIES.values():
        if name in family.published:
            return family, family.published[name]
    if not is_name(name) or name in NAMES or _imported(name):
        return None
    for family in installed_families().values():
        if name in family.published:
            return family, family.published[name]
    return None


def published_names() -> list[str]:
    """The names of published models: first ours, then those of other packages."""
    families = (*FAMILIES.values(), *installed_families().values())
    names = dict.fromkeys(name for family in families for name in family.published)
    return [name for name in names if is_name(name)]


def place_of(name: str, published: Published) -> Path:
    if published.is_file:
        return hub_folder() / published.files[0].name
    return published_folder() / name


def places_in_use(name: str) -> list[Path]:
    """The places where a model of this name lies: a published one, a file, or a folder."""
    found = find_published(name)
    place = [place_of(name, found[1])] if found is not None else []
    return [*(path for path in place if path.exists()), *_imported(name)]


def _imported(name: str) -> list[Path]:
    folder = imported_folder()
    places = (folder / f"{name}.pt", folder / name) if is_name(name) else ()
    return [path for path in places if path.exists()]


def imported_names() -> list[str]:
    """The names of imported models, without those of published ones."""
    files = [path for path in imported_folder().glob("*") if not path.name.startswith(".")]
    models = [path for path in files if path.is_dir() or path.suffix == ".pt"]
    names = {path.name if path.is_dir() else path.stem for path in models}
    return sorted(names.difference(NAMES))


def every_name() -> list[str]:
    """The name of each model: of this program, published, of bundles, and imported."""
    return list(dict.fromkeys((EMBEDDED, *published_names(), *BUNDLES, *imported_names())))


def locate(model: str) -> Path:
    """The path of the model that ``--model`` names; it need not be there before the download.

    ``model`` is a name, or a path with a separator in it. A file called ``esm2_t6_8M_UR50D`` in
    the current folder is not taken for the model of that name.

    Raises:
        UnavailableError: there is no such path, or no model of that name.
        UsageError: the path begins with a user whom this machine does not know.
    """
    if Path(model).name != model:
        return _existing_path(model)
    if model == EMBEDDED:
        if not embedded_model().exists():
            raise UnavailableError(
                f"{EMBEDDED} is not in {printable(EMBEDDED_FOLDER)}: the installation is not whole",
                hint="install virnucpro again, or name another model with --model",
            )
        return embedded_model()
    if model in BUNDLES:
        names = " and ".join(BUNDLES[model].encoders)
        raise UsageError(
            f"{model} is not one model, but {names} with a head",
            hint="it is for predict, extract and evaluate; here name one of these models",
        )
    if here := places_in_use(model):
        return here[0]
    if found := find_published(model):
        return place_of(model, found[1])
    hint = _suggestion(model)
    if Path(model).exists():
        name = printable(model)
        hint = f"if you mean {name} in the current folder, write ./{name}"
    raise UnavailableError(f"there is no model named {printable(model)}", hint=hint)


def _existing_path(model: str) -> Path:
    path = expanded(model)
    if not path.exists():
        raise UnavailableError(
            f"{printable(path)}: no such file or folder", hint=_suggestion(path.name)
        )
    return path.absolute()  # a path, not a name, wherever it is written down


def _suggestion(word: str) -> str:
    """The names that a user may have meant, or all."""
    names = {name.lower(): name for name in every_name()}
    word = word.lower().removesuffix(".pt")
    close = [name for name in names if word in name] if word else []
    close = close if len(close) == 1 else difflib.get_close_matches(word, names, n=1)
    if close:
        return f"did you mean {names[close[0]]}? `virnucpro models list` shows all names"
    return f"the names are {', '.join(names.values())}; a path has a separator: ./model.pt"


# Models


def open_model(
    model: str, on_event: OnEvent, before_fetching: BeforeFetching = lambda *_: None
) -> Model:
    """The model a user means by ``--model``: any family's by its path or published name.

    One that is to be fetched is announced by the SHA-256 that it may have; whoever is told so can
    stop it by an exception.

    Raises:
        UnavailableError: there is none, it cannot be fetched, or it is not what its name says.
    """
    path = locate(model)
    if path == embedded_model():
        return replace(inspect_esm2(path), head=embedded_head())
    found = find_published(model)
    if found is None:
        return recognise(path, on_event)
    family, published = found
    if missing := missing_files(model):
        before_fetching(model, published.digests)
        _fetch(model, missing, on_event)
    if not published.is_file:
        _check_folder(model, published, path)
    opened: Model = family.code.open_published(model, published, path)
    return opened


def verify_model(model: str) -> tuple[Model, str]:
    """Read every number of a model, and compare it with the published one. -> it, its SHA-256

    Raises:
        UnavailableError: it is damaged, or not what its name says.
    """
    if find_published(model) and (missing := missing_files(model)):
        place = locate(model)
        path = place if place.name == missing[0].name else place / missing[0].name
        raise UnavailableError(
            f"{printable(path)}: no such file",
            hint=f"fetch it with `virnucpro models download {model}`",
        )
    opened = open_model(model, lambda _: None)
    digest = opened.verify()
    check_weights(model, opened, digest)
    return opened, digest


def check_weights(name: str, model: Model, digest: str) -> None:
    """Refuse other weights under the name of a published model of one file.

    Without a SHA-256 on record, the file is compared by what is on record.

    Raises:
        UnavailableError: these are other weights.
    """
    found = find_published(name)
    if found is None or not found[1].is_file:
        return
    _, published = found
    if published.digests and digest not in published.digests:
        raise not_published(model.path, name, f"its SHA-256 is {digest}")
    if not published.digests:
        try:
            check_file(published.files[0], model.files[0])
        except UnavailableError as error:
            raise not_published(model.path, name, error) from error


# What is fetched


def missing_files(model: str) -> list[RemoteFile]:
    """The files of a published model that are not there; none of any other model."""
    found = find_published(model)
    if found is None:
        return []
    place, (_, published) = locate(model), found
    if published.is_file:
        return [] if place.exists() else list(published.files)
    return [file for file in published.files if not (place / file.name).is_file()]


def bytes_to_fetch(model: str) -> int:
    """Bytes of a named model, or of a bundle, that are to be fetched before it can be used."""
    if model in BUNDLES:
        has_head = bundled_head(model).exists()
        encoders = sum(map(bytes_to_fetch, BUNDLES[model].encoders))
        return encoders + (0 if has_head else BUNDLES[model].head.n_bytes or _HEAD_BYTES)
    found = find_published(model)
    if found is None:
        return 0
    family, published = found
    missing = missing_files(model)
    sizes = [file.n_bytes or family.code.footprint_of(published).file_bytes for file in missing]
    return sum(sizes)


def _fetch(model: str, missing: list[RemoteFile], on_event: OnEvent) -> None:
    """
    Raises:
        UnavailableError: a file cannot be fetched, or is not the published one.
    """
    found = find_published(model)
    assert found is not None, "what is missing is published"
    family, published = found
    if not published.is_file:
        for file in missing:
            fetch_file(file, place_of(model, published), on_event)
        return
    n_parameters = family.code.footprint_of(published).n_parameters
    file = replace(published.files[0], most_bytes=_MOST_BYTES_PER_PARAMETER * n_parameters)

    def check(fetched: Path) -> None:
        family.code.open_published(model, published, fetched)
        check_file(file, fetched)

    path = place_of(model, published)
    download(file, path, check, _fetching("the model", on_event))


def fetch_file(file: RemoteFile, folder: Path, on_event: OnEvent) -> Path:
    """Fetch a published file into a folder.

    Raises:
        UnavailableError: it cannot be fetched, or is not the published one.
    """
    path = folder / file.name
    download(file, path, partial(check_file, file), _fetching(file.name, on_event))
    return path


def fetch_head(bundle: str, on_event: OnEvent) -> tuple[Path, int]:
    """The published head of a bundle, fetched if need be, and the length of its chunks.

    Raises:
        UnavailableError: it cannot be fetched, or is another one.
    """
    head, path = BUNDLES[bundle].head, bundled_head(bundle)
    if not path.exists():
        fetch_file(head, path.parent, on_event)
    try:
        check_file(head, path)
    except UnavailableError as error:
        raise UnavailableError(
            f"{printable(path)} is not the published head of {bundle}: {error}",
            hint="delete it to fetch it again",
        ) from error
    return path, BUNDLES[bundle].chunk_size


def _fetching(name: str, on_event: OnEvent) -> Callable[[int, int], None]:
    return lambda n_bytes, total: on_event(Progress(f"fetching {name}", n_bytes, total, "bytes"))


def _check_folder(model: str, published: Published, folder: Path) -> None:
    """
    Raises:
        UnavailableError: a file is not the published one.
    """
    for file in published.files:
        try:
            check_file(file, folder / file.name)
        except UnavailableError as error:
            raise not_published(folder / file.name, model, error) from error
