"""``virnucpro export``: write the vectors of a finished run in the layout of another program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from virnucpro.core.atomic_io import storage_errors
from virnucpro.core.errors import InputError, InputMissingError, OutputError, UsageError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import format_count, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import ExportFormatName
from virnucpro.core.safe_dir import SafeDir
from virnucpro.results.outputs import open_run_dir
from virnucpro.store.export_formats import (
    FORMATS,
    INDEX_NAME,
    RESTORE_INPUT,
    ExportFormat,
    ExportSource,
)
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.manifest import Manifest
from virnucpro.store.vectors import open_vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What to export, and where to."""

    folder: Path  # of the run
    format: ExportFormatName
    output: Path | None = None  # None: next to the run folder, with its name
    vectors: str | None = None  # an output of the run; None: the first
    force: bool = False  # replace an existing export

    @property
    def path(self) -> Path:
        """Return the path of the export."""
        if self.output is not None:
            return self.output
        folder = self.folder.absolute()
        return folder.with_name(folder.name + FORMATS[self.format].ending)


def open_finished_stores(folder: Path) -> tuple[FeatureStore, ...]:
    """Return the stores of a finished run, one per encoder.

    Raises:
        InputMissingError: the folder has no run, or the run is not finished or has no vectors.
    """
    run_dir = open_run_dir(folder)
    recipe = run_dir.read_run(hint="name a run folder").recipe
    if not (stores := run_dir.feature_stores(recipe)):
        raise InputMissingError(
            f"{printable(run_dir.root)} contains a run without vectors: {recipe.reader} called it",
            hint=with_options(
                "make them with `virnucpro extract`, or predict with a model and {keep_vectors:yes}"
            ),
        )
    run_dir.check_finished(recipe.command)
    return stores


def export_vectors(export: Export, on_event: EventHandler) -> str:
    """Export the vectors of a run. The output appears when it is complete.

    Returns:
        A line about what was written.

    Raises:
        UsageError: the format cannot hold these vectors, or the output is in the run folder.
        OutputError: the output exists.
        FeatureFileError: a feature file is missing or corrupt.
        InputMissingError, StorageError: the run or the output cannot be used.
    """
    layout = FORMATS[export.format]
    vectors = open_vectors(open_finished_stores(export.folder))
    if export.vectors is not None:
        vectors = vectors.output(export.vectors)
    if vectors.spec.kind not in layout.kinds:
        able = [name for name, other in FORMATS.items() if vectors.spec.kind in other.kinds]
        raise UsageError(
            f"{export.format} cannot have {printable(vectors.name)}, which is "
            f"{vectors.spec.kind.replace('_', ' ')}",
            hint=with_options(
                "use {format} {able}, or export another output with {vectors}",
                able=" or ".join(able),
            ),
        )
    manifest = open_run_dir(export.folder).read_run(hint="name a run folder")
    tree = _claim(export, layout)
    n_vectors = len(vectors)

    def on_vectors(n_done: int) -> None:
        on_event(Progress("exporting", n_done, n_vectors, "vectors", (n_done, n_vectors - n_done)))

    source = ExportSource(
        vectors=vectors,
        read_sequences=lambda: _read_sequences(manifest),
        on_vectors=on_vectors,
    )
    layout.write(source, tree, tree.root / export.path.name)
    return f"{printable(export.path)} has {format_count(n_vectors, 'vector')} ({vectors.name})"


def _claim(export: Export, layout: ExportFormat) -> SafeDir:
    """Return the folder of the output, after an existing output was deleted with ``force``.

    Raises:
        UsageError: the output is in the run folder, whose files belong to the run.
        OutputError: the output exists, or its folder does not.
    """
    path = export.path
    parent = path.parent.resolve()
    if export.folder.resolve() in (parent, *parent.parents):
        raise UsageError(
            f"{printable(path)} is in the run folder",
            hint=with_options("name a file or folder elsewhere with {output}"),
        )
    with storage_errors(path):
        parent.mkdir(parents=True, exist_ok=True)
    tree = SafeDir(parent)
    target = parent / path.name
    if not (target.exists() or target.is_symlink()):
        return tree
    if not export.force:
        raise OutputError(
            f"{printable(path)} already exists",
            hint=with_options("add {force} to replace it, or name another with {output}"),
        )
    if target.is_dir():
        _delete_parts(tree, target)
    return tree


def _delete_parts(tree: SafeDir, folder: Path) -> None:
    """Delete an earlier export with several files.

    Raises:
        OutputError: the folder contains other files.
    """
    tree.delete_files(folder, lambda name: name == INDEX_NAME or name.endswith(".safetensors"))
    tree.delete_folder(folder)
    if folder.exists():
        raise OutputError(
            f"{printable(folder)} has files that are not from an export",
            hint=with_options("move them away, or name another folder with {output}"),
        )


def _read_sequences(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the id and letters of each protein of the run's input.

    Raises:
        UsageError: the run embedded frames of nucleotides.
        InputError: an input has changed since the run.
    """
    if manifest.recipe.input_type != "protein":
        raise UsageError(
            "this format stores protein sequences, and the run embedded frames of nucleotides",
            hint="use uniprot-h5, safetensors or parquet",
        )
    try:
        for record in manifest.records(manifest.inputs):
            yield record.id, record.protein
    except InputError as error:
        raise InputError(error.message, hint=RESTORE_INPUT) from error
