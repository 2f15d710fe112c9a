"""Convert scores and log-odds, and collect the scores and failures of frames."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import log, tanh

import numpy as np

from virnucpro.ground.records import DECIMALS, FRAMES_FAILED, Prediction, Values, sigmoid

_NEAR = 1e-6  # in units of the last decimal: thousands of times the spacing of doubles near 1
_SURE = 10.0**-DECIMALS  # log-odds are computed from scores clipped to [_SURE, 1 - _SURE]


def chunk_scores(predictions: Sequence[Prediction]) -> list[tuple[str, list[float]]]:
    """The id of each scored chunk, and the scores of its frames.

    Frames of one chunk are neighbours, as ``translate_six_frames`` makes them.
    """
    frames = [
        (frame.orf.chunk_id, frame.virus_score)
        for frame in predictions
        if frame.virus_score is not None
    ]
    return [
        (chunk_id, [score for _, score in group])
        for chunk_id, group in groupby(frames, key=lambda frame: frame[0])
    ]


def probability(log_odds: float) -> float:
    """The score for these log-odds, rounded to 6 decimals."""
    return round(0.5 * (1 + tanh(log_odds / 2)), DECIMALS)


def probabilities(log_odds: Values) -> Values:
    """``probability`` of each, equal to the last bit; NaN for NaN. (n,) -> (n,)"""
    scaled = sigmoid(log_odds) * 10**DECIMALS
    whole = np.rint(scaled)
    scores = whole / 10**DECIMALS  # the double that is nearest to these decimals
    # numpy's tanh may differ in the last bit, which matters halfway between two scores
    for place in np.flatnonzero(np.abs(np.abs(scaled - whole) - 0.5) < _NEAR).tolist():
        scores[place] = probability(float(log_odds[place]))
    return np.asarray(scores)


def log_odds(score: float) -> float:
    """The log-odds of a score, clipped to what scores with 6 decimals can express."""
    score = min(max(score, _SURE), 1 - _SURE)
    return log(score / (1 - score))


SUREST = log_odds(1 - _SURE)  # the largest log-odds that a score with 6 decimals can express


def failure_note(frames: Sequence[Prediction]) -> str:
    """A note on frames without a vector: how many, and the first reason; "" if there are none."""
    failures = [frame.failure for frame in frames if frame.failure]
    if not failures:
        return ""
    return f"{len(failures)} of {len(frames)} {FRAMES_FAILED}: {failures[0]}"
