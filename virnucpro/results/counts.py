"""Count the records of a run by status, call and group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import itemgetter

from virnucpro.core.logging import format_count
from virnucpro.core.recipe import STATUSES, Status

LENGTH_CLASSES = (0, 1_000, 3_000, 10_000)  # starts of length classes, in bases or residues
NO_HIT = (-1.0, 0, "")


@dataclass(slots=True)
class RecordCounts:
    """Record counts."""

    statuses: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    n_viral: int = 0
    n_known_only: int = 0  # records called viral only by k-mers of known viruses
    n_proviruses: int = 0  # proviruses that count as viruses, in records not called virus
    n_regions: int | None = None  # None: no record was searched for regions
    n_whole_regions: int = 0  # regions that cover a complete record
    n_frames: int = 0  # frames with a vector
    n_failed_frames: int = 0
    n_failed_records: int = 0  # records with a failed frame
    first_failure: str = ""  # the first failed frame, and its reason
    n_mendable: int = 0  # records with a note on a failed frame
    viral_lengths: Counter[int] = field(default_factory=Counter)  # viral records by length class
    groups: Counter[str] = field(default_factory=Counter)  # viruses with an identified group
    families: Counter[str] = field(default_factory=Counter)  # viruses with a family
    best: tuple[float, int, str] = NO_HIT  # score, length and id of the best viral record

    @property
    def n_records(self) -> int:
        return sum(self.statuses.values())

    @property
    def n_viruses(self) -> int:
        """Rows in the table of viruses."""
        return self.n_viral + self.n_proviruses

    def virus_line(self, noun: str = "contig") -> str:
        """The summary line on viruses: called records, and proviruses in other records.

        >>> RecordCounts(n_viral=2, n_proviruses=6).virus_line()
        '8 viruses: 2 contigs, 6 proviruses'
        """
        if not self.n_viruses:
            return "no viruses"
        parts = []
        if self.n_viral:
            index = f" ({self.n_known_only:,} by the index of known viruses alone)"
            parts.append(f"{format_count(self.n_viral, noun)}{index * bool(self.n_known_only)}")
        if self.n_proviruses:
            parts.append(format_count(self.n_proviruses, "provirus", "proviruses"))
        return f"{format_count(self.n_viruses, 'virus', 'viruses')}: {', '.join(parts)}"

    def include(self, other: RecordCounts) -> None:
        """Add counts from later records."""
        for count in fields(self):
            name = count.name
            own_value = getattr(self, name)
            other_value = getattr(other, name)
            if isinstance(other_value, dict):
                for key, n in other_value.items():
                    own_value[key] += n
            elif isinstance(other_value, int):
                setattr(self, name, (own_value or 0) + other_value)
        self.first_failure = self.first_failure or other.first_failure
        self.best = max(self.best, other.best, key=itemgetter(0, 1))


def sum_counts(counts: Iterable[RecordCounts]) -> RecordCounts:
    """Return the counts of all records, given those of some in order."""
    total = RecordCounts()
    for later in counts:
        total.include(later)
    return total


def add_counts(by_sample: dict[str, RecordCounts], later: Mapping[str, RecordCounts]) -> None:
    """Add counts of later records to the counts of each sample."""
    for sample, counts in later.items():
        by_sample[sample] = (
            sum_counts([by_sample[sample], counts]) if sample in by_sample else counts
        )


def sample_ranges(samples: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each sample with the first of its neighbouring records, and one past the last."""
    first = 0
    for sample, group in groupby(samples):
        end = first + len(list(group))
        yield sample, first, end
        first = end
