"""The scorer: features are right to the last base, and scores depend only on the record."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import random_dna
from feature_extraction import insert_layout, piece_features
from numpy.typing import NDArray
from quantization import FloatLayer, FloatStack, quantize_networks
from safetensors import safe_open
from safetensors.numpy import save_file
from scorer_file import save_scorer
from scorer_kmers import is_in_sample, kmer_class_table, look_up_classes
from scorer_reference import (
    frames_of,
    kept_in_order,
    kept_of,
    letters_of,
    log_odds_in_whole_numbers,
)

from virnucpro.core import native as library
from virnucpro.core.errors import UnavailableError
from virnucpro.core.types import reverse_complement
from virnucpro.sequences.fasta import read_fasta
from virnucpro.viral.features import (
    CLIP,
    NO_KMERS,
    KmerClass,
    KmerClassTable,
    WindowFeatures,
    layout_features,
)
from virnucpro.viral.networks import (
    ErrorRates,
    Kingdom,
    Knot,
    PieceNetworks,
    Scorer,
    Weights,
    calibrate,
    false_discovery_rates_of,
    load_scorer,
    most_probable,
    thresholds_of,
)
from virnucpro.viral.proteins import ProteinFeatures
from virnucpro.viral.scoring import (
    record_log_odds,
    score_block,
    score_sequences,
    score_windows,
)
from virnucpro.viral.windows import Windows

GOLDEN = Path(__file__).parents[1] / "golden" / "scorer"
JUNCTION_COLUMNS = range(WindowFeatures.JUNCTIONS.start, WindowFeatures.JUNCTIONS.stop)
PALINDROME_COLUMNS = range(WindowFeatures.PALINDROMES.start, WindowFeatures.PALINDROMES.stop)
WORD_COLUMNS = range(WindowFeatures.KMERS.start, WindowFeatures.KMERS.stop)


def random_sequence(n_bases: int, seed: int) -> str:
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), n_bases))


def nets_of(sizes: Sequence[int], n_nets: int, rng: np.random.Generator) -> FloatStack:
    """Make random networks with these numbers of inputs, hidden units and groups, two viral."""
    layers = tuple(
        (
            rng.normal(0, 2 * before**-0.5, (n_nets, behind, before)).astype(np.float32),
            rng.normal(0, 0.5, (n_nets, behind)).astype(np.float32),
        )
        for before, behind in pairwise(sizes)
    )
    return layers, 2


def random_pieces(
    size: int, shortest: int, longest: int | None, seed: int, part: int | None = None
) -> PieceNetworks:
    rng = np.random.default_rng(seed)
    n_features = WindowFeatures.N_FEATURES + (WindowFeatures.N_LAYOUT if part else 0)
    stacks = {
        0: nets_of((len(range(n_features)[WindowFeatures.SHARES_VIEW]), 8, 4, 5), 2, rng),
        WindowFeatures.RATIOS_VIEW.start: nets_of(
            (len(range(n_features)[WindowFeatures.RATIOS_VIEW]), 8, 4, 5), 3, rng
        ),
    }
    mean = rng.normal(0, 0.1, n_features).astype(np.float32)
    deviation = np.ones(n_features, np.float32)
    return PieceNetworks(
        size, shortest, longest, part, NO_KMERS, quantize_networks(mean, deviation, stacks)
    )


RATES = (ErrorRates(100, (0.0,), (0.1,), (0.5,), (0.0,)),)


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    pieces = (
        random_pieces(60, 30, 200, 1),
        random_pieces(100, 200, None, 2),
        random_pieces(300, 400, 1000, 4, part=100),
        random_pieces(500, 1000, None, 5, part=100),
    )
    windows = random_pieces(100, 100, None, 3)
    knot = Knot(100, 1.5, 0.2)
    return Scorer(
        pieces,
        windows,
        knot,
        (Knot(50, 0.5, 0.1), Knot(500, 2.0, -0.3)),
        "random",
        RATES,
        (Kingdom("first", (0, 4), RATES), Kingdom("second", (1, 2, 3), RATES)),
    )


def test_kingdom_is_the_most_probable(scorer: Scorer) -> None:
    kinds = np.array([[0.3, 0.2, 0.1, 0.1, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2], [np.nan] * 5])
    assert most_probable(scorer.sum_by_kingdom(kinds)).tolist() == [0, 1, 0]
    assert score_block([], scorer)[2].tolist() == []


def test_kinds_of_a_record_are_means_over_windows(scorer: Scorer) -> None:
    bases = random_dna(120, np.random.default_rng(5))
    parts = [bases[:60], bases[60:], reverse_complement(bases), bases]
    first, second, reverse, whole = (
        record_log_odds(part, np.array([len(part)]), scorer.pieces[:1])[1][0] for part in parts
    )
    assert whole == pytest.approx((first + second) / 2)
    assert whole.tolist() == reverse.tolist()
    assert whole.sum() == pytest.approx(1)
    in_sizes = record_log_odds(4 * bases, np.array([480]), scorer.pieces[1:3])[1][0]
    assert in_sizes.sum() == pytest.approx(1)


def test_thresholds_are_those_of_the_kingdom() -> None:
    lax = RATES
    strict = (replace(RATES[0], cuts=(2.0,)),)
    kingdoms = np.array([0, 1, 1])
    lengths = np.array([100, 100, 5000])
    assert thresholds_of([lax, strict], kingdoms, lengths, 0.1).tolist() == [0.0, 2.0, 2.0]
    rare = (replace(RATES[0], false_positives=(0.01,)),)
    rates = false_discovery_rates_of([lax, rare], kingdoms, np.zeros(3), lengths, 0.5)
    assert rates == pytest.approx([0.1 / 0.6, 0.01 / 0.51, 0.01 / 0.51])


# Features


def test_features_equal_an_independent_program() -> None:
    records = list(read_fasta(GOLDEN / "pieces.fa"))
    with np.load(GOLDEN / "features.npz") as stored:
        expected = stored["features"]
    found = piece_features(
        Windows.from_sequences([record.sequence for record in records]), NO_KMERS
    )
    assert found.dtype == np.float32
    # that program counts none of these
    unknown_there = (*JUNCTION_COLUMNS, *PALINDROME_COLUMNS, *WORD_COLUMNS)
    found = np.delete(found, unknown_there, axis=1)
    # both round once to float32, of values below 16 in float64: an ulp of these is 1e-6
    n_compared = 0
    for record, record_results, golden in zip(records, found, expected, strict=True):
        if keeps_longest_and_forward_first(record.sequence):
            np.testing.assert_allclose(record_results, golden, rtol=0, atol=1e-6, err_msg=record.id)
            n_compared += 1
    assert n_compared == 11


def keeps_longest_and_forward_first(sequence: str) -> bool:
    """Return True if that program's rule for stretches keeps the same ones."""
    letters = letters_of(sequence)
    found = [one for frame in frames_of(letters) for one in frame if one[0] >= 5]
    by_length = sorted(found, key=lambda one: -one[0])
    return kept_in_order(by_length, letters) == kept_of(letters)


