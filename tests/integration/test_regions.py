"""Virus-like regions: the hidden Markov chain, the ends of regions, and their files."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from itertools import pairwise, product
from math import exp, log, log1p
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import open_dna, random_dna
from html_parser import Page
from hypothesis import given, settings
from hypothesis import strategies as st
from region_helpers import MODEL, USUAL_IN_HOST, genes_dna, host_dna, items_of, phage_dna
from run_helpers import (
    called,
    forget_hashes,
    rows,
    write_run_json,
)
from scorer_run_helpers import outputs, predict, write

from virnucpro.cli.main import app
from virnucpro.core.errors import InputError, InputMissingError, ResumeError, UnavailableError
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord, reverse_complement
from virnucpro.results.call_rows import make_batches
from virnucpro.results.counts import RecordCounts
from virnucpro.results.output_writer import open_outputs
from virnucpro.results.outputs import REGION_OUTPUTS, RunOutput
from virnucpro.results.report.run_report import report_folder
from virnucpro.results.sample_tables import OutputDir
from virnucpro.results.table_readers import parse_region
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.viral.hmm import OWN_REGION_MODEL, RegionModel, log_likelihoods, viral_path
from virnucpro.viral.host_markers import (
    RecordText,
    Repeat,
    find_host_genes,
    find_trna_ends,
    host_peptides,
)
from virnucpro.viral.options import FALSE_POSITIVES, ThresholdOptions
from virnucpro.viral.provirus import (
    SHORTEST_RECORD,
    ProvirusFinder,
    Repeats,
    ViralRun,
    classify_region,
    describe_evidence,
    extend_known,
    refine_ends,
    regions_from_windows,
    split_runs,
)
from virnucpro.viral.provirus_features import Levels, ReadGenes, WindowTable
from virnucpro.viral.scoring import score_proteins, score_windows
from virnucpro.viral.types import Call, CalledRecords, Region
from virnucpro.workflows.find_proviruses import find_regions
from virnucpro.workflows.predict_options import RegionsOptions
from virnucpro.workflows.summary import Summary

SHARED = Path(__file__).parents[3] / "shared" / "data"
WHY = "att_length=12;trna=yes;viral_genes=4/9"
FILES = ("regions.tsv", "regions.bed", "regions.gff3", "regions.fasta", "tracks.tsv.gz")

MODEL_OF_LONG = replace(MODEL, virus_bases=20_000.0)
OWN = RegionModel.load()


def log_joint(path: tuple[bool, ...], starts: np.ndarray, evidence: np.ndarray) -> float:
    """Return the log probability of a path and all evidence, by the definition of the chain."""
    share = MODEL.first_share
    total = log(share) if path[0] else log1p(-share)
    for (a, b), (start, end) in zip(pairwise(path), pairwise(starts.tolist()), strict=True):
        total += MODEL.transition(end - start)[int(a), int(b)]
    return total + float(evidence[np.array(path)].sum())


def test_genes_count_for_pieces_nearby():
    shape = np.tile([5.0, 1.0, 2.0], (20, 1))
    items = WindowTable(
        np.arange(20) * 500, np.zeros(20), np.full(20, 0.5), shape.copy(), np.full(20, np.nan)
    )
    shape[10, 0] -= 0.3  # a deviation, of one of three figures
    moved = MODEL.contrast(items._replace(shape=shape), is_virus=True)
    moved -= MODEL.contrast(items, is_virus=True)
    assert np.flatnonzero(moved).tolist() == [8, 9, 10, 11, 12]
    assert moved[10] == pytest.approx(1.5 / 3 / 5)


@pytest.mark.parametrize(
    ("level", "found"), [(0.5, 0.5), (-0.5, -0.5), (-4.75, -4.75), (-6.0, -5), (np.nan, 0)]
)
def test_host_level_is_found_in_range(level, found):
    assert MODEL.departure(np.arange(2000) * 500, np.full(2000, level)) == found
    items = items_of(np.full(2000, MODEL.levels.index_at(MODEL.host.gc) + level))
    for is_virus, expected in ((True, level), (False, level - found)):
        contrasts = MODEL.contrast(items, is_virus=is_virus)
        assert contrasts == pytest.approx(np.full(2000, expected), nan_ok=True)


def test_states_change_at_their_rates():
    near, far = (np.exp(MODEL.transition(n_bases)) for n_bases in (1, 10**7))
    assert near == pytest.approx(np.array([[1, 1 / 40_000], [1 / 8_000, 1]]), rel=2e-4)
    assert far == pytest.approx(np.array([[5 / 6, 1 / 6]] * 2))


def test_piece_without_log_odds_is_no_evidence():
    assert MODEL.evidence(np.array([np.nan, -0.5, 1.0, 3.0])).tolist() == [0.0, -1.0, 0.1, 1.0]


@pytest.fixture(params=range(12))
def chain(request) -> tuple[np.ndarray, np.ndarray]:
    """Nine items. Some are far from the next, as if those between were missing."""
    rng = np.random.default_rng(request.param)
    starts = np.cumsum(rng.choice([500, 1000, 4000, 30_000], 9))
    return starts, rng.normal(0, 2.5, 9)


def test_path_is_the_best_of_all_paths(chain):
    best = max(product((False, True), repeat=9), key=lambda path: log_joint(path, *chain))
    assert tuple(viral_path(*chain, MODEL)[0].tolist()) == best


def test_posterior_is_the_share_of_viral_paths(chain):
    paths = list(product((False, True), repeat=9))
    weights = np.array([exp(log_joint(path, *chain)) for path in paths])
    expected = weights @ np.array(paths) / weights.sum()
    # sums of 512 float64 terms
    np.testing.assert_allclose(viral_path(*chain, MODEL)[1], expected, rtol=1e-10)


def test_items_without_evidence_change_nothing(chain):
    """Transitions count bases, so an item in between that has no evidence changes nothing."""
    starts, evidence = chain
    silent = (starts[:-1] + starts[1:]) // 2
    order = np.argsort(np.concatenate([starts, silent]))
    both = np.concatenate([starts, silent])[order]
    said = np.concatenate([evidence, np.zeros(len(silent))])[order]
    with_silent = viral_path(both, said, MODEL)[1][np.isin(both, starts)]
    np.testing.assert_allclose(with_silent, viral_path(*chain, MODEL)[1], rtol=1e-9)


def test_departure_likelihood_sums_all_paths(chain):
    starts, contrasts = chain
    departures = np.array([-1.0, 0.0, 2.5])
    expected = []
    for departure in departures:
        values = contrasts - departure
        host_density, virus_density = (
            -0.35 * (values - at) ** 2 / (2 * 1.8**2) for at in (0.0, 3.0)
        )
        paths = product((False, True), repeat=9)
        total = sum(exp(log_joint(path, starts, virus_density - host_density)) for path in paths)
        expected.append(log(total) + host_density.sum())
    likely = log_likelihoods(starts, contrasts, departures, MODEL)
    np.testing.assert_allclose(likely, expected, rtol=1e-10)  # sums of 512 float64 terms


def test_host_level_follows_its_gc():
    gc = np.array([0.3, 0.31, 0.5, 0.51])
    level = np.array([-1.0, -1.2, -4.0, -4.2])
    levels = Levels.from_values(gc, level)
    assert levels.index_at(0.3) == pytest.approx(-1.1, abs=0.05)
    assert levels.index_at(0.5) == pytest.approx(-4.1, abs=0.05)
    assert levels.index_at(0.95) == levels.index_at(0.8)
    assert levels.spread == pytest.approx(0.2, abs=0.02)
    with pytest.raises(ValueError, match="3 levels of hosts, not 25"):
        Levels((-3.0,) * 3, 1.0)


def no_genes(sequence: str) -> tuple[np.ndarray, ...]:
    """Return the genes of a sequence without any."""
    nothing = np.zeros(0, np.int64)
    return nothing, nothing, np.zeros(0), nothing


def regions_of(sequence, log_odds, model=MODEL, *, is_virus=False):
    """Return the regions of a sequence whose pieces have these log-odds."""
    items = items_of(log_odds, model)
    return regions_from_windows(sequence, items, model, no_genes, is_virus=is_virus)[0]


log_odds_along = st.lists(
    st.one_of(st.floats(-8, 8), st.just(float("nan"))), min_size=1, max_size=120
)


@settings(deadline=None, max_examples=150)
@given(log_odds_along, st.booleans(), st.integers(0, 2**31))
def test_regions_lie_within_the_record_and_apart(values, is_virus, seed):
    n_bases = MODEL.step * (len(values) - 1) + MODEL.size
    sequence = open_dna(n_bases, np.random.default_rng(seed))
    regions = regions_of(sequence, np.array(values), is_virus=is_virus)
    ends = [end for region in regions for end in (region.start, region.end)]
    assert ends == sorted(set(ends))  # no region is empty, and no two touch
    assert not ends or (ends[0] >= 0 and ends[-1] <= n_bases)
    assert all(0 <= region.posterior <= 1 for region in regions)
    assert not is_virus or [region.extent for region in regions] == ["whole"]


def genes_like(log_odds: float) -> ReadGenes:
    """Return a gene of 900 bases in each 1,000 of any sequence, with these log-odds."""

    def read(sequence: str) -> tuple[np.ndarray, ...]:
        start = np.arange(0, len(sequence) - 900, 1_000)
        return start, start + 900, np.full(len(start), log_odds), np.zeros_like(start)

    return read


def test_proteins_decide_doubtful_pieces():
    rng = np.random.default_rng(4)
    level = OWN.levels.index_at(OWN.host.gc)
    log_odds = rng.normal(level, 1.0, 399)
    log_odds[160:220] += 2
    items = items_of(log_odds, OWN)
    sequence = random_dna(200_000, rng)
    usual = OWN.genes.index_at(OWN.host.gc)
    for above, n_regions in ((0.0, 0), (3.0, 1)):
        read = genes_like(usual + above)
        regions, track = regions_from_windows(sequence, items, OWN, read, is_virus=False)
        assert len(regions) == n_regions
        assert (track.posterior[170:210] > 0.5).all() == bool(n_regions)
    assert abs(regions[0].start - 80_000) < 3_000
    assert (
        regions[0].evidence == f"viral_genes={0}/{len(read(sequence[slice(*regions[0][:2])])[0])}"
    )
    assert regions[0].region_class == "uncertain"


# genes of 1,000 bases side by side: whether each is viral, and its strand
@pytest.mark.parametrize(
    ("n_bases", "viral", "strand", "judged"),
    [
        (18_000, "1" * 6 + "0" * 9, "0" * 6 + "1" * 9, "prophage"),
        (17_999, "1" * 6 + "0" * 9, "0" * 6 + "1" * 9, "uncertain"),  # as short as satellites
        (18_000, "1" * 6 + "0" * 10, "0" * 6 + "1" * 10, "uncertain"),  # few viral genes
        (18_000, "1" * 12, "01" * 6, "uncertain"),  # no block on a strand
        (18_000, "11110111", "0" * 8, "prophage"),  # a gene between costs half of its bases
        (18_000, "1" * 8, "11110111", "prophage"),  # one of the other strand all of them
        (18_000, "11101011", "0" * 8, "uncertain"),
        (18_000, "1" * 7, "1110111", "uncertain"),
    ],
)
def test_long_block_of_viral_genes_is_a_prophage(n_bases, viral, strand, judged):
    start = 1_000 * np.arange(len(viral))
    log_odds = np.array([1.0 if one == "1" else 0.0 for one in viral])
    genes = start, start + 1_000, log_odds, np.array(list(strand), dtype=np.int64)
    for order in (slice(None), slice(None, None, -1)):  # genes come in any order
        assert classify_region(n_bases, tuple(column[order] for column in genes)) == judged


def test_short_record_is_a_provirus_if_far_above_hosts():
    rng = np.random.default_rng(5)
    gc = OWN.host.gc
    for n_bases, above, is_region in (
        (20_000, 2.6, True),
        (20_000, 2.0, False),
        (10_000, 2.6, False),  # few proteins: they spread more
        (60_000, 2.6, False),  # a host's flanks would be there
    ):
        log_odds = rng.normal(OWN.levels.index_at(gc) + 3, 1.0, n_bases // 500 - 1)
        read = genes_like(OWN.genes.index_at(gc) + above)
        items = items_of(log_odds, OWN)
        sequence = random_dna(n_bases, rng)
        regions, _ = regions_from_windows(sequence, items, OWN, read, is_virus=False)
        assert [tuple(one[:3]) for one in regions] == [(0, n_bases, "provirus")] * is_region


def test_level_of_a_long_host_hardly_matters():
    rng = np.random.default_rng(3)
    log_odds = rng.normal(-4, 1.5, 3000)
    log_odds[1500:1550] += 6
    sequence = random_dna(500 * 3000 + 500, rng)
    for shift in (0, 3):
        [region] = regions_of(sequence, log_odds + shift, OWN)
        assert abs(region.start - 750_000) < 2_000
        assert abs(region.end - 775_000) < 2_000


def test_region_in_a_host_with_unusual_level():
    rng = np.random.default_rng(6)
    sequence = random_dna(60_000, rng)
    log_odds = rng.normal(OWN.levels.index_at(OWN.host.gc), 1.5, 119)
    log_odds[60:] += 5
    for departure in (-1.5, 1.5):
        [region] = regions_of(sequence, log_odds + departure * OWN.levels.spread, OWN)
        assert abs(region.start - 30_000) < 3_000
        assert region.end == 60_000


def test_neighbours_are_split_between_evidence():
    rng = np.random.default_rng(9)
    sequence = random_dna(500_500, rng)
    for n_between, n_regions in ((4, 1), (30, 2)):
        log_odds = rng.normal(OWN.levels.index_at(OWN.host.gc), 0.5, 1000)
        log_odds[300:400] += 6
        log_odds[340 : 340 + n_between] -= 6
        assert len(regions_of(sequence, log_odds, OWN)) == n_regions
    run = ViralRun(2, 8, 1_250, 4_250)
    posterior = np.array([0, 0, 0.4, 0.9, 0.2, 0.1, 0.9, 0.3, 0])
    starts = 500 * np.arange(9)
    assert split_runs(run, starts, posterior, MODEL) == [
        ViralRun(2, 4, 1_250, 2_250),
        ViralRun(6, 8, 3_250, 4_250),
    ]
    assert split_runs(run, starts, np.full(9, 0.9), MODEL) == [run]


def test_gc_effect_is_partly_removed():
    rng = np.random.default_rng(7)
    items = items_of(rng.normal(-3, 1, 4000))
    gc = np.repeat(rng.uniform(0.3, 0.7, 200), 20)
    items = items._replace(gc=gc, log_odds=items.log_odds - 12 * (gc - 0.5))
    host = MODEL.host.value_at(items, is_virus=False)
    assert host.slope == pytest.approx(-12, abs=1)
    for weight in (0.0, 0.5, 1.0):
        left = np.polyfit(gc, items.signal(host, weight, 0.0, 1), 1)[0]
        assert left == pytest.approx(-12 * (1 - weight), abs=1)


@pytest.mark.parametrize("n_gc", [1, 200])
@pytest.mark.parametrize("n", [1, 2, 7, 19, 20, 21, 399])
def test_host_figures_are_medians(n, n_gc):
    rng = np.random.default_rng(n)
    shape = rng.normal(0, 1, (n, 3))
    gc = np.full(n, 0.41) if n_gc == 1 else rng.integers(300, 500, n) / 1000  # with ties
    items = items_of(rng.normal(0, 1, n))._replace(gc=gc, shape=shape)
    for known in (np.ones(n, dtype=bool), np.arange(n) % 5 != 1):
        some = items._replace(log_odds=np.where(known, items.log_odds, np.nan))
        gc_of_host, slope, shape_of_host = some.host_statistics()
        np.testing.assert_allclose(gc_of_host, np.median(gc[known]))
        np.testing.assert_allclose(shape_of_host, np.median(shape[known], axis=0))
        order = np.argsort(gc[known], kind="stable")
        parts = [part for part in np.array_split(order, 20) if len(part)]
        x = np.array([np.median(gc[known][part]) for part in parts])
        y = np.array([np.median(items.log_odds[known][part]) for part in parts])
        varies = np.ptp(x) > 0
        expected = np.polyfit(x, y, 1)[0] if varies else 0.0
        np.testing.assert_allclose(slope, expected, rtol=1e-9, atol=1e-9)


def test_short_dense_genes_speak_for_a_virus():
    items = items_of(np.full(200, -3.0))
    shape = items.shape.copy()
    for deviations, expected in ((0.5, 0.5), (1.0, 1.0), (4.0, 1.0)):  # beyond 1, all is alike
        shape[100:110] = items.shape[100:110] + deviations * np.array([-0.3, -0.3, 1.0])
        values = items._replace(shape=shape).signal(MODEL.host, 0.0, 1.5, 5) + 3.0
        np.testing.assert_allclose(values[102:108], 1.5 * expected)
        np.testing.assert_allclose(values[[98, 111]], 1.5 * min(1.0, deviations / 5))
        np.testing.assert_allclose(np.delete(values, range(98, 112)), 0.0, atol=1e-12)


def test_end_moves_to_an_open_stretch():
    stop = "TAATTAATTAATTAATTAA"  # closes all six frames
    sequence = "CAC" * 1000 + stop + "CAC" * 1000
    repeats = Repeats.from_sequence(sequence, np.arange(0, 5_000, 500), np.zeros(10), MODEL)

    def moved_ends(*ends: tuple[int, int]) -> list[tuple[int, int, str]]:
        return refine_ends([ViralRun(0, 1, start, end) for start, end in ends], repeats)

    [(start, end, att)] = moved_ends((2_700, 5_000))
    assert att == ""
    assert abs(start - 3_000) <= len(stop)
    assert end == 5_000
    for runs in ([(1_000, 2_600), (2_650, 5_000)], [(3_400, 3_420)]):
        moved = [end for run in moved_ends(*runs) for end in run[:2]]
        assert moved == sorted(set(moved))
    repeats = Repeats.from_sequence(
        8 * ("CAC" * 200 + stop), np.arange(0, 5_000, 500), np.zeros(10), MODEL
    )
    [(start, end, _)] = moved_ends((2_700, 4_700))  # of stops each 619 bases the nearest
    assert (start, end) == pytest.approx((2_466, 4_942), abs=len(stop) / 2)
    (_, before, _), (behind, _, _) = moved_ends((1_000, 2_600), (2_650, 4_700))
    assert before <= 2_625 < behind


PEPTIDE = "GGTGATAAATTCGCTGGTCGTCACGGTCAGAAAGGT"  # GDKFAGRHGQKG of RNA polymerase


@pytest.mark.parametrize("bases", [PEPTIDE, reverse_complement(PEPTIDE)], ids=["+", "-"])
def test_rna_polymerase_peptide_in_every_frame(bases):
    end = 0 if bases == PEPTIDE else len(bases)
    for start in (120, 121, 122, *range(1_000_000 - len(bases), 1_000_001, 7)):
        sequence = ("CAC" * (start // 3 + 1))[:start] + bases + "CAC" * 30
        assert host_peptides(sequence) == [start + end]


@pytest.mark.parametrize(
    "gene",
    [
        PEPTIDE,
        "CAGCAGCCGCGGTAA",  # 16S rRNA
        "AACTATAACGGTCCTAAGGTAGCGA",  # 23S rRNA
        "GGTCCTCTCGTA",  # on the other strand
    ],
)
def test_universal_bacterial_genes_are_host(gene):
    rng = np.random.default_rng(4)
    log_odds = rng.normal(-4, 1, 300)
    log_odds[104:120] += 8
    sequence = "CAC" * (150_500 // 3)
    place = 56_001
    guarded = sequence[:place] + gene + sequence[place + len(gene) :]
    of = [regions_of(one, log_odds, OWN) for one in (sequence, guarded)]
    assert (len(of[0]), len(of[1])) == (1, 0)


# The files

S = "0.500000"  # the score of every record here


def results(*regions_of: list[tuple[int, int, str]]) -> CalledRecords:
    made = []
    for number, regions in enumerate(regions_of):
        sequence = random_dna(400, np.random.default_rng(number))
        record = FastaRecord(f"in:r{number};=%,&|", "whatever", sequence, 1, 0, "in", f"r{number}")
        call = Call(record.name, len(sequence), "scored", "in", virus_score=0.5)
        found = tuple(
            Region(
                start, end, kind, 0.98765, "ACGTTGCAACGT", evidence=WHY, region_class="uncertain"
            )
            for start, end, kind in regions
        )
        made.append((record, call, found))
    return called(*made)


def written(folder: Path, made: CalledRecords) -> None:
    with open_outputs(REGION_OUTPUTS, OutputDir(folder, SafeDir(folder), folder)) as add:
        for portion in make_batches(made, REGION_OUTPUTS, None):
            add(portion)


def test_whole_record_region_only_if_called():
    rng = np.random.default_rng(6)
    sequence = random_dna(40_000, rng)
    far = OWN.levels.index_at(OWN.host.gc) + 5 * OWN.levels.spread
    log_odds = rng.normal(far, 1.5, 79)
    assert regions_of(sequence, log_odds, OWN) == ()
    [region] = regions_of(sequence, log_odds, OWN, is_virus=True)
    assert region[:3] == (0, 40_000, "whole")


@st.composite
def apart(draw) -> list[tuple[int, int, str]]:
    ends = sorted(draw(st.sets(st.integers(0, 400), max_size=8)))
    kinds = st.sampled_from(["provirus", "whole"])
    return [(a, b, draw(kinds)) for a, b in zip(ends[::2], ends[1::2], strict=False)]


@settings(deadline=None, max_examples=50)
@given(st.lists(apart(), min_size=1, max_size=4))
def test_region_files_agree(tmp_path_factory, regions_of):
    folder = tmp_path_factory.mktemp("files")
    made = results(*regions_of)
    written(folder, made)
    expected = [
        (made.records.ids[place], region.start, region.end, region.extent)
        for place, (regions, _) in made.regions.items()
        for region in regions
    ]
    names = [f"{record}|{kind}_{start + 1}_{end}" for record, start, end, kind in expected]
    table = rows(folder / "regions.tsv")
    assert [row["region"] for row in table] == names
    with (folder / "regions.tsv").open() as lines:
        assert list(map(parse_region, RunOutput.REGION_TABLE.values_in(lines))) == [
            (("in", made.records.names[place]), region._replace(posterior=0.9877))
            for place, (regions, _) in made.regions.items()
            for region in regions
        ]
    bed = [line.split("\t") for line in (folder / "regions.bed").read_text().splitlines()]
    assert [(row[0], int(row[1]), int(row[2]), row[3]) for row in bed] == [
        (*place[:3], name) for place, name in zip(expected, names, strict=True)
    ]
    first, *lines = (folder / "regions.gff3").read_text().splitlines()
    assert first == "##gff-version 3"
    terms = {"provirus": "proviral_region", "whole": "viral_sequence"}
    assert [
        (unquote(row[0]), row[2], int(row[3]) - 1, int(row[4]), unquote(row[8]))
        for row in (line.split("\t") for line in lines)
    ] == [
        (
            record,
            terms[kind],
            start,
            end,
            f"ID={name};att=ACGTTGCAACGT;class=uncertain;{WHY};call=other;virus_score={S}",
        )
        for (record, start, end, kind), name in zip(expected, names, strict=True)
    ]
    bases = dict(zip(made.records.ids, made.records.sequences, strict=True))
    assert {(row["call"], row["virus_score"]) for row in table} <= {("other", S)}
    assert [(one.header, one.sequence) for one in read_if_any(folder / "regions.fasta")] == [
        (f"{name} call=other virus_score={S} posterior=0.9877", bases[record][start:end])
        for (record, start, end, _), name in zip(expected, names, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        *(("start", value, "r has no region such as x") for value in ("0", "301")),
        *(("posterior", value, "r has no region such as x") for value in ("1.01", "-0.01")),
        ("extent", "virus", "x is a virus"),
        ("class", "phage", "x is of the class phage"),
    ],
)
def test_senseless_region_row_is_refused(name, value, why):
    usual = dict.fromkeys(RunOutput.REGION_TABLE.columns, "") | {"start": "101", "end": "300"}
    usual |= {"record": "r", "region": "x", "extent": "provirus", "posterior": "0.5"}

    def read(**changes: str) -> list[Region]:
        lines = (RunOutput.REGION_TABLE.columns, {**usual, **changes}.values())
        return [
            one
            for _, one in map(
                parse_region,
                RunOutput.REGION_TABLE.values_in("\t".join(line) + "\n" for line in lines),
            )
        ]

    for bounds in (("1", "1", "0"), ("7", "9", "1")):
        start, end, posterior = bounds
        [region] = read(start=start, end=end, posterior=posterior)
        assert region[:4] == (int(start) - 1, int(end), "provirus", float(posterior))
    with pytest.raises(ValueError, match=why):
        read(**{name: value})


def read_if_any(path: Path) -> list[FastaRecord]:
    return list(read_fasta(path)) if path.stat().st_size else []


# tRNA-Phe of E. coli K-12, without the CCA of the molecule
TRNA = "GCCCGGATAGCTCAGTCGGTAGAGCAGGGGATTGAAAATCCCCGTGTCCTTGGTTCGATTCCGAGTCCGGGCA"


def test_trna_end_on_either_strand():
    rng = np.random.default_rng(7)
    before = random_dna(500, rng)
    behind = random_dna(300, rng)
    sequence = before + TRNA + behind
    assert find_trna_ends(sequence) == [500 + len(TRNA)]
    assert find_trna_ends(reverse_complement(sequence)) == [300]
    unpaired = TRNA.replace("CCTTGGTTCG", "CAAAGGTTCG")  # no stem
    assert find_trna_ends(before + unpaired + behind) == []
    assert find_trna_ends("") == []


def test_trna_repeat_and_genes_are_evidence():
    rng = np.random.default_rng(7)
    sequence = random_dna(500, rng) + TRNA + random_dna(700, rng)
    log_odds = np.array([1.0, 0.0, -1.0])
    # the searched tRNA arm, here bases 548 to 565, is within 125 bases of an end
    for place, is_near in ((439, False), (440, True), (673, True), (674, False)):
        words = ["att_length=5", *["trna=yes"] * is_near, "viral_genes=1/3"]
        assert describe_evidence(sequence, (1_200, place), "ACGTA", log_odds) == ";".join(words)
    assert describe_evidence(sequence, (300, 1_200), "", log_odds) == "viral_genes=1/3"


def test_provirus_counts_by_the_threshold():
    finder = replace(ProvirusFinder.load_builtin(11), min_posterior=0.7)
    made = results([], [])
    (_, track), made.calls.are_viruses[1] = made.regions[0], True
    parts = (Region(0, 50, "provirus", 0.69), Region(60, 90, "provirus", 0.7))
    for _ in range(2):  # a note is replaced
        finder.add_detected(made, 0, (parts, track))
    finder.add_detected(made, 1, ((Region(0, 400, "whole", 0.1),), track))
    assert [[region.is_virus for region in made.regions[place][0]] for place in (0, 1)] == [
        *([False, True], [True])
    ]
    assert made.calls.notes == ["2 virus-like regions", ""]


def test_genes_of_both_strands_with_log_odds():
    gene = open_dna(600, np.random.default_rng(8))
    scorer = ProvirusFinder.load_builtin(11).scorer
    letters = STANDARD.meanings
    stops = "TAACTAACTAATTAGTTAGTTA"  # in all frames of both strands
    for is_turned, turned in enumerate((gene, reverse_complement(gene))):
        sequence = stops + turned + stops
        start, end, log_odds, strand = (column[0] for column in find_host_genes(sequence, scorer))
        assert 10 < start <= len(stops)
        assert len(stops) + 600 - 3 < end < len(sequence) - 10
        bases = sequence[start:end]
        assert strand == is_turned
        bases = reverse_complement(bases) if is_turned else bases
        protein = "".join(letters[bases[i : i + 3]] for i in range(0, len(bases), 3))
        assert log_odds == score_proteins([protein], scorer)[0]


# Runs


@pytest.fixture(scope="module")
def chromosomes() -> dict[str, str]:
    """Host genes with phage genes inside."""
    rng = np.random.default_rng(11)
    host = host_dna(200_000, rng)
    return {
        "lysogen": host[:90_000] + phage_dna(30_000, rng) + host[90_000:],
        "host": host_dna(60_000, rng),
        "short": open_dna(SHORTEST_RECORD - 1, rng),
    }


@pytest.fixture(scope="module")
def once(tmp_path_factory, chromosomes) -> Path:
    """A finished run of ``../in.fa`` with regions. No test changes it."""
    folder = tmp_path_factory.mktemp("once")
    predict(write(folder / "in.fa", **chromosomes), to=folder / "run")
    return folder / "run"


def test_regions_do_not_depend_on_neighbours(tmp_path, once, chromosomes):
    predict(write(tmp_path / "in.fa", lysogen=chromosomes["lysogen"]), to=tmp_path / "alone")
    for name in FILES[1:4]:
        assert (once / name).read_text() == (tmp_path / "alone" / name).read_text()


def test_regions_option_on_a_finished_run(tmp_path, once):
    source = once.parent / "in.fa"
    folder = tmp_path / "run"
    predict(source, to=folder, regions=False)
    plain = rows(folder / "predictions.tsv")
    assert not any((folder / name).exists() for name in FILES)
    predict(source, to=folder, resume=True)
    assert outputs(folder) == outputs(once)
    assert [{**row, "note": ""} for row in rows(folder / "predictions.tsv")] == plain
    predict(source, to=folder, regions=False, resume=True)
    assert rows(folder / "predictions.tsv") == plain
    assert not any((folder / name).exists() for name in FILES)


# times, and scores, which have regions if these were looked for at once
IN_ITS_OWN_WAY = (".json", ".log", ".html", ".scores")


def test_regions_command_equals_predict(tmp_path, chromosomes):
    """For a run of two files with equal ids and tables per file, and again when repeated."""
    sources = [write(tmp_path / name, **chromosomes) for name in ("a.fa", "b.fa")]
    once = tmp_path / "once"
    later = tmp_path / "later"
    predict(*sources, to=once, per_file=True)
    predict(*sources, to=later, per_file=True, regions=False)
    assert not any((later / name).exists() for name in FILES)
    options = RegionsOptions(folder=later, argv=("virnucpro", "regions", "later"))
    for _ in range(2):
        tally = find_regions(options, lambda _: None)
        assert (tally.n_regions, tally.n_proviruses) == (2, 2)
        assert 'id="regions"' in (later / "report.html").read_text()
        tables = [path.relative_to(once) for path in once.rglob("*.*") if path.is_file()]
        compared = [path for path in tables if path.suffix not in IN_ITS_OWN_WAY]
        assert {*FILES, "predictions.tsv"} <= {path.name for path in compared}
        for path in compared:
            assert (later / path).read_bytes() == (once / path).read_bytes(), path
    log = (later / "virnucpro.log").read_text()
    assert "virnucpro regions later" in log
    line = f"{tally.virus_line()}\n"
    assert line in log and line in (once / "virnucpro.log").read_text()
    manifests = [json.loads((folder / "run.json").read_text()) for folder in (once, later)]
    for key in ("recipe", "inputs", "cut"):
        assert manifests[0][key] == manifests[1][key]
    assert manifests[1]["counts"]["n_regions"] == 2


def test_regions_keep_the_warnings_of_the_report(tmp_path, chromosomes):
    """And add their own, only those of the last time."""
    gaps = chromosomes["short"][:500] + "---" + chromosomes["short"][500:]
    source = write(tmp_path / "in.fa", **chromosomes, gapped=gaps)
    predict(source, to=tmp_path / "run", regions=False)
    warning = "left out: 3 gaps (- . ~) of an alignment, in 1 record"
    assert warning in Page(tmp_path / "run/report.html").words
    source.rename(tmp_path / "aside.fa")
    for _ in range(2):
        with pytest.raises(ResumeError, match="gone or has changed"):
            find_regions(RegionsOptions(folder=tmp_path / "run"), lambda _: None)
    report_folder(tmp_path / "run")
    words = Page(tmp_path / "run/report.html").words
    assert warning in words and words.count("is gone or has changed") == 1
    (tmp_path / "aside.fa").rename(source)
    find_regions(RegionsOptions(folder=tmp_path / "run"), lambda _: None)
    words = Page(tmp_path / "run/report.html").words
    assert warning in words and "is gone or has changed" not in words
    predict(source, to=tmp_path / "run", regions=False, resume=True)
    assert Page(tmp_path / "run/report.html").words.count(warning) == 1


def test_regions_command_uses_the_runs_model(tmp_path, chromosomes, tiny):
    """The run names it, or it is next to the head of the model that embedded."""
    source = write(tmp_path / "in.fa", host=chromosomes["host"])
    folder = tmp_path / "run"
    own = tmp_path / "model" / "regions.json"
    shutil.copytree(tiny.model, own.parent)
    shutil.copy(tiny.head_file, own.with_name("head.safetensors"))
    facts = json.loads(OWN_REGION_MODEL.read_text())
    own.write_text(json.dumps({**facts, "training": "my own prophages"}))
    predict(source, to=folder, region_model=own)

    def model_of_regions() -> str:
        find_regions(RegionsOptions(folder=folder), lambda _: None)
        return json.loads((folder / "run.json").read_text())["cut"]["region_model"]

    assert model_of_regions() == str(own)
    stored = json.loads((folder / "run.json").read_text())
    stored["cut"].update(regions=False, region_model=None)
    stored["tables"]["model"] = str(own.parent)
    for path in own.parent.glob("model*.safetensors"):
        path.write_text("the model itself is not opened")
    write_run_json(folder, stored)
    assert model_of_regions() == str(own)
    assert (folder / "virnucpro.log").read_text().count("my own prophages") == 2
    tables = {**stored["tables"], "model": "esm2_t33_650M_UR50D"}
    write_run_json(folder, {**stored, "tables": tables})
    assert model_of_regions() is None  # and nothing is fetched
    write_run_json(folder, {**stored, "tables": ["not", "a", "table"]})
    with pytest.raises(ResumeError, match="does not say how the tables are made"):
        model_of_regions()
    write_run_json(folder, stored)
    assert model_of_regions() == str(own)
    own.unlink()
    with pytest.raises(InputMissingError, match="there is no region model"):
        model_of_regions()


def test_stricter_threshold_drops_proviruses(tmp_path, chromosomes):
    source = write(tmp_path / "in.fa", lysogen=chromosomes["lysogen"])
    folder = tmp_path / "run"
    predict(source, to=folder)
    [row] = rows(folder / "viruses.tsv")
    [region] = rows(folder / "regions.tsv")
    assert region["virus"] == row["virus"] == region["region"]
    posterior = float(row["score"])
    for threshold, n_viruses in ((posterior + 1e-5, 0), (posterior - 1e-5, 1)):
        predict(source, to=folder, resume=True, threshold=threshold)
        before = (folder / "viruses.tsv").read_bytes()
        assert len(rows(folder / "viruses.tsv")) == n_viruses
        assert len(rows(folder / "regions.tsv")) == 1
        assert find_regions(RegionsOptions(folder=folder), lambda _: None).n_proviruses == n_viruses
        assert (folder / "viruses.tsv").read_bytes() == before
        counts = json.loads((folder / "run.json").read_text())["counts"]
        assert counts["n_proviruses"] == n_viruses
    before = [(folder / name).read_bytes() for name in ("viruses.fasta", "regions.fasta")]
    source.unlink()  # the letters of the provirus are in these files
    predict(source, to=folder, resume=True, threshold=posterior - 2e-5)
    assert [(folder / name).read_bytes() for name in ("viruses.fasta", "regions.fasta")] == before


def test_stricter_presets_drop_more_proviruses():
    least = [ThresholdOptions(preset=name).min_posterior for name in FALSE_POSITIVES]
    assert least == sorted(set(least))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lysogen", "virus-like regions: 1, 0 of them complete records\nnext: head"),
        ("short", "virus-like regions: 0, 0 of them complete records\n"),
    ],
)
def test_regions_command_counts_and_names_tables(tmp_path, chromosomes, name, line):
    predict(write(tmp_path / "in.fa", **{name: chromosomes[name]}), to=tmp_path / "run")
    outcome = CliRunner().invoke(app, ["regions", str(tmp_path / "run")])
    assert outcome.exit_code == 0
    assert line in outcome.stdout
    assert ("next:" in outcome.stdout) == (name == "lysogen")


def test_regions_need_a_run_and_its_table(tmp_path, chromosomes):
    with pytest.raises(InputMissingError, match="there is no such folder"):
        find_regions(RegionsOptions(folder=tmp_path / "nothing"), lambda _: None)
    source = write(tmp_path / "in.fa", host=chromosomes["host"])
    predict(source, to=tmp_path / "run")
    forget_hashes(tmp_path / "run")
    table = tmp_path / "run/predictions.tsv"
    before = table.read_text()
    table.write_text(before.replace("host", "guest"))
    with pytest.raises(InputError, match="is not the table of this run"):
        find_regions(RegionsOptions(folder=tmp_path / "run"), lambda _: None)
    table.write_text(before)
    source.write_text(source.read_text().replace("A", "C", 1))
    with pytest.raises(ResumeError, match="is gone or has changed"):
        find_regions(RegionsOptions(folder=tmp_path / "run"), lambda _: None)
    assert table.read_text() == before


def test_replaced_record_is_searched_once(tmp_path, chromosomes):
    fasta = write(tmp_path / "in.fa", host=chromosomes["host"], lysogen="", a="ACGT" * 99)
    predict(fasta, to=tmp_path / "run")
    mended = write(tmp_path / "mended.fa", lysogen=chromosomes["lysogen"])
    predict(fasta, mended, to=tmp_path / "run", resume=True, add=True)
    table = (tmp_path / "run/predictions.tsv").read_text()
    assert [row.split("\t")[0] for row in table.splitlines()[1:]] == ["host", "a", "lysogen"]
    before = {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
    find_regions(RegionsOptions(folder=tmp_path / "run"), lambda _: None)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in FILES} == before
    assert (tmp_path / "run/predictions.tsv").read_text() == table


def test_tracks_hold_pieces_of_searched_records(once, chromosomes):
    with gzip.open(once / "tracks.tsv.gz", "rt") as text:
        columns, *lines = [line.rstrip("\n").split("\t") for line in text]
    assert columns == ["record", "start", "end", "log_odds", "posterior"]
    finder = ProvirusFinder.load_builtin(11)
    for name in ("lysogen", "host"):
        bases = chromosomes[name]
        pieces, _ = score_windows([bases], finder.scorer, finder.model.step)
        record_lines = [line[1:] for line in lines if line[0] == name]
        starts = [int(start) - 1 for start, _, _, _ in record_lines]
        assert starts == pieces.start.tolist()
        assert [f"{value:.3f}" for value in pieces.log_odds] == [row[2] for row in record_lines]
    assert {line[0] for line in lines} == {"lysogen", "host"}
    viral = [line for line in lines if float(line[4]) > 0.5]
    assert all(88_000 < int(line[1]) < 122_000 for line in viral)
    assert len(viral) > 50


def test_region_over_the_origin_has_two_parts():
    """The same bases are reported wherever the circle was cut open."""
    rng = np.random.default_rng(11)
    finder = ProvirusFinder.load_builtin(11)
    host = genes_dna(200_000, rng, 300, USUAL_IN_HOST)  # the hairpins of others are repeats
    bases = host[:90_000] + phage_dna(30_000, rng) + host[90_000:]
    spans = {}
    for first in (0, 20_777, 105_000, 125_500):
        turned = FastaRecord("x", "x circular=true", bases[first:] + bases[:first])
        call = Call("x", len(bases), "scored", virus_score=0.1)
        results = called((turned, call, None))
        finder.add_regions(results, 0)
        regions, track = results.regions[0]
        assert results.calls.notes == ["1 virus-like region"]  # of two parts, at the origin
        assert (np.diff(track.start) > 0).all()
        assert {*((track.end - track.start) % len(bases)).tolist()} == {1_000}
        spans[first] = sorted(
            ((region.start + first) % len(bases), (region.end + first - 1) % len(bases) + 1)
            for region in regions
        )
        assert [region.over_origin for region in regions] == [first == 105_000] * len(regions)
        if first == 105_000:
            assert [regions[0].start, regions[-1].end] == [0, len(bases)]
    [(start, end)] = spans[0]
    assert spans[20_777] == spans[125_500] == [(start, end)]
    assert spans[105_000] == [(start, 105_000), (105_000, end)]
    assert abs(start - 90_000) < 4_000
    assert abs(end - 120_000) < 4_000
    cut = FastaRecord("x", "x", bases[105_000:] + bases[:105_000])
    assert not any(region.over_origin for region in finder.find([cut], [[False]])[0][0][0])


def test_regions_are_counted_by_kind():
    made = results(
        [(0, 150, "whole"), (150, 400, "whole")],
        [(100, 400, "whole")],
        [(0, 90, "provirus"), (200, 300, "provirus")],
    )
    circle, track = made.regions[0]
    made.regions[0] = tuple(region._replace(over_origin=True) for region in circle), track
    summary = Summary()
    for some in (made.slice_rows(0, 2), made.slice_rows(2, 3)):
        [portion] = make_batches(some, (), None)
        summary.records.include(portion.total)
    assert (summary.records.n_regions, summary.records.n_whole_regions) == (4, 2)
    assert summary.records.virus_line() == "no viruses"
    counts = RecordCounts(n_viral=3, n_known_only=2, n_proviruses=1)
    assert counts.virus_line() == (
        "4 viruses: 3 contigs (2 by the index of known viruses alone), 1 provirus"
    )
    assert RecordCounts(n_viral=1).virus_line("protein") == "1 virus: 1 protein"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("1 length=5 depth=1.00x circular=true", True),
        ("1 [organism=x] [topology=circular]", True),
        ("ctg1 length=5 circular=yes", True),
        ("ctg1 circular=no", False),
        ("circular=true", False),  # an id
        ("x semicircular=true", False),
        ("x a circular=truest phage", False),
    ],
)
def test_header_can_declare_a_circle(header, expected):
    assert FastaRecord("1", header, "").is_circular == expected


def test_direct_repeats_are_the_ends():
    rng = np.random.default_rng(8)
    bases = random_dna(60_000, rng)
    att = "GCTTTTTTATACTAA"
    sequence = bases[:20_000] + att + bases[20_000:45_000] + att + bases[45_000:]
    log_odds = rng.normal(-4, 1, 119)
    log_odds[40:90] += 7
    [region] = regions_of(sequence, log_odds, OWN)
    assert region[:2] == (20_000, 45_030)
    assert region.att == att
    [region] = regions_of(bases + att * 2, log_odds, OWN)
    assert region.att == ""


def repeats_by(evidence: np.ndarray, sequence: str) -> Repeats:
    """Return the repeats of a sequence with pieces every 500 bases and this evidence."""
    return Repeats.from_sequence(sequence, 500 * np.arange(len(evidence)), evidence, MODEL_OF_LONG)


ATT = "CTTCTAAGTCGTGGGCCGCAGGTTCGAATCCTGCAGGGCGCGCCATT"  # of DLP12 in the gene of a tRNA


def repeats_of(word: str, *, elsewhere: str = "") -> list[Repeat]:
    """Return repeats around (40_000, 60_000), with a word from 45_000 and up to 70_000."""
    bases = random_dna(200_000, np.random.default_rng(11))
    size = len(word)
    bases = bases[:45_000] + word + bases[45_000 + size : 70_000 - size] + word + bases[70_000:]
    record = RecordText(bases + elsewhere)
    return Repeat.from_ends(record, (40_000, 60_000), (0, len(bases)), 20_000)


def test_repeat_far_from_the_ends_must_be_long():
    [repeat] = repeats_of(ATT)
    assert (repeat.start, repeat.end, repeat.bases) == (45_000, 70_000, ATT)
    assert repeat.n_by_chance < 1e-10
    assert not repeats_of(ATT[:15])


def test_repeats_elsewhere_are_a_family():
    assert not repeats_of(ATT, elsewhere=ATT)
    far = "N" * 2**24
    many = 100 * ATT
    assert not repeats_of(ATT, elsewhere=many + far)
    assert repeats_of(ATT, elsewhere=far + many), "counted as far as most genomes are long"


def test_terminators_are_no_attachment_sites():
    stem = "GCGTACCGATTGA"
    assert not repeats_of(f"AAAAA{stem}TTCG{reverse_complement(stem)}TTTTT")
    gene = random_dna(1_000, np.random.default_rng(12))
    assert not repeats_of(gene)
    left = gene[:300] + "A" + gene[301:]
    right = gene[:300] + "C" + gene[301:]
    bases = random_dna(200_000, np.random.default_rng(13))
    record = bases[:45_000] + left + bases[46_000:69_000] + right + bases[70_000:]
    text = RecordText(record)
    assert not Repeat.from_ends(text, (40_000, 60_000), (0, len(record)), 20_000)


def test_ends_move_only_with_most_evidence():
    bases = random_dna(200_000, np.random.default_rng(14))
    starts = np.arange(0, 199_500, 500)
    evidence = np.where((starts >= 40_000) & (starts < 60_000), 0.5, -0.5)
    for places, is_taken in (((38_000, 57_000), True), ((50_000, 58_000), False)):
        left, right = places
        record = bases[:left] + ATT + bases[left:right] + ATT + bases[right:]
        repeats = Repeats.from_sequence(record, starts, evidence, MODEL_OF_LONG)
        found = repeats.from_window(ViralRun(80, 120, 40_000, 60_000), (0, 200_000))
        assert (found is not None and found.bases.startswith(ATT)) == is_taken


def test_neighbours_bounded_by_repeats_stay_apart():
    rng = np.random.default_rng(12)
    bases = random_dna(180_000, rng)
    ends = [(50_000, 88_000), (90_000, 130_000)]
    two = bases
    for start, end in ends:
        two = two[: end - 25] + two[start : start + 25] + two[end:]
    around = bases[:129_975] + bases[50_000:50_025] + bases[130_000:]
    only_first = two[:120_000] + random_dna(60_000, rng)
    run = ViralRun(100, 260, 50_300, 129_600)
    evidence = np.zeros(359)
    evidence[100:260] = 0.5
    whole = [(run.start_base, run.end_base)]
    for sequence, expected in (
        (two, ends),
        (around, [(50_000, 130_000)]),
        (bases, whole),
        (only_first, whole),  # the rest has none, and the first less than half of the evidence
    ):
        repeats = repeats_by(evidence, sequence)
        parts = repeats.parts_of(run)
        assert (parts == [run]) == (len(expected) == 1)
        moved = [(start, end) for start, end, att in refine_ends(parts, repeats) if att] or whole
        # two bases may agree by chance beyond either copy, one in 4^3 more
        np.testing.assert_allclose(moved, expected, atol=2)
    weaker = evidence.copy()
    weaker[176:] = 0.1
    parts = repeats_by(weaker, only_first).parts_of(run)
    assert [(part.start_base, part.end_base) for part in parts] == [
        (run.start_base, 88_000),
        (88_000, run.end_base),  # the rest is no less viral without a repeat
    ]


def test_virus_next_to_a_bounded_one():
    """Also if a search around both finds the repeat of the first."""
    bases = random_dna(180_000, np.random.default_rng(12))
    first = (50_000, 88_000)
    second = (90_000, 106_000)
    one = bases[:87_975] + bases[50_000:50_025] + bases[88_000:]
    two = one[:105_975] + one[90_000:90_025] + one[106_000:]
    run = ViralRun(100, 212, 50_300, 105_800)
    for sequence, second_evidence, expected in (
        (two, 0.5, [first, second]),
        (two, 0.1, [first, second]),
        (one, 0.5, [first, (88_000, 105_800)]),
        (one, 0.1, [first]),
    ):
        evidence = np.zeros(359)
        evidence[100:176] = 0.5
        evidence[180:212] = second_evidence
        repeats = repeats_by(evidence, sequence)
        around = repeats.from_window(run, (0, 180_000))
        assert around is not None
        assert bases[50_000:50_025] in around.bases
        moved = [ends[:2] for ends in refine_ends(repeats.parts_of(run), repeats)]
        # the place without a repeat moves to the edge of an open stretch
        near = [2 if sequence is two or ends == first else 1_000 for ends in expected]
        for ends, other, most in zip(moved, expected, near, strict=True):
            np.testing.assert_allclose(ends, other, atol=most)


def test_run_with_a_rarer_repeat_wins():
    bases = random_dna(180_000, np.random.default_rng(12))
    lysogen = bases[:87_975] + bases[50_000:50_025] + bases[88_000:]
    evidence = np.zeros(359)
    evidence[100:176] = 0.5
    repeats = repeats_by(evidence, lysogen)
    by_pieces = ViralRun(100, 176, 50_300, 88_200)
    apart = ViralRun(240, 280, 120_000, 140_000)
    parts = [ViralRun(100, 110, 50_300, 55_000), ViralRun(120, 190, 60_000, 95_000)]
    assert repeats.confirmed([*parts, apart], [by_pieces]) == [by_pieces, apart]
    assert repeats.confirmed([apart], [by_pieces]) == [apart], "no protein says so"
    without = repeats_by(evidence, bases)
    assert without.confirmed(parts, [by_pieces]) == parts
    both = ViralRun(100, 240, 50_300, 120_000)
    long = evidence.copy()
    for rest_evidence, kept in ((0.5, [ViralRun(176, 240, 88_200, 120_000)]), (0.1, [])):
        long[177:240] = rest_evidence
        repeats = repeats_by(long, lysogen)
        assert repeats.confirmed([both], [by_pieces]) == [by_pieces, *kept], "what it leaves"
    near = ViralRun(100, 176, 50_001, 88_001)  # the same repeat is less by chance nearer to it
    assert repeats.confirmed([near], [by_pieces]) == [near]


def test_region_by_all_paths_if_long_or_bounded():
    rng = np.random.default_rng(8)
    bases = random_dna(100_000, rng)
    log_odds = rng.normal(-4, 1.0, 201)
    lysogen = bases[:40_000] + ATT + bases[40_000:60_000] + ATT + bases[60_000:]
    called = []
    for height in np.arange(1.0, 5.0, 0.02):
        values = log_odds.copy()
        values[80:121] += height
        both = (
            regions_of(bases + "A" * len(ATT * 2), values, OWN),
            regions_of(lysogen, values, OWN),
        )
        called.append(tuple(map(bool, both)))
    assert called[0] == (False, False)
    assert called[-1] == (True, True)
    assert called.count((False, True)) > 1
    assert called.count((True, False)) == 0
    item_arguments = bases, 500 * np.arange(199), np.ones(199)
    for usual, is_proven in ((20_000.0, True), (20_001.0, False)):
        repeats = Repeats.from_sequence(*item_arguments, replace(OWN, virus_bases=usual))
        assert repeats.test_repeat(ViralRun(80, 120, 40_000, 60_000)) == is_proven


def find(finder: ProvirusFinder, bases: str, *, is_virus: bool = False) -> tuple[Region, ...]:
    [[(regions, _)]] = finder.find([FastaRecord("x", "x", bases)], [[is_virus]])
    return regions


def test_called_record_is_one_region(chromosomes):
    virus = open_dna(20_000, np.random.default_rng(2))
    finder = ProvirusFinder.load_builtin(11)
    [region] = find(finder, virus, is_virus=True)
    assert region[:3] == (0, 20_000, "whole")
    flanked = chromosomes["host"] + virus
    [region] = find(finder, flanked, is_virus=True)
    assert abs(region.start - 60_000) < 2_000
    assert region.end == 80_000


def test_region_model_is_read_back_or_refused(tmp_path):
    path = tmp_path / "regions.json"
    path.write_text(MODEL.text)
    assert RegionModel.load(path) == MODEL
    falling = json.dumps(json.loads(MODEL.text) | {"edges": [2.0, 0.0]})
    for damaged in ("", "[]", '{"format": 0}', MODEL.text.replace("0.1", "NaN"), falling):
        path.write_text(damaged)
        with pytest.raises(UnavailableError, match="is not a region model"):
            RegionModel.load(path)
    with pytest.raises(InputMissingError, match="there is no region model"):
        RegionModel.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_bases", float("nan")),
        ("virus_bases", float("inf")),
        ("virus_bases", 0),
        ("distance", 0.0),
        ("weight", 0.0),
        ("first_share", 0.0),
        ("first_share", 1.0),
        ("deviation", 0.0),
        ("step", 2.5),
        ("shape_bases", 9500.5),
        ("host.gc", None),
        ("host.slope", float("nan")),
        ("host.shape", [1.0, 2.0]),
        ("host.deviation", [0.0, 0.0, 0.0]),
        ("levels.spread", float("nan")),
        ("size", 999),
        ("edges", [0.0]),
    ],
)
def test_region_model_with_bad_figure_is_refused(tmp_path, key, value):
    facts = json.loads(OWN_REGION_MODEL.read_text())
    *part, name = key.split(".")
    of = facts[part[0]] if part else facts
    assert name in of
    of[name] = value
    path = tmp_path / "regions.json"
    path.write_text(json.dumps(facts))
    with pytest.raises(UnavailableError, match="is not a region model of this VirNucPro"):
        ProvirusFinder.load_builtin(11, model=path)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared real sequences are not here")
def test_lambda_is_found_between_its_repeat():
    host = next(read_fasta(SHARED / "inputs/ecoli_K12_MG1655_GCF_000005845.2.fna.gz")).sequence
    phage = next(read_fasta(SHARED / "inputs/lambda_virus.fa")).sequence
    lysogen = host[600_000:807_342] + phage[27_738:] + phage[:27_723] + host[807_327:1_100_000]
    start = 207_327
    end = 255_829 + 15
    regions = find(ProvirusFinder.load_builtin(11), lysogen)
    [region] = [one for one in regions if one.end > start - 20_000 and one.start < end + 20_000]
    assert (region.start, region.end, region.att) == (start, end, "GCTTTTTTATACTAA")


@pytest.mark.skipif(not SHARED.exists(), reason="the shared real sequences are not here")
def test_end_moves_over_known_bases():
    phage = next(read_fasta(SHARED / "inputs/lambda_virus.fa")).sequence
    record = 3_000 * "AC" + phage[:9_000] + 3_000 * "AC"
    first = ViralRun(0, 1, 8_000, 10_000)
    second = ViralRun(2, 3, 12_300, 13_000)
    [alone] = extend_known([first], record, 20_000)
    assert 5_500 <= alone.start_base <= 6_000
    assert 15_000 <= alone.end_base <= 15_500
    assert extend_known([first], record, 1_000)[0][2:] == (7_000, 11_000)
    before, behind = extend_known([first, second], record, 20_000)
    assert (before.end_base, behind.start_base) == (12_300, 12_300)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared real sequences are not here")
def test_called_record_keeps_known_bases_far_from_its_viral_run():
    genomes = read_fasta(SHARED / "labelled3/viral.fa.gz")
    swine_fever = next(record for record in genomes if record.id == "V300004")
    finder = ProvirusFinder.load_builtin(11)
    [[([region], _)]] = finder.find([swine_fever], [[True]])
    assert (region.extent, region.start) == ("whole", 0)
    assert len(swine_fever.sequence) - region.end < 500
