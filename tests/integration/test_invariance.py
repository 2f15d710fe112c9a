"""Results do not depend on strand, origin of a circle, order, case, U, or files.

docs/OUTPUT.md, "What a result depends on", has the same list, and what may differ.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from feature_extraction import featurize_pieces
from hypothesis import example, given, settings
from hypothesis import strategies as st
from region_helpers import USUAL_IN_HOST, genes_dna, phage_dna
from run_helpers import CONTIGS, rows, write_fasta
from scorer_reference import CODES, PIECE, table_of
from scorer_run_helpers import predict

from virnucpro.core.types import FastaRecord, reverse_complement
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.open_codes import find_open_codes
from virnucpro.viral.features import layout_features
from virnucpro.viral.identification import identify_viruses
from virnucpro.viral.networks import Knot, Scorer
from virnucpro.viral.provirus import ProvirusFinder
from virnucpro.viral.scoring import score_block
from virnucpro.viral.types import Region, Track
from virnucpro.viral.windows import Windows, canonical_rotation, split_windows

# both sides of each length from which other nets read a record, and of several pieces
LENGTHS = (
    *(150, 151, 164, 165, 179, 180, 299, 301, 330, 331, 349, 350, 500, 549, 551, 699, 700),
    *(999, 1000, 1099, 1101, 1999, 2000, 3001, 3299, 3301, 7777, 9999, 10_000, 12_345, 25_001),
)
# columns of predictions.tsv that say what a record is, and those of viruses.tsv that do
CALL = (
    *("length", "status", "call", "virus_score", "fdr", "n_chunks", "n_chunks_scored", "note"),
    *("evidence", "known_family", "n_known_kmers"),
)
KIND = (
    *("extent", "length", "score", "fdr", "note", "group", "group_probability", "family"),
    *("family_kmers", "family_share", "topology", "repeat_length"),
    *("taxonomy", "genus", "genome_type", "host_source", "host_genus"),
    *("completeness", "completeness_method"),
)


def gc_rich(n_bases: int, choose: random.Random) -> str:
    """A gene with few stops in other frames, so that several stretches are equally long."""
    third = "GC" * 9 + "AT"
    codons = (
        choose.choice("GCGCGCAT") + choose.choice("GCGCAT") + choose.choice(third)
        for _ in range(n_bases // 3 + 1)
    )
    return "".join(codons)[:n_bases]


def sequences_of(length: int) -> list[str]:
    rng = np.random.default_rng(length)
    texts = [random_dna(length, rng), open_dna(length, rng), gc_rich(length, random.Random(length))]
    with_unknown = texts[0][: length // 3] + "N" * (length // 5) + texts[0][length // 3 :]
    return [*texts, with_unknown[:length], "N" * (length - 60) + texts[1][:60]]


def mirrored(regions: tuple[Region, ...], n_bases: int) -> list[Region]:
    return [
        region._replace(
            start=n_bases - region.end,
            end=n_bases - region.start,
            att=reverse_complement(region.att),
        )
        for region in reversed(regions)
    ]


# The reverse complement, step by step


@given(st.lists(PIECE, min_size=1, max_size=3), CODES)
@example(["GC" * 75, "ACGT" * 50, "A" * 301, "GAC" * 99 + "G"], STANDARD)
def test_strand_features(texts: list[str], code) -> None:
    words = table_of(texts)
    forward, _ = featurize_pieces(Windows.from_sequences(texts), words, code)
    reverse, _ = featurize_pieces(
        Windows.from_sequences(list(map(reverse_complement, texts))), words, code
    )
    np.testing.assert_array_equal(forward, reverse)


@given(st.lists(PIECE, min_size=1, max_size=3), CODES)
def test_strand_layout(texts: list[str], code) -> None:
    forward = layout_features(Windows.from_sequences(texts), code)
    reverse = layout_features(Windows.from_sequences(list(map(reverse_complement, texts))), code)
    np.testing.assert_array_equal(forward, reverse)


@given(st.integers(1, 5_000), st.integers(1, 700))
def test_strand_pieces(n_bases: int, size: int) -> None:
    _, start, n_of_piece = split_windows(np.array([0]), np.array([n_bases]), size)
    np.testing.assert_array_equal(n_bases - (start + n_of_piece)[::-1], start)
    np.testing.assert_array_equal(n_of_piece[::-1], n_of_piece)
    unread = n_bases - (start[-1] + n_of_piece[-1]) + start[0]
    gaps = np.maximum(0, start[1:] - (start + n_of_piece)[:-1])
    assert unread + gaps.sum() <= size / 10 + 2  # a piece in the middle may lack a base
    assert set(n_of_piece.tolist()) <= {min(size, n_bases), min(size, n_bases) - 1}


@pytest.mark.parametrize("length", LENGTHS)
def test_strand_scores(length: int) -> None:
    texts = sequences_of(length)
    scorer = Scorer.load_builtin()
    scores, pieces, kingdoms = score_block(texts, scorer)
    reverse = list(map(reverse_complement, texts))
    reverse_scores, piece_scores, kingdoms_of_reverse = score_block(reverse, scorer)
    assert kingdoms.tolist() == kingdoms_of_reverse.tolist()
    np.testing.assert_array_equal(scores, reverse_scores)
    for record in range(len(texts)):
        here, there = (each.take(each.record == record) for each in (pieces, piece_scores))
        np.testing.assert_array_equal(here.start, length - (there.start + there.n_bases)[::-1])
        np.testing.assert_array_equal(here.log_odds, there.log_odds[::-1])


@settings(max_examples=30, deadline=None)
@given(st.integers(150, 4_000), st.integers(0, 10**6))
def test_strand_scores_of_genes(n_bases: int, seed: int) -> None:
    text = gc_rich(n_bases, random.Random(seed))
    [forward, reverse], _, _ = score_block([text, reverse_complement(text)], Scorer.load_builtin())
    assert forward == reverse


@pytest.mark.parametrize("length", [500, 3_001, 9_999, 25_001])
def test_strand_identity(length: int) -> None:
    texts = sequences_of(length)
    reverse = list(map(reverse_complement, texts))
    assert identify_viruses(texts) == identify_viruses(reverse)


def test_strand_terminal_repeat() -> None:
    """Its first 21 bases agree at one end only."""
    repeat = random_dna(500, np.random.default_rng(1))
    copy = "A" if repeat[2] != "A" else "C"
    text = repeat + random_dna(3_000, np.random.default_rng(2)) + repeat[:2] + copy + repeat[3:]
    found = identify_viruses([text, reverse_complement(text)], [False, False])
    assert [(one.topology, one.repeat_length) for one in found] == 2 * [("DTR", 500)]


def test_strand_genetic_code() -> None:
    """Where A is rarer than T, stops of one strand are rarer than those of the other."""
    choose = random.Random(3)
    codons = ["TTT", "GTT", "CTT", "TGA", "GAA", "AAA", "TTA", "CAA"]
    for seed in range(40):
        choose.seed(seed)
        gene = "".join(choose.choices(codons, weights=[6, 4, 3, 1, 2, 2, 1, 1], k=110))
        text = "".join(choose.choices("ACGT", weights=[1, 1, 2, 4], k=1_000))
        text += gene + "".join(choose.choices("ACGT", weights=[1, 1, 2, 4], k=1_000))
        forward, reverse = find_open_codes([text, reverse_complement(text)])
        assert forward == reverse


# Regions


@given(st.text("ACGTN", min_size=1, max_size=60))
@example("GATGATGAT")
def test_first_of_circle(text: str) -> None:
    turned = [text[first:] + text[:first] for first in range(len(text))]
    first = canonical_rotation(text)
    assert turned[first] == min(turned, key=lambda one: one.replace("N", "Z"))


@pytest.fixture(scope="module")
def lysogen() -> str:
    """A phage within a host. The length is not a multiple of a step."""
    rng = np.random.default_rng(11)
    host = genes_dna(120_123, rng, 300, USUAL_IN_HOST)
    return host[:50_000] + phage_dna(30_000, rng) + host[50_000:]


def test_strand_regions(lysogen: str) -> None:
    finder = ProvirusFinder.load_builtin(11)
    n_bases = len(lysogen)
    records = [FastaRecord("x", "x", one) for one in (lysogen, reverse_complement(lysogen))]
    (forward, as_virus), (reverse, virus_too) = finder.find(records, [(False, True)] * 2)
    assert len(forward[0]) == 1 and abs(forward[0][0].start - 50_000) < 3_000
    for (regions, track), (others, other_track) in ((forward, reverse), (as_virus, virus_too)):
        assert list(regions) == mirrored(others, n_bases)
        assert_same_track(track, other_track, n_bases)


def assert_same_track(track: Track, other: Track, n_bases: int) -> None:
    order = np.argsort(n_bases - other.end)
    np.testing.assert_array_equal(track.start, (n_bases - other.end)[order])
    np.testing.assert_array_equal(track.end, (n_bases - other.start)[order])
    np.testing.assert_array_equal(track.log_odds, other.log_odds[order])
    np.testing.assert_array_equal(track.posterior, other.posterior[order])


def test_circle_regions(lysogen: str) -> None:
    """The same bases are in regions wherever a circle was cut open, and on either strand."""
    finder = ProvirusFinder.load_builtin(11)
    n_bases = len(lysogen)
    found = set()
    for first in (0, 777, 61_001, 75_500):
        turned = lysogen[first:] + lysogen[:first]
        for is_reverse in (False, True):
            text = reverse_complement(turned) if is_reverse else turned
            record = FastaRecord("x", "x circular=true", text)
            [[(regions, _)]] = finder.find([record], [[False]])
            regions = tuple(mirrored(regions, n_bases)) if is_reverse else regions
            bases = {(base + first) % n_bases for one in regions for base in range(*one[:2])}
            found.add((frozenset(bases), regions[0].posterior, regions[0].att))
    assert len(found) == 1


def test_circle_score() -> None:
    """The pieces divide the length of the circle, which is turned by a multiple of them."""
    text = open_dna(30_000, np.random.default_rng(5))
    turned = text[10_000:] + text[:10_000]
    [one, other], _, _ = score_block([text, turned], Scorer.load_builtin())
    assert one == pytest.approx(other, abs=1e-12)  # the same log-odds in another order


# Runs


@pytest.fixture(scope="module")
def records() -> dict[str, str]:
    """The contigs of the example, complete and in parts of 150 to 700 bases."""
    whole = {record.id: record.sequence for record in read_fasta(CONTIGS)}
    parts = {
        f"{name}_{size}": bases[size : 2 * size]
        for name, bases in whole.items()
        for size in (150, 299, 701)
    }
    return whole | parts


@pytest.fixture(scope="module")
def variants(records: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the reverse complement of each record, its RNA, and its letters in mixed case."""
    folder = tmp_path_factory.mktemp("variants")
    texts = dict(records)
    for name, bases in records.items():
        texts[f"{name}.reverse"] = reverse_complement(bases)
        texts[f"{name}.rna"] = bases.replace("T", "U").replace("t", "u")
        half = len(bases) // 2
        texts[f"{name}.case"] = bases[:half].lower() + bases[half:]
    predict(write_fasta(folder / "in.fa", texts), to=folder / "run")
    return folder / "run"


