"""Proteins are scored and called by their residues alone, whatever other proteins there are."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import compress, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from piece_networks import TrainingConfig, TrainingSet, fit_network
from scorer_file import save_scorer
from scorer_kmers import encode_kmers, kmer_class_table
from train_protein_scorer import find_pattern, n_pattern_values

from virnucpro.core.recipe import Recipe
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.fasta import read_fasta
from virnucpro.viral.calling import call_scored, score_records
from virnucpro.viral.features import (
    AMINO_ACIDS,
    NO_KMERS,
    NO_RESIDUE,
    KmerClass,
    KmerClassTable,
)
from virnucpro.viral.networks import BUILTIN_SCORER, ProteinNetworks, Scorer, load_scorer
from virnucpro.viral.options import ThresholdOptions
from virnucpro.viral.proteins import (
    N_RESIDUES,
    PATTERNS,
    RATIO_STEP,
    SHORTEST,
    ProteinFeatures,
    Proteins,
    composition,
    encode_protein,
    features_without_kmers,
    kmer_features,
    protein_features,
)
from virnucpro.viral.scoring import score_proteins
from virnucpro.viral.types import CalledRecords

EXAMPLES = Path(__file__).parents[2] / "examples" / "proteins.faa"
LETTERS = AMINO_ACIDS + AMINO_ACIDS.lower() + "BZJXUO*"
PROTEIN = st.text(LETTERS, min_size=SHORTEST, max_size=300)
RECIPE = Recipe(command="predict", input_type="protein", chunk_size=0, min_length=0, encoders=())


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer.load_builtin()


@pytest.fixture(scope="module")
def nets(scorer: Scorer) -> ProteinNetworks:
    assert scorer.proteins is not None
    return scorer.proteins


def random_protein(n_residues: int, seed: int) -> str:
    return "".join(np.random.default_rng(seed).choice(list(AMINO_ACIDS), n_residues))


def called(
    sequences: list[str], scorer: Scorer, cut: ThresholdOptions | None = None
) -> CalledRecords:
    records = [FastaRecord(f"p{i}", f"p{i}", sequence) for i, sequence in enumerate(sequences)]
    scored = score_records(Records.from_records(records), RECIPE, scorer)
    return call_scored(scored, RECIPE, scorer, cut or ThresholdOptions())


# Features


def test_letters_count_as_residues_in_any_case() -> None:
    assert encode_protein(AMINO_ACIDS).tolist() == list(range(N_RESIDUES))
    assert encode_protein(AMINO_ACIDS.lower()).tolist() == list(range(N_RESIDUES))
    assert (encode_protein("UuOo") == encode_protein("CCKK")).all()
    assert encode_protein("BZJX*bzjx-").tolist() == [NO_RESIDUE] * 10


def test_residue_shares_equal_hand_counts() -> None:
    protein = "MKVAXLLK"
    features = composition(Proteins.from_sequences([protein]))[0]
    residues = {AMINO_ACIDS[i]: value for i, value in enumerate(features[:N_RESIDUES]) if value}
    assert residues == {
        letter: pytest.approx((protein.count(letter) / 7) ** 0.5) for letter in "MKVAL"
    }
    pairs = features[ProteinFeatures.PAIRS]
    found = {AMINO_ACIDS[i // 20] + AMINO_ACIDS[i % 20]: pairs[i] for i in np.flatnonzero(pairs)}
    expected = [a + b for a, b in pairwise(protein) if "X" not in a + b]
    assert found == {pair: pytest.approx((1 / len(expected)) ** 0.5) for pair in expected}
    assert len(features) == ProteinFeatures.N_COMPOSITION


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_never_crosses_proteins(pattern: tuple[int, ...]) -> None:
    sequences = ["MKVALLKWX", "ACDEFGH", "MK"]
    owner, numbers = find_pattern(Proteins.from_sequences(sequences), pattern)
    expected = []
    for i, sequence in enumerate(sequences):
        for start in range(len(sequence) - pattern[-1]):
            letters = [sequence[start + place] for place in pattern]
            if "X" not in letters:
                number = 0
                for letter in letters:
                    number = number * N_RESIDUES + AMINO_ACIDS.index(letter)
                expected.append((i, number))
    assert list(zip(owner.tolist(), numbers.tolist(), strict=True)) == expected


def test_pattern_log_ratios_are_averaged() -> None:
    ratios = np.zeros(n_pattern_values(PATTERNS[0]), dtype=np.int8)
    proteins = Proteins.from_sequences(["ACDE", "ACDC", "AC"])
    numbers = find_pattern(proteins, PATTERNS[0])[1]
    ratios[numbers[0]], ratios[numbers[1]] = 64, -32  # ACD, CDE
    others = [np.zeros(n_pattern_values(pattern), dtype=np.int8) for pattern in PATTERNS[1:]]
    figures = kmer_features(proteins, NO_KMERS, [ratios, *others]) / RATIO_STEP
    first_pattern = len(KmerClass)
    figures = figures[:, first_pattern : first_pattern + 3]
    assert figures[0].tolist() == pytest.approx([16, 32, ((64**2 + 32**2) / 2) ** 0.5])
    assert figures[1].tolist() == pytest.approx([32, 32, (64**2 / 2) ** 0.5])
    assert figures[2].tolist() == [0, 0, 0]


def test_viral_word_is_found_anywhere() -> None:
    kmer = random_protein(KmerClassTable.K, 1)
    proteins = Proteins.from_sequences(
        [random_protein(40, 2) + kmer + random_protein(11, 3), kmer[:-1] * 4]
    )
    lone = encode_protein(kmer)
    numbers = encode_kmers(lone, np.zeros(KmerClassTable.K, dtype=np.int64))[1]
    table = kmer_class_table(numbers, np.array([KmerClass.VIRAL], dtype=np.uint8))
    no_ratios = [np.zeros(n_pattern_values(pattern), dtype=np.int8) for pattern in PATTERNS]
    figures = kmer_features(proteins, table, no_ratios)[:, : len(KmerClass)]
    assert figures[0, KmerClass.VIRAL - 1] == pytest.approx((1 / 52) ** 0.5)
    assert not figures[0, KmerClass.VIRAL :].any() and not figures[1].any()


# Kyte and Doolittle 1982, doi:10.1016/0022-2836(82)90515-0
HYDROPATHY = {
    **{"I": 4.5, "V": 4.2, "L": 3.8, "F": 2.8, "C": 2.5, "M": 1.9, "A": 1.8, "G": -0.4, "T": -0.7},
    **{"S": -0.8, "W": -0.9, "Y": -1.3, "P": -1.6, "H": -3.2, "K": -3.9, "R": -4.5},
    **dict.fromkeys("EQDN", -3.5),
}
CHARGE = {"K": 1, "R": 1, "D": -1, "E": -1}


@given(st.lists(st.text("AILKRDSX", min_size=1, max_size=60), min_size=1, max_size=4))
@example(["S" + "LIVALIVALIVALIVALIVAL" + "SGKDE" * 5, "SG" * 40, "K" * 18, "D" * 19])
def test_protein_windows_equal_plain_python(texts: list[str]) -> None:
    found = features_without_kmers(Proteins.from_sequences(texts))[
        :, ProteinFeatures.N_COMPOSITION :
    ]
    for text, figures in zip(texts, found, strict=True):
        helices = [text[i : i + 19] for i in range(len(text) - 18)]
        few = [len(set(text[i : i + 12])) <= 5 for i in range(len(text) - 11)]
        sums = [sum(round(10 * HYDROPATHY.get(one, 0)) for one in each) for each in helices] or [0]
        charges = [sum(CHARGE.get(one, 0) for one in each) for each in helices] or [0]
        in_membrane = sum(value > 15 * 19 for value in sums) / len(sums)
        expected = [max(sums) / 190, min(sums) / 190, in_membrane, max(charges) / 19]
        assert figures[6:10] == pytest.approx(expected, abs=1e-6)
        assert figures[10] == pytest.approx(min(charges) / 19, abs=1e-6)
        assert figures[2] == pytest.approx(sum(few) / max(1, len(few)))


@given(st.lists(PROTEIN, min_size=1, max_size=4), PROTEIN)
@settings(max_examples=30, deadline=None)
def test_protein_features_ignore_neighbours(
    scorer: Scorer, nets: ProteinNetworks, others: list[str], protein: str
) -> None:
    alone = protein_features(Proteins.from_sequences([protein]), nets.kmers, nets.ratios)
    among = protein_features(
        Proteins.from_sequences([*others, protein, *others]), nets.kmers, nets.ratios
    )
    assert alone.shape == (1, ProteinFeatures.N_FEATURES)
    assert (alone[0] == among[len(others)]).all()


# Scores


def test_score_is_the_same_alone_and_among_thousands(scorer: Scorer) -> None:
    lengths = np.random.default_rng(0).integers(SHORTEST, 700, size=2500)
    sequences = [random_protein(int(length), seed) for seed, length in enumerate(lengths)]
    together = score_proteins(sequences, scorer)
    some = [0, 999, 1000, 2499]
    alone = [score_proteins([sequences[i]], scorer)[0] for i in some]
    backwards = score_proteins(sequences[::-1], scorer)[::-1]
    # the sums of the later layers are in float64, and may differ in their last bits
    tolerance = {"rtol": 0, "atol": 1e-7}
    np.testing.assert_allclose(alone, [together[i] for i in some], **tolerance)  # type: ignore[arg-type]
    np.testing.assert_allclose(backwards, together, **tolerance)  # type: ignore[arg-type]


@given(PROTEIN)
@settings(max_examples=50, deadline=None)
def test_every_protein_has_a_score(scorer: Scorer, protein: str) -> None:
    (score,) = score_proteins([protein], scorer)
    has_residue = bool(set(protein.upper()) & set(AMINO_ACIDS + "UO"))
    assert np.isfinite(score) == has_residue


def test_many_short_proteins_take_little_memory(scorer: Scorer) -> None:
    sequences = [random_protein(SHORTEST, seed) for seed in range(5_000)]
    score_proteins(sequences[:1], scorer)
    peaks = []
    for n in (2_500, 5_000):
        tracemalloc.start()
        score_proteins(sequences[:n], scorer)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0], "3 kB of features of each would nearly double it"


def test_known_residues_of_empty_proteins_are_counted() -> None:
    proteins = Proteins.from_sequences(["", "MKX", "", "XX", "A", ""])
    assert proteins.count_known_residues.tolist() == [0, 2, 0, 0, 1, 0]


def test_no_proteins_have_no_scores(scorer: Scorer) -> None:
    assert score_proteins([], scorer).tolist() == []


# Calls


def test_unusual_proteins_have_a_status(scorer: Scorer) -> None:
    sequences = [
        random_protein(SHORTEST - 1, 1) + "*",
        random_protein(SHORTEST, 1) + "*",
        "X" * 80,
        "*",
        "ACDE-FGH" * 20,
    ]
    results = called(sequences, scorer)
    calls = results.calls
    assert calls.statuses == ["too_short", "scored", "no_orf", "invalid", "invalid"]
    assert (calls.notes[0], calls.notes[2]) == ("49 of at least 50", "no known residue")
    assert results.frames.n_per_record == [0, 1, 0, 0, 0]
    assert results.records.ids == calls.record_ids == [f"p{i}" for i in range(5)]


def test_protein_is_its_only_piece(scorer: Scorer) -> None:
    frames = called([random_protein(120, 3).lower() + "*"], scorer).frames
    calls = called([random_protein(120, 3)], scorer).calls
    assert (frames.ids, frames.chunk_ids) == (["p0"], ["p0"])
    assert frames.scores == calls.virus_scores == calls.base_scores
    assert calls.n_chunks == calls.n_chunks_scored == [1]


def test_final_stop_changes_no_score(scorer: Scorer) -> None:
    protein = random_protein(200, 4)
    calls = called([protein, protein + "*"], scorer).calls
    for bare, stopped in (calls.virus_scores, calls.rates):
        assert bare == stopped is not None


def test_stricter_preset_calls_fewer_proteins(
    scorer: Scorer,
) -> None:
    records = [record.sequence for record in read_fasta(EXAMPLES)]
    presets = ("conservative", "default", "sensitive")
    each = [called(records, scorer, ThresholdOptions(preset=preset)) for preset in presets]
    by_preset = [set(compress(one.records.ids, one.calls.are_viruses)) for one in each]
    assert by_preset[0] <= by_preset[1] <= by_preset[2]
    assert by_preset[2]
    calls = called(records, scorer, ThresholdOptions(threshold=0.3)).calls
    assert calls.are_viruses == [(score or 0) >= 0.3 for score in calls.virus_scores]


def test_fdr_rises_as_viruses_get_rarer(scorer: Scorer) -> None:
    records = [record.sequence for record in read_fasta(EXAMPLES)]
    often, rarely = (
        called(records, scorer, ThresholdOptions(prevalence=prevalence)).calls
        for prevalence in (0.5, 0.01)
    )
    assert often.virus_scores == rarely.virus_scores
    for one, other in zip(often.rates, rarely.rates, strict=True):
        assert (one or 0) < (other or 0)


def test_artificial_proteins_are_not_called(scorer: Scorer) -> None:
    made = [letter * 120 for letter in AMINO_ACIDS]
    made += [random_protein(150, seed) for seed in range(100)]
    assert sum(called(made, scorer).calls.are_viruses) <= 0.03 * len(made)


# The file


def test_scorer_file_stays_below_40_megabytes() -> None:
    assert BUILTIN_SCORER.stat().st_size < 40_000_000


def test_scorer_is_read_back_with_its_nets(
    scorer: Scorer, nets: ProteinNetworks, tmp_path: Path
) -> None:
    save_scorer(tmp_path / "both", scorer)
    save_scorer(tmp_path / "alone", replace(scorer, proteins=None))
    assert (tmp_path / "both").read_bytes() == BUILTIN_SCORER.read_bytes()
    assert load_scorer(tmp_path / "alone").proteins is None
    read = load_scorer(tmp_path / "both")
    protein = random_protein(90, 1)
    assert score_proteins([protein], read).tolist() == score_proteins([protein], scorer).tolist()


# Training


def test_nets_learn_what_distinguishes_proteins() -> None:
    rng = np.random.default_rng(0)
    kind = np.arange(600) % 2
    features = rng.normal(0, 1, (600, 12)).astype(np.float32)
    features[:, 3] += 4 * kind
    training_set = TrainingSet(features, kind, np.ones(600), n_viral=1, n_kinds=2)
    config = TrainingConfig(
        hidden=(16, 8), input_dropout=0.0, dropout=0.0, epochs=60, batch_size=50
    )
    fitted = fit_network(training_set, 0, config)
    # two normal distributions whose means are four deviations apart overlap by 2 %
    assert ((fitted.log_odds(features) > 0) == (kind == 0)).mean() > 0.9
