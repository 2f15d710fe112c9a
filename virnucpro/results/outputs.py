"""Describe the outputs that a run writes record by record: their files and columns.

``RunOutput`` describes them, and ``OUTPUTS`` lists them by command. The run folder protects, clears
and verifies them by name. ``call_rows`` and ``embedding_rows`` make the rows, as text, in any
process. A new output needs a description, a place in ``OUTPUTS`` and a function for its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from virnucpro.core.atomic_io import open_regular_file
from virnucpro.core.errors import InputError
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Command
from virnucpro.results.names import read_tsv_field
from virnucpro.store import run_dir
from virnucpro.store.run_dir import RECORD_TABLES, OutputNames, RunDir

Row = TypeVar("Row")
ORIGIN = "the origin"  # part of a region note whose other words differ between versions


@dataclass(frozen=True, slots=True, eq=False)
class OutputFile:
    """One output of a run: a text file, with or without a header line."""

    file: str
    about: str = ""  # description on the page; "": not listed there
    columns: tuple[str, ...] = ()
    per_file: bool = True  # --per-file also writes it for each input file
    is_optional: bool = False  # written only if it has a line; else an old file is deleted
    is_packed: bool = False  # compressed with gzip
    is_sorted: bool = False  # by the first column
    later_columns: frozenset[str] = frozenset()  # those that tables from earlier versions may lack
    # name of a column in tables from earlier versions -> present name
    old_names: Mapping[str, str] = field(default_factory=dict)

    def present_columns(self, header: str) -> tuple[str, ...] | None:
        """Return the present names for the columns in a header line, None for another table."""
        names = header.rstrip("\r\n").split("\t")
        columns = tuple(self.old_names.get(name, name) for name in names)
        missing = self.later_columns.difference(columns)
        expected = tuple(name for name in self.columns if name not in missing)
        return columns if columns == expected else None

    def rows_at(
        self, path: Path, parse: Callable[[dict[str, str]], Row], hint: str
    ) -> Iterator[Row]:
        """Open a table with these columns now, and yield its rows later. It closes at its end.

        Args:
            parse: converts a row, by column name. It raises ValueError for a damaged row.

        Raises:
            OSError: the table cannot be opened.
            InputError: the table is damaged. The hint says what to do.
        """

        def rows() -> Iterator[Any]:
            with TextIOWrapper(
                open_regular_file(path), "utf-8", "surrogateescape", newline="\n"
            ) as lines:
                yield None
                try:
                    yield from map(parse, self.values_in(lines))
                except ValueError as error:
                    raise InputError(
                        f"{printable(path)} is damaged, or of another version of VirNucPro: "
                        f"{printable(error)}",
                        hint,
                    ) from error

        opened = rows()
        next(opened)
        return opened

    def values_in(self, lines: Iterator[str]) -> Iterator[dict[str, str]]:
        """Yield each row's values by column. Windows line ends are accepted.

        Raises:
            ValueError: the table is damaged.
        """
        columns = self.present_columns(next(lines, ""))
        if columns is None:
            raise ValueError("its columns have other names")
        for number, line in enumerate(lines, 2):
            if not line.endswith("\n"):
                raise ValueError("its end is missing")
            values = line[:-1].removesuffix("\r").split("\t", len(columns) - 1)
            if len(values) != len(columns):
                raise ValueError(f"line {number} is not of the columns {', '.join(columns)}")
            if '"' in line:
                values = list(map(read_tsv_field, values))
            yield dict(zip(columns, values, strict=True))


_LINEAGE_COLUMNS = (
    "taxonomy",
    "genus",
    "genome_type",
    "host_source",
    "host_genus",
    "completeness",
    "completeness_method",
)


class RunOutput:
    """All outputs of runs."""

    # records, frames and chunks

    RECORD_TABLE = OutputFile(
        RECORD_TABLES["predict"],
        "every record, with its status, call, score and evidence",
        (
            "record",
            "file",
            "length",
            "status",
            "call",
            "virus_score",
            "fdr",
            "n_chunks",
            "n_chunks_scored",
            "n_frames_scored",
            "base_score",
            "note",
            "evidence",
            "known_family",
            "n_known_kmers",
        ),
        later_columns=frozenset({"evidence", "known_family", "n_known_kmers"}),
    )
    # For a run that calls nothing.
    EMBEDDED_TABLE = OutputFile(
        RECORD_TABLES["extract"],
        "every record, with its status",
        ("record", "file", "length", "status", "n_chunks", "n_embedded", "note"),
    )
    # Every frame with a score, and every chunk with such a frame, sorted by id. The formats are
    # those of the original VirNucPro.
    FRAME_TABLE = OutputFile(
        "prediction_results.txt",
        columns=("Sequence_ID", "Prediction", "score1", "score2"),
    )
    CHUNK_TABLE = OutputFile(
        "prediction_results_highestscore.csv",
        columns=("Modified_ID", "Is_Virus"),
        is_sorted=True,
    )
    VIRAL_FASTA = OutputFile("viral.fasta", "the records called virus, with their original headers")
    FAILED_SEQUENCES = OutputFile(
        run_dir.FAILED_SEQUENCES,
        "the failed sequences, to correct and run again",
        per_file=False,
        is_optional=True,
    )

    # viruses

    # One row per virus. Its name is also its sequence id in the FASTA file.
    VIRUS_TABLE = OutputFile(
        "viruses.tsv",
        "every virus: records and proviruses, with score, fdr, position, group and lineage",
        (
            "virus",
            "record",
            "file",
            "extent",
            "start",
            "end",
            "length",
            "score",
            "fdr",
            "note",
            "group",
            "group_probability",
            "family",
            "family_kmers",
            "family_share",
            "topology",
            "repeat_length",
            *_LINEAGE_COLUMNS,
        ),
        later_columns=frozenset(_LINEAGE_COLUMNS),
        old_names={
            "kind": "extent",
            "virus_kind": "group",
            "kind_probability": "group_probability",
            "kin": "family",
            "kin_words": "family_kmers",
            "kin_share": "family_share",
        },
    )
    VIRUS_FASTA = OutputFile("viruses.fasta", "their sequences")
    # One row per virus, in the terms of a checklist: see ``miuvig``.
    MIUVIG_TABLE = OutputFile(
        "miuvig.tsv",
        "their description by MIUViG, for a submission to GenBank",
        (
            "virus",
            "samp_name",
            "detec_type",
            "pred_genome_type",
            "pred_genome_struc",
            "topology",
            "number_contig",
            "assembly_qual",
            "compl_score",
            "compl_software",
            "compl_appr",
            "checkv_quality",
            "taxonomy",
            "tax_ident",
            "tax_class",
            "host_pred_appr",
            "host_pred_est_acc",
            "vir_ident_software",
            "feat_pred",
            "ref_db",
            "sim_search_meth",
        ),
    )
    # One row per gene. Positions are those in the sequence of the virus.
    GENE_TABLE = OutputFile(
        "genes.tsv",
        "the genes of each virus, with what they resemble, also as .gff3",
        (
            "gene",
            "virus",
            "record",
            "file",
            "start",
            "end",
            "strand",
            "n_residues",
            "partial",
            "start_codon",
            "coding_score",
            "log_odds",
            "n_known_kmers",
            "known_family",
        ),
        is_optional=True,
    )
    GENE_GFF3 = OutputFile("genes.gff3", columns=("##gff-version 3",), is_optional=True)
    PROTEIN_FASTA = OutputFile("proteins.faa", "their proteins", is_optional=True)

    # samples

    SAMPLE_TABLE = OutputFile(
        "samples.tsv",
        "one row per input file, or pair of read files",
        # The columns virus_* correspond to ``counts.LENGTH_CLASSES``.
        (
            "file",
            "status",
            "n_records",
            "n_scored",
            "n_virus",
            "virus_below_1000",
            "virus_1000_to_2999",
            "virus_3000_to_9999",
            "virus_from_10000",
            "n_provirus",
            "n_regions",
            "best_record",
            "best_score",
            "n_failed",
            "path",
            "error",
            "groups",
            "families",
        ),
        per_file=False,
        old_names={"kinds": "groups"},
    )
    EMBEDDED_SAMPLE_TABLE = replace(
        SAMPLE_TABLE,
        columns=("file", "status", "n_records", "n_embedded", "n_failed", "path", "error"),
    )
    MULTIQC = OutputFile(
        "virnucpro_mqc.tsv",
        "counts of every sample, for MultiQC",
        per_file=False,
    )
    MULTIQC_FAMILIES = OutputFile(
        "virnucpro_families_mqc.tsv",
        "viruses of every sample by family, for MultiQC",
        per_file=False,
        is_optional=True,
    )
    FAILED_FILES = OutputFile(
        "failed_files.txt",
        "what failed in each file",
        per_file=False,
        is_optional=True,
    )

    # regions

    REGION_TABLE = OutputFile(
        "regions.tsv",
        "virus-like regions, also as .bed, .gff3 and .fasta",
        (
            "region",
            "record",
            "file",
            "extent",
            "start",
            "end",
            "length",
            "posterior",
            "call",
            "virus_score",
            "virus",
            "att",
            "class",
            "evidence",
            "note",
        ),
        is_optional=True,
        old_names={"kind": "extent"},
    )
    REGION_BED = OutputFile("regions.bed", is_optional=True)
    REGION_GFF3 = OutputFile("regions.gff3", columns=("##gff-version 3",), is_optional=True)
    REGION_FASTA = OutputFile("regions.fasta", is_optional=True)
    TRACKS = OutputFile(
        "tracks.tsv.gz",
        columns=("record", "start", "end", "log_odds", "posterior"),
        is_optional=True,
        is_packed=True,
    )


# The outputs of each command

# What ``virnucpro regions`` writes in addition to the table of records.
REGION_OUTPUTS: tuple[OutputFile, ...] = (
    RunOutput.VIRUS_TABLE,
    RunOutput.VIRUS_FASTA,
    RunOutput.MIUVIG_TABLE,
    RunOutput.GENE_TABLE,
    RunOutput.GENE_GFF3,
    RunOutput.PROTEIN_FASTA,
    RunOutput.SAMPLE_TABLE,
    RunOutput.MULTIQC,
    RunOutput.MULTIQC_FAMILIES,
    RunOutput.REGION_TABLE,
    RunOutput.REGION_BED,
    RunOutput.REGION_GFF3,
    RunOutput.REGION_FASTA,
    RunOutput.TRACKS,
)
# The table of records comes first: it is opened first, and appears last.
OUTPUTS: Mapping[Command, tuple[OutputFile, ...]] = {
    "predict": (
        RunOutput.RECORD_TABLE,
        RunOutput.FRAME_TABLE,
        RunOutput.CHUNK_TABLE,
        RunOutput.VIRAL_FASTA,
        *REGION_OUTPUTS,
        RunOutput.FAILED_SEQUENCES,
        RunOutput.FAILED_FILES,
    ),
    "extract": (
        RunOutput.EMBEDDED_TABLE,
        RunOutput.EMBEDDED_SAMPLE_TABLE,
        RunOutput.FAILED_SEQUENCES,
        RunOutput.FAILED_FILES,
    ),
}


def all_outputs() -> list[OutputFile]:
    """Return all commands' outputs, each once. Two commands may write the same file."""
    return list(dict.fromkeys(chain.from_iterable(OUTPUTS.values())))


def open_run_dir(folder: Path) -> RunDir:
    """Return the run folder at this path, which owns all commands' outputs."""
    outputs = all_outputs()
    names = OutputNames(
        run=tuple(dict.fromkeys(output.file for output in outputs)),
        sample=tuple(output.file for output in outputs if output.per_file),
    )
    return RunDir(folder, names)
