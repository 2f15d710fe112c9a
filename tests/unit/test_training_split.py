"""A split keeps groups together, and is stable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from virnucpro.core.errors import InputError
from virnucpro.training.labelled_data import LabelledRecord, read_split, split_groups, write_split

PATH = Path("data.fa")


def make_records(n_groups: int, kingdom: str = "phage", is_virus: bool = True):
    return [
        LabelledRecord(f"{kingdom}{g}.{i}", is_virus, f"{kingdom}{g}", 1.0, kingdom)
        for g in range(n_groups)
        for i in range(1 + g % 3)
    ]


@pytest.mark.parametrize(
    ("n_groups", "expected"),
    [
        (1, {"train": 1}),
        (2, {"train": 1, "validation": 1}),
        (3, {"train": 1, "validation": 1, "test": 1}),
        (10, {"train": 6, "validation": 2, "test": 2}),
        (100, {"train": 70, "validation": 15, "test": 15}),
    ],
)
def test_each_stratum_is_split_by_itself(n_groups: int, expected: dict[str, int]) -> None:
    cells = make_records(7, "bacteria", is_virus=False)
    splits = split_groups(make_records(n_groups) + cells, seed=1)
    phage_parts = {group: part for group, part in splits.items() if group.startswith("phage")}
    assert Counter(phage_parts.values()) == expected
    assert len(splits) == n_groups + 7


def test_split_depends_on_seed_not_order() -> None:
    records = make_records(40)
    shuffled = [records[i] for i in np.random.default_rng(3).permutation(len(records))]
    assert split_groups(shuffled, seed=1) == split_groups(records, seed=1)
    assert split_groups(records, seed=2) != split_groups(records, seed=1)


def test_added_group_moves_few_groups() -> None:
    records = make_records(40) + make_records(20, "algae", is_virus=False)
    before = split_groups(records, seed=1)
    more = LabelledRecord("new", False, "new", 1.0, "algae")
    after = split_groups([*records, more], seed=1)
    moved = {group for group in before if before[group] != after[group]}
    assert all(group.startswith("algae") for group in moved)
    # one group more pushes at most one over each of the two borders between ranks
    assert len(moved) <= 2


def test_group_in_two_strata_stays_together() -> None:
    both = [
        LabelledRecord("a", True, "both", 1.0, "phage"),
        LabelledRecord("b", False, "both", 1.0, "bacteria"),
        LabelledRecord("c", False, "both", 1.0, "bacteria"),
    ]
    # alone in its stratum: training, independent of the other strata
    assert split_groups(both + make_records(9), seed=4)["both"] == "train"


def test_split_is_read_back(tmp_path: Path) -> None:
    records = make_records(12) + make_records(5, "bacteria", is_virus=False)
    splits = split_groups(records, seed=1)
    one = tmp_path / "one.tsv"
    other = tmp_path / "other.tsv"
    write_split(one, records, splits)
    write_split(other, records[::-1], dict(reversed(splits.items())))
    assert one.read_bytes() == other.read_bytes()
    assert read_split(one) == splits
    lines = one.read_text().splitlines()
    assert lines[0] == "group\tlabel\tkingdom\tsplit\tn_records"
    assert f"phage2\tvirus\tphage\t{splits['phage2']}\t3" in lines


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("group\tpart\nA\ttest\n", "split.tsv:1: no column 'split'"),
        ("group\tsplit\nA\tlearn\n", "split.tsv:2: the split is 'learn'"),
        ("group\tsplit\nA\ttest\nA\ttrain\n", "split.tsv:3: the group A is in test and in train"),
    ],
)
def test_impossible_edited_split_is_refused(tmp_path: Path, rows: str, words: str) -> None:
    path = tmp_path / "split.tsv"
    path.write_text(rows)
    with pytest.raises(InputError) as caught:
        read_split(path)
    assert words in str(caught.value) and caught.value.hint
