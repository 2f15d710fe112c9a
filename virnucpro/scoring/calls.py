"""From frame scores to calls of chunks and records, and the tables."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from math import fsum, log, tanh
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TextIO

from virnucpro.files import writing
from virnucpro.records import Call, FastaRecord, Prediction, Status
from virnucpro.scorer.score import RecordScore
from virnucpro.scoring.head import DECIMALS, HeadFacts

FRAME_COLUMNS = ("Sequence_ID", "Prediction", "score1", "score2")
CHUNK_COLUMNS = ("Modified_ID", "Is_Virus")
RECORD_COLUMNS = (
    "record",
    "file",
    "length",
    "status",
    "call",
    "virus_score",
    "n_chunks",
    "n_chunks_scored",
    "n_frames_scored",
    "note",
)
_FAILED = "frames failed"  # in the note of a record that is to be mended
SURE = 10.0**-DECIMALS  # log-odds are of scores between this and 1 minus this
_LINES_IN_MEMORY = 500_000
_FILES_AT_ONCE = 100  # that are open while lines are sorted


def scored_frames(predictions: Iterable[Prediction]) -> Iterator[tuple[Prediction, float]]:
    for prediction in predictions:
        if prediction.virus_score is not None:
            yield prediction, prediction.virus_score


def chunk_scores(predictions: Sequence[Prediction]) -> list[tuple[str, list[float]]]:
    """The id of each scored chunk, and the scores of its frames.

    Frames of one chunk are neighbours, as ``translate_six_frames`` makes them.
    """
    frames = scored_frames(predictions)
    return [
        (chunk_id, [score for _, score in group])
        for chunk_id, group in groupby(frames, key=lambda frame: frame[0].orf.chunk_id)
    ]


def score_record(chunks: Iterable[Sequence[float]], facts: HeadFacts) -> float:
    """The score of a record, 6 decimals, from those of each chunk's frames; one chunk at least.

    In log-odds: a chunk has the largest of its frames', or their mean; the record has the sum of
    its n chunks' over ``n ** exponent``.
    """
    pick = max if facts.frames == "max" else fmean
    odds = [pick([log_odds(score) for score in scores]) for scores in chunks]
    total = fsum(odds) / len(odds) ** facts.exponent
    return probability(total)


def probability(log_odds: float) -> float:
    """6 decimals."""
    return round(0.5 * (1 + tanh(log_odds / 2)), DECIMALS)


def log_odds(score: float) -> float:
    """Of being viral; a score has 6 decimals, so none is surer than the last of them."""
    score = min(max(score, SURE), 1 - SURE)
    return log(score / (1 - score))


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
    failures = [p.failure for p in predictions if p.failure]
    status: Status = "scored" if chunks else "embedded" if predictions else "no_orf"
    score, is_virus, note = None, False, ""
    if failures:
        note = f"{len(failures)} of {len(predictions)} {_FAILED}: {failures[0]}"
    if failures and len(failures) == len(predictions):
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
        n_frames_scored=len(predictions) - len(failures),
        note=note,
    )


def call_by_score(record: FastaRecord, score: RecordScore) -> Call:
    """Call one record that could be screened by the score of its sequence."""
    pieces, value = score.pieces, score.log_odds
    return Call(
        record.name,
        len(record.sequence),
        "no_orf" if value is None else "scored",
        record.sample,
        virus_score=None if value is None else probability(value),
        is_virus=score.is_virus,
        n_chunks=len(pieces.start),
        n_chunks_scored=pieces.n_known,
        note="no known base" if value is None else "",
    )


def frame_rows(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Rows of ``prediction_results.txt``; a tie is "others", as the first of two equals."""
    for prediction, score in scored_frames(predictions):
        others = round(1 - score, DECIMALS)
        label = "virus" if score > others else "others"
        yield f"{prediction.orf.id}\t{label}\t{others:.6f}\t{score:.6f}\n"


def chunk_rows(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Rows of ``prediction_results_highestscore.csv``.

    A chunk is a virus if its surest frame is, by VirNucPro's rule: the best virus score is at least
    the best score of "others".
    """
    for chunk_id, scores in chunk_scores(predictions):
        others = round(1 - min(scores), DECIMALS)
        yield f"{chunk_id}\t{max(scores) >= others}\n"


def record_row(call: Call) -> str:
    label = "" if call.virus_score is None else "virus" if call.is_virus else "other"
    score = "" if call.virus_score is None else f"{call.virus_score:.6f}"
    values = (
        call.record_id,
        call.sample,
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


class RecordRow(NamedTuple):
    """A line of ``predictions.tsv``, as far as it is read again."""

    record_id: str  # within its file
    sample: str
    status: Status
    score: float | None
    note: str


def read_record_rows(table: TextIO) -> Iterator[RecordRow]:
    """The rows of a ``predictions.tsv``, or of a ``records.tsv``."""
    columns = next(table, "").rstrip("\n").split("\t")
    for line in table:
        fields = line.rstrip("\n").split("\t", len(columns) - 1)
        row = dict(zip(columns, fields, strict=True))
        score = float(row["virus_score"]) if row["virus_score"] else None
        status: Status = row["status"]  # type: ignore[assignment]
        yield RecordRow(row["record"], row.get("file", ""), status, score, row["note"])


def read_mendable(table: TextIO) -> Iterator[tuple[str, str]]:
    """Sample and id of each record that is invalid, or of which a frame failed."""
    for row in read_record_rows(table):
        if row.status == "invalid" or _FAILED in row.note:
            yield row.sample, row.record_id


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
            self._write(sorted(self._lines, key=_first_column))
            self._lines = []
        if len(self._files) >= _FILES_AT_ONCE:
            files, self._files = self._files, []
            self._write(heapq.merge(*files, key=_first_column))
            for file in files:
                file.close()

    def _write(self, ordered: Iterable[str]) -> None:
        with writing(self._folder):
            run = tempfile.TemporaryFile("w+", encoding="utf-8", dir=self._folder)  # noqa: SIM115
            self._runs.enter_context(run)
            run.writelines(ordered)
            run.seek(0)
        self._files.append(run)

    def merged(self) -> Iterator[str]:
        last = sorted(self._lines, key=_first_column)
        return heapq.merge(*self._files, last, key=_first_column)


def _first_column(line: str) -> str:
    return line.split("\t", 1)[0]
