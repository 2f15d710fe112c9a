"""A new output needs only its description, with its file name, and an entry in a list."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from conftest import open_dna, random_dna
from run_helpers import called, rows, run_inline
from scorer_run_helpers import predict, write

import virnucpro
from virnucpro.core.errors import OutputError
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord
from virnucpro.results.call_rows import CALL_ROWS, make_batches
from virnucpro.results.output_writer import open_outputs
from virnucpro.results.outputs import (
    OUTPUTS,
    REGION_OUTPUTS,
    OutputFile,
    RunOutput,
    all_outputs,
    open_run_dir,
)
from virnucpro.results.sample_tables import OutputDir
from virnucpro.results.tsv import format_integers, format_rows, texts
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.file_scan import hash_inputs
from virnucpro.sequences.inputs import InputFile
from virnucpro.viral.types import Call, Region


def length_rows(results):
    lengths = list(map(len, results.records.sequences))
    return format_rows(texts(results.records.names), format_integers(lengths))


LENGTH_TABLE = OutputFile("lengths.tsv", columns=("record", "length"))


@pytest.fixture
def with_lengths(monkeypatch):
    monkeypatch.setitem(OUTPUTS, "predict", (*OUTPUTS["predict"], LENGTH_TABLE))
    monkeypatch.setitem(CALL_ROWS, LENGTH_TABLE, length_rows)


def lengths(folder: Path) -> dict[str, int]:
    header, *lines = (folder / LENGTH_TABLE.file).read_text().splitlines()
    assert header == "record\tlength"
    return {name: int(length) for name, length in (line.split("\t") for line in lines)}


def test_new_output_is_written_for_each_file(
    predicted, make_config, contigs, with_lengths, tmp_path
):
    """``--force`` clears it, it is never an input, and it is refused if it is a link."""
    other = tmp_path / "other.fa"
    other.write_text(">late\nGCAGCAGCAGCAGCAGCAGCAGCAGCAGCAGCAGCA\n")
    output = predicted(contigs, other, per_file=True)
    found = lengths(output)
    assert len(found) == 41
    samples = [output / "samples" / name for name in ("contigs", "other")]
    assert lengths(samples[0]) | lengths(samples[1]) == found
    assert lengths(samples[1]) == {"late": 36}
    assert LENGTH_TABLE.file in open_run_dir(output).own_names
    proteins = tmp_path / "one.faa"
    proteins.write_text(">p\nMKVLEFPQIL\n")
    run_inline(make_config(proteins, command="extract", force=True), None)
    assert not list(output.rglob(LENGTH_TABLE.file))
    (output / LENGTH_TABLE.file).symlink_to(proteins)
    with pytest.raises(OutputError, match=r"lengths\.tsv is a link"):
        run_inline(make_config(proteins, command="extract", force=True), None)
    assert proteins.read_text() == ">p\nMKVLEFPQIL\n"


def test_output_name_is_written_once():
    """Outside of docstrings and command summaries, which are prose."""
    names = {sink.file for sink in all_outputs()}
    found = []
    package = Path(virnucpro.__file__).parent
    for path in set(package.rglob("*.py")) - {package / "cli" / "main.py"}:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in prose:
                found += [name for name in names if name in str(node.value)]
    assert sorted(found) == sorted(names)


# The table of viruses

Row: TypeAlias = tuple[FastaRecord, Call, list[Region] | None]


def result(name: str, regions: list[Region] | None, *, is_virus: bool) -> Row:
    """Make a record of the file ``in`` with these regions. None: not searched."""
    sequence = random_dna(400, np.random.default_rng(len(name)))
    score = {"virus_score": 0.98 if is_virus else 0.02, "false_discovery_rate": 0.05}
    call = Call(name, 400, "scored", "in", is_virus=is_virus, **score)
    return FastaRecord(name, f"{name} of a test", sequence, sample="in"), call, regions


def written(folder: Path, *results: Row) -> dict[str, dict[str, str]]:
    """Write results. -> the rows of ``viruses.tsv``, by virus"""
    with open_outputs(REGION_OUTPUTS, OutputDir(folder, SafeDir(folder), folder)) as add:
        for portion in make_batches(called(*results), REGION_OUTPUTS, None):
            add(portion)
    return {row["virus"]: row for row in rows(folder / RunOutput.VIRUS_TABLE.file)}


def test_samples_share_a_batch_without_own_tables():
    """The number of batches does not grow with the number of files, and each has its counts."""
    results = [
        (record._replace(sample=sample), replace(call, sample=sample), regions)
        for sample, (record, call, regions) in zip(
            "aab", [result(name, [], is_virus=name != "y") for name in "xyz"], strict=True
        )
    ]
    [shared] = make_batches(called(*results), REGION_OUTPUTS, None)
    own = make_batches(called(*results), REGION_OUTPUTS, None, per_file=True)
    assert [batch.sample for batch in own] == ["a", "b"]
    assert shared.counts == {batch.sample: batch.total for batch in own}
    assert [shared.counts[sample].n_records for sample in "ab"] == [2, 1]
    assert shared.total.n_viral == 2
    for name, text in shared.rows.items():
        assert text == b"".join(batch.rows.get(name, b"") for batch in own)


def test_viruses_table_has_proviruses_of_others(tmp_path):
    whole = Region(0, 400, "whole", 0.99, is_virus=True)
    kept = Region(100, 300, "provirus", 0.95, is_virus=True)
    found = written(
        tmp_path,
        result("virus", [whole], is_virus=True),
        result("host", [Region(0, 50, "provirus", 0.4), kept], is_virus=False),
        result("unsearched", None, is_virus=True),
        result("plain", [], is_virus=False),
        result("bare", [], is_virus=True),
    )
    names = ("record", "file", "extent", "start", "end", "length", "score", "fdr")
    whole_record = ["in", "whole", "1", "400", "400", "0.980000", "0.0500"]
    assert {virus: [row[name] for name in names] for virus, row in found.items()} == {
        **{name: [name, *whole_record] for name in ("virus", "unsearched", "bare")},
        "host|provirus_101_300": ["host", "in", "provirus", "101", "300", "200", "0.950000", ""],
    }
    headers = [record.header for record in read_fasta(tmp_path / "viruses.fasta")]
    assert headers == [
        "virus of a test extent=whole score=0.980000 fdr=0.0500",
        "host|provirus_101_300 extent=provirus score=0.950000",
        "unsearched of a test extent=whole score=0.980000 fdr=0.0500",
        "bare of a test extent=whole score=0.980000 fdr=0.0500",
    ]


def test_viruses_table_trims_host_flanks(tmp_path):
    whole = Region(100, 300, "whole", 0.99, is_virus=True)
    made = result("lysogen", [whole], is_virus=True)
    [row] = written(tmp_path, made).values()
    assert (row["virus"], row["start"], row["end"]) == ("lysogen|whole_101_300", "101", "300")
    [record] = read_fasta(tmp_path / "viruses.fasta")
    assert (record.id, record.sequence) == (row["virus"], made[0].sequence[100:300])


def test_provirus_over_the_origin_is_one_virus(tmp_path):
    parts = [
        Region(0, 50, "provirus", 0.9, over_origin=True, is_virus=True),
        Region(120, 180, "provirus", 0.8, is_virus=True),
        Region(300, 400, "provirus", 0.9, over_origin=True, is_virus=True),
    ]
    made = result("circle", parts, is_virus=False)
    found = written(tmp_path, made)
    assert list(found) == ["circle|provirus_121_180", "circle|provirus_301_50"]
    row = found["circle|provirus_301_50"]
    assert (row["length"], row["note"]) == ("150", "crosses the origin")
    bases = made[0].sequence
    assert [record.sequence for record in read_fasta(tmp_path / "viruses.fasta")] == [
        bases[120:180],
        bases[300:] + bases[:50],
    ]
    names = [part["virus"] for part in rows(tmp_path / RunOutput.REGION_TABLE.file)]
    assert names == ["circle|provirus_301_50", "circle|provirus_121_180", "circle|provirus_301_50"]


# Samples


def test_sample_rows_count_calls_and_failures(tmp_path):
    rng = np.random.default_rng(3)
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.fa", one=open_dna(1_200, rng), two=open_dna(900, rng))
    write(folder / "b.fa", one=random_dna(700, rng))
    (folder / "c.fa").write_text("")
    (folder / "d.fa").write_bytes(b"\x7fELF\0\0" * 100)
    assert predict(folder, to=tmp_path / "run", threshold=0.0).exit_code == 2
    found = {row["file"]: row for row in rows(tmp_path / "run/samples.tsv")}
    assert {name: row["status"] for name, row in found.items()} == {
        **{"a": "complete", "b": "complete"},
        **{"c": "empty", "d": "unreadable"},
    }
    calls = rows(tmp_path / "run/predictions.tsv")
    best = max((row for row in calls if row["file"] == "a"), key=lambda row: row["virus_score"])
    row = found["a"]
    assert (row["n_records"], row["n_virus"]) == ("2", "2")
    assert (row["virus_below_1000"], row["virus_1000_to_2999"]) == ("1", "1")
    assert (row["best_record"], row["best_score"]) == (best["record"], best["virus_score"])
    assert "binary" in found["d"]["error"]
    assert found["d"]["path"] == str(folder / "d.fa")


def test_extract_tables_have_no_viral_columns(make_config, tmp_path):
    rng = np.random.default_rng(3)
    first = write(tmp_path / "a.fa", one=open_dna(1_200, rng), two="AC", three="AC!T")
    empty = write(tmp_path / "b.fa")
    (tmp_path / "c.fa").write_bytes(b"\x7fELF\0\0" * 100)
    config = make_config(first, empty, tmp_path / "c.fa", command="extract", chunk_size=300)
    run_inline(config, None)
    records = rows(config.output / "records.tsv")
    assert [tuple(row) for row in records[:1]] == [
        ("record", "file", "length", "status", "n_chunks", "n_embedded", "note")
    ]
    assert {row["record"]: row["status"] for row in records} == {
        **{"one": "embedded", "two": "no_orf", "three": "invalid"}
    }
    n_vectors = len(dict(virnucpro.read_features(config.output)))
    assert sum(int(row["n_embedded"]) for row in records) == n_vectors > 0
    samples = {row["file"]: row for row in rows(config.output / "samples.tsv")}
    assert list(samples["a"]) == [
        *("file", "status", "n_records", "n_embedded", "n_failed", "path", "error")
    ]
    assert {name: row["status"] for name, row in samples.items()} == {
        **{"a": "complete", "b": "empty", "c": "unreadable"}
    }
    assert (samples["a"]["n_records"], samples["a"]["n_embedded"]) == ("3", "1")
    assert "binary" in samples["c"]["error"] and samples["a"]["path"] == str(first)


def test_report_lists_each_extract_table_once(make_config, tmp_path):
    source = write(tmp_path / "a.fa", one=open_dna(1_200, np.random.default_rng(3)))
    config = make_config(source, command="extract")
    run_inline(config, None)
    page = (config.output / "report.html").read_text()
    for name in ("records.tsv", "samples.tsv"):
        assert page.count(f'href="{name}"') == 1
    assert "predictions.tsv" not in page


def test_replaced_file_has_no_sample_row(tmp_path):
    added = write(tmp_path / "added.fa", one=random_dna(700, np.random.default_rng(3)))
    inputs = [replace(hash_inputs(InputFile(str(added), sample="added")), generation=1)]
    with open_outputs(OUTPUTS["predict"], OutputDir(tmp_path, SafeDir(tmp_path), tmp_path, inputs)):
        pass
    assert not rows(tmp_path / "samples.tsv")


def test_sample_files_equal_a_run_of_that_file(tmp_path):
    """With its own ids, whatever ids other files have."""
    sources = []
    for seed, name in enumerate("ab"):
        rng = np.random.default_rng(seed)
        records = {"contig_1": open_dna(12_000, rng), "contig_2": open_dna(900, rng)}
        sources.append(write(tmp_path / f"{name}.fa", **records))
    predict(*sources, to=tmp_path / "both", per_file=True, threshold=0.0)
    assert "a:contig_1" in (tmp_path / "both/viral.fasta").read_text()
    for source in sources:
        alone = tmp_path / f"alone_{source.stem}"
        predict(source, to=alone, threshold=0.0)
        files = list((tmp_path / "both/samples" / source.stem).iterdir())
        per_file = {output.file for output in OUTPUTS["predict"] if output.per_file}
        assert {path.name for path in files} == per_file
        for path in files:
            assert path.read_bytes() == (alone / path.name).read_bytes(), path.name
