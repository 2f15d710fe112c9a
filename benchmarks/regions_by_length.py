"""Measure regions in contigs of several lengths, cut from whole genomes.

    python benchmarks/regions_by_length.py FOLDER prophages.tsv [Mesoplasma.fa ...] [--least 0.9]

FOLDER and the table are those of ``virnucpro train --data FOLDER --regions prophages.tsv``. Host
contigs are cut from chromosomes of the table, outside their prophages, and from other records of at
least 500,000 bases, with unknown prophages; a host contig with a region counts as false. Prophage
contigs hold a whole prophage at three positions, or have one at an end: as much as fits into half
of the contig. A prophage is found if half of its bases in the contig lie in regions. The region
model was learned without the chromosome, and without its file as a host. Random sequence has a GC
of 0.3 to 0.7. Files named after the table are read in genetic code 4, as a user who knows them
would do. With ``--least``, only regions with at least this posterior count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from virnucpro.core.types import FastaRecord
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.inputs import InputFile
from virnucpro.training.provirus import (
    PIECES,
    Chromosome,
    Span,
    Truth,
    learn_region_model,
    read_truth,
)
from virnucpro.viral.hmm import RegionModel
from virnucpro.viral.host_markers import find_host_genes
from virnucpro.viral.networks import Scorer
from virnucpro.viral.provirus import regions_from_windows
from virnucpro.viral.provirus_features import WindowTable

LENGTHS = (10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
MAX_CONTIGS = 40  # contigs per length and host
SHORTEST_HOST = 500_000


Find = Callable[[Chromosome, int, int, RegionModel], list[Span]]


def regions_of(
    least: float, one: Chromosome, start: int, n_bases: int, model: RegionModel
) -> list[Span]:
    """The regions of a contig with at least this posterior, in positions of the chromosome."""
    start = start // PIECES.step * PIECES.step
    items = one.items.select(
        (one.items.start >= start) & (one.items.start + PIECES.size <= start + n_bases)
    )
    moved = items._replace(start=items.start - start)
    sequence = one.sequence[start : start + n_bases]
    read_genes = partial(find_host_genes, scorer=Scorer.load_builtin())
    regions, _ = regions_from_windows(sequence, moved, model, read_genes, is_virus=False)
    kept = [region for region in regions if region.posterior >= least]
    return [(start + region.start, start + region.end) for region in kept]


def host_starts(one: Chromosome, n_bases: int) -> Iterator[int]:
    """Yield the starts of contigs that have no part of a known element."""
    elements = (*one.truth.prophages, *one.truth.unclear)
    last = len(one.sequence) - n_bases
    for start in (
        np.linspace(0, last, min(MAX_CONTIGS, len(one.sequence) // n_bases)).astype(int).tolist()
    ):
        if not any(a < start + n_bases and b > start - PIECES.step for a, b in elements):
            yield start


def count_false(one: Chromosome, model: RegionModel, find: Find) -> list[tuple[int, int]]:
    counts = []
    for n_bases in LENGTHS:
        called = [bool(find(one, at, n_bases, model)) for at in host_starts(one, n_bases)]
        counts.append((sum(called), len(called)))
    return counts


def count_found(
    one: Chromosome, model: RegionModel, kind: str, find: Find
) -> list[tuple[int, int]]:
    """Count the prophages found in contigs of each length, ``whole`` or at an ``end``."""
    counts = []
    for n_bases in LENGTHS:
        found = []
        for a, b in one.truth.prophages:
            part = min(n_bases // 2, b - a)
            whole = [a - int((n_bases - b + a) * share) for share in (0.2, 0.5, 0.8)]
            starts = [a - n_bases + part, b - part]
            if kind == "whole":
                starts = whole if n_bases > b - a + 2_000 else []
            for at in starts:
                start = min(max(0, at), len(one.sequence) - n_bases) // PIECES.step * PIECES.step
                low = max(a, start)
                high = min(b, start + n_bases)
                inside = find(one, start, n_bases, model)
                covered = sum(max(0, min(y, high) - max(x, low)) for x, y in inside)
                found.append(covered >= (high - low) / 2)
        counts.append((sum(found), len(found)))
    return counts


def show(name: str, counts: list[tuple[int, int]]) -> None:
    write(name, [f"{part} of {total}" for part, total in counts])


def write(name: str, cells: Iterable[object]) -> None:
    sys.stdout.write("\t".join([name, *map(str, cells)]) + "\n")
    sys.stdout.flush()


def add(rows: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [
        (sum(part for part, _ in column), sum(total for _, total in column))
        for column in zip(*rows, strict=True)
    ]


def score(
    folder: Path, truths: dict[str, Truth], code_4: Collection[str]
) -> dict[Path, list[Chromosome]]:
    """Read the records of each file, and score their pieces."""
    scorer = Scorer.load_builtin()
    files: dict[Path, list[Chromosome]] = {}
    for source in InputFile.complete(folder):
        code = GeneticCode.from_number(4) if Path(source.path).name in code_4 else STANDARD
        for record in read_fasta(Path(source.path), source.name):
            one = Chromosome.from_record(record, scorer, truths.get(record.id, Truth()), code)
            files.setdefault(Path(source.path), []).append(one)
    return files


def learn(files: dict[Path, list[Chromosome]], without: Path | None) -> RegionModel:
    kept = [records for path, records in files.items() if path != without]
    known = [one for records in kept for one in records if one.truth.prophages]
    others = ([one.items for one in records if not one.truth.prophages] for records in kept)
    hosts = [WindowTable.concatenate(items) for items in others if items]
    return learn_region_model(known, hosts, "")


def measure(files: dict[Path, list[Chromosome]], find: Find) -> None:
    write("contigs of", LENGTHS)
    false = []
    whole = []
    end = []
    for path, records in files.items():
        for one in records:
            if len(one.sequence) >= SHORTEST_HOST:
                model = learn(files, path)
                false.append(count_false(one, model, find))
                show(one.name, false[-1])
                whole.append(count_found(one, model, "whole", find))
                end.append(count_found(one, model, "end", find))
    show("all hosts", add(false))
    show("prophage within", add(whole))
    show("prophage at an end", add(end))
    model = learn(files, None)
    rng = np.random.default_rng(5)
    random = []
    for gc in (0.3, 0.4, 0.5, 0.6, 0.7):
        shares = [(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]
        bases = "".join(rng.choice(list("ACGT"), 1_000_000, p=shares))
        one = Chromosome.from_record(FastaRecord("", "", bases), Scorer.load_builtin(), Truth())
        random.append(count_false(one, model, find))
    show("random sequence", add(random))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("code_4", nargs="*", metavar="FILE")
    parser.add_argument("--least", type=float, default=0.0, metavar="POSTERIOR")
    options = parser.parse_args()
    files = score(options.folder, read_truth(options.table), options.code_4)
    measure(files, partial(regions_of, options.least))
