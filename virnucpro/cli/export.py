"""The command ``export``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from virnucpro.cli.command import ConsoleOptions, command
from virnucpro.cli.console import loading, print_lines, show_progress
from virnucpro.cli.exit_codes import exit_on_error
from virnucpro.core.option_schema import folder, option
from virnucpro.core.recipe import ExportFormatName


@dataclass(frozen=True, kw_only=True)
class _ExportOptions:
    """A finished run, and the layout to export."""

    folder: Annotated[Path, folder("Run folder.")]
    format: Annotated[
        ExportFormatName,
        option(
            "Write this layout: uniprot-h5, safetensors, parquet, anndata, skbio, npz or pt.",
            metavar="FORMAT",
        ),
    ]
    output: Annotated[
        Path | None,
        option(
            "Write this file, or for safetensors this folder.",
            None,
            "--output",
            "-o",
            metavar="PATH",
            show_default="next to DIR, with its name",
        ),
    ] = None
    vectors: Annotated[
        str | None,
        option(
            "Export this output of the run, such as mean_layer33.",
            metavar="NAME",
            show_default="the first",
        ),
    ] = None
    force: Annotated[bool, option("Replace an existing export.")] = False


@command(_ExportOptions, ConsoleOptions)
def export(options: _ExportOptions, console: ConsoleOptions) -> None:
    """Write the vectors of a finished run in the layout of another program.

    Every feature file is verified. The output appears when it is complete. Nothing is embedded
    again, and the run folder is not changed.

    Example: virnucpro export embeddings/ --format parquet

    One dataset per protein, as UniProt, biotrainer and protspace read it: virnucpro export
    embeddings/ --format uniprot-h5 -o embeddings.h5

    Parts of equal size for training: virnucpro export embeddings/ --format safetensors -o parts/
    """
    with exit_on_error():
        with loading(console):
            from virnucpro.store.hdf5_check import check_connector
            from virnucpro.workflows.export import Export, export_vectors

        check_connector(os.environ.get("HDF5_VOL_CONNECTOR"))
        request = Export(
            folder=options.folder,
            format=options.format,
            output=options.output,
            vectors=options.vectors,
            force=options.force,
        )
        with show_progress(console, is_one_stage=True) as events:
            line = export_vectors(request, events)
        print_lines([line], console.quiet)
