"""Call records by their vectors: by a head, by a head and the scorer, or by either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, groupby
from math import isnan
from statistics import fmean
from typing import NamedTuple

import numpy as np

from virnucpro._version import __version__
from virnucpro.core.errors import UnavailableError
from virnucpro.core.option_schema import reject_options
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import InputType, Recipe, Status
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.screen import reject_reasons
from virnucpro.viral.calling import apply_threshold
from virnucpro.viral.classifier import (
    RecordClassifier,
    ScorerClassifier,
    ThresholdText,
    describe_callers,
    describe_fixed_threshold,
    describe_threshold,
)
from virnucpro.viral.evidence import look_up_and_add
from virnucpro.viral.head import EnsembleWeights, Head, HeadInfo, chunk_scores, combine_log_odds
from virnucpro.viral.networks import Scorer
from virnucpro.viral.options import ThresholdOptions
from virnucpro.viral.probability import probabilities
from virnucpro.viral.scoring import score_block
from virnucpro.viral.types import (
    Call,
    CalledRecords,
    Calls,
    FrameScores,
    Prediction,
    failure_note,
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadClassifier(RecordClassifier):
    """A head calls by frame vectors and, if it reads them, their bases.

    Raises:
        UsageError: the threshold needs error rates, which a head alone does not have.
    """

    frame_head: Head
    options: ThresholdOptions

    def __post_init__(self) -> None:
        where = "with a head alone, which has no error rates"
        else_ = with_options("let the scorer call: leave out {head} and {calls}")
        reject_options(self.options, ("preset", "prevalence"), where, else_)

    @property
    def announcements(self) -> tuple[str, ...]:
        return (describe_callers(self.options, self.frame_head.facts.description),)

    @property
    def threshold(self) -> ThresholdText:
        return describe_fixed_threshold(self.options, self.head_facts.threshold)

    @property
    def head_facts(self) -> HeadInfo:
        """Describe the head, with the user's threshold."""
        threshold = self.options.threshold
        facts = self.frame_head.facts
        return facts if threshold is None else replace(facts, threshold=threshold)

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        results = _call_by_frames(recipe, self.head_facts, records, frames)
        is_protein = recipe.input_type == "protein"
        look_up_and_add(results, self.options, is_protein=is_protein)
        return results


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ensemble(RecordClassifier):
    """A head and the scorer call nucleotides together. The head alone calls proteins.

    Raises:
        UnavailableError: the head was combined with another scorer version.
    """

    frame_head: Head
    scorer: Scorer
    options: ThresholdOptions

    def __post_init__(self) -> None:
        if self.scorer.sha256 != self._join.scorer_sha256:
            raise UnavailableError(
                f"the head was joined with another scorer ({self._join.scorer_sha256[:12]}), not "
                f"with the one of VirNucPro {__version__} ({self.scorer.sha256[:12]})",
                hint=with_options(
                    "train the head again with `virnucpro train`, use the version that made "
                    "it, or let it call alone: {calls:head}"
                ),
            )

    @property
    def _join(self) -> EnsembleWeights:
        assert self.frame_head.facts.join is not None, "a head that is not joined calls by itself"
        return self.frame_head.facts.join

    @property
    def announcements(self) -> tuple[str, ...]:
        head = self.frame_head.facts.description
        callers = describe_callers(self.options, "the scorer", head)
        lines = [f"{callers}; {self._join.weights}"]
        if not any(knot.head for knot in self._join.knots):
            lines.append("the head has no weight at any length: scores are those of the scorer")
        return tuple(lines)

    @property
    def threshold(self) -> ThresholdText:
        return describe_threshold(self.options, [self._join.error_rates])

    def for_input_type(self, input_type: InputType) -> RecordClassifier:
        if input_type == "nucleotide":
            return self
        return HeadClassifier(frame_head=self.frame_head, options=self.options)

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        facts = self.frame_head.facts
        code = GeneticCode.from_number(recipe.genetic_code)
        results = _call_by_frames(recipe, facts, records, frames)
        combine_calls(results, facts, self.scorer, self.options, code)
        look_up_and_add(results, self.options)
        return results


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cascade(RecordClassifier):
    """The scorer calls records without embedded frames, and ``then`` calls all others.

    ``then`` also calls the records that the scorer cannot read.
    """

    first: ScorerClassifier
    then: RecordClassifier

    @classmethod
    def from_classifiers(cls, first: ScorerClassifier, then: RecordClassifier) -> Cascade:
        return cls(frame_head=then.frame_head, scorer=first.scorer, first=first, then=then)

    @property
    def announcements(self) -> tuple[str, ...]:
        return (*self.then.announcements, "the scorer alone calls records that are not embedded")

    @property
    def threshold(self) -> ThresholdText:
        (words, scores) = self.then.threshold
        (scorer_threshold, _) = self.first.threshold
        return "; not embedded: ".join(dict.fromkeys((words, scorer_threshold))), scores

    def min_length(self, input_type: InputType) -> int:
        return self.then.min_length(input_type)

    def warnings(
        self, chunk_size: int, n_records: int, n_short: int, n_shards: int
    ) -> Iterator[str]:
        """Return the usual warnings, but allow for records that are excluded on purpose."""
        return self.then.warnings(chunk_size, n_records, n_short, n_shards or 1)

    def for_input_type(self, input_type: InputType) -> RecordClassifier:
        return Cascade.from_classifiers(
            self.first.for_input_type(input_type), self.then.for_input_type(input_type)
        )

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        not_embedded = "not embedded"
        if not records.ids:
            return self.then.call(records, frames, recipe)
        bare = [not record_frames for record_frames in frames]
        first_calls = self.first.call(
            records.select(bare), [[] for is_bare in bare if is_bare], recipe
        )
        scores = iter(first_calls.calls.virus_scores)
        is_left = [is_bare and next(scores) is None for is_bare in bare]
        # Some of these rows are dropped below.
        first_calls.calls.notes[:] = [not_embedded] * len(first_calls.calls.notes)
        others = [not is_bare or left for is_bare, left in zip(bare, is_left, strict=True)]
        second_calls = self.then.call(
            records.select(others), list(compress(frames, others)), recipe
        )
        n_bare, n_others = (list(accumulate(mask, initial=0)) for mask in (bare, others))
        parts = []
        for is_other, run in groupby(range(len(others)), key=others.__getitem__):
            indices = list(run)
            called, n_before = (second_calls, n_others) if is_other else (first_calls, n_bare)
            first = n_before[indices[0]]
            parts.append(called.slice_rows(first, first + len(indices)))
        return CalledRecords.concatenate(parts)


