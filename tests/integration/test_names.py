"""Ids of any kind are the same in every table and file as in the input."""

from __future__ import annotations

import csv
import gzip
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from conftest import random_dna
from hypothesis import given
from hypothesis import strategies as st
from region_helpers import host_dna, phage_dna
from run_helpers import ROOT, invoke, rows
from scorer_run_helpers import outputs, predict, write

import virnucpro
from virnucpro.results.names import (
    bed_chrom,
    gff3_seqid,
    gff3_value,
    read_bed_chrom,
    read_tsv_field,
    tsv_field,
    tsv_line,
)
from virnucpro.results.table_blocks import TableBlock, split_table
from virnucpro.training.labelled_data import read_cells, write_table
from virnucpro.workflows.compare import compare
from virnucpro.workflows.find_proviruses import find_regions
from virnucpro.workflows.predict_options import RegionsOptions

IDS = [
    *('"c1', 'c"2', '"c3"', '"', '""', "it's", "a,b", "a;b=c&d,e", "a\\tb", "[a]", "{b}"),
    *("NA", "null", "nan", "None", "True", "007", "1e5", "-1", "1", ".", "=1+1", "@x", "+x"),
    *("#c", "##gff", "#", "track", "track_7", "browser1", ">gt", "%23c", "%", "a%20b", "a:1-5"),
    *("x|provirus_1_5", "a\x01b", "a\x1b[31m", "a\x7f", "\u200b", "caf\xe9", "\u4e2d\u6587"),
    "x" * 3_000,
]
LYSOGEN = '"#lysogen'
VIRAL = ['"p"', "#p", "track", ">p;=,&%", "p\u202e", "NA", "p/1", LYSOGEN]
PAGE = (ROOT / "docs/OUTPUT.md").read_text()
SECTION = PAGE.partition("## Read the tables\n")[2].partition("\n## ")[0]
SNIPPETS = re.findall(r"```(python|r)\n(.*?)```", SECTION, re.DOTALL)
TABLES = [
    *("predictions.tsv", "viruses.tsv", "regions.tsv", "samples.tsv", "tracks.tsv.gz"),
    *("prediction_results.txt", "prediction_results_highestscore.csv"),
]

names = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)
ids = names.map(lambda name: "".join(name.split())).filter(bool)


@pytest.fixture(scope="module")
def records() -> dict[str, str]:
    rng = np.random.default_rng(4)
    short = {name: random_dna(200, rng) for name in IDS if name not in VIRAL}
    host = host_dna(200_000, rng)
    lysogen = host[:90_000] + phage_dna(30_000, rng) + host[90_000:]
    return short | {name: phage_dna(12_000, rng) for name in VIRAL} | {LYSOGEN: lysogen}


@pytest.fixture(scope="module")
def run(tmp_path_factory, records) -> Path:
    """A finished run of ``../in.fa``, with the names of the documentation. No test changes it."""
    folder = tmp_path_factory.mktemp("names")
    predict(write(folder / "in.fa", **records), to=folder / "results", preset="sensitive")
    return folder / "results"


# Single formats


@given(st.lists(ids, min_size=1, max_size=9))
def test_tsv_line_is_read_by_csv_and_by_us(values: list[str]) -> None:
    line = tsv_line(values)
    assert next(csv.reader([line], delimiter="\t", strict=True)) == values
    assert [read_tsv_field(field) for field in line.removesuffix("\n").split("\t")] == values


@given(ids)
def test_tsv_field_without_quotes_is_unchanged(name: str) -> None:
    assert (tsv_field(name) == name) == ('"' not in name)


@pytest.mark.parametrize("field", ['"', '"c1', 'c"', '"a"b"', 'a""b'])
def test_unquoted_field_is_its_text(field: str) -> None:
    assert read_tsv_field(field) == field


@given(ids, ids)
def test_bed_chrom_is_never_a_header(one: str, other: str) -> None:
    assert not bed_chrom(one).startswith(("#", "track", "browser"))
    assert read_bed_chrom(bed_chrom(one)) == one
    assert (bed_chrom(one) == bed_chrom(other)) == (one == other)


