"""Split the groups of a manifest into four parts: a table of group, kingdom and part.

    python scripts/weights/scorer_split.py MANIFEST.tsv [EARLIER.tsv] > scorer_split.tsv

Each kingdom is split separately, in the order of a hash of the groups' names: into validation, test
and locked groups, and the rest for training. Locked groups are measured once, after all decisions.

Groups of an earlier split keep their parts. The hash of each new group gives its part.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections import Counter, defaultdict
from pathlib import Path

SEED = 1
# share of the groups of a kingdom, and the fewest groups from which a part is taken
PARTS = {"validation": (0.15, 2), "test": (0.13, 3), "locked": (0.12, 5)}


def hash_rank(group: str) -> str:
    return hashlib.blake2b(f"{SEED}\t{group}".encode()).hexdigest()


def assign_part(group: str) -> str:
    """Assign a part to a group that is not in the earlier split."""
    position = int(hash_rank(group), 16) / 16 ** len(hash_rank(group))
    for part, (share, _) in PARTS.items():
        if position < share:
            return part
        position -= share
    return "train"


def read_parts(split: Path) -> dict[str, str]:
    with split.open(encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row["group"]: row["part"] for row in rows}


def split_kingdom(names: list[str]) -> dict[str, str]:
    """Assign a part to each group of a kingdom, without an earlier split."""
    parts: list[str] = []
    for part, (share, min_groups) in PARTS.items():
        parts += [part] * (max(1, round(share * len(names))) if len(names) >= min_groups else 0)
    parts += ["train"] * (len(names) - len(parts))
    return dict(zip(sorted(names, key=hash_rank), parts, strict=True))


def main(manifest: Path, earlier: dict[str, str]) -> None:
    kingdoms: dict[str, Counter[str]] = defaultdict(Counter)
    with manifest.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            kingdoms[row["group"]][row["kingdom"]] += 1
    groups: dict[str, list[str]] = defaultdict(list)
    for group, n_records in kingdoms.items():
        groups[max(sorted(n_records), key=n_records.__getitem__)].append(group)
    sys.stdout.write("group\tkingdom\tpart\n")
    for kingdom, names in sorted(groups.items()):
        if earlier:
            part_of = {name: earlier.get(name) or assign_part(name) for name in names}
        else:
            part_of = split_kingdom(names)
        for group, part in sorted(part_of.items()):
            sys.stdout.write(f"{group}\t{kingdom}\t{part}\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [manifest] if not manifest.startswith("-"):
            main(Path(manifest), {})
        case [manifest, earlier]:
            main(Path(manifest), read_parts(Path(earlier)))
        case _:
            raise SystemExit(__doc__)
