"""Scores of records: their pieces' log-odds, averaged and calibrated by length; and of proteins.

Long pieces are read as parts, which are pieces too: the features of these are made once.
A record's score is the probability that it is viral where half of all records are. It depends on
the record and the scorer alone, not on the records beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from virnucpro.ground.numeric import Counts, Values
from virnucpro.scorer.features import (
    FIGURES,
    N_FEATURES,
    Features,
    layout_features,
    read_pieces,
    with_layout,
)
from virnucpro.scorer.nets import PieceNets, Scorer
from virnucpro.scorer.pieces import Digits, Pieces, cut, digits_of
from virnucpro.scorer.proteins import SHORTEST, Proteins
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

BASES_AT_ONCE = 2_000_000  # of records that are read before any is scored
_PIECE_BASES_AT_ONCE = 500_000
_PIECES_AT_ONCE = 1_000
_WHOLE_BASES_AT_ONCE = 1_000_000
_LONG = 1_000_000  # bases of a record that is not copied to lie beside others
_RESIDUES_AT_ONCE, _PROTEINS_AT_ONCE = 500_000, 1_000
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
    if len(sequences) > 1 and len(sequences[-1]) > _LONG:  # the longest of a block is its last
        each = (sequences[:-1], sequences[-1:])
        return [score for some in each for score in score_block(some, scorer, code)]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    mean = _Mean(len(lengths))
    pieces: dict[int, PieceScores] = {}
    nothing = np.empty(0, dtype=np.int64)
    no_pieces = PieceScores(nothing, nothing, nothing, np.empty(0))
    for nets, records, scores in _by_size("".join(sequences), lengths, scorer.pieces, code):
        mean.add(nets, records, scores)
        if not nets.part:
            calibrated = scorer.calibrated(scores.log_odds, scores.n_bases)
            _add_pieces(pieces, records, replace(scores, log_odds=calibrated), starts)
    log_odds = scorer.calibrated(mean.values, lengths)
    return [
        RecordScore(None if np.isnan(value) else value, pieces.get(record, no_pieces))
        for record, value in enumerate(log_odds.tolist())
    ]


def _add_pieces(
    pieces: dict[int, PieceScores], records: Counts, scores: PieceScores, starts: Counts
) -> None:
    """Give records their pieces, but for those that have pieces of a smaller size."""
    bounds = np.searchsorted(scores.record, np.arange(len(records) + 1)).tolist()
    for i, record in enumerate(records.tolist()):
        if record not in pieces:
            pieces[record] = scores.of_record(bounds[i], bounds[i + 1], int(starts[record]))


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

    def of_rows(self, low: int, high: int) -> _Places:
        rows = slice(low, high)
        return _Places(self.record[rows], self.first[rows], self.n_bases[rows])

    def blocks(
        self, sequence: str | Digits, size: int, n_bases: int
    ) -> Iterator[tuple[slice, Pieces]]:
        """The pieces, of about this size, with their bases, so many bases at a time."""
        n_at_once = max(1, min(_PIECES_AT_ONCE, n_bases // size))
        for low in range(0, len(self.first), n_at_once):
            block = slice(low, low + n_at_once)
            first, lengths = self.first[block], self.n_bases[block]
            digits = digits_of(sequence[int(first[0]) : int(first[-1] + lengths[-1])])
            yield block, Pieces(digits, first - first[0], lengths)

    def scored(self, log_odds: Values) -> PieceScores:
        return PieceScores(self.record, self.first, self.n_bases, log_odds)


def _by_size(
    sequence: str | Digits, lengths: Counts, pieces: Sequence[PieceNets], code: GeneticCode
) -> Iterator[tuple[PieceNets, Counts, PieceScores]]:
    """Records and their pieces for each piece size; pieces are numbered among these records."""
    for nets in pieces:
        records = np.flatnonzero(nets.reads(lengths))
        if nets.part is None and len(records):
            places = _Places.of(lengths, records, nets.size)
            wholes = [
                _Wholes.of(sequence, lengths, one, code)
                for one in pieces
                if one.part == nets.size and one.reads(lengths).any()
            ]
            log_odds = _score_pieces(sequence, places, nets, code, wholes)
            yield nets, records, places.scored(log_odds)
            for whole in wholes:
                yield whole.nets, whole.records, whole.places.scored(whole.log_odds())


@dataclass(slots=True, eq=False)
class _Wholes:
    """Pieces that are read as parts; features of parts are kept until their piece has all."""

    sequence: str | Digits
    nets: PieceNets
    code: GeneticCode
    records: Counts
    places: _Places
    total: Values  # (n_open, 1229) features of the parts, in steps, of pieces that wait for more
    n_parts: Counts  # (n_open,)
    done: list[Values] = field(default_factory=list)  # log-odds of the pieces before
    n_done: int = 0

    @classmethod
    def of(
        cls, sequence: str | Digits, lengths: Counts, nets: PieceNets, code: GeneticCode
    ) -> _Wholes:
        records = np.flatnonzero(nets.reads(lengths))
        places = _Places.of(lengths, records, nets.size)
        nothing = np.zeros((0, N_FEATURES)), np.zeros(0, dtype=np.int64)
        return cls(sequence, nets, code, records, places, *nothing)

    def add(self, first: Counts, features: Features) -> None:
        """Add parts in their order, each to the pieces that its first base lies in, at most two."""
        starts, n_bases = self.places.first, self.places.n_bases
        latest = np.searchsorted(starts, first, side="right") - 1
        self._open(int(latest.max(initial=-1)) + 1)
        for whole in (latest, latest - 1):
            inside = np.flatnonzero(whole >= 0)
            inside = inside[first[inside] < (starts + n_bases)[whole[inside]]]
            if len(inside):
                some, rows, n_parts = np.unique(
                    whole[inside], return_index=True, return_counts=True
                )
                steps = np.rint(features[inside] * _STEPS)  # whole: no sum depends on its order
                self.total[some - self.n_done] += np.add.reduceat(steps, rows)
                self.n_parts[some - self.n_done] += n_parts
        if len(first):
            self._score(int(latest[-1]) - 1)

    def log_odds(self) -> Values:
        """Log-odds of each piece, before calibration; NaN without a known base. -> (n,)"""
        self._open(len(self.places.first))
        self._score(len(self.places.first))
        return np.concatenate([np.empty(0), *self.done])

    def _open(self, end: int) -> None:
        """Make room for the features of all pieces before this one."""
        n_more = max(0, end - self.n_done - len(self.total))
        self.total = np.concatenate([self.total, np.zeros((n_more, N_FEATURES))])
        self.n_parts = np.concatenate([self.n_parts, np.zeros(n_more, dtype=np.int64)])

    def _score(self, end: int) -> None:
        """Score the pieces before this one, which get no more parts."""
        n = end - self.n_done
        if n <= 0:
            return
        means = self.total[:n] / (_STEPS * np.maximum(1, self.n_parts[:n])[:, None])
        places = self.places.of_rows(self.n_done, end)
        blocks = places.blocks(self.sequence, self.nets.size, _WHOLE_BASES_AT_ONCE)
        layouts = [layout_features(pieces, self.code) for _, pieces in blocks]
        features = with_layout(means, np.concatenate(layouts))
        self.done.append(np.where(self.n_parts[:n] > 0, self.nets.log_odds(features), np.nan))
        self.total, self.n_parts, self.n_done = self.total[n:].copy(), self.n_parts[n:], end


def score_proteins(sequences: Sequence[str], scorer: Scorer) -> list[float | None]:
    """The calibrated log-odds of each protein, in order; None where there is nothing to read.

    That is a protein without a known residue.

    Raises:
        ValueError: the scorer has no nets for proteins, or a protein is too short for them.
    """
    if scorer.proteins is None:
        raise ValueError("a scorer that reads nucleotides alone")
    if any(len(sequence) < SHORTEST for sequence in sequences):
        raise ValueError(f"a protein of fewer than {SHORTEST} residues")
    scores: list[float | None] = []
    for block in _protein_blocks(sequences):
        proteins = Proteins.of(block)
        log_odds = scorer.proteins.calibrated(scorer.proteins.log_odds(proteins), proteins.lengths)
        log_odds[proteins.n_known == 0] = np.nan
        scores += [None if np.isnan(value) else value for value in log_odds.tolist()]
    return scores


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
    columns = [FIGURES.start + number for number in chosen]
    figures = [np.empty((0, len(columns)), dtype=np.float32)]
    values = [np.empty(0)]
    for _, features, log_odds in _read_pieces(sequence, places, scorer.windows, code):
        figures.append(np.ascontiguousarray(features[:, columns]))
        values.append(log_odds)
    log_odds = scorer.windows_knot.calibrated(np.concatenate(values))
    return places.scored(log_odds), np.concatenate(figures)


def _score_pieces(
    sequence: str | Digits,
    places: _Places,
    nets: PieceNets,
    code: GeneticCode,
    wholes: Iterable[_Wholes],
) -> Values:
    """The log-odds of each piece of this size, before calibration; NaN for unknown bases alone.

    ``wholes`` get those with a known base as parts.
    """
    values = np.full(len(places.first), np.nan)
    for block, features, log_odds in _read_pieces(sequence, places, nets, code):
        values[block] = log_odds
        is_known = ~np.isnan(log_odds)
        for whole in wholes:
            whole.add(places.first[block][is_known], features[is_known])
    return values


def _read_pieces(
    sequence: str | Digits, places: _Places, nets: PieceNets, code: GeneticCode
) -> Iterator[tuple[slice, Features, Values]]:
    """Some of the pieces at a time: their features, and log-odds as above."""
    for block, pieces in places.blocks(sequence, nets.size, _PIECE_BASES_AT_ONCE):
        features, is_blank = read_pieces(pieces, nets.words, code)
        yield block, features, np.where(is_blank, np.nan, nets.log_odds(features))
