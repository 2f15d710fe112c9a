"""The options that commands of several rooms share: name, type, default and help text of each.

A class holds the options of one command, or of a duty that several share. ``cli.command`` makes the
command line of it, ``stories.api`` and the tests make it themselves, and what is asked for is read
from it where it is used. A field without an option of typer is on no command line: whoever calls
fills it. The classes of a room's own commands stand in its ``options``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from virnucpro.ground.config import InputType
from virnucpro.ground.option_fields import refuse

FILES, MODEL, DEVICES = "Files", "Model", "Devices"  # panels of --help


def option(help: str, panel: str | None = None, *names: str, **more: Any) -> Any:  # noqa: ANN401
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def folder(help: str) -> Any:  # noqa: ANN401 - as typer has it
    return typer.Argument(metavar="DIR", help=help)


def count(help: str, panel: str | None = None, **more: Any) -> Any:  # noqa: ANN401 - as typer has it
    return option(help, panel, metavar="N", **more)


GeneticCode = Annotated[
    int, count("Translate with this genetic code (NCBI number); 1 and 11 translate alike.", FILES)
]


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """The output of a command on the console; options of the command line alone."""

    quiet: Annotated[bool, option("Show only warnings and the summary.", None, "--quiet", "-q")] = (
        False
    )
    verbose: Annotated[
        bool, option("Show the whole log on the console.", None, "--verbose", "-v")
    ] = False
    log_file: Annotated[
        Path | None, option("Also write the log to this file.", metavar="FILE", show_default=False)
    ] = None

    def __post_init__(self) -> None:
        if self.quiet:
            refuse(self, ("verbose",), "with --quiet")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """A folder for results, in which a killed command goes on."""

    output_dir: Annotated[
        Path,
        option(
            "Write results, the log, and what a resume needs to this folder.",
            FILES,
            "--output-dir",
            "-o",
            metavar="DIR",
            show_default=False,
        ),
    ]
    resume: Annotated[bool, option("Resume the run in DIR; finished work is kept.", FILES)] = False


@dataclass(frozen=True, kw_only=True)
class FolderOptions(OutputOptions):
    """A run folder."""

    force: Annotated[bool, option("Delete the results in DIR and start anew.", FILES)] = False
    keep_intermediate: Annotated[
        bool, option("Keep chunks.fa and shards/ after the run.", FILES)
    ] = False
    argv: tuple[str, ...] = ()  # the command, for run.json and the log


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """A device, and the precision of matrix products on it."""

    gpus: Annotated[
        str | None,
        option(
            "Use these of the visible GPUs: numbers (0,1,2) or UUIDs.",
            DEVICES,
            metavar="all|LIST",
            show_default="all",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cuda", "cpu", "mps"], option("Use this kind of device.", DEVICES)
    ] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32", "fp8"],
        option(
            "Compute matrix products in this precision; auto: bf16 where the device has it, fp16 "
            "on older GPUs with tensor cores, else fp32. fp8 is for ESM-2 3B and 15B on GPUs of "
            "compute capability 8.9 and newer: weights take half the memory, and vectors are less "
            "exact (`virnucpro models check` shows by how much).",
            DEVICES,
        ),
    ] = "auto"
    cuda_visible_devices: str | None = None  # the variable of the environment


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(ComputeOptions):
    """The devices of a run."""

    workers: Annotated[
        int | None,
        count(
            "Use this number of processes, of one core each: to embed with --device cpu; to score "
            "without a model; to make shards and tables where GPUs embed.",
            DEVICES,
            show_default="as many as cores and memory allow",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Sequences of the user, and how to read them."""

    input: Annotated[
        tuple[Path, ...],
        option(
            "Read this FASTA or FASTQ file (plain, gz, bz2, xz or zst), folder, sample sheet (.tsv "
            "or .csv with the columns sample and path), or standard input (-). Repeatable.",
            FILES,
            "--input",
            "-i",
            metavar="FILE",
            show_default=False,
        ),
    ]
    input_type: Annotated[
        Literal["auto", "nucleotide", "protein"],
        option(
            "Read the sequences as nucleotide or protein; auto: decide by their letters.",
            FILES,
            metavar="TYPE",
        ),
    ] = "auto"
    min_length: Annotated[
        int,
        option(
            "Give records shorter than this (proteins: in residues) the status too_short. The "
            "scorer "
            "needs at least 150 bases, or 50 residues.",
            FILES,
            metavar="BASES",
            min=0,
        ),
    ] = 0
    genetic_code: GeneticCode = 11
    per_file: Annotated[
        bool, option("Also write the tables of each input file, in DIR/samples/NAME/.", FILES)
    ] = False
    strict: Annotated[
        bool,
        option(
            "Stop at the first unreadable input file, instead of skipping it.",
            FILES,
        ),
    ] = False
    rename_duplicates: Annotated[
        bool,
        option(
            "Number ids that occur twice in a file (id, id_2, ...), instead of skipping the file.",
            FILES,
        ),
    ] = False

    @property
    def known_type(self) -> InputType | None:
        """The type that the user named; None if the letters of the input decide."""
        return None if self.input_type == "auto" else self.input_type