@given(ids)
def test_gff3_names_are_encoded_and_decoded(name: str) -> None:
    assert re.fullmatch(r"[a-zA-Z0-9.:^*$@!+_?|%-]+", gff3_seqid(name))
    assert unquote(gff3_seqid(name)) == name
    assert unquote(gff3_value(name)) == name
    assert not re.search(r"[\x00-\x1f\x7f;=&,]", gff3_value(name))
    encoded = re.findall(r"%(..)", gff3_value(name))
    assert all(int(code, 16) < 32 or chr(int(code, 16)) in "\x7f%;=&," for code in encoded)


# All formats of a run


def test_ids_of_every_table_are_those_of_the_input(run, records) -> None:
    assert [row["record"] for row in rows(run / "predictions.tsv")] == list(records)
    found = {row["record"] for row in rows(run / "regions.tsv")}
    assert found == set(VIRAL), "the other tests need regions of all of them"
    assert {row["record"] for row in rows(run / "viruses.tsv")} >= found
    pieces = {row["Sequence_ID"].removesuffix("_piece_1") for row in rows(run / TABLES[-2])}
    assert pieces >= set(records) - found


@pytest.mark.parametrize("table", TABLES)
def test_no_line_of_a_table_is_split(run, table: str) -> None:
    data = (run / table).read_bytes()
    text = (gzip.decompress(data) if table.endswith(".gz") else data).decode()
    lines = text.split("\n")[:-1]
    assert text.splitlines() == lines
    assert len({line.count("\t") for line in lines}) == 1


def test_bed_and_gff3_name_the_records(run) -> None:
    found = [row["record"] for row in rows(run / "regions.tsv")]
    names = [row["region"] for row in rows(run / "regions.tsv")]
    bed = [line.split("\t") for line in (run / "regions.bed").read_text().split("\n")[:-1]]
    assert [read_bed_chrom(row[0]) for row in bed] == found
    assert [row[3] for row in bed] == names
    assert not any(row[0].startswith(("#", "track", "browser")) for row in bed)
    head, *lines = (run / "regions.gff3").read_text().split("\n")[:-1]
    gff = [line.split("\t") for line in lines]
    assert head == "##gff-version 3"
    assert [unquote(row[0]) for row in gff] == found
    assert not any(row[0].startswith((">", "#")) for row in gff)
    attributes = [dict(part.split("=") for part in row[8].split(";")) for row in gff]
    assert [unquote(fields["ID"]) for fields in attributes] == names


def test_fasta_has_the_names_of_the_tables(run) -> None:
    for fasta, table, column in (
        ("viruses.fasta", "viruses.tsv", "virus"),
        ("regions.fasta", "regions.tsv", "region"),
    ):
        with (run / fasta).open(newline="\n") as lines:
            found = [header.split(None, 1)[0] for header, _ in SimpleFastaParser(lines)]
        assert found == [row[column] for row in rows(run / table)]


def test_blocks_of_a_table_have_its_ids(run, records) -> None:
    (span,) = split_table(run / "predictions.tsv")
    block = span.read()
    assert isinstance(block, TableBlock)
    assert block.texts("record") == list(records)
    assert block.codes("record")[0] == list(records)
    assert block.texts("record", [1, 3]) == [list(records)[1], list(records)[3]]


# Our readers


def test_python_reads_the_ids_back(run, records) -> None:
    calls = list(virnucpro.read_predictions(run))
    assert [call.record_id for call in calls] == list(records)
    assert {call.record_id for call in calls if call.regions} == set(VIRAL)


def test_compare_pairs_the_ids(run, records) -> None:
    record_changes = compare(run, run)
    assert {one.table: one.n_both for one in record_changes}["records"] == len(records)
    assert all(one.agrees(0.0) for one in record_changes)


def test_regions_and_report_read_the_ids_back(run, tmp_path) -> None:
    shutil.copytree(run.parent, tmp_path / "copy")
    folder = tmp_path / "copy/results"
    before = outputs(run)
    find_regions(RegionsOptions(folder=folder, argv=()), lambda _: None)
    assert outputs(folder) == before
    assert invoke("report", folder)[0] == 0
    assert 'id="regions"' in (folder / "report.html").read_text()


