"""What a head was trained on is no test of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from virnucpro.errors import InputError, UsageError
from virnucpro.labelled.digests import group_digest, record_digest
from virnucpro.labelled.records import LabelledRecord, read_sequences
from virnucpro.log import LOGGER, announce
from virnucpro.scoring.head import Head

OfTraining = Literal["refuse", "leave out", "keep"]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Records to test a head on, and which of them it knows from training."""

    records: tuple[LabelledRecord, ...]
    trained: frozenset[str] = frozenset()  # ids; empty unless they were to be kept


@dataclass(frozen=True, slots=True)
class Trained:
    """The ids of records that were trained on, themselves or others of their groups."""

    of_head: frozenset[str]
    of_encoder: frozenset[str]

    @property
    def ids(self) -> frozenset[str]:
        return self.of_head | self.of_encoder

    def describe(self, n_records: int) -> str:
        """Who was trained on how many of so many records."""
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


def hold_out(records: Sequence[LabelledRecord], head: Head, of_training: OfTraining) -> HeldOut:
    """
    Raises:
        InputError: head or encoder were trained on some of the data, which is to be refused; or
            nothing is left.
    """
    if not len(head.trained_records) and not len(head.trained_groups):
        LOGGER.warning("the head does not say what it was trained on: nothing can be held out")
    trained = find_trained(records, head)
    if trained.ids and of_training == "refuse":
        raise InputError(
            f"{trained.describe(len(records))}: figures on them say nothing about new sequences",
            hint="leave them out with --held-out-only, or keep them, and have the report "
            "say so, with --allow-training-data",
        )
    kept = [r for r in records if of_training == "keep" or r.id not in trained.ids]
    if {record.is_virus for record in kept} != {True, False}:
        raise InputError(
            "the data to evaluate on holds no virus, or nothing else",
            hint="give labelled records of both kinds that head and encoder were not trained on",
        )
    if trained.ids and of_training == "keep":
        LOGGER.warning("%s: the figures are too good", trained.describe(len(records)))
        return HeldOut(tuple(kept), trained.ids)
    if trained.ids:
        announce(f"{trained.describe(len(records))}: they are left out")
    return HeldOut(tuple(kept))


def find_trained(records: Sequence[LabelledRecord], head: Head) -> Trained:
    """Which records, themselves or by their groups, the head and its encoder were trained on."""
    sides = (
        (set(head.trained_records.tolist()), set(head.trained_groups.tolist())),
        (set(head.encoder_records.tolist()), set(head.encoder_groups.tolist())),
    )
    digests = {group: group_digest(group) for group in {record.group for record in records}}
    of_head, of_encoder = (
        {record.id for record in records if digests[record.group] in groups} for _, groups in sides
    )
    if any(sequences for sequences, _ in sides):
        for labelled, record in read_sequences(records):
            digest = record_digest(record.sequence)
            for ids, (sequences, _) in zip((of_head, of_encoder), sides, strict=True):
                if digest in sequences:
                    ids.add(labelled.id)
    return Trained(frozenset(of_head), frozenset(of_encoder))
