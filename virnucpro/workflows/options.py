"""Options that ``predict`` and ``extract`` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from virnucpro.core.errors import ResumeError, UsageError
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import (
    Panel,
    build_options,
    count,
    option,
    reject_options,
)
from virnucpro.core.option_text import with_options
from virnucpro.core.paths import expand_path
from virnucpro.core.recipe import Command, InputType, Store
from virnucpro.engine.options import CacheOptions, EngineOptions
from virnucpro.models.options import ModelOptions

GeneticCode = Annotated[
    int,
    count(
        "Translate with this genetic code (NCBI number). Codes 1 and 11 give the same translation.",
        Panel.FILES,
    ),
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """An output folder in which an interrupted command can be resumed."""

    output_dir: Annotated[
        Path,
        option(
            with_options("Write results, the log, and the files for {resume} to this folder."),
            Panel.FILES,
            "--output-dir",
            "-o",
            metavar="DIR",
            show_default=False,
        ),
    ]
    resume: Annotated[
        bool,
        option(
            "Continue the run in DIR, and keep its finished work. Start one if none is there.",
            Panel.FILES,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class FolderOptions(OutputOptions):
    """A run folder."""

    force: Annotated[bool, option("Delete the results in DIR and start again.", Panel.FILES)] = (
        False
    )
    keep_intermediate: Annotated[
        bool, option("Keep chunks.fa and shards/ after the run.", Panel.FILES)
    ] = False
    argv: tuple[str, ...] = ()  # the command, for run.json and the log


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """The user's sequences and how to read them."""

    input: Annotated[
        tuple[Path, ...],
        option(
            "Read this FASTA or FASTQ file (plain, gz, bz2, xz or zst), folder, sample sheet (.tsv "
            "or .csv with the columns sample and path), or standard input (-). Repeatable.",
            Panel.FILES,
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
            Panel.FILES,
            metavar="TYPE",
        ),
    ] = "auto"
    min_length: Annotated[
        int,
        option(
            "Give records with fewer bases (proteins: residues) the status too_short. The scorer "
            "of predict needs at least 150 bases or 50 residues.",
            Panel.FILES,
            metavar="BASES",
            min=0,
        ),
    ] = 0
    genetic_code: GeneticCode = 11
    per_file: Annotated[
        bool, option("Also write the tables of each input file, in DIR/samples/NAME/.", Panel.FILES)
    ] = False
    strict: Annotated[
        bool,
        option(
            "Stop at the first unreadable input file, instead of skipping it.",
            Panel.FILES,
        ),
    ] = False
    rename_duplicates: Annotated[
        bool,
        option(
            "Number ids that occur twice in a file (id, id_2, ...), instead of skipping the file.",
            Panel.FILES,
        ),
    ] = False

    @property
    def known_type(self) -> InputType | None:
        """The type that the user named, or None if the input letters decide."""
        return None if self.input_type == "auto" else self.input_type


