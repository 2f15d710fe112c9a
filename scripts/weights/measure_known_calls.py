"""Measure how many fragments of labelled genomes are called, by score and as known viruses.

    python scripts/weights/measure_known_calls.py manifest.tsv > calls.tsv

The manifest is that of ``scorer_manifest.py``. For each kind of virus and length, 500 fragments are
sampled, each from a random record of the kind that is long enough, at a random position on a random
strand. ``virnucpro predict`` calls them with the built-in files, whose training data contain these
genomes.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sampling import RecordSet, collect_records

from virnucpro.core.numeric import BoolArray
from virnucpro.sequences.fasta import write_record
from virnucpro.training.labelled_data import read_data_manifest, read_records
from virnucpro.viral.windows import opposite_strand

KINDS = {
    "phages": ("phages",),
    "dsDNA viruses of eukaryotes": ("dsDNA viruses of eukaryotes",),
    "RNA viruses": ("RNA+ viruses", "RNA- viruses", "dsRNA viruses"),
}
LENGTHS = (150, 300, 500, 1000)  # bases
N_FRAGMENTS = 500
SEED = 1


def count_calls(fragments: list[str], folder: Path) -> Counter[str]:
    """Count the called fragments by evidence."""
    fasta = folder / "fragments.fa"
    with fasta.open("w", encoding="ascii") as out:
        for number, bases in enumerate(fragments):
            write_record(out, str(number), bases)
    results = folder / "results"
    command = [sys.executable, "-m", "virnucpro", "predict", "--quiet", "--force"]
    command += ["--no-regions", "--no-genes", "--no-report", "--workers", "1"]
    subprocess.run([*command, "-i", fasta, "-o", results], check=True, stdout=sys.stderr)
    with (results / "predictions.tsv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    assert len(rows) == len(fragments), "each fragment has a row"
    return Counter(row["evidence"] for row in rows if row["call"] == "virus")


def sample_fragments(
    collection: RecordSet, is_kind: BoolArray, n_bases: int, rng: np.random.Generator
) -> list[str]:
    """Sample fragments of random records of a kind."""
    records = np.flatnonzero(is_kind & (collection.lengths >= n_bases))
    fragments = []
    for record in rng.choice(records, N_FRAGMENTS):
        start = int(rng.integers(collection.lengths[record] - n_bases, endpoint=True))
        digits = collection.sequence(record)[start : start + n_bases]
        strand = opposite_strand(digits) if rng.random() < 0.5 else digits
        fragments.append(np.frombuffer(b"ACGTN", np.uint8)[strand].tobytes().decode())
    return fragments


def main(manifest: Path) -> None:
    collection = collect_records(read_records(read_data_manifest(manifest)))
    print("kind", "bases", "fragments", "by_score", "as_known", "called", sep="\t")
    for kind, kingdoms in KINDS.items():
        is_kind = np.array([record.kingdom in kingdoms for record in collection.records])
        for n_bases in LENGTHS:
            fragments = sample_fragments(
                collection, is_kind, n_bases, np.random.default_rng([n_bases, SEED])
            )
            with TemporaryDirectory() as folder:
                calls = count_calls(fragments, Path(folder))
            n_by_score = calls["score"] + calls["both"]
            n_known = calls["known"] + calls["both"]
            print(kind, n_bases, N_FRAGMENTS, n_by_score, n_known, calls.total(), sep="\t")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [manifest] if not manifest.startswith("-"):
            main(Path(manifest))
        case _:
            raise SystemExit(__doc__)
