"""Calibration: log-odds of frames become probabilities, by parameters from validation groups.

In this order: whether a chunk is its best frame or their mean (by AUROC of chunks); the
temperature (by cross-entropy of chunks); the exponent of the number of chunks (by cross-entropy
of records of many lengths); the threshold (by the share of others called viral).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.callers.head import DECIMALS, FrameRule
from virnucpro.ground.numeric import Mask, Values, sigmoid
from virnucpro.learning.evaluation.metrics import auroc
from virnucpro.learning.labelled.frames import LabelledFrames, balanced_weights

FALSE_POSITIVES = 0.05  # of the others in validation, at the threshold
N_CHUNKS = (1, 2, 6, 20)  # of one record; 500 to 10,000 bases where a chunk has 500
_TEMPERATURES: list[float] = np.geomspace(1 / 20, 20, 601).round(4).tolist()  # 1 % apart
_RULES: tuple[FrameRule, ...] = ("max", "mean")


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Chunks or records with their log-odds of being viral; all rows are in step."""

    odds: Values
    is_virus: Mask
    weight: Values
    record: NDArray[np.int64]

    def auroc(self) -> float:
        return auroc(self.odds, self.is_virus, self.weight)

    def cross_entropy(self, scale: float = 1.0) -> float:
        """The mean of what is lost if the log-odds are multiplied by ``scale``."""
        losses = np.logaddexp(0, np.where(self.is_virus, -self.odds, self.odds) * scale)
        return float(np.average(losses, weights=self.weight))


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
    whole = len(chunks[rule].odds)  # no record has more chunks
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


def chunks_of(odds: Values, frames: LabelledFrames, weight: Values, rule: FrameRule) -> Units:
    """The frames of each chunk as one; ``weight`` is of frames, those of a chunk weigh the same."""
    _, first, chunk, n = np.unique(
        frames.chunk, return_index=True, return_inverse=True, return_counts=True
    )
    if rule == "max":
        joined = np.full(len(n), -np.inf)
        np.maximum.at(joined, chunk, odds)
    else:
        joined = np.bincount(chunk, odds) / n
    return Units(joined, frames.is_virus[first], weight[first], frames.record[first])


def fit_temperature(units: Units) -> float:
    """The divisor of log-odds for the least cross-entropy (Guo et al. 2017)."""
    return min(_TEMPERATURES, key=lambda value: units.cross_entropy(1 / value))


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Neighbouring chunks of one record, as if they were a record."""

    n: NDArray[np.int64]  # chunks
    units: Units  # with the sums of their log-odds


def _runs(chunks: Units, n_chunks: int, temperature: float) -> _Runs:
    """Up to ``n_chunks`` scored chunks each, which weigh as much as these chunks together."""
    place = np.arange(len(chunks.record)) - np.searchsorted(chunks.record, chunks.record)
    key = chunks.record * (len(place) + 1) + place // n_chunks
    _, first, run, n = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    weight: Values = np.bincount(run, chunks.weight).astype(np.float64)
    total: Values = np.bincount(run, chunks.odds / temperature).astype(np.float64)
    units = Units(total, chunks.is_virus[first], weight, chunks.record[first])
    return _Runs(n, units)


def _joined(runs: _Runs, exponent: float) -> Units:
    units = runs.units
    return Units(units.odds / runs.n**exponent, units.is_virus, units.weight, units.record)


def _threshold(fragments: Sequence[Units]) -> float:
    """The score that ``FALSE_POSITIVES`` of the others reach, lengths counting the same.

    With the decimals of scores: those of the surest are near 1, and near to each other. Never
    under 0.5, whatever is told apart well: what is rather no virus is not called one.
    """
    odds = np.concatenate([units.odds[~units.is_virus] for units in fragments])
    weight = np.concatenate(
        [units.weight[~units.is_virus] / units.weight.sum() for units in fragments]
    )
    order = np.argsort(-odds)
    share = np.cumsum(weight[order]) / weight.sum()
    at = odds[order][np.searchsorted(share, FALSE_POSITIVES)]
    score = np.round(sigmoid(at), DECIMALS)
    return float(np.clip(score, 0.5, 1 - 10.0**-DECIMALS))
