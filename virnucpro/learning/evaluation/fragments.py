"""Fragments for an evaluation: pieces of the labelled records, as users would have them.

Of each length a record gives as many fragments as fit side by side, at most ``per_record``: one
at a random place in each of so many equal parts of it, on a random strand. A record also stands
whole, or, where that would cost more than its fragments, as a random window of ``per_record``
times the longest length. Where a record is cut depends on its id and the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from virnucpro.ground.errors import UsageError
from virnucpro.ground.files import atomic
from virnucpro.learning.labelled.records import Labelled, LabelledRecord, record_digest
from virnucpro.sequences.fasta import write_record

WHOLE = 0  # as a length
_COMPLEMENT = str.maketrans("ACGTURYKMBDHVacgturykmbdhv", "TGCAAYRMKVHDBtgcaayrmkvhdb")  # IUPAC
_COLUMNS = ("fragment", "record", "length", "start", "end", "strand", "label", "group", "kingdom")


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
