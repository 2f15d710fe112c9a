"""Calibration on validation groups, on log-odds with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from labelled_data_helpers import head_facts
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from virnucpro.core.numeric import FloatArray, sigmoid
from virnucpro.sequences.kmers import N_FEATURES
from virnucpro.training.evaluation.calibration import (
    FALSE_POSITIVES,
    Calibration,
    calibrate,
    fit_logistic,
    fit_temperature,
    select_chunks,
)
from virnucpro.training.evaluation.metrics import Samples
from virnucpro.training.frame_dataset import LabelledFrames
from virnucpro.viral.head import EncoderInfo

N_CHUNKS = 20  # of a record
TOO_SURE = 6.0  # times the log-odds that would be right


def records(n: int, per_chunk: int = 1, n_chunks: int = N_CHUNKS) -> LabelledFrames:
    """Make records of one size. Every other one is viral, and each is its own group."""
    n_rows = n * n_chunks * per_chunk
    record = np.arange(n_rows) // (n_chunks * per_chunk)
    return replace(
        LabelledFrames.from_store(["M"] * n_rows, np.zeros((n_rows, N_FEATURES), dtype=np.float32)),
        chunk=np.arange(n_rows) // per_chunk,
        record=record,
        is_virus=record % 2 == 0,
        group=record,
    )


def log_odds(is_virus: NDArray[np.bool_], rng: np.random.Generator, strength: float) -> FloatArray:
    """Draw normal log-odds. They are calibrated if their variance is twice their mean."""
    mean = np.where(is_virus, strength, -strength)
    return rng.normal(mean, math.sqrt(2 * strength))


def correlated(frames: LabelledFrames, rng: np.random.Generator) -> FloatArray:
    """All chunks of a record have the same evidence."""
    first = np.unique(frames.record, return_index=True)[1]
    return log_odds(frames.is_virus[first], rng, 1.0)[frames.record]


def independent(frames: LabelledFrames, rng: np.random.Generator) -> FloatArray:
    """Every chunk has new evidence."""
    return log_odds(frames.is_virus, rng, 0.1)


ENCODER = EncoderInfo(family="", name="", encoder_id="", layer=1, pooling="mean", dim=1)


def scores(odds: FloatArray, found: Calibration, n_chunks: int) -> FloatArray:
    """Return the scores that ``predict`` gives records with this number of one-frame chunks."""
    p = np.round(sigmoid(odds / found.temperature), 6)
    runs = p.reshape(-1, N_CHUNKS)
    facts = head_facts(found, ENCODER, 500)
    return np.array(
        [
            facts.score([[score] for score in row[first : first + n_chunks]])
            for row in runs.tolist()
            for first in range(0, N_CHUNKS, n_chunks)
        ]
    )


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_temperature_is_recovered(factor):
    rng = np.random.default_rng(1)
    right = rng.normal(0, 2, 5000)
    p = 1 / (1 + np.exp(-right))
    is_virus = rng.random(len(p)) < p
    samples = Samples(factor * right, is_virus, np.arange(len(p)), np.ones(len(p)))
    # the standard error of the logarithm of a slope in a logistic regression, and the grid's 1 %
    error = 1 / math.sqrt(np.sum(p * (1 - p) * right**2))
    assert abs(math.log(fit_temperature(samples) / factor)) < 4 * error + 0.01


@pytest.mark.parametrize(
    ("make", "low", "high"), [(correlated, 0.95, 1.0), (independent, 0.0, 0.1)]
)
def test_exponent_separates_agreeing_chunks(
    make: Callable[..., FloatArray], low: float, high: float
):
    frames = records(300)
    odds = make(frames, np.random.default_rng(2))
    assert low <= calibrate(odds, odds, frames).exponent <= high


def test_long_records_count_even_if_few():
    """Up to 20 chunks have new evidence. The other 180 chunks of a record repeat it."""
    short = records(16)
    odds = independent(short, np.random.default_rng(2))
    exponent = calibrate(odds, odds, short).exponent
    again = np.tile(odds.reshape(16, N_CHUNKS), (1, 10)).ravel()
    assert calibrate(again, again, records(16, n_chunks=200)).exponent > exponent + 0.1


@pytest.mark.parametrize("make", [correlated, independent])
def test_threshold_passes_one_in_twenty(make):
    frames = records(400)
    odds = make(frames, np.random.default_rng(3))
    found = calibrate(odds, odds, frames)
    shares = []
    parts = []
    for n_chunks in (1, 2, 6, 20):
        is_virus = np.repeat(np.arange(400) % 2 == 0, math.ceil(N_CHUNKS / n_chunks))
        n = np.tile(np.minimum(n_chunks, N_CHUNKS - np.arange(0, N_CHUNKS, n_chunks)), 400)
        called = scores(odds, found, n_chunks) >= found.threshold
        shares.append(np.average(called[~is_virus], weights=n[~is_virus]))
        parts.append(n.max() / n[~is_virus].sum())
    # the one that is called last has a share of its own; its score is rounded, as all are
    assert FALSE_POSITIVES - 0.002 <= np.mean(shares) <= FALSE_POSITIVES + max(parts) + 0.002


def test_sure_threshold_can_be_reached():
    frames = records(400)
    odds = 30 + log_odds(frames.is_virus, np.random.default_rng(4), 5.0)
    found = calibrate(odds, odds, frames)
    assert 0 < found.threshold < 1


def test_best_or_mean_by_separation():
    rng = np.random.default_rng(5)
    frames = records(200, per_chunk=4, n_chunks=3)
    noise = rng.normal(size=len(frames))
    every_frame_tells = noise + np.where(frames.is_virus, 0.5, -0.5)
    one_tells = noise + np.where(frames.is_virus & (np.arange(len(frames)) % 4 == 1), 4.0, 0.0)
    assert calibrate(noise, every_frame_tells, frames).frames == "mean"
    assert calibrate(noise, one_tells, frames).frames == "max"


def test_chunk_uses_its_own_frames():
    frames = records(2, per_chunk=2, n_chunks=2)
    odds = np.array([1.0, 2.0, 3.0, -4.0, 5.0, 5.0, -7.0, -8.0])
    weight = np.array([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0])
    best, mean = (select_chunks(odds, frames, weight, rule) for rule in ("max", "mean"))
    assert best.scores.tolist() == [2, 3, 5, -7]
    assert mean.scores.tolist() == [1.5, -0.5, 5, -7.5]
    for samples in (best, mean):
        assert samples.weights.tolist() == [1, 2, 3, 4]
        assert samples.is_virus.tolist() == [True, True, False, False]
        assert samples.groups.tolist() == [0, 0, 1, 1]


def calibration_error(scores: FloatArray, is_virus: NDArray[np.bool_]) -> float:
    samples = Samples(scores, is_virus, np.arange(len(scores)), np.ones(len(scores)))
    error = samples.measure(scores >= 0.5)["calibration_error"]
    assert error is not None
    return error


def test_calibration_holds_at_every_length():
    rng = np.random.default_rng(6)
    frames = records(600)
    is_virus = frames.is_virus[::N_CHUNKS]
    odds = TOO_SURE * independent(frames, rng)
    found = calibrate(odds, odds, frames)
    other = TOO_SURE * independent(frames, rng)
    for n_chunks in (1, 20):
        labels = np.repeat(is_virus, N_CHUNKS // n_chunks)
        # 15 bins, each off by its noise: in sum at most 0.8 / 2 * sqrt(15 / n)
        noise = 0.4 * math.sqrt(15 / len(labels))
        assert calibration_error(scores(other, found, n_chunks), labels) < 2 * noise
        p = 0.5 * (1 + np.tanh(other.reshape(-1, n_chunks).sum(axis=1) / 2))
        assert calibration_error(p, labels) > 2 * noise, "the limit tells"


def test_separated_scores_have_no_temperature():
    frames = records(100)
    rng = np.random.default_rng(8)
    told = np.where(frames.is_virus, 1.0, -1.0)
    for odds in (told, -told, 100 * rng.normal(size=len(frames))):
        assert calibrate(odds, odds, frames).is_at_limit
    odds = log_odds(frames.is_virus, rng, 1.0)
    assert not calibrate(odds, odds, frames).is_at_limit


def test_protein_network_has_its_temperature():
    frames = records(400)
    odds = log_odds(frames.is_virus, np.random.default_rng(7), 1.0)
    found = calibrate(2 * odds, 0.5 * odds, frames)
    # both are within the same noise of what made them too sure, or not sure enough
    assert found.protein_temperature / found.temperature == pytest.approx(4, rel=0.02)
    assert found.temperature == pytest.approx(0.5, rel=0.1)


def test_logistic_fit_agrees_with_scikit_learn() -> None:
    """Without a penalty, which in scikit-learn only pulls towards 0."""
    rng = np.random.default_rng(3)
    inputs = np.column_stack([rng.normal(size=(400, 2)), np.ones(400)])
    is_virus = rng.random(400) < sigmoid(inputs @ np.array([1.5, -0.7, 0.3]))
    weights = rng.random(400)
    weights /= weights.sum()
    model = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000)
    model.fit(inputs, is_virus, sample_weight=weights * len(weights))
    fitted = fit_logistic(inputs, is_virus, weights, np.zeros(3))
    np.testing.assert_allclose(fitted, model.coef_[0], rtol=1e-5)
