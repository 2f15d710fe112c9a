"""What an evaluation scores: records that were not trained on, and pieces as users would have them.

Of each length a record gives as many fragments as fit side by side, at most ``per_record``: one
at a random place in each of so many equal parts of it, on a random strand. A record also stands
whole, or, where that would cost more than its fragments, as a random window of ``per_record``
times the longest length. Where a record is cut depends on its id and the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from virnucpro.callers.caller import Caller
from virnucpro.ground.errors import InputError, UsageError
from virnucpro.ground.files import atomic
from virnucpro.ground.log import LOGGER, announce, counted
from virnucpro.learning.labelled.records import (
    Labelled,
    LabelledRecord,
    TrainingDigests,
    record_digest,
)
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.sketch import sketch_of

WHOLE = 0  # as a length
_COMPLEMENT = str.maketrans("ACGTURYKMBDHVacgturykmbdhv", "TGCAAYRMKVHDBtgcaayrmkvhdb")  # IUPAC
_COLUMNS = ("fragment", "record", "length", "start", "end", "strand", "label", "group", "kingdom")
OfTraining = Literal["refuse", "leave out", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """The options by which records are cut into fragments."""

    lengths: tuple[int, ...]  # bases
    per_record: int  # fragments of each length
    seed: int

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or self.per_record < 1:
            raise UsageError(
                "--lengths and --fragments-per-record are numbers above 0",
                hint="for example --lengths 300,500,3000 --fragments-per-record 3",
            )
        if len(set(self.lengths)) != len(self.lengths):
            raise UsageError("--lengths names a length twice", hint="name each once")
        if self.seed < 0:
            raise UsageError("--seed is negative", hint="give a number from 0 on")


class Fragment(NamedTuple):
    """A piece of a labelled record, in bases of its forward strand."""

    id: str  # neutral: it tells nothing of the record
    record: LabelledRecord
    length: int  # that was asked for, or WHOLE
    start: int
    end: int
    strand: str


def write_fragments(
    pairs: Iterable[Labelled], cutting: Cutting, fasta: Path, table: Path
) -> list[Fragment]:
    """Cut all records; write their fragments, and where each is from."""
    fragments: list[Fragment] = []
    with atomic(fasta) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as out:
        for labelled, record in pairs:
            for fragment in cut_record(labelled, len(record.sequence), cutting):
                numbered = fragment._replace(id=f"fragment{len(fragments) + 1:07d}")
                bases = record.sequence[fragment.start : fragment.end]
                if fragment.strand == "-":
                    bases = bases.translate(_COMPLEMENT)[::-1]
                write_record(out, numbered.id, bases)
                fragments.append(numbered)
    with atomic(table) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as out:
        out.write("\t".join(_COLUMNS) + "\n")
        out.writelines(map(_row, fragments))
    return fragments


def cut_record(labelled: LabelledRecord, n_bases: int, cutting: Cutting) -> Iterator[Fragment]:
    """The fragments of one record, without ids, by rising length and place."""
    for length in sorted(cutting.lengths):
        rng = np.random.default_rng([cutting.seed, record_digest(labelled.id), length])
        n_fragments = min(cutting.per_record, n_bases // length)
        for i in range(n_fragments):
            first, last = i * n_bases // n_fragments, (i + 1) * n_bases // n_fragments - length
            yield _place(labelled, length, length, (first, last), rng)
    rng = np.random.default_rng([cutting.seed, record_digest(labelled.id), WHOLE])
    n_whole = min(n_bases, cutting.per_record * max(cutting.lengths))
    yield _place(labelled, WHOLE, n_whole, (0, n_bases - n_whole), rng)


def _place(
    labelled: LabelledRecord,
    length: int,
    n_bases: int,
    starts: tuple[int, int],
    rng: np.random.Generator,
) -> Fragment:
    start = int(rng.integers(starts[0], starts[1], endpoint=True))
    strand = "+-"[int(rng.integers(2))]
    return Fragment("", labelled, length, start, start + n_bases, strand)


def length_name(length: int) -> str:
    return "whole" if length == WHOLE else str(length)


def _row(fragment: Fragment) -> str:
    record = fragment.record
    values = (
        fragment.id,
        record.id,
        length_name(fragment.length),
        fragment.start,
        fragment.end,
        fragment.strand,
        record.label,
        record.group,
        record.kingdom,
    )
    return "\t".join(map(str, values)) + "\n"


def memories_of(caller: Caller) -> dict[str, TrainingDigests]:
    """What each that calls was trained on."""
    return {owner: TrainingDigests.of(*digests) for owner, digests in caller.trained_on.items()}


def knowing(
    memories: Mapping[str, TrainingDigests], labelled: LabelledRecord, sequence: str
) -> list[str]:
    """Who was trained on a record: on it, on others of its group, or on a close relative."""
    sketch = sketch_of(sequence)
    return [
        owner
        for owner, memory in memories.items()
        if memory.has(labelled) or memory.has_content(sketch)
    ]


class HeldOut:
    """Records to test a caller on, and those among them that it was trained on."""

    def __init__(self, caller: Caller, of_training: OfTraining) -> None:
        self._memories = memories_of(caller)
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
            owners = knowing(self._memories, labelled, record.sequence)
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