def combine_calls(
    results: CalledRecords,
    facts: HeadInfo,
    scorer: Scorer,
    cut: ThresholdOptions,
    code: GeneticCode,
) -> None:
    """Combine a head's calls with the scorer, in place.

    A record without a scored frame gets the scorer's score. A record that the scorer cannot read
    keeps the head's score.
    """
    assert facts.join is not None, "a head that is not joined calls by itself"
    calls = results.calls
    statuses = enumerate(results.calls.statuses)
    indices = np.array([i for i, status in statuses if status in ("scored", "no_orf")], dtype=int)
    lengths = results.records.lengths[indices]
    sequences = [results.records.sequences[i] for i in indices]
    base, _, kingdoms = score_block(sequences, scorer, code)
    head = np.array([_head_log_odds(results.embedded.get(i, ()), facts) for i in indices.tolist()])
    joined = combine_log_odds(facts.join.knots, base, head, lengths)
    by_kingdom = scorer.select_error_rates("nucleotide")
    is_virus, rates = (
        np.where(np.isnan(joined), scorer_rates, joined_rates)
        for scorer_rates, joined_rates in zip(
            apply_threshold(base, lengths, kingdoms, by_kingdom, cut),
            apply_threshold(joined, lengths, 0 * kingdoms, [facts.join.error_rates], cut),
            strict=True,
        )
    )
    scores = probabilities(np.where(np.isnan(joined), base, joined))
    columns = indices, scores, probabilities(base), is_virus, rates
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for index, score, base_score, decision, rate in rows:
        if not isnan(base_score):  # NaN: the scorer cannot read it
            calls.statuses[index] = "scored"
            calls.are_viruses[index] = decision
            calls.virus_scores[index] = score
            calls.base_scores[index] = base_score
            calls.rates[index] = rate


