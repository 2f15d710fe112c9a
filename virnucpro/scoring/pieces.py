"""Records become calls by the scorer, which reads their bases alone: no frame, no vector.

Records wait until they fill a block, so memory holds one block, or one longer record. A score
does not depend on the block that it is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from virnucpro.config import Recipe
from virnucpro.options import FALSE_POSITIVES, CutOptions
from virnucpro.records import Call, FastaRecord, Orf, Prediction, RecordResult
from virnucpro.scorer.nets import Scorer
from virnucpro.scorer.score import BASES_AT_ONCE, PieceScores, RecordScore, score_block
from virnucpro.scoring.calls import Decision, call_by_score, probability
from virnucpro.sequences.genetic_code import genetic_code
from virnucpro.sequences.screen import screen

_RECORDS_AT_ONCE = 20_000


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
    for block in _blocks(records):
        refusals = [screen(record, recipe) for record in block]
        sequences = [
            record.sequence
            for record, (status, _) in zip(block, refusals, strict=True)
            if status is None
        ]
        scores = score_block(sequences, scorer, code)
        decisions = iter(_decide(scores, sequences, scorer, cut))
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


def _blocks(records: Iterable[FastaRecord]) -> Iterator[list[FastaRecord]]:
    block: list[FastaRecord] = []
    n_letters = 0
    for record in records:
        block.append(record)
        n_letters += len(record.header) + len(record.sequence)
        if n_letters >= BASES_AT_ONCE or len(block) == _RECORDS_AT_ONCE:
            yield block
            block, n_letters = [], 0
    yield block


def _decide(
    scores: Sequence[RecordScore], sequences: Sequence[str], scorer: Scorer, cut: CutOptions
) -> Iterator[tuple[RecordScore, Decision]]:
    """Each score with the decision that follows from it."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    log_odds = np.array([score.log_odds for score in scores], dtype=np.float64)  # NaN for None
    is_virus = log_odds >= scorer.threshold(lengths, FALSE_POSITIVES[cut.preset])
    if cut.threshold is not None:
        is_virus = np.array(list(map(probability, log_odds.tolist()))) >= cut.threshold
    rates = scorer.false_discovery_rates(log_odds, lengths, cut.prevalence)
    decisions = map(Decision, is_virus.tolist(), rates.tolist())
    return zip(scores, decisions, strict=True)


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
