"""Implement ``virnucpro models``: describe, verify and import models.

Imported files are verified, then copied to the path for their name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from virnucpro.core.atomic_io import (
    TEMPORARY,
    atomic_path,
    hash_file,
    storage_errors,
    temporary_path,
)
from virnucpro.core.errors import (
    InputMissingError,
    OutputError,
    StorageError,
    UnavailableError,
    UsageError,
)
from virnucpro.core.logging import format_bytes, printable
from virnucpro.core.paths import expand_path
from virnucpro.core.recipe import Footprint, join_footprints
from virnucpro.models.base import Model, identify_model
from virnucpro.models.download import check_file
from virnucpro.models.lookup import (
    NamedModel,
    all_model_names,
    bundled_head,
    bytes_to_fetch,
    find_model,
    find_published,
    imported_folder,
    imported_names,
    is_name,
    model_paths,
    open_model,
    published_files,
)
from virnucpro.models.names import DEFAULT_MODEL, TINY_MODEL, current_name
from virnucpro.models.registry import BUNDLES, RemoteFile


def describe_models(*, as_json: bool, hugging_face: Path | None = None) -> Iterator[str]:
    """Yield a line for each named model: its requirements, and its path if it is installed."""
    models = (_model_details(name, hugging_face) for name in all_model_names())
    if as_json:
        yield json.dumps(list(models), indent=2)
        return
    yield _model_line(
        ("name", "parameters", "dimensions", "GPU memory", "default", "installed", "path or size")
    )
    for facts in models:
        memory = f"{format_bytes(facts['least_gpu_memory'])} to {format_bytes(facts['gpu_memory'])}"
        place = printable(facts["path"])
        if not facts["installed"]:
            place = f"{format_bytes(facts['to_fetch'])} to download"
        elif facts["notice"]:
            place += f" ({facts['notice']})"
        installed = "built-in" if facts["kind"] == "embedded" else _yes_or_no(facts["installed"])
        parameters = f"{facts['parameters'] / 1e6:,.1f} M"
        default = "default" if facts["is_default"] else ""
        dim = f"{facts['dim']:,}"
        yield _model_line((facts["name"], parameters, dim, memory, default, installed, place))


def _model_line(cells: tuple[str, str, str, str, str, str, str]) -> str:
    name, parameters, dim, memory, default, installed, place = cells
    sizes = f"{name:<22}{parameters:>10}{dim:>12}  {memory:<19}"
    return f"{sizes} {default:<8} {installed:<10} {place}"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _model_details(name: str, hugging_face: Path | None) -> dict[str, Any]:
    """Collect the details of a named model, as in ``models list --json``. Sizes are in bytes."""
    encoders = BUNDLES[name].encoders if name in BUNDLES else ()
    sizes = [_measure_size(each) for each in encoders or (name,)]
    footprint = join_footprints([size.footprint for size in sizes])
    least = footprint.gpu_memory(footprint.min_tokens)  # computed, without CUDA's own memory
    to_fetch = bytes_to_fetch(name, hugging_face)
    return {
        "name": name,
        "kind": _model_kind(name),
        "notice": " ".join(size.notice for size in sizes).strip(),
        "parameters": footprint.n_parameters,
        "dim": sum(size.dim for size in sizes),  # for a bundle, of the concatenated vector
        "is_default": name == DEFAULT_MODEL,  # used where a model is needed and none is named
        "installed": not to_fetch,
        "least_gpu_memory": least,
        "gpu_memory": footprint.gpu_memory(),  # with less free memory, batches are smaller
        "to_fetch": to_fetch,
        # The file or folder, even before a download. For a bundle, its head.
        "path": str(bundled_head(name) if encoders else find_model(name, hugging_face)),
        "encoders": encoders,
    }


def _model_kind(name: str) -> str:
    if name == TINY_MODEL:
        return "embedded"
    if name in BUNDLES:
        return "bundle"
    return "imported" if name in imported_names() else "published"


def describe_model(model: str, hugging_face: Path | None = None) -> tuple[list[str], Path | None]:
    """Describe a model by its content, or by its name before a download.

    Returns:
        The lines, and the head next to the model, if any.

    Raises:
        UnavailableError: the model does not exist, or is damaged.
    """
    if model in BUNDLES:
        return list(_describe_bundle(model)), None
    path = find_model(model, hugging_face)
    found = find_published(model, hugging_face)
    if found and found.missing:
        published = found.published
        head = None
        facts = (published.n_layers, published.dim, found.footprint, "known once fetched")
        lines = [f"path        {printable(path)}, once fetched"]
        lines += _addresses(model)
    else:
        there = open_model(model, lambda _: None, hugging_face)
        head = there.head
        facts = (there.n_layers, there.dim, there.footprint, there.encoder_id)
        lines = [f"path        {printable(path)}"]
        lines += [f"note        {there.notice}"] if there.notice else []
        lines += [f"includes    {', '.join(there.includes)}"] if there.includes else []
    n_layers, dim, footprint, encoder_id = facts
    lines += [
        f"layers      {n_layers}",
        f"dimensions  {dim}",
        f"parameters  {footprint.n_parameters / 1e6:,.1f} M",
        f"encoder id  {encoder_id}",
        *_describe_needs(footprint),
    ]
    return lines, head


def _describe_bundle(model: str) -> Iterator[str]:
    bundle = BUNDLES[model]
    n_bytes = bytes_to_fetch(model)
    yield f"encoders    {' and '.join(bundle.encoders)}"
    yield f"head        {printable(bundled_head(model))}, for chunks of {bundle.chunk_size} bases"
    yield f"to fetch    {format_bytes(n_bytes) if n_bytes else 'nothing: all of it is here'}"
    yield from _addresses(model)
    sizes = [_measure_size(name).footprint for name in bundle.encoders]
    yield from _describe_needs(join_footprints(sizes))


def _addresses(name: str) -> list[str]:
    return [f"file        {file.url}" for file, _ in published_files(name)]


class _Size(NamedTuple):
    """The size of a model and its vectors."""

    footprint: Footprint
    dim: int
    notice: str = ""


def _measure_size(name: str) -> _Size:
    """Measure a model. A published model need not be downloaded."""
    if found := find_published(name):
        return _Size(found.footprint, found.published.dim)
    model = open_model(name, lambda _: None)
    return _Size(model.footprint, model.dim, model.notice)


def verify_model(model: str, hugging_face: Path | None = None) -> tuple[Model, str]:
    """Read every number in a model and compare it with the published one.

    Returns:
        The model, and its SHA-256.

    Raises:
        UnavailableError: the model is damaged, or differs from the published one.
    """
    found = find_published(model, hugging_face)
    if found and (missing := found.missing):
        raise UnavailableError(
            f"{printable(missing[0][1])}: no such file",
            hint=f"fetch it with `virnucpro models download {model}`",
        )
    opened = open_model(model, lambda _: None, hugging_face)
    return opened, found.verify(opened) if found else opened.verify()


# Import


def _describe_needs(footprint: Footprint) -> list[str]:
    """Describe the disk space and memory for a model, computed for half precision."""
    most = footprint.gpu_memory()
    least = footprint.gpu_memory(footprint.min_tokens)
    converted = footprint.converted_bytes
    return [
        f"disk        {format_bytes(footprint.file_bytes + converted)}"
        + (f", including {format_bytes(converted)} for the converted model" if converted else ""),
        f"GPU memory  {format_bytes(most)} for the default batches, {format_bytes(least)} at least",
        f"RAM         {format_bytes(footprint.weight_bytes('bf16') + (1 << 29))} for a CPU worker",
    ]


def download_models(source: str, name: str | None, folder: Path | None) -> tuple[str, list[str]]:
    """Import a model, or, from a folder, the files of the published model called ``source``.

    Without ``name``, the model is named after its file or folder. Raises as ``import_model`` and
    ``import_files``.

    Returns:
        The name for ``--model``, and lines with the paths.
    """
    if folder is not None:
        paths = import_files(source, folder)
        return source, [f"{printable(path.name)} is at {printable(path)}" for path in paths]
    path = expand_path(source)
    if name is None:
        name = path.name if path.is_dir() else path.stem
    model, digest = import_model(path, name)
    return name, [f"{name} is at {printable(model.path)}, sha256 {digest}"]


def import_model(source: Path, name: str) -> tuple[Model, str]:
    """Verify a model and copy it to the path for its name. From a folder, copy only model files.

    Returns:
        The model, and its SHA-256.

    Raises:
        UsageError: the name is invalid.
        UnavailableError: the source is not a model, is damaged, contains code, or is another
            published model.
        OutputError: another model has the name.
    """
    found = _publication(name)
    model = identify_model(source, lambda _: None)
    if not model.files or model.path != source:
        raise UnavailableError(
            f"{printable(source)} is not imported: models of this kind are used where they are",
            hint=f"name it by its path: --model {printable(source.absolute())}",
        )
    hashes = _hashes(model.files)
    digest = found.verify(found.open(source)) if found else model.verify()
    if in_use := model_paths(name):
        return _is_same_file(name, in_use[0], hashes), digest
    if source.is_dir():
        target = imported_folder() / name
    else:
        target = found.home if found else imported_folder() / f"{name}.pt"
    _copy(model, target, hashes)
    for companion in model.companions:
        copy = target.with_name(target.stem + companion.name.removeprefix(source.stem))
        with storage_errors(copy), atomic_path(copy) as temporary:
            _copy_file(companion, temporary, copy)
    return identify_model(target, lambda _: None), digest


def _is_same_file(name: str, path: Path, hashes: Sequence[str]) -> Model:
    """Compare the existing model with this name with the files to import.

    Raises:
        OutputError: a model with other files has this name.
    """
    there = identify_model(path, lambda _: None)
    if _hashes(there.files) != hashes:
        raise OutputError(
            f"another model already has the name {name}: {printable(path)}",
            hint="give another name with --name, or delete that one first",
        )
    return there


def _hashes(files: Sequence[Path]) -> list[str]:
    return [hash_file(file) for file in files]


def _publication(name: str) -> NamedModel | None:
    """Return the published model with this name, if any.

    Raises:
        UsageError: an imported model cannot have this name.
    """
    is_taken = current_name(name) == TINY_MODEL or len(published_files(name)) > 1
    if not is_name(name) or is_taken or name.endswith(".pt"):
        raise UsageError(
            f"{printable(name)!r} cannot be the name of a model",
            hint="give another with --name: letters, digits, '_', '-' and '.'",
        )
    return find_published(name)


def import_files(name: str, folder: Path) -> list[Path]:
    """Copy the files of a published model or bundle from a folder, by name, and verify them.

    The folder may lack files that were imported before. Nothing is downloaded.

    Raises:
        UsageError: no published model with several files has this name.
        InputMissingError: files are missing.
        UnavailableError: a file differs from the published one.
    """
    files = published_files(name)
    if len(files) < 2:
        several = [one for one in all_model_names() if len(published_files(one)) > 1]
        raise UsageError(
            f"--from is for {', '.join(several)}, not for {printable(name)}",
            hint="to import one checkpoint: `virnucpro models import PATH --name NAME`",
        )
    given = [(file, place) for file, place in files if (folder / file.name).exists()]
    absent = [part for part in files if part not in given and not part[1].exists()]
    if absent:
        raise InputMissingError(
            f"{printable(folder)} lacks {', '.join(file.name for file, _ in absent)}",
            hint=f"`virnucpro models info {name}` says where each file is published",
        )
    for file, place in given:
        _import_file(file, folder / file.name, place)
    return [place for _, place in given]


def _import_file(file: RemoteFile, source: Path, target: Path) -> None:
    """Copy a published file from the user's folder to its path.

    Raises:
        UnavailableError: the file differs from the published one.
        OutputError, StorageError: the copy cannot be written.
    """
    with storage_errors(target, target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary:
        _copy_file(source, temporary, target)
        try:
            check_file(file, temporary)
        except UnavailableError as error:
            raise UnavailableError(
                f"{printable(source)} is not the published {file.name}: {error}",
                hint=f"fetch it from {file.url}",
            ) from error


def _copy(model: Model, target: Path, hashes: Sequence[str]) -> None:
    """Copy a model file or folder. ``target`` appears when the copy is complete.

    Raises:
        StorageError: the copy differs from the content that was read before.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    is_folder = model.path.is_dir()
    with _new_folder(target) if is_folder else atomic_path(target) as copy:
        copies = [copy / file.name for file in model.files] if is_folder else [copy]
        for file, to in zip(model.files, copies, strict=True):
            _copy_file(file, to, target)
        if _hashes(copies) != hashes:
            raise StorageError(
                f"the copy in {printable(target.parent)} is not what was copied",
                hint="check the disk, or wait until the file is complete, then import it again",
            )


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` if the block succeeds."""
    for leftover in target.parent.glob(f".{target.name}.*{TEMPORARY}"):
        shutil.rmtree(leftover)  # left by a killed import
    copy = temporary_path(target)
    copy.mkdir()
    try:
        yield copy
        copy.rename(target)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _copy_file(source: Path, copy: Path, target: Path) -> None:
    with storage_errors(target, source, copy):  # errors name both paths
        shutil.copyfile(source, copy)
