"""Who calls the records of a run: the scorer, a head, both, or nobody.

A run has one caller, which is chosen here. Whoever needs a call asks it, and never what it is made
of. Whether a run embeds is another question: the scorer calls with vectors or without, and its
calls are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from safetensors import safe_open

from virnucpro import __version__
from virnucpro.callers.calls import call_record, failure_note
from virnucpro.callers.head import Head, HeadFacts
from virnucpro.callers.join import Join
from virnucpro.callers.options import FALSE_POSITIVES, Calls, CutOptions
from virnucpro.callers.pieces import ScoredRecords, call_scored, join_calls, score_records
from virnucpro.ground.config import InputType, Recipe
from virnucpro.ground.errors import UnavailableError, UsageError
from virnucpro.ground.files import EMBEDDED_FOLDER
from virnucpro.ground.records import Call, CalledRecords, Prediction, RecordResult, Records
from virnucpro.scorer.nets import (
    Digests,
    ErrorRates,
    Scorer,
    own_scorer,
)
from virnucpro.scorer.proteins import SHORTEST as SHORTEST_PROTEIN
from virnucpro.sequences.genetic_code import genetic_code
from virnucpro.sequences.screen import screen_all
from virnucpro.sequences.sketch import NO_KMERS, Sketch, unpack

Trained = tuple[Digests, Digests, Sketch]  # of records, of their groups; of all sequences


@dataclass(frozen=True, slots=True)
class Cut:
    """The rule by which a record is called viral, in words and in numbers."""

    words: str = ""
    scores: tuple[tuple[int, float], ...] = ()  # a length, and the lowest score of a virus there


class Caller(Protocol):
    """Calls records: by their sequence, by vectors of their frames, or by both.

    It may cross to another process.
    """

    @property
    def announcements(self) -> tuple[str, ...]:
        """Who calls, in lines for the user."""

    @property
    def cut(self) -> Cut: ...

    @property
    def hashes(self) -> Mapping[str, str]:
        """What of it belongs to the recipe of a run."""

    @property
    def facts(self) -> Mapping[str, Mapping[str, object]]:
        """What a report says of the scorer and of the head, if they call."""

    @property
    def trained_on(self) -> Mapping[str, Trained]:
        """What each that calls was trained on."""

    @property
    def frame_head(self) -> Head | None:
        """What scores frames by their vectors; None: nobody reads these."""

    @property
    def scorer(self) -> Scorer | None:
        """What scores sequences; None: it is not needed, and not loaded."""

    def shortest(self, input_type: InputType) -> int:
        """The length of the shortest record that it calls."""

    def of_type(self, input_type: InputType) -> Caller:
        """Who calls records of this type.

        Raises:
            UsageError: an option of the cut is not for them.
        """

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        """Call each record. Beside it are its embedded frames, scored or not."""


@dataclass(frozen=True, slots=True)
class NoCall:
    """Nobody calls: records are only embedded."""

    announcements: tuple[str, ...] = ()
    cut: Cut = Cut()
    frame_head: Head | None = None
    scorer: Scorer | None = None

    @property
    def hashes(self) -> Mapping[str, str]:
        return {}

    @property
    def facts(self) -> Mapping[str, Mapping[str, object]]:
        return {}

    @property
    def trained_on(self) -> Mapping[str, Trained]:
        return {}

    def shortest(self, input_type: InputType) -> int:
        return 0

    def of_type(self, input_type: InputType) -> Caller:
        return self

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        return CalledRecords.of(_call_by_frames(recipe, None, records, frames))


@dataclass(frozen=True, slots=True)
class ByScorer:
    """The scorer calls, by the sequence alone; frames that are embedded change no call."""

    scorer: Scorer
    options: CutOptions
    input_type: InputType = "nucleotide"
    frame_head: Head | None = None

    @property
    def announcements(self) -> tuple[str, ...]:
        return (f"called by the scorer of VirNucPro {__version__}",)

    @property
    def cut(self) -> Cut:
        return _cut_of(self.options, self.scorer.error_rates_of(self.input_type))

    @property
    def hashes(self) -> Mapping[str, str]:
        return {"scorer_sha256": self.scorer.sha256}

    @property
    def facts(self) -> Mapping[str, Mapping[str, object]]:
        return _facts_of_scorer(self.scorer)

    @property
    def trained_on(self) -> Mapping[str, Trained]:
        return _training_of_scorer(self.scorer)

    def shortest(self, input_type: InputType) -> int:
        return SHORTEST_PROTEIN if input_type == "protein" else self.scorer.shortest

    def of_type(self, input_type: InputType) -> ByScorer:
        return replace(self, input_type=input_type)

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        results = self.call_scored(self.score(records, recipe), recipe)
        results.embedded = {place: each for place, each in enumerate(frames) if each}
        for place, each in results.embedded.items():
            results.calls.notes[place] = results.calls.notes[place] or failure_note(each)
        return results

    def score(self, records: Records, recipe: Recipe) -> ScoredRecords:
        """Score each record."""
        return score_records(records, recipe, self.scorer)

    def call_scored(self, scored: ScoredRecords, recipe: Recipe) -> CalledRecords:
        """Call each record whose score is there."""
        return call_scored(scored, recipe, self.scorer, self.options)


@dataclass(frozen=True, slots=True)
class ByHead:
    """A head calls, by the vectors of frames and, if it reads them, their bases.

    Raises:
        UsageError: the cut is by error rates, which a head alone does not have.
    """

    head: Head
    options: CutOptions

    def __post_init__(self) -> None:
        if self.options.preset != "default":
            raise UsageError(
                f"--preset {self.options.preset} needs error rates, and a head alone has none",
                hint="give --threshold, or let the scorer call: leave out --head and --calls",
            )
        if self.options.prevalence != CutOptions.prevalence:
            raise UsageError(
                "--prevalence is for the column fdr; a head alone has no error rates",
                hint="leave it out",
            )

    @property
    def announcements(self) -> tuple[str, ...]:
        return ("called by the head alone",)

    @property
    def cut(self) -> Cut:
        return _cut_at(self._facts.threshold)

    @property
    def scorer(self) -> None:
        return None

    @property
    def frame_head(self) -> Head:
        return self.head

    @property
    def hashes(self) -> Mapping[str, str]:
        return {"head_sha256": self.head.sha256}

    @property
    def facts(self) -> Mapping[str, Mapping[str, object]]:
        return _facts_of_head(self.head)

    @property
    def trained_on(self) -> Mapping[str, Trained]:
        return _training_of_head(self.head)

    @property
    def _facts(self) -> HeadFacts:
        """The facts of the head, with the user's threshold."""
        threshold = self.options.threshold
        facts = self.head.facts
        return facts if threshold is None else replace(facts, threshold=threshold)

    def shortest(self, input_type: InputType) -> int:
        return 0

    def of_type(self, input_type: InputType) -> Caller:
        return self

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        return CalledRecords.of(_call_by_frames(recipe, self._facts, records, frames))


