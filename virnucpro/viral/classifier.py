"""Choose the classifier for a run: the scorer, a head, both, or none.

A run has one classifier. Any code that needs a call, or that depends on the calling method, asks
the classifier and does not inspect it. The scorer makes the same calls with and without vectors.

A run may embed only a subset: the scorer reads every record, and the score decides. The decision
depends only on score and length, so it is the same in every run and at every threshold. The bounds
are the scorer's false positive rates, measured by cross-validation over groups. Therefore the same
share of cellular records is embedded at each length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, compress, groupby
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from virnucpro._version import __version__
from virnucpro.core.atomic_io import EMBEDDED_FOLDER
from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.events import SCORING, STAGES
from virnucpro.core.logging import format_count
from virnucpro.core.numeric import IntArray
from virnucpro.core.option_schema import reject_options
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import (
    USUAL_CHUNK_SIZE,
    EmbeddingRule,
    InputType,
    Recipe,
    Status,
)
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.genetic_code import GeneticCode
from virnucpro.sequences.kmers import Sketch
from virnucpro.sequences.screen import EXCLUDED, reject_reasons, reject_records
from virnucpro.viral.calling import ScoredRecords, call_scored, combine_calls, score_records
from virnucpro.viral.evidence import look_up_and_add
from virnucpro.viral.head import (
    EnsembleWeights,
    Head,
    HeadInfo,
    chunk_scores,
    failure_note,
    probability,
)
from virnucpro.viral.identification import load_tables
from virnucpro.viral.known import KnownIndex
from virnucpro.viral.networks import ErrorRates, Scorer, thresholds_of
from virnucpro.viral.options import FALSE_POSITIVES, CallsBy, ThresholdOptions
from virnucpro.viral.types import Call, CalledRecords, Calls, FrameScores, Prediction

_NOTE = "not embedded"

# digests of training records and their groups, and a sketch of all sequences
Trained: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.uint64], Sketch]


# the rule that calls a record viral: as text, and as the lowest viral score at each length
ThresholdText: TypeAlias = tuple[str, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordClassifier:
    """Calls records by sequence, by their frame vectors, or by both.

    The base class calls nothing: it serves ``extract``, which only embeds. Classifiers can be sent
    to other processes.
    """

    stages: ClassVar[tuple[str, ...]] = STAGES  # run stages with this classifier
    stores_scores: ClassVar[bool] = False  # True: a later threshold needs only the stored scores

    frame_head: Head | None = None  # scores frames by their vectors. None: frames get no score
    scorer: Scorer | None = None  # scores sequences. None: not needed and not loaded

    @property
    def announcements(self) -> tuple[str, ...]:
        """Return the lines that tell the user which classifier makes the calls."""
        return ()

    @property
    def threshold(self) -> ThresholdText:
        return "", ()

    @property
    def hashes(self) -> Mapping[str, str]:
        """Return the hashes for a run recipe.

        With a head, the scorer may still select records.
        """
        hashes: dict[str, str] = {}
        if self.frame_head is not None:
            hashes["head_sha256"] = self.frame_head.sha256
            hashes["scorer_sha256"] = Scorer.load_builtin().sha256
        elif self.scorer is not None:
            hashes["scorer_sha256"] = self.scorer.sha256
        if hashes:
            hashes["known_sha256"] = KnownIndex.load_builtin().sha256
        return hashes

    @property
    def to_dict(self) -> Mapping[str, Mapping[str, object]]:
        """Describe the scorer and the head for a report, if they make calls."""
        facts: dict[str, Mapping[str, object]] = {}
        if (head := self.frame_head) is not None:
            facts["head"] = {"sha256": head.sha256, **asdict(head.facts)}
        if (scorer := self.scorer) is not None:
            facts["scorer"] = {"sha256": scorer.sha256, "training": scorer.training}
        return facts

    @property
    def trained_on(self) -> Mapping[str, Trained]:
        """Return the training data of the scorer and the head, if they make calls."""
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
    def head_facts(self) -> HeadInfo | None:
        """Return the rules of a head that calls alone, or None if no head calls alone."""
        return None

    @property
    def recommended_chunk(self) -> tuple[int, str] | None:
        """Return the only supported chunk size and the reason, or None if any size works."""
        if self.frame_head is None:
            return None
        return self.frame_head.facts.chunk_size, "the head was made for chunks of"

    def chunk_size(self, asked: int | None) -> int:
        """Return the chunk size in bases: the user's size, or the default.

        Raises:
            UsageError: the classifier works on another chunk size.
        """
        only, why = self.recommended_chunk or (asked or USUAL_CHUNK_SIZE, "")
        if asked not in (None, only):
            raise UsageError(
                with_options(
                    "{why} {only} bases; {chunk_size:{asked}} is not possible",
                    why=why,
                    only=only,
                    asked=asked,
                ),
                hint=with_options(
                    "leave {chunk_size} out, or name a model or a head for that size"
                ),
                option="chunk_size",
            )
        return only

    def warnings(
        self, chunk_size: int, n_records: int, n_short: int, n_shards: int
    ) -> Iterator[str]:
        """Warn about records with weak or missing calls. ``n_short``: below half a chunk."""
        if not n_shards:
            yield "no record has a frame to embed: the table has the status of each"
        join = self.frame_head.facts.join if self.frame_head else None
        # the ensemble weights were measured on data that included such short records
        is_measured = join is not None and 2 * join.knots[0].n_bases < chunk_size
        if self.frame_head and not is_measured and n_short > n_records / 2:
            yield (
                f"calls of records shorter than half a chunk of {chunk_size} bases are less "
                f"reliable: {n_short} of {format_count(n_records, 'record')}"
            )

    def min_length(self, input_type: InputType) -> int:
        """Return the minimum record length for a call, in bases or residues."""
        return 0

    def for_input_type(self, input_type: InputType) -> RecordClassifier:
        """Return the classifier for this record type.

        Raises:
            UsageError: a threshold option is not supported for this type.
        """
        return self

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        """Call each record. ``frames`` contains its embedded frames, with or without scores."""
        return _call_by_frames(recipe, self.head_facts, records, frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScorerClassifier(RecordClassifier):
    """The scorer calls by sequence alone. Embedded frames do not change calls."""

    scorer: Scorer
    options: ThresholdOptions
    input_type: InputType = "nucleotide"

    @property
    def announcements(self) -> tuple[str, ...]:
        return (_describe_callers(self.options, f"the scorer of VirNucPro {__version__}"),)

    @property
    def threshold(self) -> ThresholdText:
        return _describe_threshold(self.options, self.scorer.select_error_rates(self.input_type))

    def min_length(self, input_type: InputType) -> int:
        return self.scorer.min_length(input_type)

    def for_input_type(self, input_type: InputType) -> _ScorerClassifier:
        return replace(self, input_type=input_type)

    def score(self, records: Records, recipe: Recipe) -> ScoredRecords:
        """Score each record."""
        return score_records(records, recipe, self.scorer)

    def call_scored(self, scored: ScoredRecords, recipe: Recipe) -> CalledRecords:
        """Call each record that has a score."""
        return call_scored(scored, recipe, self.scorer, self.options)

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        results = self.call_scored(self.score(records, recipe), recipe)
        results.embedded = {place: each for place, each in enumerate(frames) if each}
        for place, each in results.embedded.items():
            results.calls.notes[place] = results.calls.notes[place] or failure_note(each)
        return results


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassifier(_ScorerClassifier):
    """The scorer calls and nothing is embedded. The scores are stored for later thresholds."""

    stages: ClassVar = (STAGES[0], SCORING)
    stores_scores: ClassVar = True

    @property
    def recommended_chunk(self) -> tuple[int, str]:
        return USUAL_CHUNK_SIZE, "the scorer works on pieces of"

    def warnings(self, *_: int) -> Iterator[str]:
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadClassifier(RecordClassifier):
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
        return (_describe_callers(self.options, self.frame_head.facts.description),)

    @property
    def threshold(self) -> ThresholdText:
        return _describe_fixed_threshold(self.options, self.head_facts.threshold)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ensemble(RecordClassifier):
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
        who = _describe_callers(self.options, "the scorer", head)
        lines = [f"{who}; {self._join.weights}"]
        if not any(knot.head for knot in self._join.knots):
            lines.append("the head has no weight at any length: scores are those of the scorer")
        return tuple(lines)

    @property
    def threshold(self) -> ThresholdText:
        return _describe_threshold(self.options, [self._join.error_rates])

    def for_input_type(self, input_type: InputType) -> RecordClassifier:
        if input_type == "nucleotide":
            return self
        return _HeadClassifier(frame_head=self.frame_head, options=self.options)

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        facts = self.frame_head.facts
        code = GeneticCode.from_number(recipe.genetic_code)
        results = _call_by_frames(recipe, facts, records, frames)
        combine_calls(results, facts, self.scorer, self.options, code)
        look_up_and_add(results, self.options)
        return results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cascade(RecordClassifier):
    """The scorer calls records without embedded frames, and ``then`` calls all others.

    ``then`` also calls the records that the scorer cannot read.
    """

    first: _ScorerClassifier
    then: RecordClassifier

    @classmethod
    def from_classifiers(cls, first: _ScorerClassifier, then: RecordClassifier) -> _Cascade:
        return cls(frame_head=then.frame_head, scorer=first.scorer, first=first, then=then)

    @property
    def announcements(self) -> tuple[str, ...]:
        return (*self.then.announcements, "the scorer alone calls records that are not embedded")

    @property
    def threshold(self) -> ThresholdText:
        (words, scores), (of_others, _) = self.then.threshold, self.first.threshold
        return "; not embedded: ".join(dict.fromkeys((words, of_others))), scores

    def min_length(self, input_type: InputType) -> int:
        return self.then.min_length(input_type)

    def warnings(
        self, chunk_size: int, n_records: int, n_short: int, n_shards: int
    ) -> Iterator[str]:
        """Return the usual warnings, but allow for records that are excluded on purpose."""
        return self.then.warnings(chunk_size, n_records, n_short, n_shards or 1)

    def for_input_type(self, input_type: InputType) -> RecordClassifier:
        return _Cascade.from_classifiers(
            self.first.for_input_type(input_type), self.then.for_input_type(input_type)
        )

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        if not records.ids:
            return self.then.call(records, frames, recipe)
        bare = [not each for each in frames]
        by_first = self.first.call(
            records.select(bare), [[] for is_bare in bare if is_bare], recipe
        )
        scores = iter(by_first.calls.virus_scores)
        is_left = [is_bare and next(scores) is None for is_bare in bare]
        by_first.calls.notes[:] = [_NOTE] * len(by_first.calls.notes)  # some rows are dropped below
        others = [not is_bare or left for is_bare, left in zip(bare, is_left, strict=True)]
        by_then = self.then.call(records.select(others), list(compress(frames, others)), recipe)
        n_bare, n_others = (list(accumulate(each, initial=0)) for each in (bare, others))
        parts = []
        for is_other, run in groupby(range(len(others)), key=others.__getitem__):
            places = list(run)
            called, n_before = (by_then, n_others) if is_other else (by_first, n_bare)
            first = n_before[places[0]]
            parts.append(called.slice_rows(first, first + len(places)))
        return CalledRecords.concatenate(parts)


def choose_classifier(
    options: ThresholdOptions,
    calls: CallsBy,
    head: Head | None,
    rules: Sequence[EmbeddingRule] = ("all",),
) -> RecordClassifier:
    """Choose the classifier for a prediction.

    If there is a head, it calls. The scorer joins it if both were combined in training and
    ``calls`` allows it. Without a head, the scorer calls. ``rules`` select the records to embed.
    Without rules, nothing is embedded. The scorer calls the records that the last rule excludes.

    Raises:
        UnavailableError: the head was combined with another scorer.
        UsageError: a head does not support the threshold.
    """
    load_tables()  # a damaged table fails before anything is computed
    if not rules:
        return SequenceClassifier(scorer=Scorer.load_builtin(), options=options)
    if head is not None and (head.facts.join is None or calls == "head"):
        caller: RecordClassifier = _HeadClassifier(frame_head=head, options=options)
    elif head is not None:
        caller = _Ensemble(frame_head=head, scorer=Scorer.load_builtin(), options=options)
    else:
        caller = _ScorerClassifier(scorer=Scorer.load_builtin(), options=options)
    if rules[-1] == "all":
        return caller
    return _Cascade.from_classifiers(
        _ScorerClassifier(scorer=Scorer.load_builtin(), options=options), caller
    )


def select_for_embedding(
    records: Records, recipe: Recipe, rules: Sequence[EmbeddingRule]
) -> IntArray:
    """Return for each record the index of the first rule that selects it. See ``SelectRecords``.

    Every rule selects the records that the scorer cannot read.
    """
    first_rules = np.zeros(len(records.ids), dtype=np.int64)
    if recipe.encoders and rules[0] != "all":
        first_rules = _first_selecting_rule(records, recipe, rules)
    return reject_records(first_rules, records, recipe)


def _first_selecting_rule(
    records: Records, recipe: Recipe, rules: Sequence[EmbeddingRule]
) -> IntArray:
    """Return the index of the first rule that selects each record, or ``EXCLUDED``."""
    scorer = Scorer.load_builtin()
    scored = score_records(records, recipe, scorer)
    rates = scorer.select_error_rates(recipe.input_type)
    where = rates, scored.kingdoms, records.lengths
    # The false positive rate at the lowest embedded score, and that of the strictest preset.
    max_rate = 0.2
    min_rate = FALSE_POSITIVES["conservative"]
    is_low = scored.log_odds < thresholds_of(*where, max_rate)  # False for NaN, no score
    is_sure = scored.log_odds >= thresholds_of(*where, min_rate)
    left_out = {"all": np.zeros_like(is_low), "viral": is_low, "uncertain": is_low | is_sure}
    asks = ~np.array([left_out[rule] for rule in rules])
    return np.where(asks.any(axis=0), asks.argmax(axis=0), EXCLUDED)


def _kmers_of(scorer: Scorer) -> Sketch:
    """Return the sketch of the training data stored with the scorer, or an empty one."""
    with safe_open(EMBEDDED_FOLDER / "trained.safetensors", framework="np") as handle:
        is_of_it = handle.metadata()["scorer_sha256"] == scorer.sha256
        return Sketch.unpack(handle.get_tensor("trained_kmers")) if is_of_it else Sketch()


def _describe_callers(options: ThresholdOptions, *classifiers: str) -> str:
    """Name what calls the records.

    >>> _describe_callers(ThresholdOptions(), "the scorer")
    'called by the scorer and the index of known viruses'
    """
    index = "the index of known viruses"
    if options.evidence == "known":
        return f"called by {index} alone"
    if options.evidence == "score":
        *first, last = classifiers
        return f"called by {' and '.join([*first, last])}{' alone' * (not first)}"
    return f"called by {', '.join(classifiers)} and {index}"


def _describe_threshold(
    options: ThresholdOptions, error_rates: Sequence[Sequence[ErrorRates]]
) -> ThresholdText:
    """Describe the user's threshold, or else that from a preset, by error rates.

    At each length, the score is the lowest one that any kingdom needs.
    """
    if options.threshold is not None or options.evidence == "known":
        return _describe_fixed_threshold(options, options.threshold)
    share = FALSE_POSITIVES[options.preset]
    words = f"at most {100 * share:g} % false positives per length (preset {options.preset})"
    scores = tuple(
        (each[0].n_bases, probability(min(rates.threshold_at(share) for rates in each)))
        for each in zip(*error_rates, strict=True)
    )
    return words, scores


def _describe_fixed_threshold(options: ThresholdOptions, threshold: float | None) -> ThresholdText:
    """Describe a threshold for all lengths. Scores do not matter if only the index calls."""
    if options.evidence == "known" or threshold is None:
        return "none, because scores do not count", ()
    return f"a score of {threshold} or more", ((1, threshold),)


def _call_by_frames(
    recipe: Recipe,
    facts: HeadInfo | None,
    records: Records,
    frames: Sequence[list[Prediction]],
) -> CalledRecords:
    """Call records by their frame scores. Without ``facts`` they are only embedded."""
    screened = reject_reasons(records, recipe)
    calls = list[Call]()
    for place, (record, predictions) in enumerate(zip(records.iter_records(), frames, strict=True)):
        length = len(record.sequence)
        if place in screened:
            status, note = screened[place]
            calls.append(Call(record.name, length, status, record.sample, note=note))
        else:
            calls.append(call_record(record, recipe.count_chunks(length), predictions, facts))
    embedded: dict[int, Sequence[Prediction]] = {i: each for i, each in enumerate(frames) if each}
    scores = FrameScores.from_predictions(frames)
    return CalledRecords(records, Calls.from_calls(calls), scores, embedded=embedded)


def call_record(
    record: FastaRecord,
    n_chunks: int,
    predictions: Sequence[Prediction],
    facts: HeadInfo | None,
) -> Call:
    """Call one record that passed the screen. Without ``facts`` it is only embedded.

    Failed frames do not count in the score. The note counts them. If all frames failed, the record
    failed.
    """
    chunks = chunk_scores(predictions)
    n_failed = sum(bool(prediction.failure) for prediction in predictions)
    status: Status = "scored" if chunks else "embedded" if predictions else "no_orf"
    score = None
    is_virus = False
    if n_failed and n_failed == len(predictions):
        status = "failed"
    elif chunks and facts is not None:
        score = facts.score([scores for _, scores in chunks])
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
