"""Rules that turn the scores of frames into calls of chunks and records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import fsum, log, tanh
from statistics import fmean

import numpy as np

from virnucpro.callers.head import HeadFacts
from virnucpro.ground.config import Status
from virnucpro.ground.records import (
    DECIMALS,
    FRAMES_FAILED,
    Call,
    FastaRecord,
    Prediction,
    Values,
    sigmoid,
)

_NEAR = 1e-6  # in units of the last decimal: a thousand times what doubles near 1 are apart
_SURE = 10.0**-DECIMALS  # scores are clipped to [_SURE, 1 - _SURE] before log-odds are taken


def chunk_scores(predictions: Sequence[Prediction]) -> list[tuple[str, list[float]]]:
    """The id of each scored chunk, and the scores of its frames.

    Frames of one chunk are neighbours, as ``translate_six_frames`` makes them.
    """
    frames = [
        (frame.orf.chunk_id, frame.virus_score)
        for frame in predictions
        if frame.virus_score is not None
    ]
    return [
        (chunk_id, [score for _, score in group])
        for chunk_id, group in groupby(frames, key=lambda frame: frame[0])
    ]


def score_chunks(predictions: Sequence[Prediction], facts: HeadFacts) -> dict[str, float]:
    """The score of each scored chunk by its id, as if it were a record of its own."""
    chunks = chunk_scores(predictions)
    return {chunk_id: score_record([scores], facts) for chunk_id, scores in chunks}


def score_record(chunks: Iterable[Sequence[float]], facts: HeadFacts) -> float:
    """The score of a record, 6 decimals, from those of each chunk's frames; one chunk at least.

    In log-odds the record has the sum of its n chunks' over ``n ** exponent``.
    """
    odds = chunk_log_odds(chunks, facts)
    return probability(fsum(odds) / len(odds) ** facts.exponent)


def chunk_log_odds(chunks: Iterable[Sequence[float]], facts: HeadFacts) -> list[float]:
    """The log-odds of each chunk from the scores of its frames: the largest, or their mean."""
    pick = max if facts.frame_rule == "max" else fmean
    return [pick([log_odds(score) for score in scores]) for scores in chunks]


def probability(log_odds: float) -> float:
    """The score for these log-odds, with 6 decimals."""
    return round(0.5 * (1 + tanh(log_odds / 2)), DECIMALS)


def probabilities(log_odds: Values) -> Values:
    """The same for many, to the last bit; NaN for NaN. (n,) -> (n,)"""
    scaled = sigmoid(log_odds) * 10**DECIMALS
    whole = np.rint(scaled)
    scores = whole / 10**DECIMALS  # the number that is next to those decimals
    # numpy's tanh may differ in the last bit, which counts near the middle between two scores
    for place in np.flatnonzero(np.abs(np.abs(scaled - whole) - 0.5) < _NEAR).tolist():
        scores[place] = probability(float(log_odds[place]))
    return np.asarray(scores)


def log_odds(score: float) -> float:
    """The log-odds of being viral, clipped to what 6 decimals can hold."""
    score = min(max(score, _SURE), 1 - _SURE)
    return log(score / (1 - score))


SUREST = log_odds(1 - _SURE)  # as far as the scores of a run tell


def call_record(
    record: FastaRecord,
    n_chunks: int,
    predictions: Sequence[Prediction],
    facts: HeadFacts | None,
) -> Call:
    """Call one record that could be screened; without facts it was only to be embedded.

    The frames that failed are left out of its score, and are named in its note; without any other
    the record itself has failed.
    """
    chunks = chunk_scores(predictions)
    n_failed = sum(bool(prediction.failure) for prediction in predictions)
    status: Status = "scored" if chunks else "embedded" if predictions else "no_orf"
    score, is_virus = None, False
    if n_failed and n_failed == len(predictions):
        status = "failed"
    elif chunks and facts is not None:
        score = score_record([scores for _, scores in chunks], facts)
        is_virus = score >= facts.threshold
    return Call(
        record.name,
        len(record.sequence),
        status,
        record.sample,
        virus_score=score,
        is_virus=is_virus,
        n_chunks=n_chunks,
        n_chunks_scored=len(chunks),
        n_frames_scored=len(predictions) - n_failed,
        note=failure_note(predictions),
    )


def failure_note(frames: Sequence[Prediction]) -> str:
    """The note on frames without a vector, if there are any; it gives the first reason."""
    failures = [frame.failure for frame in frames if frame.failure]
    if not failures:
        return ""
    return f"{len(failures)} of {len(frames)} {FRAMES_FAILED}: {failures[0]}"
