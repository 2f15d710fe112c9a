"""Scores of records: their pieces' log-odds, averaged and calibrated by length.

Long pieces are read as parts, which are pieces too: the features of these are made once.
A record's score is the probability that it is viral where half of all records are. It depends on
the record and the scorer alone, not on the records beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from virnucpro.numeric import Counts, Values
from virnucpro.scorer.features import (
    FIGURES,
    N_FEATURES,
    N_FIGURES,
    Features,
    layout_features,
    piece_features,
    with_layout,
)
from virnucpro.scorer.nets import PieceNets, Scorer
from virnucpro.scorer.pieces import UNKNOWN, Digits, Pieces, cut, encode
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

BASES_AT_ONCE = 2_000_000  # of records that are read before any is scored
_PIECE_BASES_AT_ONCE = 500_000
_PIECES_AT_ONCE = 1_000
_WHOLE_BASES_AT_ONCE = 1_000_000
_STEPS = np.float64(2**24)  # that 1 has, where features of parts are added


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
    mean = _Mean(len(lengths))
    pieces: dict[int, PieceScores] = {}
    nothing = np.empty(0, dtype=np.int64)
    no_pieces = PieceScores(nothing, nothing, nothing, np.empty(0))
    digits = encode("".join(sequences))
    for nets, records, scores in _by_size(digits, lengths, scorer.pieces, code):
        mean.add(nets, records, scores)
        if nets.part:
            continue
        calibrated = replace(scores, log_odds=scorer.calibrated(scores.log_odds, scores.n_bases))
        bounds = np.searchsorted(scores.record, np.arange(len(records) + 1)).tolist()
        for i, record in enumerate(records.tolist()):
            if record not in pieces:
                pieces[record] = calibrated.of_record(bounds[i], bounds[i + 1], int(starts[record]))
    log_odds = scorer.calibrated(mean.values, lengths)
    return [
        RecordScore(None if np.isnan(value) else value, pieces.get(record, no_pieces))
        for record, value in enumerate(log_odds.tolist())
    ]


def record_log_odds(digits: Digits, lengths: Counts, pieces: Sequence[PieceNets]) -> Values:
    """The log-odds of records, before calibration; NaN for no score.

    The mean over piece sizes of the mean over pieces; where some are read as parts, a half of it
    is theirs. Records side by side, (n_bases,), and their lengths, (n,) -> (n,)
    """
    mean = _Mean(len(lengths))
    for nets, records, scores in _by_size(digits, lengths, pieces, STANDARD):
        mean.add(nets, records, scores)
    return mean.values


class _Mean:
    """The mean over piece sizes of each record's log-odds, as they come."""

    def __init__(self, n_records: int) -> None:
        self._total = np.zeros((2, n_records))  # of pieces read at once, and as parts
        self._n_sizes = np.zeros((2, n_records))

    def add(self, nets: PieceNets, records: Counts, scores: PieceScores) -> None:
        means = scores.means(len(records))
        has_mean = ~np.isnan(means)
        way = 0 if nets.part is None else 1
        self._total[way, records[has_mean]] += means[has_mean]
        self._n_sizes[way, records[has_mean]] += 1

    @property
    def values(self) -> Values:
        means = self._total / np.maximum(1, self._n_sizes)
        n_ways = (self._n_sizes > 0).sum(axis=0)
        return np.where(n_ways > 0, means.sum(axis=0) / np.maximum(1, n_ways), np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where the pieces of some records are, in order. Arrays in step, places rising."""

    record: Counts  # (n,) whose it is, counted among these records
    first: Counts  # (n,) its first base among those of all records
    n_bases: Counts  # (n,)

    @classmethod
    def of(cls, lengths: Counts, records: Counts, size: int) -> _Places:
        """The pieces of this size of some of the records that lie side by side."""
        of_records = lengths[records]
        owner, place, n_bases = cut(of_records, size)
        moved = (np.cumsum(lengths) - lengths)[records] - (np.cumsum(of_records) - of_records)
        return cls(owner, place + moved[owner], n_bases)

    def blocks(self, digits: Digits, size: int, n_bases: int) -> Iterator[tuple[slice, Pieces]]:
        """The pieces, of about this size, with their bases, so many bases at a time."""
        n_at_once = max(1, min(_PIECES_AT_ONCE, n_bases // size))
        for low in range(0, len(self.first), n_at_once):
            block = slice(low, low + n_at_once)
            first, lengths = self.first[block], self.n_bases[block]
            bases = slice(first[0], first[-1] + lengths[-1])
            yield block, Pieces.of(digits[bases], first - first[0], lengths)

    def scored(self, log_odds: Values) -> PieceScores:
        return PieceScores(self.record, self.first, self.n_bases, log_odds)


def _by_size(
    digits: Digits, lengths: Counts, pieces: Sequence[PieceNets], code: GeneticCode
) -> Iterator[tuple[PieceNets, Counts, PieceScores]]:
    """Records and their pieces for each piece size; pieces are numbered among these records."""
    for nets in pieces:
        records = np.flatnonzero(nets.reads(lengths))
        if nets.part is None and len(records):
            places = _Places.of(lengths, records, nets.size)
            wholes = [
                _Wholes.of(lengths, one)
                for one in pieces
                if one.part == nets.size and one.reads(lengths).any()
            ]
            yield nets, records, places.scored(_score_pieces(digits, places, nets, code, wholes))
            for whole in wholes:
                yield whole.nets, whole.records, whole.places.scored(whole.log_odds(digits, code))


@dataclass(frozen=True, slots=True, eq=False)
class _Wholes:
    """Pieces that are read as parts, and what is known of their parts so far."""

    nets: PieceNets
    records: Counts
    places: _Places
    total: Values  # (n, 1229) features of the parts, in steps
    n_parts: Counts  # (n,)

    @classmethod
    def of(cls, lengths: Counts, nets: PieceNets) -> _Wholes:
        records = np.flatnonzero(nets.reads(lengths))
        places = _Places.of(lengths, records, nets.size)
        n = len(places.first)
        return cls(nets, records, places, np.zeros((n, N_FEATURES)), np.zeros(n, dtype=np.int64))

    def add(self, first: Counts, features: Features) -> None:
        """Add parts in their order, each to the pieces that its first base lies in, at most two."""
        starts, n_bases = self.places.first, self.places.n_bases
        latest = np.searchsorted(starts, first, side="right") - 1
        for whole in (latest, latest - 1):
            inside = np.flatnonzero(whole >= 0)
            inside = inside[first[inside] < (starts + n_bases)[whole[inside]]]
            if len(inside):
                some, rows, n_parts = np.unique(
                    whole[inside], return_index=True, return_counts=True
                )
                steps = np.rint(features[inside] * _STEPS)  # whole: no sum depends on its order
                self.total[some] += np.add.reduceat(steps, rows)
                self.n_parts[some] += n_parts

    def log_odds(self, digits: Digits, code: GeneticCode) -> Values:
        """Log-odds of each piece, before calibration; NaN without a known base. -> (n,)"""
        means = self.total / (_STEPS * np.maximum(1, self.n_parts)[:, None])
        blocks = self.places.blocks(digits, self.nets.size, _WHOLE_BASES_AT_ONCE)
        layouts = [layout_features(pieces, code) for _, pieces in blocks]
        features = with_layout(means, np.concatenate(layouts))
        return np.where(self.n_parts > 0, self.nets.log_odds(features), np.nan)


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
    places = _Places(np.zeros(len(start), dtype=np.int64), start, np.full(len(start), size))
    figures = [np.empty((0, N_FIGURES), dtype=np.float32)]
    values = [np.empty(0)]
    for _, features, log_odds in _read_pieces(encode(sequence), places, scorer.windows, code):
        figures.append(features[:, FIGURES])
        values.append(log_odds)
    log_odds = scorer.windows_knot.calibrated(np.concatenate(values))
    return places.scored(log_odds), np.concatenate(figures)


def _score_pieces(
    digits: Digits, places: _Places, nets: PieceNets, code: GeneticCode, wholes: Iterable[_Wholes]
) -> Values:
    """The log-odds of each piece of this size, before calibration; NaN for unknown bases alone.

    ``wholes`` get those with a known base as parts.
    """
    values = np.full(len(places.first), np.nan)
    for block, features, log_odds in _read_pieces(digits, places, nets, code):
        values[block] = log_odds
        is_known = ~np.isnan(log_odds)
        for whole in wholes:
            whole.add(places.first[block][is_known], features[is_known])
    return values


def _read_pieces(
    digits: Digits, places: _Places, nets: PieceNets, code: GeneticCode
) -> Iterator[tuple[slice, Features, Values]]:
    """Some of the pieces at a time: their features, and log-odds as above."""
    for block, pieces in places.blocks(digits, nets.size, _PIECE_BASES_AT_ONCE):
        features = piece_features(pieces, nets.words, code)
        is_blank = (pieces.digits[:, 0] == UNKNOWN).all(axis=1)
        yield block, features, np.where(is_blank, np.nan, nets.log_odds(features))