@dataclass(frozen=True, slots=True)
class Joined:
    """A head and the scorer call nucleotides together; proteins are called by the head alone.

    Raises:
        UnavailableError: the head was joined with another scorer than that of this version.
    """

    head: Head
    scorer: Scorer
    options: CutOptions

    def __post_init__(self) -> None:
        if self.scorer.sha256 != self._join.scorer_sha256:
            raise UnavailableError(
                f"the head is joined with another scorer ({self._join.scorer_sha256[:12]}) than "
                f"that of VirNucPro {__version__} ({self.scorer.sha256[:12]})",
                hint="train the head again with `virnucpro train`, use the version that made it, "
                "or let it call alone: --calls head",
            )

    @property
    def _join(self) -> Join:
        assert self.head.facts.join is not None, "a head that is not joined calls by itself"
        return self.head.facts.join

    @property
    def announcements(self) -> tuple[str, ...]:
        knots = self._join.knots
        weights = ", ".join(f"{knot.head:.2f} at {knot.n_bases:,}" for knot in knots)
        lines = [f"called by the scorer and the head; weight of the head by bases: {weights}"]
        if not any(knot.head for knot in knots):
            lines.append("the head adds nothing at any length: the scores are those of the scorer")
        return tuple(lines)

    @property
    def cut(self) -> Cut:
        return _cut_of(self.options, self._join.error_rates)

    @property
    def frame_head(self) -> Head:
        return self.head

    @property
    def hashes(self) -> Mapping[str, str]:
        return {"head_sha256": self.head.sha256}  # which names the scorer

    @property
    def facts(self) -> Mapping[str, Mapping[str, object]]:
        return {**_facts_of_head(self.head), **_facts_of_scorer(self.scorer)}

    @property
    def trained_on(self) -> Mapping[str, Trained]:
        return {**_training_of_head(self.head), **_training_of_scorer(self.scorer)}

    def shortest(self, input_type: InputType) -> int:
        return 0

    def of_type(self, input_type: InputType) -> Caller:
        return self if input_type == "nucleotide" else ByHead(self.head, self.options)

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        facts, code = self.head.facts, genetic_code(recipe.genetic_code)
        alone = _call_by_frames(recipe, facts, records, frames)
        return CalledRecords.of(list(join_calls(alone, facts, self.scorer, self.options, code)))


