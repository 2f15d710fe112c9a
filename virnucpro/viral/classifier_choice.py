"""Choose the classifier for a run: the scorer, a head, both, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from virnucpro.core.recipe import EmbeddingRule
from virnucpro.viral.classifier import RecordClassifier, ScorerClassifier, SequenceClassifier
from virnucpro.viral.identification import load_tables
from virnucpro.viral.networks import Scorer
from virnucpro.viral.options import CallsBy, ThresholdOptions

if TYPE_CHECKING:
    from virnucpro.viral.head import Head


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
    scorer = Scorer.load_builtin()
    if not rules:
        return SequenceClassifier(scorer=scorer, options=options)
    # Only runs with vectors use these.
    from virnucpro.viral.head_classifiers import Cascade, Ensemble, HeadClassifier

    caller: RecordClassifier
    if head is None:
        caller = ScorerClassifier(scorer=scorer, options=options)
    elif head.facts.join is None or calls == "head":
        caller = HeadClassifier(frame_head=head, options=options)
    else:
        caller = Ensemble(frame_head=head, scorer=scorer, options=options)
    if rules[-1] == "all":
        return caller
    return Cascade.from_classifiers(ScorerClassifier(scorer=scorer, options=options), caller)
