"""Scores of records: their pieces' log-odds, averaged and calibrated by length.

A record's score is the probability that it is viral where half of all records are. It depends on
the record and the scorer alone, not on the records beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from virnucpro.scorer.features import piece_features
from virnucpro.scorer.nets import PieceNets, Scorer
from virnucpro.scorer.pieces import UNKNOWN, Counts, Digits, Pieces, cut, encode

_BASES_AT_ONCE = 2_000_000  # of records that are read before any is scored
_PIECE_BASES_AT_ONCE = 250_000

Values = NDArray[np.float64]


def score_sequences(sequences: Iterable[str], scorer: Scorer) -> Iterator[float | None]:
    """The calibrated log-odds of each sequence, in order; None where there is nothing to read.

    That is a sequence shorter than ``scorer.shortest`` bases, or one of unknown bases alone.
    """
    waiting: list[str] = []
    n_bases = 0
    for sequence in sequences:
        waiting.append(sequence)
        n_bases += len(sequence)
        if n_bases >= _BASES_AT_ONCE:
            yield from _score(waiting, scorer)
            waiting, n_bases = [], 0
    yield from _score(waiting, scorer)


def _score(sequences: Sequence[str], scorer: Scorer) -> Iterator[float | None]:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    digits = encode("".join(sequences))
    log_odds = scorer.calibrated(record_log_odds(digits, lengths, scorer.pieces), lengths)
    yield from (None if np.isnan(value) else float(value) for value in log_odds)


def record_log_odds(digits: Digits, lengths: Counts, pieces: Sequence[PieceNets]) -> Values:
    """The mean over piece sizes of the mean over pieces, before calibration; NaN for no score.

    Records side by side, (n_bases,), and their lengths, (n,) -> (n,)
    """
    total, n_sizes = np.zeros(len(lengths)), np.zeros(len(lengths))
    starts = np.cumsum(lengths) - lengths
    for nets in pieces:
        is_inside = lengths >= nets.shortest
        if nets.longest is not None:
            is_inside &= lengths < nets.longest
        records = np.flatnonzero(is_inside)
        if len(records):
            means = _means(digits, starts[records], lengths[records], nets)
            has_mean = ~np.isnan(means)
            total[records[has_mean]] += means[has_mean]
            n_sizes[records[has_mean]] += 1
    return np.where(n_sizes > 0, total / np.maximum(1, n_sizes), np.nan)


def _means(digits: Digits, starts: Counts, lengths: Counts, nets: PieceNets) -> Values:
    """The mean log-odds of each record's pieces of this size, of those with a known base."""
    owner, place, n_bases = cut(lengths, nets.size)
    place += (starts - (np.cumsum(lengths) - lengths))[owner]
    values = np.empty(len(owner))
    n_at_once = max(1, _PIECE_BASES_AT_ONCE // nets.size)
    for first in range(0, len(owner), n_at_once):
        block = slice(first, first + n_at_once)
        pieces = Pieces.of(digits, place[block], n_bases[block])
        values[block] = nets.log_odds(piece_features(pieces))
        is_blank = (pieces.digits[:, 0] == UNKNOWN).all(axis=1)
        values[block][is_blank] = np.nan
    is_known = ~np.isnan(values)
    total = np.bincount(owner[is_known], values[is_known], minlength=len(lengths))
    n_pieces = np.bincount(owner[is_known], minlength=len(lengths))
    return np.where(n_pieces > 0, total / np.maximum(1, n_pieces), np.nan)
