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
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from virnucpro.config import Footprint, join_footprints
from virnucpro.devices import as_size, default_gpu_memory, describe_needs
from virnucpro.encoders.base import Model, recognise
from virnucpro.encoders.esm2.checkpoint import ESM2Shape
from virnucpro.encoders.esm2.family import ESM2Model, footprint_of, inspect_esm2, verify_esm2
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
from virnucpro.errors import OutputError, StorageError, UnavailableError, UsageError
from virnucpro.events import OnEvent, Progress
from virnucpro.files import (
    EMBEDDED_FOLDER,
    TEMPORARY,
    atomic,
    expanded,
    sha256,
    temporary_beside,
    writing,
)
from virnucpro.log import printable

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
    if here := _places_in_use(model):
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

    Without a SHA-256 on record, only shape and size are compared.

    Raises:
        UnavailableError: these are other weights.
    """
    if model in PUBLISHED:
        _as_published(model, checkpoint).check(sha256)


def _as_published(model: str, checkpoint: ESM2Model) -> ESM2Model:
    """The checkpoint as the published model of that name, whose shape and size it has."""
    published, n_bytes = PUBLISHED[model], checkpoint.n_bytes
    checkpoint = replace(checkpoint, published=model, accepted=published.digests)
    if checkpoint.shape != shape_of(model):
        raise checkpoint.other_weights(f"it has {checkpoint.shape}")
    if checkpoint.path.is_file() and published.n_bytes not in (None, n_bytes):
        raise checkpoint.other_weights(f"it has {n_bytes} bytes, not {published.n_bytes}")
    return checkpoint


def _check_md5(model: str, checkpoint: ESM2Model) -> None:
    """Refuse other weights for a model without a SHA-256 on record; reads the whole file."""
    published = PUBLISHED.get(model)
    if published is None or not published.md5:
        return
    md5 = hashlib.md5(usedforsecurity=False)
    with checkpoint.files[0].open("rb") as handle:
        while block := handle.read(_BLOCK):
            md5.update(block)
    if md5.hexdigest() != published.md5:
        checkpoint = replace(checkpoint, published=model)
        raise checkpoint.other_weights(f"its MD5 is {md5.hexdigest()}")


def describe_models() -> Iterator[str]:
    """A line for each model that has a name: what it needs, and where it lies or would lie."""
    footprints = {EMBEDDED: inspect_esm2(locate(EMBEDDED)).footprint}
    footprints |= {name: _published_footprint(name) for name in (*PUBLISHED, *FOLDERS)}
    footprints |= {
        name: join_footprints([footprints[encoder] for encoder in bundle.encoders])
        for name, bundle in BUNDLES.items()
    }
    footprints |= {name: inspect_esm2(locate(name)).footprint for name in imported_names()}
    for name, footprint in footprints.items():
        path = bundled_head(name) if name in BUNDLES else locate(name)
        n_bytes = bytes_to_fetch(name)
        state = f"not here, {as_size(n_bytes)} to fetch" if n_bytes else "here"
        size = f"{footprint.n_parameters / 1e6:,.1f} M"
        memory = f"{default_gpu_memory(footprint) / 1e9:.1f} GB"
        yield f"{name:<22}{size:>10} parameters  {memory:>7} of a GPU  {state}: {printable(path)}"


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


def describe_model(model: str) -> Iterator[str]:
    """Lines about a model, by its content, or by its name if it is yet to be fetched.

    Raises:
        UnavailableError: there is none, or it is damaged.
    """
    footprint: Footprint
    if model in BUNDLES:
        yield from _describe_bundle(model)
        return
    path = locate(model)
    if model in PUBLISHED and not path.exists():
        shape = shape_of(model)
        n_layers, width, encoder_id = shape.n_layers, shape.width, "told when it is here"
        footprint = footprint_of(shape, download_bytes(model))
        yield f"path        {printable(path)}, when it is fetched"
    elif model in FOLDERS and missing_files(model):
        folder = FOLDERS[model]
        n_layers, width, encoder_id = folder.n_layers, folder.width, "told when it is here"
        footprint = folder.footprint
        yield f"path        {printable(path)}, when it is fetched"
        yield from (f"file        {file.url}" for file in folder.files)
    else:
        there = open_model(model, lambda _: None)
        n_layers, width, encoder_id = there.n_layers, there.width, there.encoder_id
        footprint = there.footprint
        yield f"path        {printable(path)}"
    yield f"layers      {n_layers}"
    yield f"dimensions  {width}"
    yield f"parameters  {footprint.n_parameters / 1e6:,.1f} M"
    yield f"encoder id  {encoder_id}"
    yield from describe_needs(footprint)


def _describe_bundle(model: str) -> Iterator[str]:
    bundle = BUNDLES[model]
    n_bytes = bytes_to_fetch(model)
    yield f"encoders    {' and '.join(bundle.encoders)}"
    yield f"head        {printable(bundled_head(model))}, for chunks of {bundle.chunk_size} bases"
    yield f"to fetch    {as_size(n_bytes) if n_bytes else 'nothing: all of it is here'}"
    for encoder in bundle.encoders:
        if encoder in FOLDERS:
            yield from (f"file        {file.url}" for file in FOLDERS[encoder].files)
        else:
            yield f"file        {BASE_URL}/{encoder}.pt"
    yield f"file        {bundle.head.url}"
    footprints = map(_published_footprint, bundle.encoders)
    yield from describe_needs(join_footprints(list(footprints)))


def _published_footprint(name: str) -> Footprint:
    """The footprint of a published model that need not be here."""
    if name in FOLDERS:
        return FOLDERS[name].footprint
    return footprint_of(shape_of(name), download_bytes(name))


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
    _check_md5(model, checkpoint)
    return checkpoint, digest


def imported_names() -> list[str]:
    """The names of imported models, without those of published ones."""
    folder = imported_folder()
    files = [path for path in folder.glob("*") if not path.name.startswith(".")]
    models = [path for path in files if path.is_dir() or path.suffix == ".pt"]
    names = {path.name if path.is_dir() else path.stem for path in models}
    return sorted(names.difference(PUBLISHED, [EMBEDDED]))


def _places_in_use(name: str) -> list[Path]:
    """The places where a checkpoint of this name lies: a file, or a Hugging Face folder."""
    if not _NAME.fullmatch(name):
        return []
    folder = imported_folder()
    places = [hub_folder() / f"{name}.pt"] if name in PUBLISHED else [folder / f"{name}.pt"]
    return [path for path in (*places, folder / name) if path.exists()]


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
    is_taken = name == EMBEDDED or name in FOLDERS or name in BUNDLES
    if not _NAME.fullmatch(name) or is_taken or name.endswith(".pt"):
        raise UsageError(
            f"{printable(name)!r} cannot be the name of a model",
            hint="give another with --name: letters, digits, '_', '-' and '.'",
        )
    checkpoint = verify_esm2(source)
    in_use, digest = _places_in_use(name), checkpoint.sha256()
    try:
        check_published(name, checkpoint, digest)
        _check_md5(name, checkpoint)
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


def _download_esm2(model: str, path: Path, on_event: OnEvent, base_url: str) -> None:
    file = RemoteFile(
        url=f"{base_url}/{model}.pt",
        n_bytes=PUBLISHED[model].n_bytes,
        most_bytes=_MOST_BYTES_PER_PARAMETER * shape_of(model).n_parameters,
    )

    def check(fetched: Path) -> None:
        checkpoint = inspect_esm2(fetched)
        check_published(model, checkpoint, checkpoint.sha256())
        _check_md5(model, checkpoint)

    download(file, path, check, _fetching("the model", on_event))
