"""Held-out data: records that head, encoder and scorer were not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from virnucpro.callers.caller import Caller
from virnucpro.ground.errors import InputError, UsageError
from virnucpro.ground.log import LOGGER, announce, counted
from virnucpro.learning.labelled.records import Labelled, LabelledRecord, TrainingDigests
from virnucpro.sequences.sketch import sketch_of

OfTraining = Literal["refuse", "leave out", "keep"]


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
    """Records to test a caller on, and those among them that it was trained on."""

    def __init__(self, caller: Caller, of_training: OfTraining) -> None:
        self._memories = {
            owner: TrainingDigests.of(*digests) for owner, digests in caller.trained_on.items()
        }
        self._of_training = of_training
        self.records: list[LabelledRecord] = []  # those that passed ``select``
        self.trained: frozenset[str] = frozenset()  # ids; empty unless they were to be kept
        for owner, memory in self._memories.items():
            if owner != "its encoder" and not memory:  # few encoders were trained on labels
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
            sketch = sketch_of(record.sequence)
            owners = [
                owner
                for owner, memory in self._memories.items()
                if memory.has(labelled) or memory.has_content(sketch)
            ]
            for owner in owners:
                ids[owner].add(labelled.id)
            if not owners or self._of_training != "leave out":
                self.records.append(labelled)
                yield labelled, record
        self._tell(ids, n_records)

    def _tell(self, ids: Mapping[str, set[str]], n_records: int) -> None:
        """Tell which records, by owner, were trained on, themselves or others like them.

        Raises:
            InputError: as ``select``.
        """
        trained = frozenset[str]().union(*ids.values())
        counts = [f"{owner} was trained on {len(own):,}" for owner, own in ids.items() if own]
        clause = (
            f"{', '.join(counts)} of {counted(n_records, 'record')}, or on parts of them, close "
            "relatives or others of their groups"
        )
        if trained and self._of_training == "refuse":
            raise InputError(
                f"{clause}: figures on them say nothing about new sequences",
                hint="leave them out with --held-out-only, or keep them, and have the report "
                "say so, with --allow-training-data",
            )
        if {record.is_virus for record in self.records} != {True, False}:
            raise InputError(
                "the data to evaluate on holds no virus, or nothing else: of "
                f"{counted(n_records, 'record')}, {n_records - len(self.records):,} are left out",
                hint="give labelled records of both kinds that were not trained on",
            )
        if trained and self._of_training == "keep":
            LOGGER.warning("%s: the figures are too good", clause)
            self.trained = trained
        elif trained:
            announce(f"{clause}: they are left out")
