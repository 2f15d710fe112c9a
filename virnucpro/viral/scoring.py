"""Score records and proteins. Window log-odds are averaged per record and calibrated by length.

Long windows are read in parts, which are smaller windows, so that features are computed once. A
score is the probability that a record is viral in a sample where half the records are. It depends
on the record and the scorer, not on other records.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isnan
from typing import NamedTuple, TypeAlias

import numpy as np

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.open_codes import encode
from virnucpro.viral.features import (
    Features,
    WindowFeatures,
    layout_features,
    library_input,
)
from virnucpro.viral.networks import PieceNetworks, Scorer, calibrate, most_probable
from virnucpro.viral.proteins import Proteins
from virnucpro.viral.windows import Windows, split_windows

_NOTHING = np.zeros(0, dtype=np.int64)


class WindowScores(NamedTuple):
    """Record windows, in order, with their log-odds."""

    record: IntArray  # (n,) record index
    start: IntArray  # (n,) first base
    n_bases: IntArray  # (n,)
    log_odds: FloatArray  # (n,) NaN: no known base, or not read yet

    @classmethod
    def from_arrays(cls, lengths: IntArray, records: IntArray, size: int) -> WindowScores:
        """Return unread windows with this size for some concatenated records.

        Starts count from the very first base.
        """
        starts = np.cumsum(lengths) - lengths
        owner, start, n_bases = split_windows(starts[records], lengths[records], size)
        return cls(records[owner], start, n_bases, np.full(len(owner), np.nan))

    @classmethod
    def concatenate(cls, parts: Iterable[WindowScores]) -> WindowScores:
        nothing = cls(_NOTHING, _NOTHING, _NOTHING, np.empty(0))
        return cls(*map(np.concatenate, zip(nothing, *parts, strict=True)))

    def means(self, n_records: int) -> FloatArray:
        """Return each record's mean log-odds over windows, NaN without a known base. (n_records,)

        The values are added in both orders, so that the reverse complement has the same sum.
        """
        return self.means_of(self.log_odds, n_records)

    def means_of(self, values: FloatArray, n_records: int) -> FloatArray:
        """Return each record's mean of these values over its windows, as ``means`` does. (n,)"""
        is_known = ~np.isnan(self.log_odds)
        owner = self.record[is_known]
        values = values[is_known]
        twice = np.bincount(owner, values, minlength=n_records)
        twice += np.bincount(owner[::-1], values[::-1], minlength=n_records)
        n_pieces = np.bincount(owner, minlength=n_records)
        return np.where(n_pieces > 0, twice / np.maximum(1, 2 * n_pieces), np.nan)

    def take(self, chosen: IntArray | BoolArray | slice) -> WindowScores:
        return WindowScores._make(column[chosen] for column in self)


# the networks for one size, with their windows and the probability of each kind, (n, n_kinds)
SizeScores: TypeAlias = tuple[PieceNetworks, WindowScores, FloatArray]


def score_sequences(
    sequences: Iterable[str], scorer: Scorer, code: GeneticCode = STANDARD
) -> Iterator[float | None]:
    """Return each sequence's calibrated log-odds, in order, None if it cannot be scored.

    A sequence needs a known base, and at least ``scorer.shortest`` bases.
    """
    max_letters = 2_000_000  # in the records that are scored together
    for batch in _batches(sequences, max_letters):
        scores, _, _ = score_block(batch, scorer, code)
        yield from (None if isnan(value) else value for value in scores.tolist())


def _batches(sequences: Iterable[str], max_letters: int) -> Iterator[list[str]]:
    """Yield sequence batches, in order."""
    waiting: list[str] = []
    n_letters = 0
    for sequence in sequences:
        waiting.append(sequence)
        n_letters += len(sequence)
        if n_letters >= max_letters:
            yield waiting
            waiting = []
            n_letters = 0
    if waiting:
        yield waiting


