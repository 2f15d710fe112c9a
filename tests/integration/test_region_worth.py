"""Figures about regions counted by hand, and the training and evaluation of regions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import random_dna
from region_helpers import host_dna, items_of, phage_dna
from run_helpers import rows
from scorer_run_helpers import predict, write

from virnucpro.core.errors import InputError, UnavailableError
from virnucpro.training.options import EvaluateOptions, TrainOptions
from virnucpro.training.provirus import (
    Chromosome,
    RegionScores,
    Truth,
    evaluate_regions,
    f1_interval,
    learn_region_model,
    leave_one_out,
    measure_regions,
    read_genes,
    read_truth,
    train_regions,
)
from virnucpro.viral.hmm import RegionModel

TRUTH = Truth(prophages=((100, 200), (300, 400), (600, 700)), unclear=((500, 520),))


def test_figures_equal_hand_counts():
    """One region spans two prophages, one prophage has two regions, one region is unclear."""
    regions = [(90, 390), (500, 520), (600, 660), (670, 700), (900, 1000)]
    genes = [(100, 150), (210, 250), (600, 690), (905, 995), (650, 690), (661, 669), (505, 515)]
    figures = measure_regions(regions, TRUTH, 1000, genes)
    assert figures == RegionScores(
        bases=(100 + 90 + 90, 10 + 100 + 100, 10 + 10),
        # by their middles: 125, 645, 670; 230, 950; 665
        genes=(3, 2, 1),
        prophages=3,
        found=3,
        regions=4,
        false=1,
        n_bases=1000,
        split=1,
        merged=1,
        ends=(10, 190, 210, 10, 0, 0),
    )
    row = dict(zip(("precision", "recall", "f1"), figures.row(), strict=False))
    assert row == {"precision": "0.571", "recall": "0.933", "f1": "0.709"}


def test_figures_that_are_not_defined_are_left_empty():
    nothing = measure_regions([], Truth(), 1000)
    assert nothing.row()[:3] == ["", "", ""]
    assert measure_regions([(0, 10)], Truth(), 1000).row()[:3] == ["0.000", "", "0.000"]


def test_sums_over_sequences_and_their_interval():
    good = measure_regions([(100, 200)], Truth(((100, 200),)), 1000)
    bad = measure_regions([(300, 400)], Truth(((100, 200),)), 1000)
    assert RegionScores.sum([good, bad]).f1 == pytest.approx(0.5)
    assert RegionScores.sum([good, bad]).ends == (0, 0)
    assert f1_interval([good, good], 0) == (1.0, 1.0)
    assert f1_interval([good, bad], 0) == (0.0, 1.0)
    empty = measure_regions([], Truth(), 1000)
    assert f1_interval([good, empty, empty], 0) == (1.0, 1.0)  # no figure is no bad one


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seq_id\tstart\tend\na\t1\t5\n", "no column 'kind'"),
        ("seq_id\tstart\tend\tkind\na\t5\t5\tprophage\n", ":2: no interval from 5 to 5"),
        ("seq_id\tstart\tend\tkind\na\t-1\t5\tprophage\n", ":2: no interval from -1 to 5"),
        ("seq_id\tstart\tend\tkind\na\t1\t5\tother\n", "no row of the kind prophage"),
    ],
)
def test_useless_truth_is_refused(tmp_path, text, words):
    path = tmp_path / "truth.tsv"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_truth(path)
    assert caught.value.hint


def test_genes_are_the_cds_of_a_gff3_file(tmp_path):
    path = tmp_path / "genes.gff"
    path.write_text(
        "##gff-version 3\nseq%201\tx\tgene\t1\t9\t.\t+\t.\tID=a\n"
        "seq%201\tx\tCDS\t1\t9\t.\t+\t0\tID=b\n##FASTA\n>seq 1\nACGT\n"
    )
    assert read_genes(path) == {"seq 1": [(0, 9)]}
    path.write_text("seq\tCDS\n")
    with pytest.raises(InputError, match=":1 is not a line of GFF3"):
        read_genes(path)


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> tuple[Path, Path]:
    """Three chromosomes with a virus each, and the table of the viruses."""
    folder = tmp_path_factory.mktemp("truth")
    lines = ["seq_id\tstart\tend\tkind\tname"]
    records = {}
    for number in range(3):
        rng = np.random.default_rng(number)
        host = host_dna(90_000, rng)
        start = 30_000 + 900 * number
        records[f"c{number}"] = host[:start] + phage_dna(20_000, rng) + host[start:]
        lines.append(f"c{number}\t{start}\t{start + 20_000}\tprophage\tp{number}")
    table = folder / "truth.tsv"
    table.write_text("\n".join([*lines, ""]))
    return write(folder / "genomes.fa", **records), table


def test_regions_learned_on_left_out_chromosomes(truth, tmp_path):
    data, table = truth
    stages = []
    options = TrainOptions(data=data, output_dir=tmp_path / "model")
    lines = train_regions(options, table, lambda event: stages.append(event.stage))
    assert stages == ["scoring pieces"] * 3 + ["leaving each out"] * 3
    figures = rows(tmp_path / "model/regions_left_out.tsv")
    assert lines == (tmp_path / "model/regions_left_out.tsv").read_text().splitlines()
    assert [row["seq_id"] for row in figures] == ["c0", "c1", "c2", "all"]
    assert figures[-1]["found"] == "3"
    assert float(figures[-1]["f1"]) > 0.9
    model = RegionModel.load(tmp_path / "model/regions.json")
    assert model.training == "3 prophages of 3 chromosomes"
    assert model.virus_bases == 20_000
    predict(data, to=tmp_path / "run", region_model=tmp_path / "model/regions.json")
    assert [row["record"] for row in rows(tmp_path / "run/regions.tsv")] == ["c0", "c1", "c2"]
    recorded = json.loads((tmp_path / "run/run.json").read_text())["cut"]["region_model"]
    assert recorded == str(tmp_path / "model/regions.json")
    with pytest.raises(UnavailableError, match="is not a region model"):
        predict(data, to=tmp_path / "none", region_model=table)
    again = train(data, table, tmp_path / "again")
    for name in ("regions.json", "regions_left_out.tsv"):
        assert (tmp_path / "model" / name).read_bytes() == (again / name).read_bytes()


def test_records_without_prophages_set_host_levels(truth, tmp_path):
    data, table = truth
    folder = tmp_path / "genomes"
    folder.mkdir()
    rng = np.random.default_rng(7)
    write(folder / "other.fa", a="".join(rng.choice(list("ACGGGCCC"), 60_000)))
    write(folder / "short.fa", b=random_dna(30_000, rng))  # too few pieces for a host
    (folder / "truth.fa").write_bytes(data.read_bytes())
    alone, joined = (
        RegionModel.load(train(of, table, tmp_path / name) / "regions.json")
        for of, name in ((data, "alone"), (folder, "joined"))
    )
    assert joined.training == "3 prophages of 3 chromosomes, and 1 other host"
    assert joined.levels.index_at(0.45) == pytest.approx(alone.levels.index_at(0.45), abs=0.01)
    assert abs(joined.levels.index_at(0.75) - alone.levels.index_at(0.75)) > 0.1


def train(data: Path, table: Path, to: Path) -> Path:
    train_regions(TrainOptions(data=data, output_dir=to), table, lambda _: None)
    return to


def test_predicted_regions_are_measured(truth, tmp_path):
    data, table = truth
    options = EvaluateOptions(data=data, output_dir=tmp_path / "e")
    lines = evaluate_regions(options, table, lambda _: None)
    assert lines == (tmp_path / "e/regions_evaluation.tsv").read_text().splitlines()
    figures = rows(tmp_path / "e/regions_evaluation.tsv")
    assert [row["found"] for row in figures] == ["1", "1", "1", "3"]
    assert (tmp_path / "e/run/regions.tsv").exists()
    elsewhere = tmp_path / "elsewhere.tsv"
    elsewhere.write_text(table.read_text().replace("c0", "guest"))
    again = EvaluateOptions(data=data, output_dir=tmp_path / "f")
    with pytest.raises(InputError, match="no sequence has the id guest of the truth"):
        evaluate_regions(again, elsewhere, lambda _: None)


def test_two_sequences_with_one_name_are_refused(truth, tmp_path):
    data, table = truth
    folder = tmp_path / "genomes"
    folder.mkdir()
    shutil.copy(data, folder / "a.fa")
    write(folder / "b.fa", c1=random_dna(60_000, np.random.default_rng(8)))
    with pytest.raises(InputError, match="2 sequences have the id c1"):
        train(folder, table, tmp_path / "model")
    options = EvaluateOptions(data=folder, output_dir=tmp_path / "e")
    with pytest.raises(InputError, match="2 sequences have the id c1"):
        evaluate_regions(options, table, lambda _: None)


def test_too_few_chromosomes_are_refused(truth, tmp_path):
    data, table = truth
    columns, *lines = table.read_text().splitlines()
    other = tmp_path / "other.tsv"
    for rows_of_truth, words in (
        (lines[:2], "2 chromosomes with prophages; 3 are needed"),
        (["c1\t5\t999999\tprophage\tx"], "an interval ends at 999,999"),
        ([*lines[1:], "c0\t100\t110000\tprophage\tx"], "c0 has no piece of its host"),
    ):
        other.write_text("\n".join([columns, *rows_of_truth, ""]))
        with pytest.raises(InputError, match=words) as caught:
            train(data, other, tmp_path / "model")
        assert caught.value.hint


def chromosome(seed: int, prophage: tuple[int, int] = (20_000, 30_000)) -> Chromosome:
    """A chromosome of 100,000 bases whose prophage has much higher log-odds than its host."""
    rng = np.random.default_rng(seed)
    log_odds = rng.normal(-4, 1, 199)
    log_odds[40:59] += 5
    items = items_of(log_odds)
    shape = items.shape + rng.normal(0, 0.3, items.shape.shape)
    genes = log_odds + rng.normal(1, 1, 199)
    items = items._replace(gc=items.gc + rng.normal(0, 0.02, 199), shape=shape, genes=genes)
    return Chromosome(f"c{seed}", "A" * 100_000, items, Truth((prophage,)))


def test_short_prophage_teaches_only_its_length():
    short = (20_100, 20_400)
    chromosomes = [chromosome(0), chromosome(1), chromosome(2, short)]
    model = learn_region_model(chromosomes, [], "")
    assert model.virus_bases == round(20_300 / 3)
    assert model.distance > 3
    with pytest.raises(InputError, match="no prophage of c2, c3 has a piece of 1,000") as caught:
        learn_region_model([chromosome(2, short), chromosome(3, short)], [], "")
    assert caught.value.hint


def test_equal_chromosomes_teach_no_region_model():
    with pytest.raises(
        InputError, match=r"levels of hosts with the same GC spread by 0\.0"
    ) as caught:
        learn_region_model([chromosome(0)] * 3, [], "")
    assert "several species" in caught.value.hint


def test_chromosome_is_left_out_with_its_file():
    first, second, third = map(chromosome, range(3))
    host = chromosome(3).items
    other = chromosome(4).items
    genomes = [([first, second], host), ([third], None), ([], other)]
    names = [
        (one.name, [item.name for item in others]) for one, others, _ in leave_one_out(genomes)
    ]
    assert names == [("c0", ["c1", "c2"]), ("c1", ["c0", "c2"]), ("c2", ["c0", "c1"])]
    hosts = [[host is item for item in hosts] for _, _, hosts in leave_one_out(genomes)]
    assert hosts == [[False], [False], [True, False]]