def test_word_table_names_only_its_words() -> None:
    rng = np.random.default_rng(9)
    numbers = np.unique(rng.integers(20**KmerClassTable.K, size=5000))
    owners = rng.integers(1, 7, size=len(numbers)).astype(np.uint8)
    table = kmer_class_table(numbers[::2], owners[::2])
    expected = owners.copy()
    expected[1::2] = 0
    np.testing.assert_array_equal(look_up_classes(table, numbers), expected)
    assert not look_up_classes(NO_KMERS, numbers).any()


def test_sampled_words_are_in_their_own_buckets() -> None:
    numbers = np.unique(np.random.default_rng(10).integers(20**KmerClassTable.K, size=8000))
    table = kmer_class_table(numbers, np.full(len(numbers), KmerClass.VIRAL, np.uint8))
    n_in_sample = int(is_in_sample(numbers).sum())
    assert table.bucket_sizes[KmerClassTable.N_BUCKETS // 2 :].sum() == n_in_sample
    # standard deviation sqrt(8000 * 7 / 64) = 30; four of them
    assert n_in_sample == pytest.approx(8000 / KmerClassTable.SAMPLED_ONE_IN, abs=120)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: KmerClassTable(np.zeros(3, np.uint8), np.zeros(0, np.uint16)), "buckets"),
        (
            lambda: KmerClassTable(
                np.zeros(KmerClassTable.N_BUCKETS, np.uint8), np.zeros(1, np.uint16)
            ),
            "buckets",
        ),
        (
            lambda: KmerClassTable(
                np.ones(KmerClassTable.N_BUCKETS, np.uint8), np.zeros(0, np.uint16)
            ),
            "buckets",
        ),
        (lambda: kmer_class_table(np.array([1]), np.array([0], np.uint8)), "unknown classes"),
        (lambda: kmer_class_table(np.array([1]), np.array([7], np.uint8)), "unknown classes"),
        (
            lambda: kmer_class_table(np.full(256, 7), np.full(256, KmerClass.VIRAL, np.uint8)),
            "256 k-mers in one",
        ),
    ],
)
def test_senseless_word_table_is_refused(make: Callable[[], KmerClassTable], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


# Scores


def test_score_does_not_depend_on_other_records() -> None:
    """Also for records across a block border, and for one that is read by itself."""
    scorer = Scorer.load_builtin()
    rng = np.random.default_rng(13)
    lengths = [*range(150, 310), 499, 500, 1000, 2000, 12_000, 480_000]
    sequences = [random_sequence(n, n) for n in rng.permutation(lengths)]
    sequences.append(random_sequence(1_000_001, 1))
    together = list(score_sequences(sequences, scorer))
    alone = [next(score_sequences([sequence], scorer)) for sequence in sequences]
    # a value within 1e-15 of half way between two of float32 is rounded to either: 1e-7 of it
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-7)  # type: ignore[arg-type]
    _, pieces, _ = score_block(sequences[-2:], scorer)
    assert np.unique(pieces.record).tolist() == [0, 1]


