"""Held-out data: records that head and encoder were not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import InputError, UsageError
from virnucpro.labelled.digests import group_digest, record_digest
from virnucpro.labelled.records import Labelled, LabelledRecord
from virnucpro.log import LOGGER, announce
from virnucpro.scoring.head import Head

OfTraining = Literal["refuse", "leave out", "keep"]


@dataclass(frozen=True, slots=True)
class Trained:
    """The ids of records that were trained on, themselves or others of their groups."""

    of_head: frozenset[str]
    of_encoder: frozenset[str]

    @property
    def ids(self) -> frozenset[str]:
        return self.of_head | self.of_encoder

    def describe(self, n_records: int) -> str:
        """A clause on how many of these records head and encoder were trained on."""
        parts = (("the head", self.of_head), ("its encoder", self.of_encoder))
        counts = [f"{who} was trained on {len(ids):,}" for who, ids in parts if ids]
        return f"{', '.join(counts)} of {n_records:,} records, or on others of their groups"


def policy(held_out_only: bool, allow_training_data: bool) -> OfTraining:
    """
    Raises:
        UsageError: both were said.
    """
    match held_out_only, allow_training_data:
        case True, True:
            raise UsageError(
                "--held-out-only and --allow-training-data contradict each other",
                hint="the first leaves out what the head was trained on, the second keeps it",
            )
        case True, False:
            return "leave out"
        case False, True:
            return "keep"
    return "refuse"


class HeldOut:
    """Records to test a head on, and those among them that it was trained on."""

    def __init__(self, head: Head, of_training: OfTraining) -> None:
        self._head = _Memory(head.trained_records, head.trained_groups)
        self._encoder = _Memory(head.encoder_records, head.encoder_groups)
        self._of_training = of_training
        self.records: list[LabelledRecord] = []  # those that passed ``select``
        self.trained: frozenset[str] = frozenset()  # ids; empty unless they were to be kept
        if not len(head.trained_records) and not len(head.trained_groups):
            LOGGER.warning("the head does not say what it was trained on: nothing can be held out")

    def select(self, pairs: Iterable[Labelled]) -> Iterator[Labelled]:
        """Pass on the records that are to be tested, one by one.

        Raises:
            InputError: at the end: head or encoder were trained on some of the data, which is to
                be refused; or nothing is left.
        """
        n_records = 0
        of_head, of_encoder = set[str](), set[str]()
        for labelled, record in pairs:
            n_records += 1
            digests = group_digest(labelled.group), record_digest(record.sequence)
            for ids, memory in ((of_head, self._head), (of_encoder, self._encoder)):
                if memory.knows(*digests):
                    ids.add(labelled.id)
            is_trained = labelled.id in of_head or labelled.id in of_encoder
            if not is_trained or self._of_training != "leave out":
                self.records.append(labelled)
                yield labelled, record
        self._tell(Trained(frozenset(of_head), frozenset(of_encoder)), n_records)

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
                hint="give labelled records of both kinds that head and encoder were not trained "
                "on",
            )
        if trained.ids and self._of_training == "keep":
            LOGGER.warning("%s: the figures are too good", trained.describe(n_records))
            self.trained = trained.ids
        elif trained.ids:
            announce(f"{trained.describe(n_records)}: they are left out")


class _Memory:
    """The digests of the records and groups that a head, or an encoder, was trained on."""

    def __init__(self, records: NDArray[np.uint64], groups: NDArray[np.uint64]) -> None:
        self._records, self._groups = set(records.tolist()), set(groups.tolist())

    def knows(self, group: int, record: int) -> bool:
        """True if it was trained on this record, or on others of its group."""
        return group in self._groups or record in self._records
