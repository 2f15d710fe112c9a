"""Call records by the scorer alone, and select the records to embed.

A run has one classifier. Any code that needs a call, or that depends on the calling method, asks
the classifier and does not inspect it. The scorer makes the same calls with and without vectors.
``head_classifiers`` has the classifiers that read vectors.

A run may embed only a subset: the scorer reads every record, and the score decides. The decision
depends only on score and length, so it is the same in every run and at every threshold. The bounds
are the scorer's false positive rates, measured by cross-validation over groups. Therefore the same
share of cellular records is embedded at each length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from virnucpro._version import __version__
from virnucpro.core.errors import UsageError
from virnucpro.core.events import SCORING, STAGES
from virnucpro.core.logging import format_count
from virnucpro.core.numeric import IntArray
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import USUAL_CHUNK_SIZE, EmbeddingRule, InputType, Recipe
from virnucpro.core.types import Records
from virnucpro.sequences.screen import EXCLUDED, reject_records
from virnucpro.viral.calling import ScoredRecords, call_scored, score_records
from virnucpro.viral.known import KnownIndex
from virnucpro.viral.networks import ErrorRates, Scorer, thresholds_of
from virnucpro.viral.options import FALSE_POSITIVES, ThresholdOptions
from virnucpro.viral.probability import probability
from virnucpro.viral.types import CalledRecords, Prediction, failure_note

if TYPE_CHECKING:
    from virnucpro.viral.head import Head

# the rule that calls a record viral: as text, and as the lowest viral score at each length
ThresholdText: TypeAlias = tuple[str, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecordClassifier:
    """Calls records by sequence, by their frame vectors, or by both.

    Classifiers can be sent to other processes.
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
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScorerClassifier(RecordClassifier):
    """The scorer calls by sequence alone. Embedded frames do not change calls."""

    scorer: Scorer
    options: ThresholdOptions
    input_type: InputType = "nucleotide"

    @property
    def announcements(self) -> tuple[str, ...]:
        return (describe_callers(self.options, f"the scorer of VirNucPro {__version__}"),)

    @property
    def threshold(self) -> ThresholdText:
        return describe_threshold(self.options, self.scorer.select_error_rates(self.input_type))

    def min_length(self, input_type: InputType) -> int:
        return self.scorer.min_length(input_type)

    def for_input_type(self, input_type: InputType) -> ScorerClassifier:
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
        results.embedded = {
            index: record_frames for index, record_frames in enumerate(frames) if record_frames
        }
        for index, each in results.embedded.items():
            results.calls.notes[index] = results.calls.notes[index] or failure_note(each)
        return results


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceClassifier(ScorerClassifier):
    """The scorer calls and nothing is embedded. The scores are stored for later thresholds."""

    stages: ClassVar = (STAGES[0], SCORING)
    stores_scores: ClassVar = True

    @property
    def recommended_chunk(self) -> tuple[int, str]:
        return USUAL_CHUNK_SIZE, "the scorer works on pieces of"

    def warnings(self, *_: int) -> Iterator[str]:
        return iter(())


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


def describe_callers(options: ThresholdOptions, *classifiers: str) -> str:
    """Name what calls the records.

    >>> describe_callers(ThresholdOptions(), "the scorer")
    'called by the scorer and the index of known viruses'
    """
    index = "the index of known viruses"
    if options.evidence == "known":
        return f"called by {index} alone"
    if options.evidence == "score":
        *first, last = classifiers
        return f"called by {' and '.join([*first, last])}{' alone' * (not first)}"
    return f"called by {', '.join(classifiers)} and {index}"


def describe_threshold(
    options: ThresholdOptions, error_rates: Sequence[Sequence[ErrorRates]]
) -> ThresholdText:
    """Describe the user's threshold, or else that from a preset, by error rates.

    At each length, the score is the lowest one that any kingdom needs.
    """
    if options.threshold is not None or options.evidence == "known":
        return describe_fixed_threshold(options, options.threshold)
    share = FALSE_POSITIVES[options.preset]
    words = f"at most {100 * share:g} % false positives per length (preset {options.preset})"
    scores = tuple(
        (each[0].n_bases, probability(min(rates.threshold_at(share) for rates in each)))
        for each in zip(*error_rates, strict=True)
    )
    return words, scores


def describe_fixed_threshold(options: ThresholdOptions, threshold: float | None) -> ThresholdText:
    """Describe a threshold for all lengths. Scores do not matter if only the index calls."""
    if options.evidence == "known" or threshold is None:
        return "none, because scores do not count", ()
    return f"a score of {threshold} or more", ((1, threshold),)