def test_every_long_record_has_a_score(scorer: Scorer) -> None:
    sequences = ["", "ACGT", "A" * 29, "A" * 30, "TAA" * 20, "TA" * 300, "N" * 500]
    scores = list(score_sequences(sequences, scorer))
    assert [score is not None for score in scores] == [False] * 3 + [True] * 3 + [False]


def test_record_score_is_a_calibrated_mean(scorer: Scorer) -> None:
    sequence = random_sequence(249, 3)  # pieces of 100, which overlap
    long = scorer.pieces[1]
    pieces = [sequence[:100], sequence[75:174], sequence[149:]]
    piece_scores = long.nets.log_odds(piece_features(Windows.from_sequences(pieces), NO_KMERS))
    expected = calibrate(scorer.knots, np.array([piece_scores.mean()]), np.array([249]))
    assert next(score_sequences([sequence], scorer)) == pytest.approx(expected[0], abs=1e-12)


@pytest.mark.parametrize(
    ("n_bases", "parts_of_wholes"),
    [
        (420, {0: (0, 80, 160, 240), 120: (80, 160, 240, 320)}),
        (400, {0: (0, 100, 200), 100: (100, 200, 300)}),
        (650, {0: (0, 92, 184), 175: (184, 275, 366), 350: (366, 458, 550)}),
        (910, {0: (0, 102, 203), 305: (304, 405, 506), 610: (607, 708, 810)}),
        (1000, {0: (0, 100, 200, 300, 400), 500: (500, 600, 700, 800, 900)}),
    ],
)
def test_parts_of_long_records_count_one_third(
    scorer: Scorer, n_bases: int, parts_of_wholes: Mapping[int, tuple[int, ...]]
) -> None:
    """A part is a piece with its middle in a long piece.

    Some are in two, where long pieces overlap.
    """
    raw = replace(scorer, pieces=(scorer.pieces[1],), knots=(Knot(100, 1.0, 0.0),))
    nets = scorer.pieces[2 if n_bases < 1000 else 3]
    sequence = random_sequence(n_bases, 6)
    complete_scores = []
    for start, starts in parts_of_wholes.items():
        parts = Windows.from_sequences([sequence[i : i + 100] for i in starts])
        means = piece_features(parts, NO_KMERS).mean(axis=0, dtype=np.float64)
        whole = Windows.from_sequences([sequence[start : start + nets.size]])
        complete_scores.append(
            nets.nets.log_odds(insert_layout(means[None], layout_features(whole)))[0]
        )
    piece_scores = next(score_sequences([sequence], raw))
    assert piece_scores is not None
    both = replace(scorer, pieces=(scorer.pieces[1], nets), knots=raw.knots)
    found = next(score_sequences([sequence], both))
    # features are float32, whose means are rounded in another order
    assert found == pytest.approx((2 * piece_scores + np.mean(complete_scores)) / 3, abs=1e-5)


