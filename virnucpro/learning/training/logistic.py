"""Logistic regression on a few columns, by Newton's method."""

from __future__ import annotations

import numpy as np

from virnucpro.ground.numeric import Mask, Values, sigmoid

_STEPS = 50  # a few are enough
_DAMPING = 1e-6  # each step can be solved, even where all rows are alike


def fit_logistic(
    inputs: Values, is_virus: Mask, weights: Values, start: Values, pull: float = 0.0
) -> Values:
    """The coefficients of the least weighted cross-entropy. (n, k), (n,), (n,), (k,) -> (k,)

    Weights add up to about 1. ``pull`` draws the coefficients towards the start, and keeps them
    finite where the labels are told apart perfectly.
    """
    fitted: Values = start.copy()
    for _ in range(_STEPS):
        chances = sigmoid(inputs @ fitted)
        gradient = inputs.T @ (weights * (is_virus - chances)) - pull * (fitted - start)
        curvature = (inputs * (weights * chances * (1 - chances))[:, None]).T @ inputs
        fitted += np.linalg.solve(curvature + max(pull, _DAMPING) * np.eye(len(fitted)), gradient)
    return fitted