def _head_log_odds(predictions: Sequence[Prediction], facts: HeadInfo) -> float:
    """Return the mean log-odds over a record's scored chunks, or NaN without one."""
    chunks = [scores for _, scores in chunk_scores(predictions)]
    return fmean(facts.chunk_log_odds(chunks)) if chunks else np.nan


def _call_by_frames(
    recipe: Recipe,
    facts: HeadInfo,
    records: Records,
    frames: Sequence[list[Prediction]],
) -> CalledRecords:
    """Call records by their frame scores."""
    screened = reject_reasons(records, recipe)
    lengths: list[int] = records.lengths.tolist()
    no_frames = _FrameCall.from_predictions((), facts)
    rows = [_FrameCall.from_predictions(one, facts) if one else no_frames for one in frames]
    n_chunks = list(map(recipe.count_chunks, lengths))
    for index, (status, note) in screened.items():
        rows[index] = _FrameCall(status, note=note)
        n_chunks[index] = 0
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(6)]
    statuses, scores, are_viruses, n_chunks_scored, n_frames_scored, notes = columns
    n_records = len(lengths)
    calls = Calls(
        record_ids=records.names,
        lengths=lengths,
        statuses=statuses,
        samples=list(records.samples),
        virus_scores=scores,
        base_scores=[None] * n_records,
        are_viruses=are_viruses,
        rates=[None] * n_records,
        n_chunks=n_chunks,
        n_chunks_scored=n_chunks_scored,
        n_frames_scored=n_frames_scored,
        notes=notes,
        evidences=[""] * n_records,
        known_families=[""] * n_records,
        n_known_kmers=[None] * n_records,
    )
    embedded: dict[int, Sequence[Prediction]] = {
        index: record_frames for index, record_frames in enumerate(frames) if record_frames
    }
    return CalledRecords(records, calls, FrameScores.from_predictions(frames), embedded=embedded)


class _FrameCall(NamedTuple):
    """What the frames of a record decide about it."""

    status: Status
    virus_score: float | None = None
    is_virus: bool = False
    n_chunks_scored: int = 0
    n_frames_scored: int = 0
    note: str = ""

    @classmethod
    def from_predictions(cls, predictions: Sequence[Prediction], facts: HeadInfo) -> _FrameCall:
        """Decide by the frames of a record that passed the screen."""
        chunks = chunk_scores(predictions)
        n_failed = sum(bool(prediction.failure) for prediction in predictions)
        status: Status = "scored" if chunks else "no_orf"
        score = None
        is_virus = False
        if n_failed and n_failed == len(predictions):
            status = "failed"
        elif chunks:
            score = facts.score([scores for _, scores in chunks])
            is_virus = score >= facts.threshold
        return cls(
            status,
            virus_score=score,
            is_virus=is_virus,
            n_chunks_scored=len(chunks),
            n_frames_scored=len(predictions) - n_failed,
            note=failure_note(predictions) if n_failed else "",
        )


def call_record(
    record: FastaRecord,
    n_chunks: int,
    predictions: Sequence[Prediction],
    facts: HeadInfo,
) -> Call:
    """Call one record that passed the screen.

    Failed frames do not count in the score. The note counts them. If all frames failed, the record
    failed.
    """
    decision = _FrameCall.from_predictions(predictions, facts)
    return Call(
        record.name,
        len(record.sequence),
        sample=record.sample,
        n_chunks=n_chunks,
        **decision._asdict(),
    )
