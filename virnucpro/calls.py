"""From frame scores to calls of chunks and records, and the tables."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TextIO

from virnucpro.head import DECIMALS
from virnucpro.records import Call, Prediction, Status

FRAME_COLUMNS = ("Sequence_ID", "Prediction", "score1", "score2")
CHUNK_COLUMNS = ("Modified_ID", "Is_Virus")
RECORD_COLUMNS = (
    "record",
    "length",
    "status",
    "call",
    "virus_score",
    "n_chunks",
    "n_chunks_scored",
    "n_frames_scored",
    "note",
)
_LINES_IN_MEMORY = 500_000


def scored_frames(predictions: Iterable[Prediction]) -> Iterator[tuple[Prediction, float]]:
    for prediction in predictions:
        if prediction.virus_score is not None:
            yield prediction, prediction.virus_score


def best_scores(predictions: Sequence[Prediction]) -> list[tuple[str, float, float]]:
    """Per scored chunk: its id, the best virus score, and the best score of "others".

    Frames of one chunk are neighbours, as ``translate_six_frames`` makes them.
    """
    chunks = []
    frames = scored_frames(predictions)
    for chunk_id, group in groupby(frames, key=lambda frame: frame[0].orf.chunk_id):
        scores = [score for _, score in group]
        chunks.append((chunk_id, max(scores), round(1 - min(scores), DECIMALS)))
    return chunks


def call_record(
    record_id: str, length: int, n_chunks: int, predictions: Sequence[Prediction], threshold: float
) -> Call:
    """Call one record that could be screened: the mean of its chunks' best virus scores.

    A record of which any frame failed has no call: what is missing might have changed it.
    """
    chunks = best_scores(predictions)
    failures = [p.failure for p in predictions if p.failure]
    n_scored = len(predictions) - len(failures)
    status: Status = "scored" if chunks else "embedded" if predictions else "no_orf"
    score, note = None, ""
    if failures:
        status = "failed"
        note = f"{len(failures)} of {len(predictions)} frames failed: {failures[0]}"
    elif chunks:
        score = round(sum(best for _, best, _ in chunks) / len(chunks), DECIMALS)
    return Call(
        record_id,
        length,
        status,
        virus_score=score,
        is_virus=score is not None and score >= threshold,
        n_chunks=n_chunks,
        n_chunks_scored=len(chunks),
        n_frames_scored=n_scored,
        note=note,
    )


def frame_rows(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Rows of ``prediction_results.txt``; a tie is "others", as the first of two equals."""
    for prediction, score in scored_frames(predictions):
        others = round(1 - score, DECIMALS)
        label = "virus" if score > others else "others"
        yield f"{prediction.orf.id}\t{label}\t{others:.6f}\t{score:.6f}\n"


def chunk_rows(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Rows of ``prediction_results_highestscore.csv``; a tie is a virus."""
    for chunk_id, virus, others in best_scores(predictions):
        yield f"{chunk_id}\t{virus >= others}\n"


def record_row(call: Call) -> str:
    label = "" if call.virus_score is None else "virus" if call.is_virus else "other"
    score = "" if call.virus_score is None else f"{call.virus_score:.6f}"
    values = (
        call.record_id,
        call.length,
        call.status,
        label,
        score,
        call.n_chunks,
        call.n_chunks_scored,
        call.n_frames_scored,
        call.note,
    )
    return "\t".join(map(str, values)) + "\n"


def read_statuses(table: TextIO) -> Iterator[tuple[str, Status]]:
    """The records and statuses of a ``predictions.tsv``."""
    next(table, None)
    for line in table:
        record_id, _, status, *_ = line.rstrip("\n").split("\t")
        yield record_id, status  # type: ignore[misc]


def read_record_scores(table: TextIO) -> Iterator[tuple[str, Status, float | None]]:
    """The records, statuses and virus scores of a ``predictions.tsv``."""
    next(table, None)
    for line in table:
        record_id, _, status, _, score, *_ = line.rstrip("\n").split("\t")
        yield record_id, status, float(score) if score else None  # type: ignore[misc]


def read_frame_scores(table: TextIO) -> Iterator[tuple[str, float]]:
    """The frames and virus scores of a ``prediction_results.txt``."""
    next(table, None)
    for line in table:
        frame_id, _, _, score = line.rstrip("\n").split("\t")
        yield frame_id, float(score)


class SortedLines:
    """Lines in any order in, sorted by their first column out; memory holds a part of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # on a disk that is large enough
        self._lines: list[str] = []
        self._runs = ExitStack()
        self._files: list[TextIO] = []

    def __enter__(self) -> SortedLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.close()

    def extend(self, lines: Iterable[str]) -> None:
        self._lines.extend(lines)
        if len(self._lines) >= _LINES_IN_MEMORY:
            run = tempfile.TemporaryFile("w+", encoding="utf-8", dir=self._folder)  # noqa: SIM115
            self._runs.enter_context(run)
            run.writelines(sorted(self._lines, key=_first_column))
            run.seek(0)
            self._files.append(run)
            self._lines = []

    def merged(self) -> Iterator[str]:
        last = sorted(self._lines, key=_first_column)
        return heapq.merge(*self._files, last, key=_first_column)


def _first_column(line: str) -> str:
    return line.split("\t", 1)[0]