@dataclass(frozen=True, kw_only=True)
class RunOptions(CacheOptions, EngineOptions, ModelOptions, FolderOptions, SequenceOptions):
    """The options that ``predict`` and ``extract`` share."""

    command: ClassVar[Command]
    # Names of the options that ``run.json`` records: threshold options, and others that change
    # rows.
    threshold_options: ClassVar[tuple[str, ...]] = ()
    table_options: ClassVar[tuple[str, ...]]
    typed: tuple[str, ...] = ()  # names of options given on the command line, even at defaults

    add: Annotated[
        bool,
        option(
            with_options(
                "With {resume}, also add the inputs that the run in DIR does not have yet. Without "
                "{add}, such an input is an error."
            ),
            Panel.FILES,
        ),
    ] = False
    plan_only: Annotated[
        bool,
        option(
            "Only plan the run. `virnucpro work DIR` then runs its parts on any number of "
            "machines, and this command with --resume joins them.",
            Panel.CLUSTER,
        ),
    ] = False
    no_embed: Annotated[
        bool,
        option(
            "Stop with an error if vectors are missing, instead of embedding here; needs --resume.",
            Panel.CLUSTER,
        ),
    ] = False
    executor: Annotated[
        str,
        option(
            "Embed on this machine (local), on nodes that Parsl requests from a scheduler (parsl), "
            "or with an executor of this name from an installed package.",
            Panel.CLUSTER,
            metavar="NAME",
        ),
    ] = "local"
    executor_config: Annotated[
        Path | None,
        option(
            "Read the settings of Parsl's nodes from this YAML file: provider (local, slurm), "
            "max_blocks, walltime, ...",
            Panel.CLUSTER,
            metavar="FILE",
            show_default="one block on this machine",
        ),
    ] = None
    store: Annotated[
        Store,
        option(
            "Store vectors in this type. bfloat16 takes half the disk space and keeps 8 "
            "significant bits of each number. predict calls from the stored vectors.",
            Panel.MODEL,
        ),
    ] = "float32"
    report: Annotated[
        bool,
        option(
            "Write DIR/report.html, one page about the run that can be read offline.",
            Panel.FILES,
        ),
    ] = True

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)
        for name in ("plan_only", "no_embed"):
            if getattr(self, name):
                reject_options(
                    self, ("cache",), with_options(f"with {{{name}}}, where nothing is embedded")
                )
        if self.plan_only:
            reject_options(self, ("no_embed",), with_options("with {plan_only}"))
        if not self.resume:
            reject_options(
                self, ("no_embed",), with_options("without {resume}: a new run has no vectors yet")
            )
            reject_options(
                self, ("add",), with_options("without {resume}, which continues the run")
            )
        if self.executor == "local":
            reject_options(self, ("executor_config",), with_options("without {executor:parsl}"))
        self.check_type(self.input_type)

    @property
    def embeds_here(self) -> bool:
        return not (self.plan_only or self.no_embed) and self.executor == "local"

    @property
    def asks_for_vectors(self) -> bool:
        """True if the options make the run embed."""
        return True

    def check_without_engine(self) -> None:
        """Reject options that have no effect if nothing is embedded.

        Raises:
            UsageError: such an option was given.
        """
        reject_options(
            self,
            ("keep_intermediate", "store"),
            "where nothing is embedded",
            with_options("add {model}"),
        )

    def check_type(self, input_type: str) -> None:
        """Reject options that have no effect on input of this type.

        Raises:
            UsageError: such an option was given.
        """
        if input_type == "protein":
            reject_options(self, ("chunk_size", "genetic_code"), "on proteins, which are not cut")


def record_options(options: RunOptions) -> dict[str, dict[str, object]]:
    """Return the options that change rows, for ``run.json``. Threshold options come separately."""
    return {
        "cut": _recorded_values(options, options.threshold_options),
        "tables": _recorded_values(options, options.table_options),
    }


def _recorded_values(options: RunOptions, names: Iterable[str]) -> dict[str, object]:
    """Return option values by name, with absolute paths."""
    values = {name: getattr(options, name) for name in names}
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = str(expand_path(value).absolute())
        elif name == "model" and value is not None:
            values[name] = name_anywhere(value)
    return values


def name_anywhere(model: str) -> str:
    """Return a model as ``--model`` names it, with an absolute path if it is a path."""
    return model if Path(model).name == model else str(expand_path(model).absolute())


_Options = TypeVar("_Options", bound=RunOptions)


def restore_options(kind: type[_Options], folder: Path, stored: Mapping[str, Any]) -> _Options:
    """Read the options that change rows from ``run.json``.

    Raises:
        ResumeError: the options are missing.
    """
    try:
        recorded = {**stored["tables"], **stored["cut"], "output_dir": str(folder)}
        values = {name: value for name, value in recorded.items() if value is not None}
        return build_options(kind, {**values, "input": [str(folder)]})
    except (KeyError, TypeError, UsageError) as error:
        raise ResumeError(
            f"{printable(folder)}: run.json does not say how the tables are made",
            hint=with_options(
                "rewrite it: repeat the command of the run with {resume}, and with {plan_only} if "
                "the run was only planned"
            ),
        ) from error
