"""Calibration: log-odds of frames become probabilities, by parameters from validation groups.

In this order: whether a chunk is its best frame or their mean (by AUROC of chunks); the
temperature (by cross-entropy of chunks); the exponent of the number of chunks (by cross-entropy
of records of many lengths); the threshold (by the share of others called viral).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from virnucpro.callers.head import DECIMALS, FrameRule
from virnucpro.ground.numeric import Values, sigmoid
from virnucpro.learning.evaluation.metrics import Samples
from virnucpro.learning.labelled.frames import LabelledFrames, balanced_weights

FALSE_POSITIVES = 0.05  # of the others in validation, at the threshold
N_CHUNKS = (1, 2, 6, 20)  # of one record; 500 to 10,000 bases where a chunk has 500
_TEMPERATURES: list[float] = np.geomspace(1 / 20, 20, 601).round(4).tolist()  # 1 % apart
_RULES: tuple[FrameRule, ...] = ("max", "mean")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration of a head. The temperatures are the best between 1/20 and 20."""

    frames: FrameRule
    temperature: float  # of the network with composition
    protein_temperature: float
    exponent: float
    threshold: float

    @property
    def is_at_limit(self) -> bool:
        """True if the best temperature may lie outside: scores tell nothing, or everything."""
        return self.temperature in (_TEMPERATURES[0], _TEMPERATURES[-1])


def calibrate(protein: Values, nucleotide: Values, frames: LabelledFrames) -> Calibration:
    """Choose all of it from log-odds of frames, (n,) each, of groups not trained on."""
    weight = balanced_weights(frames).astype(np.float64)
    chunks = {rule: chunks_of(nucleotide, frames, weight, rule) for rule in _RULES}
    rule = max(_RULES, key=lambda rule: chunks[rule].auroc())
    temperature = fit_temperature(chunks[rule])
    whole = len(chunks[rule])  # no record has more chunks
    fragments = [_runs(chunks[rule], n, temperature) for n in (*N_CHUNKS, whole)]
    exponent = min(
        np.linspace(0, 1, 21).round(2).tolist(),
        key=lambda exponent: sum(_joined(part, exponent).cross_entropy() for part in fragments),
    )
    others = [_joined(part, exponent) for part in fragments[: len(N_CHUNKS)]]
    return Calibration(
        frames=rule,
        temperature=temperature,
        protein_temperature=fit_temperature(chunks_of(protein, frames, weight, rule)),
        exponent=exponent,
        threshold=_threshold(others),
    )


def chunks_of(odds: Values, frames: LabelledFrames, weight: Values, rule: FrameRule) -> Samples:
    """The frames of each chunk as one, with their record as the group.

    ``weight`` is of frames; those of a chunk weigh the same.
    """
    _, first, chunk, n = np.unique(
        frames.chunk, return_index=True, return_inverse=True, return_counts=True
    )
    if rule == "max":
        joined = np.full(len(n), -np.inf)
        np.maximum.at(joined, chunk, odds)
    else:
        joined = np.bincount(chunk, odds) / n
    return Samples(joined, frames.is_virus[first], frames.record[first], weight[first])


def fit_temperature(samples: Samples) -> float:
    """The divisor of log-odds for the least cross-entropy (Guo et al. 2017)."""
    return min(_TEMPERATURES, key=lambda value: samples.cross_entropy(1 / value))


def _runs(chunks: Samples, n_chunks: int, temperature: float) -> tuple[Samples, NDArray[np.int64]]:
    """Up to ``n_chunks`` neighbouring chunks of a record as if they were one, and their numbers.

    A run has the sum of their log-odds, and weighs as much as its chunks together.
    """
    record = chunks.groups
    place = np.arange(len(record)) - np.searchsorted(record, record)
    key = record * (len(place) + 1) + place // n_chunks
    _, first, run, n = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    weight: Values = np.bincount(run, chunks.weights).astype(np.float64)
    total: Values = np.bincount(run, chunks.scores / temperature).astype(np.float64)
    return Samples(total, chunks.is_virus[first], record[first], weight), n


def _joined(run: tuple[Samples, NDArray[np.int64]], exponent: float) -> Samples:
    samples, n = run
    return replace(samples, scores=samples.scores / n**exponent)


def _threshold(fragments: Sequence[Samples]) -> float:
    """The score that ``FALSE_POSITIVES`` of the others reach, lengths counting the same.

    With the decimals of scores: those of the surest are near 1, and near to each other. Never
    under 0.5, whatever is told apart well: what is rather no virus is not called one.
    """
    odds = np.concatenate([one.scores[~one.is_virus] for one in fragments])
    weight = np.concatenate([one.weights[~one.is_virus] / one.weights.sum() for one in fragments])
    order = np.argsort(-odds)
    share = np.cumsum(weight[order]) / weight.sum()
    at = odds[order][np.searchsorted(share, FALSE_POSITIVES)]
    score = np.round(sigmoid(at), DECIMALS)
    return float(np.clip(score, 0.5, 1 - 10.0**-DECIMALS))
