"""Named checkpoints: where they lie, and how they get there.

One lies in this package, with a head for it. The published ones are fair-esm's, kept in the folder
that torch hub uses, so that one download serves every program; those of other families are folders,
which lie beside it. Others are brought by file, and lie in a folder of ours there. Nothing is
fetched unless a name was asked for and is not there.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from virnucpro.encoders.base import Model, recognise
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.family import ESM2Model, inspect_esm2, verify_esm2
from virnucpro.encoders.fetch import OnBytes, download, git_blob
from virnucpro.encoders.published import (
    BASE_URL,
    BUNDLES,
    EMBEDDED,
    FOLDERS,
    NAMES,
    PUBLISHED,
    RemoteFile,
)
from virnucpro.ground.errors import UnavailableError, UsageError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.files import (
    EMBEDDED_FOLDER,
    expanded,
    sha256,
)
from virnucpro.ground.log import printable

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_BLOCK = 1 << 20
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


def shape_of(name: str) -> ESM2Shape:
    """The shape of a published model."""
    published = PUBLISHED[name]
    return ESM2Shape(published.n_layers, published.dim, published.n_heads)


def download_bytes(name: str) -> int:
    """Size of a published checkpoint; half precision is assumed where none is on record."""
    return PUBLISHED[name].n_bytes or 2 * shape_of(name).n_parameters


def locate(model: str) -> Path:
    """The path of the checkpoint that ``--model`` names; it need not be there before the download.

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
    if model in FOLDERS:
        return published_folder() / model
    if model in BUNDLES:
        names = " and ".join(BUNDLES[model].encoders)
        raise UsageError(
            f"{model} is not one model, but {names} with a head",
            hint="it is for predict, extract and evaluate; here name one of these models",
        )
    if here := places_in_use(model):
        return here[0]
    if model in PUBLISHED:
        return hub_folder() / f"{model}.pt"
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
    names = {name.lower(): name for name in (*NAMES, *imported_names())}
    word = word.lower().removesuffix(".pt")
    close = [name for name in names if word in name] if word else []
    close = close if len(close) == 1 else difflib.get_close_matches(word, names, n=1)
    if close:
        return f"did you mean {names[close[0]]}? `virnucpro models list` shows all names"
    return f"the names are {', '.join(names.values())}; a path has a separator: ./model.pt"


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
    if model in FOLDERS:
        if missing_files(model):
            before_fetching(model, frozenset())
        complete_folder(model, on_event)
    has_family = Path(model).name != model or model in FOLDERS
    if has_family and (recognised := recognise(path, on_event)):
        return recognised
    if model in PUBLISHED and not path.exists():
        before_fetching(model, PUBLISHED[model].digests)
    checkpoint = find_checkpoint(model, on_event)
    return replace(checkpoint, head=embedded_head()) if path == embedded_model() else checkpoint


def find_checkpoint(
    model: str, on_event: OnEvent = lambda _: None, base_url: str = BASE_URL
) -> ESM2Model:
    """The ESM-2 a user means by ``--model``, fetched if need be.

    Raises:
        UnavailableError: there is none, it cannot be fetched, or it is not what its name says.
    """
    path = locate(model)
    if model in PUBLISHED and not path.exists():
        _download_esm2(model, path, on_event, base_url)
    checkpoint = inspect_esm2(path)
    return _as_published(model, checkpoint) if model in PUBLISHED else checkpoint


def missing_files(model: str) -> list[RemoteFile]:
    """The files of a published folder that are not there."""
    return [file for file in FOLDERS[model].files if not (locate(model) / file.name).is_file()]


def complete_folder(model: str, on_event: OnEvent) -> None:
    """Fetch what is missing of a published folder, and check what is there.

    Raises:
        UnavailableError: a file cannot be fetched, or is not the published one.
    """
    for file in missing_files(model):
        fetch_file(file, locate(model), on_event)
    for file in FOLDERS[model].files:
        path = locate(model) / file.name
        try:
            check_file(file, path)
        except UnavailableError as error:
            raise UnavailableError(
                f"{printable(path)} is not that of the published {model}: {error}",
                hint="delete it to fetch it again; name a model of your own by its path",
            ) from error


def fetch_file(file: RemoteFile, folder: Path, on_event: OnEvent) -> Path:
    """Fetch a published file into a folder.

    Raises:
        UnavailableError: it cannot be fetched, or is not the published one.
    """
    path = folder / file.name
    download(file, path, partial(check_file, file), _fetching(file.name, on_event))
    return path


def _fetching(name: str, on_event: OnEvent) -> OnBytes:
    return lambda n_bytes, total: on_event(Progress(f"fetching {name}", n_bytes, total, "bytes"))