def spread(n_features: int, rng: np.random.Generator) -> tuple[Weights, Weights]:
    """Return a random mean and deviation of features."""
    mean = rng.normal(0, 2, n_features).astype(np.float32)
    return mean, rng.uniform(0.1, 3, n_features).astype(np.float32)


@pytest.mark.parametrize(
    ("n_inputs", "hidden", "n_rows"),
    [(1, (1, 1), 1), (6, (40, 33), 13), (7, (16, 5), 8), (1101, (128, 64), 97), (1241, (31, 4), 3)],
)
def test_log_odds_equal_plain_python(n_inputs: int, hidden: tuple[int, int], n_rows: int) -> None:
    rng = np.random.default_rng(8)
    nets = {0: nets_of((n_inputs, *hidden, 19), 2, rng), 3: nets_of((n_inputs, 9, 3, 40), 1, rng)}
    (first, _), (second, bias), _ = nets[3][0]
    first[:, :, 0] *= 1e6  # one weight may be far larger than all others
    second[:, 0] = 0
    bias[:, 1] = 1e9
    mean, deviation = spread(n_inputs + 4, rng)
    views = quantize_networks(mean, deviation, nets)
    features = rng.normal(0, 6, (n_rows, n_inputs + 4)).astype(np.float32)
    features[0] = 1e6 * rng.choice([-1, 1], n_inputs + 4)
    found = views.log_odds(features)
    expected = log_odds_in_whole_numbers(
        features, mean, deviation, [(low, of, 2) for low, of in stacked_layers(nets)]
    )
    # exponentials and logarithms of two libraries, of logits that a bias of 1e9 makes large
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)
    alone = [views.log_odds(features[i : i + 1])[0] for i in range(n_rows)]
    np.testing.assert_array_equal(found, alone)


def test_prokaryote_net_counts_by_likelihood() -> None:
    rng = np.random.default_rng(8)
    nets = {
        0: nets_of((201, 40, 20, 7), 1, rng),
        WindowFeatures.RATIOS_VIEW.start: nets_of((73, 9, 5, 2), 1, rng),
    }
    nets[WindowFeatures.RATIOS_VIEW.start] = nets[WindowFeatures.RATIOS_VIEW.start][0], 1
    special = nets_of((73, 16, 8, 2), 1, rng)[0], 1
    mean, deviation = spread(201, rng)
    usual = quantize_networks(mean, deviation, nets)
    views = quantize_networks(mean, deviation, nets, special)
    features = rng.normal(0, 4, (101, 201)).astype(np.float32)
    each = [(low, of, nets[low][1]) for low, of in stacked_layers(nets)]
    expected = log_odds_in_whole_numbers(
        features,
        mean,
        deviation,
        each,
        (WindowFeatures.RATIOS_VIEW.start, layers_of(special[0], 0), 1),
    )
    found = views.log_odds(features)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert not np.allclose(found, usual.log_odds(features), atol=0.1)


def stacked_layers(
    stacks: Mapping[int, FloatStack],
) -> Iterator[tuple[int, list[tuple[NDArray[np.float64], NDArray[np.float64]]]]]:
    """Return the first column and the layers of each network."""
    for column, (layers, _) in stacks.items():
        for number in range(len(layers[0][0])):
            yield column, layers_of(layers, number)


