"""Records become calls by the scorer, which reads their letters alone: no frame, no vector.

They come in blocks. A score does not depend on the block that it is computed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.callers.calls import (
    Decision,
    call_by_score,
    call_protein,
    chunk_log_odds,
    chunk_scores,
    join_call,
    probability,
)
from virnucpro.callers.head import HeadFacts
from virnucpro.callers.join import join_log_odds
from virnucpro.callers.options import FALSE_POSITIVES, CutOptions
from virnucpro.callers.regions import Found
from virnucpro.ground.config import Recipe
from virnucpro.ground.numeric import Mask, Values
from virnucpro.ground.records import (
    PROTEIN,
    Call,
    FastaRecord,
    Orf,
    Prediction,
    RecordResult,
    Status,
)
from virnucpro.scorer.nets import ErrorRates, Scorer, false_discovery_rates, thresholds
from virnucpro.scorer.proteins import SHORTEST as SHORTEST_PROTEIN
from virnucpro.scorer.score import PieceScores, RecordScore, score_block, score_proteins
from virnucpro.sequences.genetic_code import GeneticCode, genetic_code
from virnucpro.sequences.screen import protein_of, screen


class ScoredRecord(NamedTuple):
    """A record by the scorer alone: all that its call is made of but the cut.

    Of a record that was screened out the status is set, and the score is None.
    """

    record: FastaRecord
    status: Status | None
    note: str  # why it was screened out, or what else its sequence shows
    score: RecordScore | None
    # its regions if it is called other, and if it is called a virus; None: it was not searched
    found: tuple[Found, Found] | None = None


def score_records(
    records: Sequence[FastaRecord], recipe: Recipe, scorer: Scorer
) -> list[ScoredRecord]:
    """Each record, in order, with the score of its sequence.

    A protein is a single piece. The stop that gene callers write behind it does not count.
    """
    is_protein = recipe.input_type == "protein"
    refusals = [(_screen_protein if is_protein else screen)(record, recipe) for record in records]
    readable = [
        protein_of(record) if is_protein else record.sequence
        for record, (status, _) in zip(records, refusals, strict=True)
        if status is None
    ]
    if is_protein:
        assert scorer.proteins is not None, "a scorer without nets for proteins calls none"
        each = list(map(_one_piece, readable, score_proteins(readable, scorer)))
    else:
        each = score_block(readable, scorer, genetic_code(recipe.genetic_code))
    scores = iter(each)
    return [
        ScoredRecord(record, status, note, next(scores) if status is None else None)
        for record, (status, note) in zip(records, refusals, strict=True)
    ]


def _one_piece(protein: str, log_odds: float | None) -> RecordScore:
    first, n_residues = np.zeros(1, dtype=np.int64), np.array([len(protein)], dtype=np.int64)
    value = np.array([log_odds], dtype=np.float64)  # NaN for None
    return RecordScore(log_odds, PieceScores(first, first, n_residues, value))


def call_scored(
    each: Sequence[ScoredRecord], recipe: Recipe, scorer: Scorer, cut: CutOptions
) -> Iterator[RecordResult]:
    """Call each record, in order; beside it are the predictions for its pieces."""
    is_protein = recipe.input_type == "protein"
    error_rates = scorer.error_rates
    if is_protein:
        assert scorer.proteins is not None, "a scorer without nets for proteins calls none"
        error_rates = scorer.proteins.error_rates
    scores = [(one.record, one.score) for one in each if one.score is not None]
    lengths = np.array(
        [
            score.pieces.n_bases[0] if is_protein else len(record.sequence)
            for record, score in scores
        ],
        dtype=np.int64,
    )
    log_odds = np.array([score.log_odds for _, score in scores], dtype=np.float64)  # NaN for None
    decisions = _decide(log_odds, lengths, error_rates, cut)
    for record, status, note, score, _ in each:
        if score is None:
            assert status is not None, "what has no score was screened out"
            call = Call(record.name, len(record.sequence), status, record.sample, note=note)
            yield RecordResult(record, [], call)
        elif is_protein:
            call = call_protein(record, score.log_odds, next(decisions))
            call = replace(call, note=call.note or note)
            yield RecordResult(record, _whole(record, score.pieces), call)
        else:
            call = call_by_score(record, score, next(decisions))
            call = replace(call, note=call.note or note)
            yield RecordResult(record, list(_predictions(record.id, score.pieces)), call)


def _whole(protein: FastaRecord, pieces: PieceScores) -> list[Prediction]:
    """The prediction of a protein, if it has a score."""
    name, (n_residues,), (log_odds,) = protein.id, pieces.n_bases.tolist(), pieces.log_odds.tolist()
    if log_odds != log_odds:  # NaN
        return []
    orf = Orf(name, name, name, 0, n_residues, PROTEIN, protein_of(protein))
    return [Prediction(orf, probability(log_odds))]


def _screen_protein(record: FastaRecord, recipe: Recipe) -> tuple[Status | None, str]:
    """The status and the note of a protein that is left out, or None and ""."""
    status, note = screen(record, recipe)
    n_residues = len(protein_of(record))
    if status is None and n_residues < SHORTEST_PROTEIN:
        return "too_short", f"{n_residues} of at least {SHORTEST_PROTEIN}"
    return status, note


def join_calls(
    results: Sequence[RecordResult],
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
    readable = [result for result in results if result.call.status in ("scored", "no_orf")]
    sequences = [result.record.sequence for result in readable]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    scores = score_block(sequences, scorer, code)
    base = np.array([score.log_odds for score in scores], dtype=np.float64)  # NaN for None
    head = np.array([_head_log_odds(result, facts) for result in readable], dtype=np.float64)
    joined = join_log_odds(facts.join.knots, base, head, lengths)
    calls = map(
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
    for result in results:
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
    firsts: Iterable[Decision], seconds: Iterable[Decision], is_first: Mask
) -> Iterator[Decision]:
    """The first decision on each record where there is one, or else the second."""
    for first, second, is_there in zip(firsts, seconds, is_first.tolist(), strict=True):
        yield first if is_there else second


def _decide(
    log_odds: Values, lengths: NDArray[np.int64], error_rates: Sequence[ErrorRates], cut: CutOptions
) -> Iterator[Decision]:
    """The decision that follows from each calibrated log-odds; none for NaN."""
    is_virus = log_odds >= thresholds(error_rates, lengths, FALSE_POSITIVES[cut.preset])
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
