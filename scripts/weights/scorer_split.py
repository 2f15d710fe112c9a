"""Split the groups of a manifest into four parts: a table of group, kingdom and part.

    python scripts/weights/scorer_split.py MANIFEST.tsv > scorer_split.tsv

Each kingdom is split separately, in the order of a hash of the groups' names: into validation, test
and locked groups, and the rest for training. Locked groups are measured once, after all decisions.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections import Counter, defaultdict
from pathlib import Path

SEED = 1
# share of the groups, and the least groups of a kingdom that gives the part any
PARTS = {"validation": (0.15, 2), "test": (0.13, 3), "locked": (0.12, 5)}


def rank(group: str) -> str:
    return hashlib.blake2b(f"{SEED}\t{group}".encode()).hexdigest()


def main(manifest: Path) -> None:
    kingdoms: dict[str, Counter[str]] = defaultdict(Counter)
    with manifest.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            kingdoms[row["group"]][row["kingdom"]] += 1
    groups: dict[str, list[str]] = defaultdict(list)
    for group, n_records in kingdoms.items():
        groups[max(sorted(n_records), key=n_records.__getitem__)].append(group)
    sys.stdout.write("group\tkingdom\tpart\n")
    for kingdom, names in sorted(groups.items()):
        parts = []
        for part, (share, least) in PARTS.items():
            parts += [part] * (max(1, round(share * len(names))) if len(names) >= least else 0)
        parts += ["train"] * (len(names) - len(parts))
        by_rank = sorted(names, key=rank)
        for group, part in sorted(zip(by_rank, parts, strict=True)):
            sys.stdout.write(f"{group}\t{kingdom}\t{part}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
