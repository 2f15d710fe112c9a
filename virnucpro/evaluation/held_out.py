"""Held-out data: records that head, encoder and scorer were not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import InputError, UsageError
from virnucpro.labelled.digests import group_digest, record_digest
from virnucpro.labelled.records import Labelled, LabelledRecord
from virnucpro.log import LOGGER, announce, counted
from virnucpro.scorer.nets import Scorer
from virnucpro.scoring.head import Head

OfTraining = Literal["refuse", "leave out", "keep"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingMemory:
    """Digests of the records and of the groups that something was trained on."""

    owner: str  # "the head", say
    records: NDArray[np.uint64]
    groups: NDArray[np.uint64]


def memories_of(head: Head | None, scorer: Scorer | None) -> list[TrainingMemory]:
    """The memories of what calls the records: a head, its encoder, the scorer."""
    memories = []
    if head is not None:
        memories += [
            TrainingMemory("the head", head.trained_records, head.trained_groups),
            TrainingMemory("its encoder", head.encoder_records, head.encoder_groups),
        ]
    if scorer is not None:
        memories.append(TrainingMemory("the scorer", scorer.trained_records, scorer.trained_groups))
    return memories


@dataclass(frozen=True, slots=True)
class Trained:
    """The ids of records that were trained on, themselves or others of their groups, by owner."""

    by_owner: Mapping[str, frozenset[str]]

    @property
    def ids(self) -> frozenset[str]:
        return frozenset[str]().union(*self.by_owner.values())

    def describe(self, n_records: int) -> str:
        """A clause on how many of these records each of them was trained on."""
        counts = [
            f"{owner} was trained on {len(ids):,}" for owner, ids in self.by_owner.items() if ids
        ]
        return (
            f"{', '.join(counts)} of {counted(n_records, 'record')}, or on others of their groups"
        )


def policy(held_out_only: bool, allow_training_data: bool) -> OfTraining:
    """
    Raises:
        UsageError: both were said.
    """
    match held_out_only, allow_training_data:
        case True, True:
            raise UsageError(
                "--held-out-only and --allow-training-data contradict each other",
                hint="the first leaves out what was trained on, the second keeps it",
            )
        case True, False:
            return "leave out"
        case False, True:
            return "keep"
    return "refuse"


class HeldOut:
    """Records to test a head or the scorer on, and those among them that it was trained on."""

    def __init__(self, memories: Sequence[TrainingMemory], of_training: OfTraining) -> None:
        self._memories = {
            memory.owner: (set(memory.groups.tolist()), set(memory.records.tolist()))
            for memory in memories
        }
        self._of_training = of_training
        self.records: list[LabelledRecord] = []  # those that passed ``select``
        self.trained: frozenset[str] = frozenset()  # ids; empty unless they were to be kept
        for owner, digests in self._memories.items():
            if owner != "its encoder" and not any(digests):  # few encoders were trained on labels
                LOGGER.warning(
                    "%s does not say what it was trained on: nothing can be held out", owner
                )

    def select(self, pairs: Iterable[Labelled]) -> Iterator[Labelled]:
        """Pass on the records that are to be tested, one by one.

        Raises:
            InputError: at the end: some of the data was trained on, which is to be refused; or
                nothing is left.
        """
        n_records = 0
        ids: dict[str, set[str]] = {owner: set() for owner in self._memories}
        for labelled, record in pairs:
            n_records += 1
            group, digest = group_digest(labelled.group), record_digest(record.sequence)
            is_trained = False
            for owner, (groups, records) in self._memories.items():
                if group in groups or digest in records:
                    ids[owner].add(labelled.id)
                    is_trained = True
            if not is_trained or self._of_training != "leave out":
                self.records.append(labelled)
                yield labelled, record
        trained = Trained({owner: frozenset(of_owner) for owner, of_owner in ids.items()})
        self._tell(trained, n_records)

    def _tell(self, trained: Trained, n_records: int) -> None:
        """
        Raises:
            InputError: as ``select``.
        """
        if trained.ids and self._of_training == "refuse":
            raise InputError(
                f"{trained.describe(n_records)}: figures on them say nothing about new sequences",
                hint="leave them out with --held-out-only, or keep them, and have the report "
                "say so, with --allow-training-data",
            )
        if {record.is_virus for record in self.records} != {True, False}:
            raise InputError(
                "the data to evaluate on holds no virus, or nothing else",
                hint="give labelled records of both kinds that were not trained on",
            )
        if trained.ids and self._of_training == "keep":
            LOGGER.warning("%s: the figures are too good", trained.describe(n_records))
            self.trained = trained.ids
        elif trained.ids:
            announce(f"{trained.describe(n_records)}: they are left out")
