"""A cascade: the scorer reads every record, and its score decides which ones are embedded.

What is asked for follows from the score of a record and its length alone: it is the same in every
run, and no cut changes it. The bounds are shares of the scorer's error rates, which folds over
groups gave, so at each length the same share of cellular records is embedded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from operator import itemgetter

import numpy as np

from virnucpro.callers.caller import ByScorer, Caller, Cut
from virnucpro.callers.options import FALSE_POSITIVES, Embed
from virnucpro.callers.pieces import score_records
from virnucpro.ground.config import InputType, Recipe
from virnucpro.ground.records import CalledRecords, Prediction, Records
from virnucpro.scorer.nets import Scorer, thresholds

# share of the cellular records of a length whose score is as high as the lowest that is embedded
NEARLY_VIRAL = 0.2
SURELY_VIRAL = FALSE_POSITIVES["conservative"]  # the same, of those that every preset calls virus
_NOTE = "not embedded"


def first_asking(records: Records, recipe: Recipe, rules: Sequence[Embed]) -> list[int | None]:
    """The place of the first rule that asks for each record, in order; None if none does.

    Every rule asks for what the scorer cannot read.
    """
    if rules[0] == "all":
        return [0] * len(records.ids)
    scorer = Scorer.own()
    log_odds, lengths = score_records(records, recipe, scorer).log_odds, records.lengths
    rates = scorer.error_rates_of(recipe.input_type)
    is_low = log_odds < thresholds(rates, lengths, NEARLY_VIRAL)  # False for NaN, no score
    is_sure = log_odds >= thresholds(rates, lengths, SURELY_VIRAL)
    left_out = {"all": np.zeros_like(is_low), "viral": is_low, "uncertain": is_low | is_sure}
    asks = ~np.array([left_out[rule] for rule in rules])
    first = np.where(asks.any(axis=0), asks.argmax(axis=0), -1)
    return [None if place < 0 else place for place in first.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade(Caller):
    """The scorer calls the records without embedded frames, and ``then`` calls all others.

    What the scorer cannot read is left to ``then`` as well.
    """

    first: ByScorer
    then: Caller

    @classmethod
    def of(cls, first: ByScorer, then: Caller) -> Cascade:
        return cls(frame_head=then.frame_head, scorer=first.scorer, first=first, then=then)

    @property
    def announcements(self) -> tuple[str, ...]:
        return (*self.then.announcements, "the scorer alone calls records that are not embedded")

    @property
    def cut(self) -> Cut:
        words = dict.fromkeys((self.then.cut.words, self.first.cut.words))
        return replace(self.then.cut, words="; not embedded: ".join(words))

    def shortest(self, input_type: InputType) -> int:
        return self.then.shortest(input_type)

    def of_type(self, input_type: InputType) -> Caller:
        return Cascade.of(self.first.of_type(input_type), self.then.of_type(input_type))

    def call(
        self, records: Records, frames: Sequence[list[Prediction]], recipe: Recipe
    ) -> CalledRecords:
        if not records.ids:
            return self.then.call(records, frames, recipe)
        bare = [not each for each in frames]
        by_first = self.first.call(records.kept(bare), [[] for is_bare in bare if is_bare], recipe)
        scores = iter(by_first.calls.virus_scores)
        is_left = [is_bare and next(scores) is None for is_bare in bare]
        by_first.calls.notes[:] = [_NOTE] * len(by_first.calls.notes)  # of those that are kept
        others = [not is_bare or left for is_bare, left in zip(bare, is_left, strict=True)]
        by_then = self.then.call(records.kept(others), list(compress(frames, others)), recipe)
        return CalledRecords.joined(
            [
                (by_then if is_other else by_first).rows(first, end)
                for is_other, first, end in _runs(bare, others)
            ]
        )


def _runs(bare: Sequence[bool], others: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    """Neighbours that one caller calls: whether the second does, and their places among its own.

    The first has called all bare records, and the second calls all ``others``.
    """
    n_first = n_then = 0
    for is_other, run in groupby(zip(others, bare, strict=True), key=itemgetter(0)):
        places = list(run)
        n_bare = sum(is_bare for _, is_bare in places)
        first = n_then if is_other else n_first
        yield is_other, first, first + len(places)
        n_first += n_bare
        n_then += len(places) if is_other else 0
