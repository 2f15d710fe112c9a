"""Scores of records: their pieces' log-odds, averaged and calibrated by length.

A record's score is the probability that it is viral where half of all records are. It depends on
the record and the scorer alone, not on the records beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from virnucpro.scorer.features import FIGURES, N_FIGURES, Features, piece_features
from virnucpro.scorer.nets import PieceNets, Scorer
from virnucpro.scorer.pieces import UNKNOWN, Counts, Digits, Pieces, cut, encode
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

BASES_AT_ONCE = 2_000_000  # of records that are read before any is scored
_PIECE_BASES_AT_ONCE = 250_000

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PieceScores:
    """The log-odds of pieces of records, in their order; NaN for one of unknown bases alone."""

    record: Counts  # (n,) whose it is
    start: Counts  # (n,) its first base
    n_bases: Counts  # (n,)
    log_odds: Values  # (n,)

    def means(self, n_records: int) -> Values:
        """The mean log-odds of each record's pieces; NaN without a known base. (n_records,)"""
        is_known = ~np.isnan(self.log_odds)
        owner = self.record[is_known]
        total = np.bincount(owner, self.log_odds[is_known], minlength=n_records)
        n_pieces = np.bincount(owner, minlength=n_records)
        return np.where(n_pieces > 0, total / np.maximum(1, n_pieces), np.nan)

    @property
    def n_known(self) -> int:
        """Pieces with a known base."""
        return int(np.count_nonzero(~np.isnan(self.log_odds)))

    def of_record(self, first: int, end: int, start: int) -> PieceScores:
        """The scores of the pieces of one record, with their starts in the record."""
        some = slice(first, end)
        return PieceScores(
            self.record[some], self.start[some] - start, self.n_bases[some], self.log_odds[some]
        )


@dataclass(frozen=True, slots=True, eq=False)
class RecordScore:
    """The calibrated log-odds of a record, None where there is nothing to read, and its pieces'.

    Pieces are those of the smallest size that the record is read in, each calibrated by its own
    length.
    """

    log_odds: float | None
    pieces: PieceScores


def score_sequences(
    sequences: Iterable[str], scorer: Scorer, code: GeneticCode = STANDARD
) -> Iterator[float | None]:
    """The calibrated log-odds of each sequence, in order; None where there is nothing to read.

    That is a sequence shorter than ``scorer.shortest`` bases, or one of unknown bases alone.
    """
    waiting: list[str] = []
    n_bases = 0
    for sequence in sequences:
        waiting.append(sequence)
        n_bases += len(sequence)
        if n_bases >= BASES_AT_ONCE:
            yield from (score.log_odds for score in score_block(waiting, scorer, code))
            waiting, n_bases = [], 0
    yield from (score.log_odds for score in score_block(waiting, scorer, code))


def score_block(
    sequences: Sequence[str], scorer: Scorer, code: GeneticCode = STANDARD
) -> list[RecordScore]:
    """Each sequence with its pieces, in order, read side by side."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    total = _Mean(len(lengths))
    pieces: dict[int, PieceScores] = {}
    nothing = np.empty(0, dtype=np.int64)
    no_pieces = PieceScores(nothing, nothing, nothing, np.empty(0))
    digits = encode("".join(sequences))
    for records, scores in _by_size(digits, lengths, scorer.pieces, code):
        total.add(records, scores)
        calibrated = PieceScores(
            scores.record,
            scores.start,
            scores.n_bases,
            scorer.calibrated(scores.log_odds, scores.n_bases),
        )
        bounds = np.searchsorted(scores.record, np.arange(len(records) + 1)).tolist()
        for i, record in enumerate(records.tolist()):
            if record not in pieces:
                pieces[record] = calibrated.of_record(bounds[i], bounds[i + 1], int(starts[record]))
    log_odds = scorer.calibrated(total.values, lengths)
    return [
        RecordScore(None if np.isnan(value) else value, pieces.get(record, no_pieces))
        for record, value in enumerate(log_odds.tolist())
    ]


def record_log_odds(digits: Digits, lengths: Counts, pieces: Sequence[PieceNets]) -> Values:
    """The mean over piece sizes of the mean over pieces, before calibration; NaN for no score.

    Records side by side, (n_bases,), and their lengths, (n,) -> (n,)
    """
    total = _Mean(len(lengths))
    for records, scores in _by_size(digits, lengths, pieces, STANDARD):
        total.add(records, scores)
    return total.values


class _Mean:
    """The mean over piece sizes of each record's log-odds, as they come."""

    def __init__(self, n_records: int) -> None:
        self._total, self._n_sizes = np.zeros(n_records), np.zeros(n_records)

    def add(self, records: Counts, scores: PieceScores) -> None:
        means = scores.means(len(records))
        has_mean = ~np.isnan(means)
        self._total[records[has_mean]] += means[has_mean]
        self._n_sizes[records[has_mean]] += 1

    @property
    def values(self) -> Values:
        return np.where(self._n_sizes > 0, self._total / np.maximum(1, self._n_sizes), np.nan)


