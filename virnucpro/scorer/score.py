"""Scores of records: their pieces' log-odds, averaged and calibrated by length; and of proteins.

Long pieces are read as parts, which are pieces too: the features of these are made once.
A record's score is the probability that it is viral where half of all records are. It depends on
the record and the scorer alone, not on other records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from virnucpro.ground.library import call
from virnucpro.ground.records import Counts, Mask, Values
from virnucpro.scorer.features import (
    FIGURES,
    N_FEATURES,
    N_LAYOUT,
    Features,
    layout_features,
    library_input,
)
from virnucpro.scorer.nets import PieceNets, Scorer
from virnucpro.scorer.pieces import Digits, Pieces, cut, digits_of
from virnucpro.scorer.proteins import SHORTEST, Proteins
from virnucpro.sequences.translate import STANDARD, GeneticCode

BASES_AT_ONCE = 2_000_000  # of records that are read before any is scored
_PIECE_BASES_AT_ONCE = 500_000  # of records whose pieces are read, of one size after another
_LONG = 1_000_000  # bases of a record that is not copied to lie beside others
_NOTHING = np.zeros(0, dtype=np.int64)
_RESIDUES_AT_ONCE, _PROTEINS_AT_ONCE = 500_000, 1_000


class PieceScores(NamedTuple):
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

    def take(self, chosen: Counts | Mask) -> PieceScores:
        return PieceScores._make(column[chosen] for column in self)


def score_sequences(
    sequences: Iterable[str], scorer: Scorer, code: GeneticCode = STANDARD
) -> Iterator[float | None]:
    """The calibrated log-odds of each sequence, in order; None where there is nothing to read.

    That is a sequence shorter than ``scorer.shortest`` allows, or one of unknown bases alone.
    """
    waiting: list[str] = []
    n_bases = 0
    for sequence in sequences:
        waiting.append(sequence)
        n_bases += len(sequence)
        if n_bases >= BASES_AT_ONCE:
            yield from _numbers(score_block(waiting, scorer, code)[0])
            waiting, n_bases = [], 0
    yield from _numbers(score_block(waiting, scorer, code)[0])


def _numbers(values: Values) -> Iterator[float | None]:
    """The values; None for NaN."""
    return (None if value != value else value for value in values.tolist())


def score_block(
    sequences: Sequence[str], scorer: Scorer, code: GeneticCode = STANDARD
) -> tuple[Values, PieceScores]:
    """The calibrated log-odds of each sequence, read side by side, and its pieces.

    NaN where there is nothing to read. Pieces are those of the smallest size that a record is read
    in, each calibrated by its own length. (n,)
    """
    if len(sequences) > 1 and len(sequences[-1]) > _LONG:  # the longest of a block is its last
        before, of_before = score_block(sequences[:-1], scorer, code)
        last, of_last = score_block(sequences[-1:], scorer, code)
        of_last = of_last._replace(record=of_last.record + len(before))
        return np.append(before, last), _side_by_side([of_before, of_last])
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    mean, has_pieces = _Mean(len(lengths)), np.zeros(len(lengths), dtype=np.bool_)
    pieces = [PieceScores(_NOTHING, _NOTHING, _NOTHING, np.empty(0))]
    for nets, records, scores in _by_size("".join(sequences), lengths, scorer.pieces, code):
        mean.add(nets, records, scores)
        if not nets.part:
            calibrated = scorer.calibrated(scores.log_odds, scores.n_bases)
            owner = records[scores.record]
            inside = PieceScores(owner, scores.start - starts[owner], scores.n_bases, calibrated)
            pieces.append(inside.take(~has_pieces[owner]))
            has_pieces[records] = True
    together = _side_by_side(pieces)
    ordered = together.take(np.argsort(together.record, kind="stable"))
    return scorer.calibrated(mean.values, lengths), ordered


def _side_by_side(each: Sequence[PieceScores]) -> PieceScores:
    return PieceScores(*map(np.concatenate, zip(*each, strict=True)))


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

    @classmethod
    def joined(cls, each: Sequence[_Places]) -> _Places:
        columns = ([one.record, one.first, one.n_bases] for one in (_NO_PLACES, *each))
        return cls(*map(np.concatenate, zip(*columns, strict=True)))

    def take(self, chosen: Counts | slice) -> _Places:
        return _Places(self.record[chosen], self.first[chosen], self.n_bases[chosen])

    def within(self, block: _Block) -> slice:
        """The pieces that begin in this block."""
        low, high = np.searchsorted(self.first, (block.first, block.end)).tolist()
        return slice(low, high)

    def scored(self, log_odds: Values) -> PieceScores:
        return PieceScores(self.record, self.first, self.n_bases, log_odds)


_NO_PLACES = _Places(_NOTHING, _NOTHING, _NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some of the bases, and those behind that pieces which begin in them have."""

    first: int
    end: int  # of the bases that pieces begin in
    row: Pieces  # of all bases; none

    def pieces(self, places: _Places) -> Pieces:
        return self.row.at(places.first - self.first, places.n_bases)


