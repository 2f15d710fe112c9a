"""Viruses in the report: proviruses, classes by sample, and gene maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from virnucpro.core.helper_pool import HelperPool, TaskRunner
from virnucpro.results.outputs import OutputFile, RunOutput
from virnucpro.results.report.virus_rows import (
    NO_CLASS,
    ListedVirus,
    best_proviruses,
    class_of,
    count_classes,
    lineage_bars,
    read_gene_maps,
)

TAILED = "Viruses;Duplodnaviria;Heunggongvirae;Uroviricota;Caudoviricetes;;"
CORONA = "Viruses;Riboviria;Orthornavirae;Pisuviricota;Pisoniviricetes;Nidovirales;Coronaviridae"


@pytest.fixture
def helpers() -> TaskRunner[None]:
    return HelperPool().helpers(None, 1, "rows")


def write(path: Path, output: OutputFile, rows: Sequence[dict[str, object]]) -> Path:
    usual = {"start": 1, "end": 9, "length": 9, "score": 0.5, "n_known_kmers": 0, "n_residues": 3}
    lines = ["\t".join(output.columns)]
    for row in rows:
        values = dict.fromkeys(output.columns, "") | usual | row
        lines.append("\t".join(str(values[name]) for name in output.columns))
    path.write_text("\n".join(lines) + "\n")
    return path


def listed(record: str, file: str = "a", length: int = 1_000) -> ListedVirus:
    return ListedVirus(record, file, "whole", length, 0.9, 0.1, "score", "phage", "", "")


def test_best_proviruses_come_first(tmp_path, helpers):
    rows = [
        {"virus": f"p{number}", "file": "a", "extent": "provirus", "score": score, "group": "phage"}
        for number, score in enumerate((0.6, 0.9, 0.7))
    ]
    rows.insert(1, {"virus": "whole", "file": "a", "extent": "whole", "score": 0.99})
    table = write(tmp_path / "viruses.tsv", RunOutput.VIRUS_TABLE, rows)
    found = best_proviruses(table, 2, helpers)
    assert [(virus.record, virus.score) for virus in found] == [("p1", 0.9), ("p2", 0.7)]
    assert {(virus.extent, virus.group) for virus in found} == {("provirus", "phage")}
    assert best_proviruses(tmp_path / "missing.tsv", 2, helpers) == []


def test_classes_are_counted_by_file(tmp_path, helpers):
    rows = [
        {"file": "a", "taxonomy": TAILED, "group": "phage"},
        {"file": "a", "taxonomy": "Viruses;Riboviria;;;;;", "group": "RNA+"},
        {"file": "b", "taxonomy": CORONA, "group": "RNA+"},
        {"file": "b"},  # a protein
    ]
    table = write(tmp_path / "viruses.tsv", RunOutput.VIRUS_TABLE, rows)
    counts = count_classes(table, helpers)
    expected = {("a", "Caudoviricetes"): 1, ("a", NO_CLASS): 1, ("b", "Pisoniviricetes"): 1}
    assert counts == expected


@pytest.mark.parametrize(
    ("taxonomy", "name"), [(TAILED, "Caudoviricetes"), ("", NO_CLASS), ("Viruses;;;;;;", NO_CLASS)]
)
def test_class_is_the_fifth_name(taxonomy, name):
    assert class_of(taxonomy) == name


def test_bars_add_up_and_rare_classes_are_joined():
    counts = {("a", f"Class{number}"): 20 - number for number in range(10)} | {("b", NO_CLASS): 3}
    drawn = lineage_bars(counts)
    assert drawn is not None
    first, second = drawn.bars
    assert (first.sample, first.n) == ("a", sum(20 - number for number in range(10)))
    assert sum(width for _, _, width, _ in first.parts) == pytest.approx(1000)
    assert [text for *_, text in first.parts][-2:] == ["Class6: 14", "other classes: 36"]
    assert second.parts == [("k8", 0.0, 1000.0, f"{NO_CLASS}: 3")]
    assert [name for _, name in drawn.legend][-2:] == ["other classes", NO_CLASS]
    assert lineage_bars({}) is None


def test_gene_map_draws_each_strand(tmp_path, helpers):
    gene = {"virus": "v", "record": "v", "file": "a"}
    rows = [
        {**gene, "gene": "v_1", "start": 101, "end": 400, "strand": "+", "log_odds": 2.5},
        {**gene, "gene": "v_2", "start": 501, "end": 600, "strand": "-", "log_odds": -1},
        {**gene, "gene": "v_3", "start": 901, "end": 100, "strand": "+", "n_known_kmers": 4},
        {**gene, "gene": "w_1", "virus": "w", "record": "w"},
        {**gene, "gene": "v_1", "file": "b", "log_odds": 1},
    ]
    table = write(tmp_path / "genes.tsv", RunOutput.GENE_TABLE, rows)
    [drawn] = read_gene_maps(table, [listed("v"), listed("none")], helpers)
    assert (drawn.virus, drawn.length, drawn.n_genes) == ("v", 1_000, 3)
    forward, reverse, last, first = drawn.arrows  # the gene over the origin has two parts
    assert forward.path == "M100.0 4H392.0L400.0 10L392.0 16H100.0z"
    assert reverse.path == "M600.0 20H508.0L500.0 26L508.0 32H600.0z"
    assert (forward.css_class, reverse.css_class) == ("gene-virus", "gene-cell")
    assert last.css_class == first.css_class == "gene-short gene-known"
    assert last.path.startswith("M900.0 4") and first.path.startswith("M0.0 4")
    assert "v_1: 101-400 (+), log-odds 2.50, 0 k-mers" in forward.text


def test_whole_record_with_a_cut_name_has_its_map(tmp_path, helpers):
    row = {"gene": "v|whole_5_900_1", "virus": "v|whole_5_900", "record": "v", "file": "a"}
    table = write(
        tmp_path / "genes.tsv", RunOutput.GENE_TABLE, [{**row, "strand": "+", "log_odds": 1}]
    )
    assert [drawn.virus for drawn in read_gene_maps(table, [listed("v")], helpers)] == ["v"]
    provirus = listed("v|whole_5_900")._replace(extent="provirus")
    assert [drawn.virus for drawn in read_gene_maps(table, [provirus], helpers)] == [
        "v|whole_5_900"
    ]
