"""Who calls the records of a run: the scorer, a head, both, or nobody.

A run has one caller, which is chosen here. Whoever needs a call asks it, and never what it is made
of. Whether a run embeds is another question: the scorer calls with vectors or without, and its
calls are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from safetensors import safe_open

from virnucpro import __version__
from virnucpro.callers.calls import call_record, failure_note
from virnucpro.callers.head import Head, HeadFacts, Join
from virnucpro.callers.kmers import NO_KMERS, Sketch, unpack
from virnucpro.callers.options import FALSE_POSITIVES, Calls, CutOptions
from virnucpro.callers.pieces import ScoredRecords, call_scored, join_calls, score_records
from virnucpro.ground.config import InputType, Recipe
from virnucpro.ground.errors import UnavailableError, UsageError
from virnucpro.ground.files import EMBEDDED_FOLDER
from virnucpro.ground.records import Call, CalledRecords, Prediction, RecordResult, Records
from virnucpro.scorer.nets import Digests, ErrorRates, Scorer
from virnucpro.scorer.proteins import SHORTEST as SHORTEST_PROTEIN
from virnucpro.sequences.translate import GeneticCode, screen_all

Trained = tuple[Digests, Digests, Sketch]  # of records, of their groups; of all sequences


@dataclass(frozen=True, slots=True)
class Cut:
    """The rule by which a record is called viral, in words and in numbers."""

    words: str = ""
    scores: tuple[tuple[int, float], ...] = ()  # a length, and the lowest score of a virus there


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Calls records: by their sequence, by vectors of their frames, or by both.

    A ``Caller`` itself calls nothing: records are only embedded. It may cross to another process.
    """

    frame_head: Head | None = None  # scores frames by their vectors; None: nobody reads these
    scorer: Scorer | None = None  # scores sequences; None: it is not needed, and not loaded

    @property
    def announcements(self) -> tuple[str, ...]:
        """Lines for the user that say who calls."""
        return ()

    @property
    def cut(self) -> Cut:
        return Cut()

    @property
    def hashes(self) -> Mapping[str, str]:
        """What of it belongs to the recipe of a run. A head that is joined names its scorer."""
        if self.frame_head is not None:
            return {"head_sha256": self.frame_head.sha256}
        return {} if self.scorer is None else {"scorer_sha256": self.scorer.sha256}

    @property
    def facts(self) -> Mapping[str, Mapping[str, object]]:
        """Facts of the scorer and of the head for a report, if they call."""
        facts: dict[str, Mapping[str, object]] = {}
        if (head := self.frame_head) is not None:
            facts["head"] = {"sha256": head.sha256, **asdict(head.facts)}
        if (scorer := self.scorer) is not None:
            facts["scorer"] = {"sha256": scorer.sha256, "training": scorer.training}
        return facts

    @property
    def trained_on(self) -> Mapping[str, Trained]:
        """The training data of the scorer and of the head, if they call."""
        trained: dict[str, Trained] = {}
        if (head := self.frame_head) is not None:
            trained = {
                "the head": (head.trained_records, head.trained_groups, head.trained_kmers),
                "its encoder": (head.encoder_records, head.encoder_groups, head.encoder_kmers),
            }
        if (scorer := self.scorer) is not None:
            kmers = _kmers_of(scorer)
            trained["the scorer"] = (scorer.trained_records, scorer.trained_groups, kmers)
        return trained

    @property
    def head_facts(self) -> HeadFacts | None:
        """How the head calls by itself; None: frames make no call."""
        return None

    def shortest(self, input_type: InputType) -> int:
        """The length of the shortest record that it calls."""
        return 0

    def of_type(self, input_type: InputType) -> Caller:
        """Who calls records of this type.

        Raises:
            UsageError: an option of the cut is not for them.
        """
        return self

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        """Call each record. It comes with its embedded frames, scored or not."""
        return CalledRecords.of(_call_by_frames(recipe, self.head_facts, records, frames))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByScorer(Caller):
    """The scorer calls, by the sequence alone; frames that are embedded change no call."""

    scorer: Scorer
    options: CutOptions
    input_type: InputType = "nucleotide"

    @property
    def announcements(self) -> tuple[str, ...]:
        return (f"called by the scorer of VirNucPro {__version__}",)

    @property
    def cut(self) -> Cut:
        return _cut_of(self.options, self.scorer.error_rates_of(self.input_type))

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
        """Call each record that has a score."""
        return call_scored(scored, recipe, self.scorer, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByHead(Caller):
    """A head calls, by the vectors of frames and, if it reads them, their bases.

    Raises:
        UsageError: the cut is by error rates, which a head alone does not have.
    """

    frame_head: Head
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
        return _cut_at(self.head_facts.threshold)

    @property
    def head_facts(self) -> HeadFacts:
        """The facts of the head, with the user's threshold."""
        threshold, facts = self.options.threshold, self.frame_head.facts
        return facts if threshold is None else replace(facts, threshold=threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined(Caller):
    """A head and the scorer call nucleotides together; proteins are called by the head alone.

    Raises:
        UnavailableError: the head was joined with another scorer than that of this version.
    """

    frame_head: Head
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
        assert self.frame_head.facts.join is not None, "a head that is not joined calls by itself"
        return self.frame_head.facts.join

    @property
    def announcements(self) -> tuple[str, ...]:
        knots = self._join.knots
        weights = ", ".join(f"{knot.head:.2f} at {knot.n_bases:,}" for knot in knots)
        lines = [
            f"called by the scorer and the head; weight of the head by length in bases: {weights}"
        ]
        if not any(knot.head for knot in knots):
            lines.append("the head adds nothing at any length: the scores are those of the scorer")
        return tuple(lines)

    @property
    def cut(self) -> Cut:
        return _cut_of(self.options, self._join.error_rates)

    def of_type(self, input_type: InputType) -> Caller:
        if input_type == "nucleotide":
            return self
        return _ByHead(frame_head=self.frame_head, options=self.options)

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        facts, code = self.frame_head.facts, GeneticCode.of(recipe.genetic_code)
        alone = _call_by_frames(recipe, facts, records, frames)
        return CalledRecords.of(list(join_calls(alone, facts, self.scorer, self.options, code)))


def caller_of(options: CutOptions, calls: Calls, head: Head | None) -> Caller:
    """The caller of a prediction: the head if there is one, joined where it may be, or the scorer.

    Raises:
        UnavailableError: the head was joined with another scorer.
        UsageError: the cut is not for a head.
    """
    if head is not None and (head.facts.join is None or calls == "head"):
        return _ByHead(frame_head=head, options=options)
    scorer = Scorer.own()
    if head is None:
        return ByScorer(scorer=scorer, options=options)
    return _Joined(frame_head=head, scorer=scorer, options=options)


def _kmers_of(scorer: Scorer) -> Sketch:
    """The sketch of the scorer's training data, stored next to it; empty for other scorers."""
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