def read_columns(table: Path, key: str, columns: tuple[str, ...]) -> dict[str, list[str]]:
    return {row[key]: [row[column] for column in columns] for row in rows(table)}


@pytest.mark.parametrize("change", ["reverse", "rna", "case"])
def test_run_of_variants(variants: Path, records: dict[str, str], change: str) -> None:
    calls = read_columns(variants / "predictions.tsv", "record", CALL)
    kinds = read_columns(variants / "viruses.tsv", "record", KIND)
    assert len(kinds) > 40
    for name in records:
        assert calls[f"{name}.{change}"] == calls[name]
        assert kinds.get(f"{name}.{change}") == kinds.get(name)


def test_run_in_other_files(variants: Path, records: dict[str, str], tmp_path: Path) -> None:
    """Records in another order, in three files. One file follows another run's file."""
    names = list(records)
    random.Random(4).shuffle(names)
    files = [
        write_fasta(tmp_path / f"{n}.fa", {name: records[name] for name in names[n::3]})
        for n in range(3)
    ]
    predict(*files, to=tmp_path / "run")
    for table, columns in (("predictions.tsv", CALL), ("viruses.tsv", KIND)):
        here = read_columns(tmp_path / "run" / table, "record", columns)
        there = read_columns(variants / table, "record", columns)
        assert here == {name: row for name, row in there.items() if name in records}


# Joined records


def test_joined_records() -> None:
    """A record joined with N has the mean of all pieces, as if they were from one record."""
    own = Scorer.load_builtin()
    [nets] = [nets for nets in own.pieces if nets.size == 500]
    scorer = replace(own, pieces=(nets,), knots=(Knot(500, 1.0, 0.0),))
    first = random_dna(1_500, np.random.default_rng(7))
    second = gc_rich(3_000, random.Random(7))
    [one, other, joined], _, _ = score_block([first, second, first + 1_000 * "N" + second], scorer)
    assert joined == pytest.approx((3 * one + 6 * other) / 9, abs=1e-12)
