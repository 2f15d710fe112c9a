"""The split: groups for training, for validation, and held out for the test.

Whole groups only: pieces of one genome, or of near relatives, on both sides of a split flatter
every figure. A split is a table that is written down, may be edited, and given back.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Literal, get_args

from virnucpro.ground.errors import InputError
from virnucpro.ground.files import atomic
from virnucpro.ground.log import printable
from virnucpro.learning.labelled.records import LabelledRecord, read_cells

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_COLUMNS = ("group", "label", "kingdom", "split", "n_records")
_FOR_VALIDATION = _FOR_TEST = 0.15  # shares of the groups
_Stratum = tuple[str, str]  # label and kingdom


def split_groups(records: Iterable[LabelledRecord], seed: int) -> dict[str, Split]:
    """Give every group to one split.

    Each stratum, a label in a kingdom, is split by itself: with three groups or more every split
    gets one of them, with two the test gets none, with one training has it. A group in several
    strata belongs to the one that most of its records are in. Groups are ranked by a hash of
    their name and the seed, so the order of the records does not matter, and a group more
    changes nothing in other strata.
    """
    strata: dict[_Stratum, list[str]] = {}
    for group, stratum in _main_strata(records).items():
        strata.setdefault(stratum, []).append(group)
    splits: dict[str, Split] = {}
    for groups in strata.values():
        n_validation, n_test = _allot(len(groups))
        for rank, group in enumerate(sorted(groups, key=lambda name: _rank(name, seed))):
            if rank < n_test:
                splits[group] = "test"
            elif rank < n_test + n_validation:
                splits[group] = "validation"
            else:
                splits[group] = "train"
    return splits


def _main_strata(records: Iterable[LabelledRecord]) -> dict[str, _Stratum]:
    counts: dict[str, Counter[_Stratum]] = {}
    for record in records:
        counts.setdefault(record.group, Counter())[(record.label, record.kingdom)] += 1
    return {
        group: min(strata, key=lambda stratum: (-strata[stratum], stratum))
        for group, strata in counts.items()
    }


def _allot(n_groups: int) -> tuple[int, int]:
    """The numbers of groups for validation and test; at least one is left for training."""
    n_test = min(max(1, round(n_groups * _FOR_TEST)), max(0, n_groups - 2))
    n_validation = min(max(1, round(n_groups * _FOR_VALIDATION)), n_groups - n_test - 1)
    return n_validation, n_test


def _rank(group: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\t{group}".encode(), digest_size=16).digest()


def write_split(path: Path, records: Iterable[LabelledRecord], splits: Mapping[str, Split]) -> None:
    """A row per group, label and kingdom, in their order; the same bytes for the same data."""
    counts = Counter((record.group, record.label, record.kingdom) for record in records)
    with (
        atomic(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as out,
    ):
        out.write("\t".join(_COLUMNS) + "\n")
        for (group, label, kingdom), n_records in sorted(counts.items()):
            out.write(f"{group}\t{label}\t{kingdom}\t{splits[group]}\t{n_records}\n")


def read_split(path: Path) -> dict[str, Split]:
    """The split of each group, of a table with at least the columns ``group`` and ``split``.

    Raises:
        InputError: it is not such a table, or a group is in two splits; names file and line.
        InputMissingError: it cannot be read.
    """
    splits: dict[str, Split] = {}
    hint = "a table of groups and their splits, as training writes it beside the head"
    for line, cells in read_cells(path, needed=("group", "split"), hint=hint):
        where, group, split = f"{printable(path)}:{line}", cells["group"], cells["split"]
        if split not in SPLITS:
            raise InputError(
                f"{where}: the split is {printable(split)!r}",
                hint=f"a split is one of {', '.join(SPLITS)}",
            )
        if splits.setdefault(group, split) != split:
            raise InputError(
                f"{where}: the group {printable(group)} is in {splits[group]} and in {split}",
                hint="a group is whole: give all its lines the same split",
            )
    return splits


def check_groups(groups: Set[str], splits: Mapping[str, Split]) -> None:
    """
    Raises:
        InputError: a group is in no split.
    """
    if unknown := groups - splits.keys():
        raise InputError(
            f"the split says nothing of {len(unknown)} groups of the data, "
            f"for example {printable(min(unknown))}",
            hint="add them to the table of the split, or give the split that was made of this data",
        )