def layers_of(
    layers: Sequence[FloatLayer], number: int
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the weights and biases of one network."""
    return [(w[number].astype(np.float64), b[number].astype(np.float64)) for w, b in layers]


def test_integers_approximate_the_weights() -> None:
    rng = np.random.default_rng(8)
    nets = nets_of((600, 64, 32, 5), 1, rng)
    nets[0][0][0][...] /= 2
    mean, deviation = spread(600, rng)
    views = quantize_networks(mean, deviation, {0: nets})
    standard = rng.normal(0, 1, (500, 600)) * (rng.random((500, 600)) < 0.2)
    features = (mean + standard * deviation).astype(np.float32)
    x = (features - mean.astype(np.float64)) / deviation
    for number, (weight, bias) in enumerate(layers_of(nets[0], 0)):
        x = (gelu(x) if number else x.clip(-CLIP, CLIP)) @ weight.T + bias
    expected = np.log(np.exp(x[:, :2]).sum(axis=1) / np.exp(x[:, 2:]).sum(axis=1))
    error = views.log_odds(features) - expected
    # a rounding is off by 0.29 of a step: 0.01 in an input, 0.015 in a GELU, and 0.5 % in a sum by
    # its weights; weights of norm 2 double that in the second layer and in the third
    assert np.sqrt((error**2).mean()) < 0.1 < expected.std() / 5


def gelu(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """GELU by the hyperbolic tangent. Hendrycks and Gimpel 2016, arXiv:1606.08415."""
    inner = 0.7978845608028654 * (values + 0.044715 * values**3)
    return np.asarray(values * (1 + np.tanh(inner)) / 2)


def test_every_processor_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable code uses no special instructions of this machine."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no compiler on this machine")
    portable = tmp_path / "portable.so"
    flags = ("-std=c99", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "-DPORTABLE")
    flags += ("-Wno-psabi",)
    package = library.LIBRARY.parents[1]
    sources = sorted(package.rglob("*.c"))
    subprocess.run([compiler, *flags, "-o", portable, *sources, "-lm"], check=True)
    rng = np.random.default_rng(8)
    nets = {0: nets_of((301, 70, 33, 19), 2, rng), 7: nets_of((298, 8, 4, 5), 1, rng)}
    views = quantize_networks(*spread(305, rng), nets)
    features = rng.normal(0, 4, (101, 305)).astype(np.float32)
    found = views.log_odds(features)
    projected = rng.normal(size=(2 * 21, 3, 3, 24)).astype(np.float32)
    attended = attend(projected)
    monkeypatch.setattr(library, "LIBRARY", portable)
    np.testing.assert_array_equal(views.log_odds(features), found)
    # float32: sums of 24 products and of 21 keys, in other orders
    np.testing.assert_allclose(attend(projected), attended, rtol=0, atol=1e-5)


def attend(projected: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute attention within two proteins of one length, without rotation."""
    n, _, n_heads, dim = projected.shape
    cos = np.ones((n, dim), np.float32)
    sin = np.zeros((n, dim // 2), np.float32)
    out = np.empty((n, n_heads, dim), np.float32)
    addresses = [array.ctypes.data for array in (projected, cos, sin, out)]
    runs = np.array([0, 2, n // 2])
    library.call("attend", addresses[0], 0, *addresses[1:3], runs, 1, n_heads, dim, addresses[3])
    return out


def test_unknown_bases_do_not_change_a_score(scorer: Scorer) -> None:
    known = random_sequence(1000, 5)
    raw = replace(scorer, pieces=scorer.pieces[1::2], knots=(Knot(100, 1.0, 0.0),))
    scores = list(score_sequences([known, known + 500 * "N"], raw))
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)


def test_calibration_is_linear_in_log_length(
    scorer: Scorer,
) -> None:
    middle = round((50 * 500) ** 0.5)
    lengths = np.array([1, 50, middle, 500, 10**6])
    found = calibrate(scorer.knots, np.ones(5), lengths)
    # an integer number of bases is up to 0.2 % off the middle of the logarithms
    np.testing.assert_allclose(found, [0.6, 0.6, 1.15, 1.7, 1.7], rtol=0, atol=3e-3)


# The file


def test_windows_have_their_own_networks(scorer: Scorer) -> None:
    sequence = random_sequence(900, 5)
    windows, _ = score_windows([sequence], scorer, 50)
    as_pieces = replace(
        scorer,
        pieces=(replace(scorer.windows, shortest=1),),
        knots=(scorer.windows_knot,),
    )
    each = [sequence[start : start + 100] for start in range(0, 801, 50)]
    assert windows.log_odds.tolist() == pytest.approx(list(score_sequences(each, as_pieces)))
    others = list(score_sequences(each, scorer))
    assert windows.log_odds.tolist() != pytest.approx(others)


def test_package_nets_fit_their_features() -> None:
    scorer = Scorer.load_builtin()
    proteins = Scorer.load_builtin().proteins
    assert proteins is not None
    each = [
        (one.nets, WindowFeatures.N_FEATURES + (WindowFeatures.N_LAYOUT if one.part else 0))
        for one in scorer.pieces
    ]
    each.append((scorer.windows.nets, WindowFeatures.N_FEATURES))
    for nets, n_features in (*each, (proteins.nets, ProteinFeatures.N_FEATURES)):
        assert nets.centre.shape == nets.scale.shape == (n_features,)
        assert np.isfinite([nets.centre, nets.scale]).all() and (nets.scale > 0).all()
        for layers, _ in nets.stacks.values():
            assert all(np.isfinite(values).all() for layer in layers for values in layer)
    for nets, n_features in each:
        n_inputs = {column: layers[0][0].shape[2] for column, (layers, _) in nets.stacks.items()}
        ends = (WindowFeatures.SHARES_VIEW, WindowFeatures.RATIOS_VIEW)
        assert n_inputs == {of.start or 0: len(range(n_features)[of]) for of in ends}
    assert proteins.nets.stacks[0][0][0][0].shape[2] == ProteinFeatures.N_FEATURES
    lengths = [[nets.size for nets in scorer.pieces]]
    for one in (scorer, proteins):
        lengths += [[at.n_bases for at in one.knots], [at.n_bases for at in one.error_rates]]
    assert all(some and some == sorted(set(some)) for some in lengths)
    assert not len(scorer.windows.kmers)
    assert {id(nets.kmers) for nets in (*scorer.pieces, proteins)} == {id(proteins.kmers)}
    wholes = [nets for nets in scorer.pieces if nets.part]
    assert all(whole.part in lengths[0] for whole in wholes)
    assert [whole.longest for whole in wholes] == [*(w.shortest for w in wholes[1:]), None]


@pytest.mark.parametrize("part", ["facts", "tensors"])
def test_scorer_without_windows_is_refused(scorer: Scorer, part: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_scorer(path, scorer)
    with safe_open(path, framework="np") as stored:
        facts = json.loads(stored.metadata()["facts"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    if part == "facts":
        del facts["windows"]
    else:
        tensors = {name: tensors[name] for name in tensors if not name.startswith("windows.")}
    save_file(tensors, path, metadata={"facts": json.dumps(facts)})
    with pytest.raises(UnavailableError, match=r"file is not a scorer of VirNucPro: .*windows"):
        load_scorer(path)


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_other_file_is_no_scorer(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UnavailableError, match="file is not a scorer"):
        load_scorer(tmp_path / "file")


def test_process_refuses_another_scorer(monkeypatch):
    scorer = Scorer.load_builtin()
    unpickle, sent = scorer.__reduce__()
    assert unpickle(*sent) is scorer
    another = replace(scorer, sha256="0" * 64)
    monkeypatch.setattr(Scorer, "load_builtin", staticmethod(lambda: another))
    with pytest.raises(UnavailableError, match="was replaced during the run"):
        unpickle(*sent)
