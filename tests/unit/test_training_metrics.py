"""Evaluation figures equal those of scikit-learn, or can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn import metrics as oracle

from virnucpro.training.evaluation.metrics import MEASURES, Measures, Samples, auroc


def measured(samples: Samples, threshold: float) -> Measures:
    return samples.measure(samples.scores >= threshold)


def defined(figures: Measures) -> Measures:
    assert tuple(figures) == MEASURES
    return {name: value for name, value in figures.items() if value is not None}


def resampled(samples: Samples, threshold: float, seed: int) -> tuple[Measures, Measures]:
    return samples.bootstrap(samples.scores >= threshold, seed)


def make_samples(n: int, rng: np.random.Generator, decimals: int = 2, n_groups: int = 40):
    """Make scores with ties, groups that lean to one side, and different weights."""
    groups = rng.integers(0, n_groups, n)
    is_virus = groups % 2 == 0
    logits = rng.normal(np.where(is_virus, 0.7, -0.7)) + 0.3 * (groups % 5 - 2)
    scores = np.round(1 / (1 + np.exp(-logits)), decimals)
    return Samples(scores, is_virus, groups, rng.choice([0.5, 1.0, 3.0], n))


def of(scores: list[float], labels: list[int], weights: list[float] | None = None) -> Samples:
    n = len(scores)
    return Samples(
        np.array(scores, dtype=float),
        np.array(labels, dtype=bool),
        np.arange(n),
        np.array(weights or [1.0] * n),
    )


@pytest.mark.parametrize("seed", range(5))
def test_figures_and_curve_equal_scikit_learn(seed: int) -> None:
    samples = make_samples(500, np.random.default_rng(seed))
    found = measured(samples, 0.6)
    threshold = 0.6
    labels = samples.is_virus
    scores = samples.scores
    weights = samples.weights
    called = scores >= threshold
    false, true, thresholds = oracle.roc_curve(
        labels, scores, sample_weight=weights, drop_intermediate=False
    )
    allowed = np.flatnonzero(false <= 0.01)[-1]
    expected = {
        "auroc": oracle.roc_auc_score(labels, scores, sample_weight=weights),
        "auprc": oracle.average_precision_score(labels, scores, sample_weight=weights),
        "accuracy": oracle.accuracy_score(labels, called, sample_weight=weights),
        "precision": oracle.precision_score(labels, called, sample_weight=weights),
        "recall": oracle.recall_score(labels, called, sample_weight=weights),
        "f1": oracle.f1_score(labels, called, sample_weight=weights),
        "false_positives": 1 - oracle.recall_score(~labels, ~called, sample_weight=weights),
        "recall_at_1_percent": true[allowed],
        "threshold_at_1_percent": thresholds[allowed],
    }
    for name, value in expected.items():
        # sums of 500 weights in float64
        assert found[name] == pytest.approx(value, abs=1e-12), name
    cuts, true_positives, false_positives = samples.curve()
    # scikit-learn begins with a point where nothing is called
    np.testing.assert_array_equal(cuts, thresholds[1:])
    np.testing.assert_allclose(true_positives / true_positives[-1], true[1:])
    np.testing.assert_allclose(false_positives / false_positives[-1], false[1:])


def test_weight_of_two_counts_as_two_samples() -> None:
    twice = of([0.9, 0.4, 0.4, 0.6, 0.1], [1, 1, 1, 0, 0])
    once = of([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0], [1, 2, 1, 1])
    assert measured(once, 0.5) == measured(twice, 0.5)


def test_calibration_error_is_predicted_minus_observed() -> None:
    # bins of 1/15: three samples near .1 of which one is a virus, one at .9 that is
    samples = of([0.10, 0.11, 0.12, 0.90], [0, 1, 0, 1])
    curve = samples.reliability()
    np.testing.assert_allclose(curve.mean_score, [0.11, 0.90])
    np.testing.assert_allclose(curve.virus_shares, [1 / 3, 1.0])
    assert curve.n.tolist() == [3, 1]
    expected = (3 * (1 / 3 - 0.11) + 1 * 0.1) / 4
    assert measured(samples, 0.5)["calibration_error"] == pytest.approx(expected)
    assert measured(of([1.0, 0.0], [1, 0]), 0.5)["calibration_error"] == 0


def test_calibration_weighs_labels_equally() -> None:
    uneven = of([0.2] * 4 + [0.8], [0, 0, 0, 0, 1])
    assert uneven.reliability().weight.tolist() == pytest.approx([0.5, 0.5])
    mixed = of([0.8] * 4, [0, 0, 0, 1])  # half of 0.8 are viral when labels weigh the same
    for samples, error in ((uneven, 0.2), (of([0.2, 0.8], [0, 1]), 0.2), (mixed, 0.3)):
        assert measured(samples, 0.5)["calibration_error"] == pytest.approx(error)


def test_precision_for_rare_viruses() -> None:
    # 3 of 4 viruses are called, and 1 of 5 others
    samples = of([0.9] * 3 + [0.1] + [0.9] + [0.1] * 4, [1] * 4 + [0] * 5)
    found = measured(samples, 0.5)
    for name, share in (("1", 0.01), ("5", 0.05), ("20", 0.2)):
        expected = share * 0.75 / (share * 0.75 + (1 - share) * 0.2)
        assert found[f"precision_if_{name}_percent_viral"] == pytest.approx(expected)
    assert measured(samples, 1.0)["precision_if_5_percent_viral"] is None


def test_calls_need_not_follow_one_threshold() -> None:
    samples = of([0.9, 0.4, 0.8, 0.3], [1, 1, 0, 0])
    found = samples.measure(np.array([False, True, False, True]))
    assert found["recall"] == found["false_positives"] == found["precision"] == 0.5


def test_one_class_leaves_figures_empty() -> None:
    assert defined(measured(of([0.9, 0.2], [1, 1]), 0.5)) == {"recall": 0.5}
    assert defined(measured(of([0.9, 0.2], [0, 0]), 0.5)) == {"false_positives": 0.5}
    assert not defined(measured(of([], []), 0.5))
    assert not defined(resampled(of([0.9, 0.2], [1, 1]), 0.5, seed=1)[0])


def test_no_call_gives_no_precision() -> None:
    found = measured(of([0.3, 0.2], [1, 0]), 0.5)
    assert found["precision"] is None
    assert (found["recall"], found["f1"], found["accuracy"]) == (0, 0, 0.5)


def test_threshold_is_never_at_a_false_best() -> None:
    found = measured(of([0.3, 0.9, 0.3], [1, 0, 0]), 0.5)
    assert (found["recall_at_1_percent"], found["threshold_at_1_percent"]) == (0, None)


def test_interval_is_over_groups() -> None:
    """A hundred pieces per group carry no more evidence than one: the interval stays as wide."""
    few = make_samples(40, np.random.default_rng(3), decimals=6)
    one_each = Samples(few.scores, np.arange(40) % 2 == 0, np.arange(40), np.ones(40))
    many = Samples(*(np.repeat(v, 100) for v in (few.scores, one_each.is_virus, one_each.groups)),
                   np.ones(4000))  # fmt: skip
    narrow = resampled(one_each, 0.5, seed=1)
    wide = resampled(many, 0.5, seed=1)
    for end, expected in zip(narrow, wide, strict=True):
        assert end["auroc"] == pytest.approx(expected["auroc"], abs=1e-12)
    single = replace(many, groups=np.arange(4000))
    as_pieces = resampled(single, 0.5, seed=1)
    assert as_pieces[1]["auroc"] - as_pieces[0]["auroc"] < (wide[1]["auroc"] - wide[0]["auroc"]) / 3


def test_interval_covers_the_truth() -> None:
    """Groups share a shift, so pieces are not independent. 95 % of intervals contain the AUROC."""

    def draw(rng: np.random.Generator, n_groups: int, n_pieces: int) -> Samples:
        groups = np.repeat(np.arange(n_groups), n_pieces)
        is_virus = groups % 2 == 0
        shift = rng.normal(0, 1, n_groups)[groups]
        logits = rng.normal(np.where(is_virus, 1.0, 0.0)) + shift
        return Samples(1 / (1 + np.exp(-logits)), is_virus, groups, np.ones(len(groups)))

    truth = measured(draw(np.random.default_rng(0), 20_000, 1), 0.5)["auroc"]
    assert truth is not None
    hits = 0
    for seed in range(60):
        low, high = draw(np.random.default_rng(seed + 1), 80, 5).auroc_interval(seed)
        assert low is not None and high is not None
        hits += low <= truth <= high
    all_samples = resampled(draw(np.random.default_rng(60), 80, 5), 0.5, 59)
    assert (all_samples[0]["auroc"], all_samples[1]["auroc"]) == (low, high), (
        "the same for all figures at once"
    )
    # of 60 intervals at 90 %, what percentiles keep of 95 % with 80 groups, fewer than 48 hold
    # the truth once in a hundred times; the seeds are fixed
    assert hits >= 48


def test_seed_fixes_the_interval() -> None:
    samples = make_samples(400, np.random.default_rng(5))
    one = resampled(samples, 0.5, seed=7)
    other = resampled(samples, 0.5, seed=7)
    assert one == other
    assert resampled(samples, 0.5, seed=8)[0] != one[0]
    value = measured(samples, 0.5)
    assert one[0]["calibration_error"] is None  # resamples are above it
    for name in MEASURES[:-1]:
        assert one[0][name] <= value[name] <= one[1][name], name


def test_group_with_both_labels_is_drawn_by_label() -> None:
    samples = Samples(np.linspace(0, 1, 12), np.arange(12) % 3 == 0, np.arange(12) % 4, np.ones(12))
    assert samples.auroc_interval(1)[0] is not None
    assert replace(samples, groups=np.zeros(12, int)).auroc_interval(1) == (None, None)


def test_infinite_odds_are_ranked_and_nan_refused():
    """The probabilities of infinite log-odds are all 1."""
    odds = np.array([-np.inf, 41.0, 40.0, 500.0])
    is_virus = np.array([False, True, False, True])
    assert auroc(odds, is_virus) == 1.0
    with pytest.raises(AssertionError, match="must not be NaN"):
        auroc(np.array([0.0, np.nan]), np.array([True, False]))