def score_block(
    sequences: Sequence[str], scorer: Scorer, code: GeneticCode = STANDARD
) -> tuple[FloatArray, WindowScores, IntArray]:
    """Return each sequence's calibrated log-odds in a block, its windows and its kingdom.

    NaN if it cannot be scored. The windows have the smallest size for the record. Each is
    calibrated by its own length. A kingdom is an index in ``Scorer.kingdoms``. (n,), (n,)
    """
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    has_pieces = np.zeros(len(lengths), dtype=np.bool_)
    pieces = list[WindowScores]()
    sizes = list(_by_size(sequences, lengths, scorer.pieces, code))
    for nets, scores, _ in sizes:
        if not nets.part:
            calibrated = calibrate(scorer.knots, scores.log_odds, scores.n_bases)
            inside = scores._replace(start=scores.start - starts[scores.record])
            new = ~has_pieces[scores.record]
            pieces.append(inside._replace(log_odds=calibrated).take(new))
            has_pieces[scores.record] = True
    together = WindowScores.concatenate(pieces)
    ordered = together.take(np.argsort(together.record, kind="stable"))
    log_odds = calibrate(scorer.knots, _mean_score(sizes, len(lengths)), lengths)
    # Summing before averaging leaves fewer columns to average.
    kingdom_scores = [(nets, scores, scorer.sum_by_kingdom(kinds)) for nets, scores, kinds in sizes]
    return log_odds, ordered, most_probable(mean_kinds(kingdom_scores, len(lengths)))


def record_log_odds(
    bases: str, lengths: IntArray, pieces: Sequence[PieceNetworks]
) -> tuple[FloatArray, FloatArray]:
    """Return the log-odds of concatenated records, before calibration, and their kinds.

    NaN: no score. n -> (n,), (n, n_kinds)
    """
    sizes = list(_by_size([bases], lengths, pieces, STANDARD))
    return _mean_score(sizes, len(lengths)), mean_kinds(sizes, len(lengths))


def _mean_score(sizes: Iterable[SizeScores], n_records: int) -> FloatArray:
    """Return the mean over window sizes of the mean over windows. NaN: no score. (n_records,)

    All sizes that are read in parts weigh half as much together as all others together.
    """
    means = [(nets, scores.means(n_records)) for nets, scores, _ in sizes]
    return _mean_over_sizes(means, n_records)