def caller_of(options: CutOptions, calls: Calls, head: Head | None) -> Caller:
    """The caller of a prediction: the head if there is one, joined where it may be, or the scorer.

    Raises:
        UnavailableError: the head was joined with another scorer.
        UsageError: the cut is not for a head.
    """
    if head is not None and (head.facts.join is None or calls == "head"):
        return ByHead(head, options)
    scorer = own_scorer()
    return ByScorer(scorer, options) if head is None else Joined(head, scorer, options)


def _facts_of_head(head: Head) -> dict[str, Mapping[str, object]]:
    return {"head": {"sha256": head.sha256, **asdict(head.facts)}}


def _facts_of_scorer(scorer: Scorer) -> dict[str, Mapping[str, object]]:
    return {"scorer": {"sha256": scorer.sha256, "training": scorer.training}}


def _training_of_head(head: Head) -> dict[str, Trained]:
    return {
        "the head": (head.trained_records, head.trained_groups, head.trained_kmers),
        "its encoder": (head.encoder_records, head.encoder_groups, head.encoder_kmers),
    }


def _training_of_scorer(scorer: Scorer) -> dict[str, Trained]:
    return {
        "the scorer": (scorer.trained_records, scorer.trained_groups, _kmers_of(scorer)),
    }


def _kmers_of(scorer: Scorer) -> Sketch:
    """The sketch of all that the scorer was trained on, which lies beside it; empty for others."""
    with safe_open(EMBEDDED_FOLDER / "trained.safetensors", framework="np") as handle:
        is_of_it = handle.metadata()["scorer_sha256"] == scorer.sha256
        return unpack(handle.get_tensor("trained_kmers")) if is_of_it else NO_KMERS


def _cut_of(options: CutOptions, error_rates: Sequence[ErrorRates]) -> Cut:
    """The cut of a preset, by error rates, unless the user named a threshold."""
    if options.threshold is not None:
        return _cut_at(options.threshold)
    share = FALSE_POSITIVES[options.preset]
    return Cut(
        f"preset {options.preset}, at most {share:.1%} false positives among unknown hosts",
        tuple((rates.n_bases, rates.cut_score(share)) for rates in error_rates),
    )


def _cut_at(threshold: float) -> Cut:
    return Cut(f"scores of {threshold} and more", ((1, threshold),))


def _call_by_frames(
    recipe: Recipe,
    facts: HeadFacts | None,
    records: Records,
    frames: Sequence[list[Prediction]],
) -> list[RecordResult]:
    """Call records by the scores of their frames; without facts they were only to be embedded."""
    screened, results = screen_all(records, recipe), []
    for place, (record, predictions) in enumerate(zip(records.each(), frames, strict=True)):
        length = len(record.sequence)
        if place in screened:
            status, note = screened[place]
            call = Call(record.name, length, status, record.sample, note=note)
        else:
            call = call_record(record, recipe.count_chunks(length), predictions, facts)
        results.append(RecordResult(record, predictions, call, frames=predictions))
    return results
