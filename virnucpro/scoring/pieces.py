"""Records become calls by the scorer, which reads their bases alone: no frame, no vector.

Records wait until they fill a block, so memory holds one block, or one longer record. A score
does not depend on the block that it is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from virnucpro.config import Recipe
from virnucpro.options import FALSE_POSITIVES, CutOptions
from virnucpro.records import Call, FastaRecord, Orf, Prediction, RecordResult
from virnucpro.scorer.nets import ErrorRates, Scorer, false_discovery_rates, threshold
from virnucpro.scorer.score import BASES_AT_ONCE, PieceScores, RecordScore, score_block
from virnucpro.scoring.calls import (
    Decision,
    call_by_score,
    chunk_log_odds,
    chunk_scores,
    join_call,
    probability,
)
from virnucpro.scoring.head import HeadFacts
from virnucpro.scoring.join import join_log_odds
from virnucpro.sequences.genetic_code import GeneticCode, genetic_code
from virnucpro.sequences.screen import screen

_RECORDS_AT_ONCE = 20_000

T = TypeVar("T")
Values = NDArray[np.float64]


def call_by_scorer(
    records: Iterable[FastaRecord],
    recipe: Recipe,
    scorer: Scorer,
    cut: CutOptions,
    on_letters: Callable[[int], None],
) -> Iterator[RecordResult]:
    """Each record, in order, with a prediction for each of its pieces, and its call.

    ``on_letters`` hears the number of finished letters.
    """
    n_done = 0
    code = genetic_code(recipe.genetic_code)
    for block in _blocks(records, lambda record: record):
        refusals = [screen(record, recipe) for record in block]
        sequences = [
            record.sequence
            for record, (status, _) in zip(block, refusals, strict=True)
            if status is None
        ]
        scores = score_block(sequences, scorer, code)
        decisions = iter(_decide_all(scores, sequences, scorer, cut))
        for record, (status, note) in zip(block, refusals, strict=True):
            length = len(record.sequence)
            n_done += length
            if status is None:
                score, decision = next(decisions)
                predictions = list(_predictions(record.id, score.pieces))
                yield RecordResult(record, predictions, call_by_score(record, score, decision))
            else:
                call = Call(record.name, length, status, record.sample, note=note)
                yield RecordResult(record, [], call)
        on_letters(n_done)


def join_calls(
    results: Iterable[RecordResult],
    facts: HeadFacts,
    scorer: Scorer,
    cut: CutOptions,
    code: GeneticCode,
) -> Iterator[RecordResult]:
    """Records called by a head become records called by scorer and head, in the same order.

    One without a scored frame gets the score of the scorer; what the scorer cannot read keeps
    that of the head.
    """
    assert facts.join is not None, "a head that is not joined calls by itself"
    for block in _blocks(results, lambda result: result.record):
        readable = [result for result in block if result.call.status in ("scored", "no_orf")]
        sequences = [result.record.sequence for result in readable]
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        scores = score_block(sequences, scorer, code)
        base = np.array([score.log_odds for score in scores], dtype=np.float64)  # NaN for None
        head = np.array([_head_log_odds(result, facts) for result in readable], dtype=np.float64)
        joined = join_log_odds(facts.join.knots, base, head, lengths)
        calls = iter(
            map(
                join_call,
                [result.call for result in readable],
                map(_number, base.tolist()),
                map(_number, joined.tolist()),
                _prefer(
                    _decide(joined, lengths, facts.join.error_rates, cut),
                    _decide(base, lengths, scorer.error_rates, cut),
                    ~np.isnan(joined),
                ),
            )
        )
        for result in block:
            is_joined = result.call.status in ("scored", "no_orf")
            yield result._replace(call=next(calls)) if is_joined else result


def _head_log_odds(result: RecordResult, facts: HeadFacts) -> float:
    """The mean log-odds of a record's scored chunks; NaN without one."""
    chunks = [scores for _, scores in chunk_scores(result.predictions)]
    return fmean(chunk_log_odds(chunks, facts)) if chunks else np.nan


def _number(value: float) -> float | None:
    """The value, or None for NaN."""
    return None if value != value else value


def _prefer(
    firsts: Iterable[Decision], seconds: Iterable[Decision], is_first: NDArray[np.bool_]
) -> Iterator[Decision]:
    """The first decision on each record where there is one, or else the second."""
    for first, second, is_there in zip(firsts, seconds, is_first.tolist(), strict=True):
        yield first if is_there else second


def _blocks(items: Iterable[T], record_of: Callable[[T], FastaRecord]) -> Iterator[list[T]]:
    block: list[T] = []
    n_letters = 0
    for item in items:
        record = record_of(item)
        block.append(item)
        n_letters += len(record.header) + len(record.sequence)
        if n_letters >= BASES_AT_ONCE or len(block) == _RECORDS_AT_ONCE:
            yield block
            block, n_letters = [], 0
    yield block


def _decide_all(
    scores: Sequence[RecordScore], sequences: Sequence[str], scorer: Scorer, cut: CutOptions
) -> Iterator[tuple[RecordScore, Decision]]:
    """Each score with the decision that follows from it."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    log_odds = np.array([score.log_odds for score in scores], dtype=np.float64)  # NaN for None
    return zip(scores, _decide(log_odds, lengths, scorer.error_rates, cut), strict=True)


def _decide(
    log_odds: Values,
    lengths: NDArray[np.int64],
    error_rates: Sequence[ErrorRates],
    cut: CutOptions,
) -> Iterator[Decision]:
    """The decision that follows from each calibrated log-odds; none for NaN."""
    is_virus = log_odds >= threshold(error_rates, lengths, FALSE_POSITIVES[cut.preset])
    if cut.threshold is not None:
        is_virus = np.array(list(map(probability, log_odds.tolist()))) >= cut.threshold
    rates = false_discovery_rates(error_rates, log_odds, lengths, cut.prevalence)
    return map(Decision, is_virus.tolist(), rates.tolist())


def _predictions(record_id: str, pieces: PieceScores) -> Iterator[Prediction]:
    """A prediction per piece with a known base. A piece has both strands, and is its own chunk."""
    rows = zip(
        pieces.start.tolist(), pieces.n_bases.tolist(), pieces.log_odds.tolist(), strict=True
    )
    for number, (start, n_bases, log_odds) in enumerate(rows, 1):
        if log_odds == log_odds:  # not NaN
            name = f"{record_id}_piece_{number}"
            orf = Orf(name, name, record_id, start, start + n_bases, "+", "")
            yield Prediction(orf, probability(log_odds))
