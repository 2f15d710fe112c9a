"""Convert between scores and log-odds. A score is a probability with 6 decimals."""

from __future__ import annotations

from math import log, tanh

import numpy as np

from virnucpro.core.numeric import DECIMALS, FloatArray, sigmoid

_SURE = 10.0**-DECIMALS  # log-odds are computed from scores clipped to [_SURE, 1 - _SURE]


def probability(log_odds: float) -> float:
    """Convert log-odds to a score, rounded to 6 decimals."""
    return round(0.5 * (1 + tanh(log_odds / 2)), DECIMALS)


def probabilities(log_odds: FloatArray) -> FloatArray:
    """Apply ``probability`` to each value, equal to the last bit. NaN stays NaN. (n,) -> (n,)"""
    scaled = sigmoid(log_odds) * 10**DECIMALS
    whole = np.rint(scaled)
    scores = whole / 10**DECIMALS  # the double that is nearest to these decimals
    # numpy's tanh may differ in the last bit, which matters halfway between two scores
    nearest = 1e-6  # in units of the last decimal: thousands of times the spacing of doubles near 1
    for index in np.flatnonzero(np.abs(np.abs(scaled - whole) - 0.5) < nearest).tolist():
        scores[index] = probability(float(log_odds[index]))
    return np.asarray(scores)


def log_odds(score: float) -> float:
    """Convert a score to log-odds, clipped to what 6 decimals can express."""
    score = min(max(score, _SURE), 1 - _SURE)
    return log(score / (1 - score))


SUREST = log_odds(1 - _SURE)  # the largest log-odds that a score with 6 decimals can express