def _by_size(
    digits: Digits, lengths: Counts, pieces: Sequence[PieceNets], code: GeneticCode
) -> Iterator[tuple[Counts, PieceScores]]:
    """Records and their pieces for each piece size; pieces are numbered among these records."""
    starts = np.cumsum(lengths) - lengths
    for nets in pieces:
        is_inside = lengths >= nets.shortest
        if nets.longest is not None:
            is_inside &= lengths < nets.longest
        records = np.flatnonzero(is_inside)
        if len(records):
            owner, place, n_bases = cut(lengths[records], nets.size)
            before = np.cumsum(lengths[records]) - lengths[records]
            place += (starts[records] - before)[owner]
            values = _score_pieces(digits, place, n_bases, nets, code)
            yield records, PieceScores(owner, place, n_bases, values)


def score_windows(
    sequence: str, scorer: Scorer, size: int, step: int, code: GeneticCode = STANDARD
) -> tuple[PieceScores, Features]:
    """Overlapping pieces of one sequence, one every ``step`` bases, with calibrated log-odds.

    Beside them the plain figures of each piece, (n, 36): see ``features``. Words do not count:
    those of the prophages of a host's relatives are words of cells.

    Raises:
        ValueError: the scorer's nets of windows are of another size.
    """
    if scorer.windows.size != size:
        raise ValueError(f"windows of {size} bases for nets of {scorer.windows.size} bases")
    start = np.arange(0, len(sequence) - size + 1, step, dtype=np.int64)
    n_bases = np.full(len(start), size)
    figures = np.full((len(start), N_FIGURES), np.nan, dtype=np.float32)
    digits = encode(sequence)
    values = _score_pieces(digits, start, n_bases, scorer.windows, code, figures)
    log_odds = scorer.windows_knot.calibrated(values)
    return PieceScores(np.zeros(len(start), dtype=np.int64), start, n_bases, log_odds), figures


def _score_pieces(
    digits: Digits,
    place: Counts,
    n_bases: Counts,
    nets: PieceNets,
    code: GeneticCode,
    figures: Features | None = None,
) -> Values:
    """The log-odds of each piece of this size, before calibration; NaN for unknown bases alone.

    Its plain figures are written into ``figures``, if that is there.
    """
    values = np.empty(len(place))
    n_at_once = max(1, _PIECE_BASES_AT_ONCE // nets.size)
    for first in range(0, len(place), n_at_once):
        block = slice(first, first + n_at_once)
        low, high = place[block][0], place[block][-1] + n_bases[block][-1]
        pieces = Pieces.of(digits[low:high], place[block] - low, n_bases[block])
        features = piece_features(pieces, nets.words, code)
        values[block] = nets.log_odds(features)
        if figures is not None:
            figures[block] = features[:, FIGURES]
        is_blank = (pieces.digits[:, 0] == UNKNOWN).all(axis=1)
        values[block][is_blank] = np.nan
    return values