def test_other_threshold_without_input_keeps_ids(run, tmp_path) -> None:
    write(tmp_path / "in.fa", **{"of": "ACGT" * 50})
    shutil.copy(run.parent / "in.fa", tmp_path / "in.fa")
    predict(tmp_path / "in.fa", to=tmp_path / "run", preset="sensitive")
    predict(tmp_path / "in.fa", to=tmp_path / "expected", preset="default")
    (tmp_path / "in.fa").unlink()
    predict(tmp_path / "in.fa", to=tmp_path / "run", preset="default", resume=True)
    assert outputs(tmp_path / "run") == outputs(tmp_path / "expected")


def test_tables_of_training_keep_names(tmp_path) -> None:
    write_table(tmp_path / "t.tsv", ("id", "group"), [(name, "g") for name in IDS])
    assert [cells["id"] for _, cells in read_cells(tmp_path / "t.tsv", ("id",), "")] == IDS
    assert [row["id"] for row in rows(tmp_path / "t.tsv")] == IDS


# Other readers


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("language", "code"), SNIPPETS, ids=[code.split()[1] for _, code in SNIPPETS]
)
def test_documented_snippet_reads_the_ids(run, monkeypatch, table, language, code) -> None:
    monkeypatch.chdir(run.parent)
    code = code.replace("predictions.tsv", table)
    expected = read_column(run / table)
    if language == "r":
        assert column_in_r(code, expected) == expected[1]
        return
    pytest.importorskip(code.split()[1])
    if table.endswith(".gz") and "open(" in code:
        code = f"import gzip\n{code}".replace("with open(", "with gzip.open(").replace(
            '", newline', '", "rt", newline'
        )
    scope: dict[str, object] = {}
    exec(code, scope)
    read = scope["table"]
    name, values = expected
    found = [row[name] for row in read] if isinstance(read, list) else list(read[name])
    assert found == values
    if not isinstance(read, list) and "length" in read.columns:
        assert read["length"].sum() > 0, "numbers are numbers"


def read_column(table: Path) -> tuple[str, list[str]]:
    """Return the name and the values of the first column of a table."""
    opened = gzip.open if table.suffix == ".gz" else open
    with opened(table, "rt", encoding="utf-8", newline="") as lines:
        columns, *values = csv.reader(lines, delimiter="\t", strict=True)
    assert values
    return columns[0], [row[0] for row in values]


def column_in_r(code: str, expected: tuple[str, list[str]]) -> list[str]:
    """Return the values of a column as R reads and writes them."""
    if not shutil.which("Rscript"):
        pytest.skip("needs R")
    name = expected[0]
    code = re.sub(r"text <- .*", f'text <- c("{name}" = "character")', code)
    code = f'{code}\nwriteLines(table[["{name}"]], "column.txt", useBytes = TRUE)\n'
    subprocess.run(["Rscript", "-e", code], check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    return Path("column.txt").read_text().split("\n")[:-1]


@pytest.mark.skipif(not shutil.which("samtools"), reason="needs samtools")
def test_samtools_finds_every_virus_by_its_name(run, tmp_path) -> None:
    shutil.copy(run / "viruses.fasta", tmp_path)
    with (run / "viruses.fasta").open(newline="\n") as lines:
        bases = {header.split(None, 1)[0]: bases for header, bases in SimpleFastaParser(lines)}
    for name in bases:
        command = ["samtools", "faidx", tmp_path / "viruses.fasta", f"{{{name}}}:2-50"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert found.split("\n", 1)[1].rstrip("\n") == bases[name][1:50]


@pytest.mark.skipif(not shutil.which("bedtools"), reason="needs bedtools")
def test_bedtools_reads_every_region(run) -> None:
    command = ["bedtools", "sort", "-i", run / "regions.bed"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert sorted(found.splitlines()) == sorted((run / "regions.bed").read_text().splitlines())