def mean_kinds(sizes: Sequence[SizeScores], n_records: int) -> FloatArray:
    """Return the mean of each column of probabilities, averaged like the scores. (n_records, n)"""
    n_kinds = sizes[0][2].shape[1] if sizes else 0
    columns = [
        _mean_over_sizes(
            [(nets, scores.means_of(kinds[:, kind], n_records)) for nets, scores, kinds in sizes],
            n_records,
        )
        for kind in range(n_kinds)
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((n_records, 0))


def _mean_over_sizes(
    means_by_size: Iterable[tuple[PieceNetworks, FloatArray]], n_records: int
) -> FloatArray:
    total, n_sizes = np.zeros((2, 2, n_records))  # for windows read in one go, and in parts
    for nets, means in means_by_size:
        has_mean = ~np.isnan(means)
        row = 0 if nets.part is None else 1
        total[row, has_mean] += means[has_mean]
        n_sizes[row, has_mean] += 1
    size_weights = np.array([[2.0], [1.0]])  # windows read in one go, and in parts
    weights = size_weights * (n_sizes > 0)
    means = (weights * total / np.maximum(1, n_sizes)).sum(axis=0)
    sums = weights.sum(axis=0)
    return np.where(sums > 0, means / np.maximum(1, sums), np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A block of bases, and the bases after it that windows from this block extend into."""

    first: int
    end: int  # end of the block. The row extends further
    row: Windows  # only the digits, without windows

    def rows(self, pieces: WindowScores) -> slice:
        """Return the rows for windows that begin in this block."""
        low, high = np.searchsorted(pieces.start, (self.first, self.end)).tolist()
        return slice(low, high)

    def pieces(self, pieces: WindowScores) -> Windows:
        return self.row.select(pieces.start - self.first, pieces.n_bases)


def _blocks(sequences: Sequence[str], longest: int) -> Iterator[_Block]:
    """Yield all sequences' bases in blocks, for windows of at most ``longest`` bases."""
    piece_bases_at_once = 500_000  # bases read for all window sizes before the next bases
    starts = [0, *accumulate(map(len, sequences))]
    n_bases = starts[-1]
    for first in range(0, n_bases, piece_bases_at_once):
        end = first + piece_bases_at_once
        window_end = min(n_bases, end + longest)
        low = bisect_right(starts, first) - 1
        high = bisect_left(starts, window_end)
        last = high - 1
        inner = sequences[low + 1 : high - 1]
        if low == last:
            text = sequences[low][first - starts[low] : window_end - starts[low]]
        else:
            ends = (
                sequences[low][first - starts[low] :],
                sequences[last][: window_end - starts[last]],
            )
            text = "".join((ends[0], *inner, ends[1]))
        yield _Block(first, end, Windows(encode(text), _NOTHING, _NOTHING))


def _by_size(
    sequences: Sequence[str], lengths: IntArray, pieces: Sequence[PieceNetworks], code: GeneticCode
) -> Iterator[SizeScores]:
    """Yield the networks for each size, and the scored windows in the records that they read."""
    size_windows = [
        _RecordWindows.from_record(
            nets,
            WindowScores.from_arrays(lengths, np.flatnonzero(nets.reads(lengths)), nets.size),
            _CompleteSequences.from_sequences(
                lengths, [larger for larger in pieces if larger.part == nets.size]
            ),
        )
        for nets in pieces
        if nets.part is None and nets.reads(lengths).any()
    ]
    for block in _blocks(sequences, max(nets.size for nets in pieces)):
        for reading in size_windows:
            reading.iter_blocks(block, code)
    for reading in size_windows:
        yield reading.nets, reading.pieces, reading.kinds
        yield from reading.complete.scores()


@dataclass(frozen=True, slots=True, eq=False)
class _RecordWindows:
    """Windows with one size, read in order, and the larger windows that contain them.

    Log-odds are not calibrated. Windows without a known base do not count as parts.
    """

    nets: PieceNetworks
    pieces: WindowScores
    complete: _CompleteSequences
    kinds: FloatArray  # (n, n_kinds) probability of each kind
    chosen: IntArray  # feature columns to keep
    features: Features  # (n, n_chosen)

    @classmethod
    def from_record(
        cls,
        nets: PieceNetworks,
        pieces: WindowScores,
        complete: _CompleteSequences,
        chosen: IntArray = _NOTHING,
    ) -> _RecordWindows:
        features = np.empty((len(pieces.record), len(chosen)), dtype=np.float32)
        kinds = np.empty((len(pieces.record), nets.nets.n_kinds))
        return cls(nets, pieces, complete, kinds, chosen, features)

    def iter_blocks(self, block: _Block, code: GeneticCode) -> None:
        """Read the windows that begin in the block, and score complete larger windows."""
        rows = block.rows(self.pieces)
        batch = self.pieces.take(rows)
        complete_rows = self.complete.rows(batch)
        call(
            "piece_log_odds",
            *library_input(block.pieces(batch), self.nets.kmers, code),
            *self.nets.nets.arguments,
            *(batch.log_odds, self.kinds[rows]),
            *(self.chosen, len(self.chosen), self.features[rows]),
            *(complete_rows, self.complete.total, self.complete.n_parts),
        )
        self.complete.score(block, code)


@dataclass(slots=True, eq=False)
class _CompleteSequences:
    """Windows that are read in parts. Features are added up until a window is complete."""

    nets: Sequence[PieceNetworks]
    pieces: WindowScores  # for all networks. One network reads each record
    reader: IntArray  # (n,) index of the networks that read each window
    layout: FloatArray  # (n, 12)
    total: FloatArray  # (n_open, 1229) sums of part features, in steps, for incomplete windows
    n_parts: IntArray  # (n_open,)
    kinds: FloatArray  # (n, n_kinds) probability of each kind
    n_done: int = 0  # number of leading windows that already have log-odds

    @classmethod
    def from_sequences(cls, lengths: IntArray, nets: Sequence[PieceNetworks]) -> _CompleteSequences:
        windows = [
            WindowScores.from_arrays(
                lengths, np.flatnonzero(size_nets.reads(lengths)), size_nets.size
            )
            for size_nets in nets
        ]
        pieces = WindowScores.concatenate(windows)
        order = np.argsort(pieces.start, kind="stable")
        reader = np.repeat(np.arange(len(windows)), [len(scores.start) for scores in windows])
        nothing = np.zeros((0, WindowFeatures.N_FEATURES)), np.zeros(0, dtype=np.int64)
        layout = np.empty((len(order), WindowFeatures.N_LAYOUT))
        kinds = np.full(
            (len(order), max([0, *(size_nets.nets.n_kinds for size_nets in nets)])), np.nan
        )
        return cls(nets, pieces.take(order), reader[order], layout, *nothing, kinds)

    def rows(self, parts: WindowScores) -> IntArray:
        """Return the rows of ``total`` for the windows that contain each part, or -1. -> (n, 2)

        The parts are in order. A part is in the windows, at most two, that contain its middle.
        """
        middle = 2 * parts.start + parts.n_bases  # in half bases
        start = 2 * self.pieces.start
        end = 2 * (self.pieces.start + self.pieces.n_bases)
        latest = np.searchsorted(start, middle, side="right") - 1
        self._open(int(latest.max(initial=-1)) + 1)
        end = np.append(end, 0)  # index -1: ends before all others
        piece = np.stack([latest, np.maximum(-1, latest - 1)], axis=1)
        return np.where(middle[:, None] <= end[piece], piece - self.n_done, -1)

    def score(self, block: _Block, code: GeneticCode) -> None:
        """Read the layout for windows that begin in the block, and score complete windows."""
        rows = block.rows(self.pieces)
        if rows.start < rows.stop:
            self.layout[rows] = layout_features(block.pieces(self.pieces.take(rows)), code)
        self._score(int(np.searchsorted(self.pieces.start, block.end, side="right")) - 2)

    def scores(self) -> Iterator[SizeScores]:
        """Score the remaining windows. Yield the networks for each size, with their windows."""
        self._open(len(self.pieces.start))
        self._score(len(self.pieces.start))
        for number, nets in enumerate(self.nets):
            is_own = self.reader == number
            yield nets, self.pieces.take(is_own), self.kinds[is_own]

    def _open(self, end: int) -> None:
        """Allocate features for all windows before ``end``."""
        n_more = end - self.n_done - len(self.total)
        if n_more > 0:
            self.total = np.concatenate([self.total, np.zeros((n_more, WindowFeatures.N_FEATURES))])
            self.n_parts = np.concatenate([self.n_parts, np.zeros(n_more, dtype=np.int64)])

    def _score(self, end: int) -> None:
        """Score the windows before ``end``, which are complete."""
        n = end - self.n_done
        finished = slice(self.n_done, end)
        if n <= 0:
            return
        parts = self.total[:n], self.n_parts[:n], self.layout[finished]
        for number, nets in enumerate(self.nets):
            chosen = np.flatnonzero((self.reader[finished] == number) & (self.n_parts[:n] > 0))
            log_odds = np.empty(len(chosen))
            kinds = np.empty((len(chosen), nets.nets.n_kinds))
            arguments = nets.nets.arguments
            call("whole_log_odds", *parts, chosen, len(chosen), *arguments, log_odds, kinds)
            self.pieces.log_odds[chosen + self.n_done] = log_odds
            self.kinds[chosen + self.n_done] = kinds
        self.total = self.total[n:].copy()
        self.n_parts = self.n_parts[n:]
        self.n_done = end


def score_proteins(sequences: Iterable[str], scorer: Scorer) -> FloatArray:
    """Return each protein's calibrated log-odds, in order, NaN without a known residue. (n,)"""
    residues_at_once = 100_000  # a protein takes 3 kB for its features, however short it is
    nets = scorer.proteins
    assert nets is not None, "a scorer without nets for proteins scores none"
    scores = [np.empty(0)]
    for batch in _batches(sequences, residues_at_once):
        proteins = Proteins.from_sequences(batch)
        log_odds = calibrate(nets.knots, nets.log_odds(proteins), proteins.lengths)
        log_odds[proteins.count_known_residues == 0] = np.nan
        scores.append(log_odds)
    return np.concatenate(scores)


def score_windows(
    sequences: Sequence[str],
    scorer: Scorer,
    step: int,
    code: GeneticCode = STANDARD,
    chosen: Sequence[int] = (),
) -> tuple[WindowScores, Features]:
    """Score overlapping windows of each sequence, one every ``step`` bases.

    The windows have the size of the scorer's sliding windows, and calibrated log-odds. The second
    result contains the ``chosen`` columns of each window's 36 plain statistics, (n, n_chosen):
    see ``features``. K-mers are not used, because k-mers from prophages in related hosts count as
    cellular.
    """
    size = scorer.windows.size
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    n_pieces = np.maximum(0, (lengths - size) // step + 1)
    owner = np.repeat(np.arange(len(lengths)), n_pieces)
    start = step * (np.arange(len(owner)) - (np.cumsum(n_pieces) - n_pieces)[owner])
    first = start + (np.cumsum(lengths) - lengths)[owner]
    pieces = WindowScores(owner, first, np.full(len(owner), size), np.empty(len(owner)))
    columns = np.array(
        [WindowFeatures.STATISTICS.start + number for number in chosen], dtype=np.int64
    )
    reading = _RecordWindows.from_record(
        scorer.windows, pieces, _CompleteSequences.from_sequences(_NOTHING, ()), columns
    )
    for block in _blocks(sequences, size):
        reading.iter_blocks(block, code)
    log_odds = scorer.windows_knot.calibrated(pieces.log_odds)
    return pieces._replace(start=start, log_odds=log_odds), reading.features