def _blocks(sequence: str | Digits, longest: int) -> Iterator[_Block]:
    """All bases, some at a time, for pieces of at most so many bases."""
    for first in range(0, len(sequence), _PIECE_BASES_AT_ONCE):
        end = first + _PIECE_BASES_AT_ONCE
        digits = digits_of(sequence[first : end + longest])
        yield _Block(first, end, Pieces(digits, _NOTHING, _NOTHING))


def _by_size(
    sequence: str | Digits, lengths: Counts, pieces: Sequence[PieceNets], code: GeneticCode
) -> Iterator[tuple[PieceNets, Counts, PieceScores]]:
    """Records and their pieces for each piece size; pieces are numbered among these records."""
    readings = [
        _Reading.of(lengths, nets, [one for one in pieces if one.part == nets.size])
        for nets in pieces
        if nets.part is None and nets.reads(lengths).any()
    ]
    for block in _blocks(sequence, max(nets.size for nets in pieces)):
        for reading in readings:
            reading.read(block, code)
    for reading in readings:
        yield reading.nets, reading.records, reading.places.scored(reading.log_odds)
        yield from reading.wholes.scored()


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Pieces of one size, read in their order, and pieces of larger sizes that they are parts of.

    Log-odds are those before calibration; NaN for unknown bases alone, which are no part.
    """

    nets: PieceNets
    records: Counts  # whose pieces they are
    places: _Places
    wholes: _Wholes
    chosen: Counts  # features that are kept
    log_odds: Values  # (n,)
    features: Features  # (n, n_chosen)

    @classmethod
    def of(cls, lengths: Counts, nets: PieceNets, wholes: Sequence[PieceNets]) -> _Reading:
        records = np.flatnonzero(nets.reads(lengths))
        places = _Places.of(lengths, records, nets.size)
        return cls.at(places, nets, _Wholes.of(lengths, wholes), _NOTHING, records)

    @classmethod
    def at(
        cls,
        places: _Places,
        nets: PieceNets,
        wholes: _Wholes,
        chosen: Counts,
        records: Counts,
    ) -> _Reading:
        n = len(places.first)
        room = np.empty(n), np.empty((n, len(chosen)), dtype=np.float32)
        return cls(nets, records, places, wholes, chosen, *room)

    def read(self, block: _Block, code: GeneticCode) -> None:
        """Read the pieces that begin in the block, and score the larger ones that end before."""
        rows = self.places.within(block)
        places = self.places.take(rows)
        pieces, of_wholes = block.pieces(places), self.wholes.rows(places.first)
        call(
            "piece_log_odds",
            *library_input(pieces, self.nets.words, code),
            *self.nets.stacked.arguments,
            self.log_odds[rows],
            *(self.chosen, len(self.chosen), self.features[rows]),
            *(of_wholes, self.wholes.total, self.wholes.n_parts),
        )
        self.wholes.read(block, code)


@dataclass(slots=True, eq=False)
class _Wholes:
    """Pieces that are read as parts; features of parts are kept until their piece has all."""

    records: list[tuple[PieceNets, Counts]]  # that nets read
    places: _Places  # of the pieces for all nets; each record is read by one of them
    reader: Counts  # (n,) which nets read a piece
    layout: Values  # (n, 12)
    log_odds: Values  # (n,) of the pieces before ``n_done``
    total: Values  # (n_open, 1229) features of the parts, in steps, of pieces that wait for more
    n_parts: Counts  # (n_open,)
    n_done: int = 0

    @classmethod
    def of(cls, lengths: Counts, pieces: Sequence[PieceNets]) -> _Wholes:
        records = [(nets, np.flatnonzero(nets.reads(lengths))) for nets in pieces]
        each = [_Places.of(lengths, some, nets.size) for nets, some in records]
        places = _Places.joined(each)
        order = np.argsort(places.first, kind="stable")
        reader = np.repeat(np.arange(len(each)), [len(some.first) for some in each])
        room = np.empty((len(order), N_LAYOUT)), np.full(len(order), np.nan)
        nothing = np.zeros((0, N_FEATURES)), np.zeros(0, dtype=np.int64)
        return cls(records, places.take(order), reader[order], *room, *nothing)

    def rows(self, first: Counts) -> Counts:
        """The rows of ``total`` of the pieces that parts in their order lie in, -1 for none.

        A part lies in the pieces that its first base lies in, at most two. (n,) -> (n, 2)
        """
        latest = np.searchsorted(self.places.first, first, side="right") - 1
        self._open(int(latest.max(initial=-1)) + 1)
        end = np.append(self.places.first + self.places.n_bases, 0)  # -1 is before all
        piece = np.stack([latest, np.maximum(-1, latest - 1)], axis=1)
        return np.where(first[:, None] < end[piece], piece - self.n_done, -1)

    def read(self, block: _Block, code: GeneticCode) -> None:
        """Read what only the pieces have that begin in the block; score those with all parts."""
        rows = self.places.within(block)
        if rows.start < rows.stop:
            self.layout[rows] = layout_features(block.pieces(self.places.take(rows)), code)
        self._score(int(np.searchsorted(self.places.first, block.end, side="right")) - 2)

    def scored(self) -> Iterator[tuple[PieceNets, Counts, PieceScores]]:
        """Nets, the records that they read, and the log-odds of their pieces."""
        self._open(len(self.places.first))
        self._score(len(self.places.first))
        for number, (nets, records) in enumerate(self.records):
            chosen = np.flatnonzero(self.reader == number)
            if len(records):
                yield nets, records, self.places.take(chosen).scored(self.log_odds[chosen])

    def _open(self, end: int) -> None:
        """Make room for the features of all pieces before this one."""
        n_more = end - self.n_done - len(self.total)
        if n_more > 0:
            self.total = np.concatenate([self.total, np.zeros((n_more, N_FEATURES))])
            self.n_parts = np.concatenate([self.n_parts, np.zeros(n_more, dtype=np.int64)])

    def _score(self, end: int) -> None:
        """Score the pieces before this one, which get no more parts."""
        n, done = end - self.n_done, slice(self.n_done, end)
        if n <= 0:
            return
        parts = self.total[:n], self.n_parts[:n], self.layout[done]
        for number, (nets, _) in enumerate(self.records):
            chosen = np.flatnonzero((self.reader[done] == number) & (self.n_parts[:n] > 0))
            log_odds = np.empty(len(chosen))
            arguments = nets.stacked.arguments
            call("whole_log_odds", *parts, chosen, len(chosen), *arguments, log_odds)
            self.log_odds[chosen + self.n_done] = log_odds
        self.total, self.n_parts, self.n_done = self.total[n:].copy(), self.n_parts[n:], end


def score_proteins(sequences: Sequence[str], scorer: Scorer) -> Values:
    """The calibrated log-odds of each protein, in order; NaN where there is nothing to read.

    That is a protein without a known residue. (n,)

    Raises:
        ValueError: the scorer has no nets for proteins, or a protein is too short for them.
    """
    if scorer.proteins is None:
        raise ValueError("a scorer that reads nucleotides alone")
    if any(len(sequence) < SHORTEST for sequence in sequences):
        raise ValueError(f"a protein of fewer than {SHORTEST} residues")
    scores = [np.empty(0)]
    for block in _protein_blocks(sequences):
        proteins = Proteins.of(block)
        log_odds = scorer.proteins.calibrated(scorer.proteins.log_odds(proteins), proteins.lengths)
        log_odds[proteins.n_known == 0] = np.nan
        scores.append(log_odds)
    return np.concatenate(scores)


def _protein_blocks(sequences: Sequence[str]) -> Iterator[list[str]]:
    """Some of the proteins at a time, in order."""
    waiting: list[str] = []
    n_residues = 0
    for sequence in sequences:
        waiting.append(sequence)
        n_residues += len(sequence)
        if n_residues >= _RESIDUES_AT_ONCE or len(waiting) == _PROTEINS_AT_ONCE:
            yield waiting
            waiting, n_residues = [], 0
    if waiting:
        yield waiting


def score_windows(
    sequence: str,
    scorer: Scorer,
    size: int,
    step: int,
    code: GeneticCode = STANDARD,
    chosen: Sequence[int] = (),
) -> tuple[PieceScores, Features]:
    """Overlapping pieces of one sequence, one every ``step`` bases, with calibrated log-odds.

    Beside them the chosen ones of the 36 plain figures of each piece, (n, n_chosen): see
    ``features``. Words do not count: those of the prophages of a host's relatives are words of
    cells.

    Raises:
        ValueError: the scorer's nets of windows are of another size.
    """
    if scorer.windows.size != size:
        raise ValueError(f"windows of {size} bases for nets of {scorer.windows.size} bases")
    start = np.arange(0, len(sequence) - size + 1, step, dtype=np.int64)
    places = _Places(np.zeros(len(start), dtype=np.int64), start, np.full(len(start), size))
    columns = np.array([FIGURES.start + number for number in chosen], dtype=np.int64)
    no_wholes = _Wholes.of(_NOTHING, ())
    reading = _Reading.at(places, scorer.windows, no_wholes, columns, _NOTHING)
    for block in _blocks(sequence, size):
        reading.read(block, code)
    log_odds = scorer.windows_knot.calibrated(reading.log_odds)
    return places.scored(log_odds), reading.features
