"""The scorer's training: every group has its say, nothing of a fold leaks, negatives are made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from virnucpro.labelled.records import LabelledRecord
from virnucpro.scorer.features import N_FEATURES, fragment_features
from virnucpro.scorer.nets import Knot, Scorer, load_scorer, save_scorer
from virnucpro.scorer.pieces import Digits, encode
from virnucpro.training import made
from virnucpro.training.piece_nets import Fitting, Lessons, Range, fit_piece_nets
from virnucpro.training.sampling import Collection, draw, gc_matched_weights
from virnucpro.training.scorer_folds import (
    fit_knot,
    fit_threshold,
    fragment_log_odds,
    group_folds,
)

SHARES = {"phages": 0.75, "RNA viruses": 0.25, "bacteria": 1.0}


def collection_of(rows: list[tuple[str, bool, str, str]], n_bases: int = 400) -> Collection:
    """Random records: id, is viral, group, kingdom."""
    rng = np.random.default_rng(0)
    records = tuple(
        LabelledRecord(name, is_virus, group, kingdom=kingdom)
        for name, is_virus, group, kingdom in rows
    )
    lengths = np.full(len(rows), n_bases)
    digits = rng.integers(4, size=lengths.sum()).astype(np.uint8)
    return Collection(records, digits, np.cumsum(lengths) - lengths, lengths)


@pytest.fixture(scope="module")
def collection() -> Collection:
    """A large group of phages beside a small one, RNA viruses, and two groups of bacteria."""
    phages = [(f"p{i}", True, "large" if i < 81 else "small", "phages") for i in range(82)]
    others = [("r", True, "rna", "RNA viruses"), ("b", False, "b1", "bacteria")]
    return collection_of([*phages, *others, ("c", False, "b2", "bacteria")])


# Sampling


def test_kingdoms_have_their_shares_and_groups_nearly_the_same_say(
    collection: Collection,
) -> None:
    fragments = draw(collection, 300, 8000, SHARES, np.random.default_rng(1))
    drawn = Counter(collection.records[i].group for i in fragments.record)
    n_phages = drawn["large"] + drawn["small"]
    # standard deviation sqrt(8000 * 0.75 * 0.25) = 39; four of them
    assert n_phages == pytest.approx(6000, abs=155)
    assert drawn["rna"] == 8000 - n_phages
    assert drawn["b1"] + drawn["b2"] == 8000
    # 81 times the bases count three times: 81 ** 0.25; four standard deviations of sqrt(1125)
    assert drawn["small"] == pytest.approx(n_phages / 4, abs=134)


def test_fragments_are_windows_of_their_records_on_either_strand(collection: Collection) -> None:
    fragments = draw(collection, 300, 50, SHARES, np.random.default_rng(2))
    strands = Counter()
    for digits, record in zip(fragments.digits, fragments.record, strict=True):
        sequence = collection.sequence(record).tobytes()
        forward, reverse = digits.tobytes(), (3 - digits[::-1]).tobytes()
        assert (forward in sequence) != (reverse in sequence)
        strands[forward in sequence] += 1
    assert min(strands.values()) > 20  # of 100; fewer have a chance of 1e-10


def test_records_that_are_too_short_are_not_drawn() -> None:
    rows = [("a", True, "a", "phages"), ("b", True, "b", "phages"), ("c", False, "c", "bacteria")]
    uneven = collection_of(rows)
    lengths = np.array([400, 200, 400])
    short = Collection(uneven.records, uneven.digits, uneven.starts, lengths)
    fragments = draw(short, 300, 20, SHARES, np.random.default_rng(0))
    assert set(fragments.record.tolist()) == {0, 2}


def test_labels_weigh_the_same_at_every_gc() -> None:
    rng = np.random.default_rng(3)
    is_virus = rng.random(20_000) < 0.5
    gc = np.where(is_virus, rng.normal(0.42, 0.08, 20_000), rng.normal(0.5, 0.08, 20_000))
    weights = gc_matched_weights(gc, is_virus)
    middle = (gc > 0.35) & (gc < 0.55)
    for low in (0.35, 0.4, 0.45, 0.5):
        inside = middle & (gc >= low) & (gc < low + 0.05)
        by_label = [weights[inside & (is_virus == label)].sum() for label in (False, True)]
        assert by_label[0] == pytest.approx(by_label[1])


# Made negatives


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("n_bases", [150, 1000])
def test_made_sequences_are_as_long_as_they_were_asked_for(kind: str, n_bases: int) -> None:
    rng = np.random.default_rng(4)
    sequence = made.make(kind, n_bases, rng.integers(4, size=n_bases).astype(np.uint8), rng)
    assert sequence.shape == (n_bases,)
    assert sequence.dtype == np.uint8
    assert sequence.max() < 4


def test_shuffling_keeps_dinucleotides_and_not_their_order() -> None:
    rng = np.random.default_rng(5)
    sequence = encode("AACG" * 5000)
    shuffled = made.shuffle_dinucleotides(sequence, rng)
    before, after = (
        np.bincount(4 * digits[:-1].astype(np.int64) + digits[1:], minlength=16)
        for digits in (sequence, shuffled)
    )
    # binomial: at most sqrt(20000) / 2 = 71 each; five of them
    np.testing.assert_allclose(after, before, rtol=0, atol=354)
    assert (shuffled != sequence).mean() > 0.5


# Fitting


def biased(n: int, codon: str, rng: np.random.Generator) -> Digits:
    """Fragments of 150 bases in which every third codon is this one."""
    digits = rng.integers(4, size=(n, 50, 3)).astype(np.uint8)
    digits[:, ::3] = encode(codon)
    return digits.reshape(n, 150)


def test_nets_learn_to_tell_one_codon_usage_from_another() -> None:
    rng = np.random.default_rng(6)
    digits = np.concatenate([biased(300, "GCA", rng), biased(300, "CTG", rng)])
    is_virus = np.arange(600) < 300
    lessons = Lessons(fragment_features(digits), is_virus, np.ones(600))
    nets = fit_piece_nets(Range(150, 150), [lessons, lessons], Fitting(batch=50, epochs=4))
    assert nets.mean.shape == (N_FEATURES,)
    held_out = np.concatenate([biased(100, "GCA", rng), biased(100, "CTG", rng)])
    log_odds = fragment_log_odds(held_out, [nets])
    assert ((log_odds > 0) == (np.arange(200) < 100)).mean() > 0.95


def test_no_group_is_in_two_folds_and_every_kingdom_in_all() -> None:
    rows = [
        (f"{kingdom}{i}", kingdom == "phages", f"{kingdom} {i // 2}", kingdom)
        for kingdom in ("phages", "bacteria")
        for i in range(20)
    ]
    folds = group_folds(collection_of(rows).records)
    assert len(folds) == 20
    for kingdom in ("phages", "bacteria"):
        inside = Counter(fold for group, fold in folds.items() if group.startswith(kingdom))
        assert inside == dict.fromkeys(range(5), 2)


def test_a_knot_finds_the_slope_and_the_offset_that_made_the_labels() -> None:
    rng = np.random.default_rng(7)
    log_odds = rng.normal(0, 3, 100_000)
    is_virus = rng.random(len(log_odds)) < 1 / (1 + np.exp(-(0.5 * log_odds + 1)))
    knot = fit_knot(500, log_odds, is_virus)
    # labels weigh the same, which takes their log odds off the offset
    prior = np.log(is_virus.mean() / (1 - is_virus.mean()))
    # standard errors of about 0.01
    assert (knot.slope, knot.offset) == pytest.approx((0.5, 1 - prior), abs=0.04)


def test_a_threshold_calls_the_share_of_cells_that_it_was_fitted_for() -> None:
    rng = np.random.default_rng(8)
    is_virus = rng.random(40_000) < 0.3
    log_odds = rng.normal(np.where(is_virus, 3.0, -1.0), 1.0)
    threshold = fit_threshold(log_odds, is_virus, 0.03)
    assert (log_odds[~is_virus] > threshold).mean() == pytest.approx(0.03, abs=1e-4)
    assert threshold == pytest.approx(-1 + 1.881, abs=0.06)  # the normal's; standard error 0.015


def test_thresholds_lie_on_lines_over_the_logarithm_of_the_length(tmp_path: Path) -> None:
    nets = fit_piece_nets(Range(150, 150), [coin_lessons()], Fitting(batch=50, epochs=1))
    saved = Scorer((nets,), (Knot(150, 1.0, 0.0),), "coins", ((100, 2.0), (10_000, -1.0)))
    save_scorer(tmp_path / "scorer.safetensors", saved)
    scorer = load_scorer(tmp_path / "scorer.safetensors")
    assert scorer.thresholds == saved.thresholds
    values = scorer.threshold(np.array([0, 50, 100, 1000, 10_000, 5_000_000]))
    np.testing.assert_allclose(values, [2, 2, 2, 0.5, -1, -1], rtol=0, atol=1e-12)
    for unordered in (((100, 1.0), (100, 2.0)), ((300, 1.0), (100, 2.0)), ()):
        with pytest.raises(ValueError, match="values at"):
            Scorer((nets,), saved.knots, "coins", unordered)


def coin_lessons() -> Lessons:
    rng = np.random.default_rng(9)
    features = rng.normal(size=(100, N_FEATURES)).astype(np.float32)
    return Lessons(features, rng.random(100) < 0.5, np.ones(100))
