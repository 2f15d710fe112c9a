"""What a head was trained on is no test of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from virnucpro.errors import InputError, UsageError
from virnucpro.head import Head
from virnucpro.log import LOGGER, announce
from virnucpro.training.digests import group_digest, record_digest
from virnucpro.training.labelled import LabelledRecord, read_sequences

OfTraining = Literal["refuse", "leave out", "keep"]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Records to test a head on, and which of them it knows from training."""

    records: tuple[LabelledRecord, ...]
    trained: frozenset[str] = frozenset()  # ids; empty unless they were to be kept


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
        InputError: the head was trained on some of the data, which is to be refused; or nothing
            is left.
    """
    if not len(head.trained_records) and not len(head.trained_groups):
        LOGGER.warning("the head does not say what it was trained on: nothing can be held out")
    trained = find_trained(records, head)
    known = (
        f"the head was trained on {len(trained):,} of {len(records):,} records, or on others of "
        "their groups"
    )
    if trained and of_training == "refuse":
        raise InputError(
            f"{known}: figures on them say nothing about new sequences",
            hint="leave them out with --held-out-only, or keep them, and have the report "
            "say so, with --allow-training-data",
        )
    kept = [r for r in records if of_training == "keep" or r.id not in trained]
    if {record.is_virus for record in kept} != {True, False}:
        raise InputError(
            "the data to evaluate on holds no virus, or nothing else",
            hint="give labelled records of both kinds that the head was not trained on",
        )
    if trained and of_training == "keep":
        LOGGER.warning("%s: the figures are too good", known)
        return HeldOut(tuple(kept), trained)
    if trained:
        announce(f"{known}: they are left out")
    return HeldOut(tuple(kept))


def find_trained(records: Sequence[LabelledRecord], head: Head) -> frozenset[str]:
    """The ids of records that the head, or another record of their group, was trained on."""
    groups, sequences = set(head.trained_groups.tolist()), set(head.trained_records.tolist())
    known = {group for group in {r.group for r in records} if group_digest(group) in groups}
    found = {record.id for record in records if record.group in known}
    if sequences:
        found |= {
            labelled.id
            for labelled, record in read_sequences(records)
            if record_digest(record.sequence) in sequences
        }
    return frozenset(found)