def check_file(file: RemoteFile, path: Path) -> None:
    """Refuse another file than the published one; all of it is read.

    Raises:
        UnavailableError: it is another one.
    """
    n_bytes = path.stat().st_size
    if file.n_bytes not in (None, n_bytes):
        raise UnavailableError(f"it has {n_bytes} bytes, not {file.n_bytes}")
    if file.sha256 and (digest := sha256(path)) != file.sha256:
        raise UnavailableError(f"its SHA-256 is {digest}")
    if file.git_blob and (digest := git_blob(path)) != file.git_blob:
        raise UnavailableError(f"its id in git is {digest}")


def check_published(model: str, checkpoint: ESM2Model, sha256: str) -> None:
    """Refuse other weights under the name of a published model.

    Without a SHA-256 on record, shape, size and the MD5 of the whole file are compared.

    Raises:
        UnavailableError: these are other weights.
    """
    if model not in PUBLISHED:
        return
    published = _as_published(model, checkpoint)
    published.check(sha256)
    if recorded := PUBLISHED[model].md5:
        md5 = hashlib.md5(usedforsecurity=False)
        with checkpoint.files[0].open("rb") as handle:
            while block := handle.read(_BLOCK):
                md5.update(block)
        if md5.hexdigest() != recorded:
            raise published.other_weights(f"its MD5 is {md5.hexdigest()}")


def _as_published(model: str, checkpoint: ESM2Model) -> ESM2Model:
    """The checkpoint as the published model of that name, whose shape and size it has."""
    published, n_bytes = PUBLISHED[model], checkpoint.n_bytes
    checkpoint = replace(checkpoint, published=model, accepted=published.digests)
    if checkpoint.shape != shape_of(model):
        raise checkpoint.other_weights(f"it has {checkpoint.shape}")
    if checkpoint.path.is_file() and published.n_bytes not in (None, n_bytes):
        raise checkpoint.other_weights(f"it has {n_bytes} bytes, not {published.n_bytes}")
    return checkpoint


def bundled_head(bundle: str) -> Path:
    """The place of the published head of a bundle."""
    return published_folder() / bundle / BUNDLES[bundle].head.name


def bytes_to_fetch(model: str) -> int:
    """Bytes of a named model, or of a bundle, that are to be fetched before it can be used."""
    if model in BUNDLES:
        has_head = bundled_head(model).exists()
        encoders = sum(map(bytes_to_fetch, BUNDLES[model].encoders))
        return encoders + (0 if has_head else BUNDLES[model].head.n_bytes or _HEAD_BYTES)
    if model in FOLDERS:
        return sum(file.n_bytes or 0 for file in missing_files(model))
    return 0 if locate(model).exists() else download_bytes(model)


def verify_model(model: str) -> tuple[Model, str]:
    """Read every number of a model, and compare it with the published one. -> it, its SHA-256

    Raises:
        UnavailableError: it is damaged, or not what its name says.
    """
    if model in FOLDERS:
        if missing := missing_files(model):
            raise UnavailableError(
                f"{printable(locate(model) / missing[0].name)}: no such file",
                hint=f"fetch it with `virnucpro models download {model}`",
            )
        opened = open_model(model, lambda _: None)
        return opened, opened.prepare("fp32", None, lambda _: None)[1]
    checkpoint = verify_esm2(locate(model))
    digest = checkpoint.sha256()
    check_published(model, checkpoint, digest)
    return checkpoint, digest


def imported_names() -> list[str]:
    """The names of imported models, without those of published ones."""
    folder = imported_folder()
    files = [path for path in folder.glob("*") if not path.name.startswith(".")]
    models = [path for path in files if path.is_dir() or path.suffix == ".pt"]
    names = {path.name if path.is_dir() else path.stem for path in models}
    return sorted(names.difference(PUBLISHED, [EMBEDDED]))


def is_name(text: str) -> bool:
    """True if a model could be called so."""
    return _NAME.fullmatch(text) is not None


def places_in_use(name: str) -> list[Path]:
    """The places where a checkpoint of this name lies: a file, or a Hugging Face folder."""
    if not is_name(name):
        return []
    folder = imported_folder()
    places = [hub_folder() / f"{name}.pt"] if name in PUBLISHED else [folder / f"{name}.pt"]
    return [path for path in (*places, folder / name) if path.exists()]


def _download_esm2(model: str, path: Path, on_event: OnEvent, base_url: str) -> None:
    file = RemoteFile(
        url=f"{base_url}/{model}.pt",
        n_bytes=PUBLISHED[model].n_bytes,
        most_bytes=_MOST_BYTES_PER_PARAMETER * shape_of(model).n_parameters,
    )

    def check(fetched: Path) -> None:
        checkpoint = inspect_esm2(fetched)
        check_published(model, checkpoint, checkpoint.sha256())

    download(file, path, check, _fetching("the model", on_event))
