"""Measure regions in synthetic lysogens: phages inserted into bacterial contigs.

    python benchmarks/lysogens.py FOLDER prophages.tsv CATALOGUE.tsv.gz ... [--seeds 1 2 3]

FOLDER and the table are those of ``regions_by_length.py``; the hosts are their chromosomes, outside
known prophages. A catalogue has a row for each sequence (id, file, label, kind, cluster, length)
and lies in the folder of its FASTA files. The first phage of 15,000 to 65,000 bases represents its
cluster. A phage starts at a random position of its circle and is inserted into 120,000 bases of a
host with similar GC, between two copies of 14 to 45 bases of the host. It is whole, or decayed: a
fifth to a half is lost in blocks, and 5 % of the bases are drawn again. Pairs are two such
neighbours up to 6,000 bases apart. Other contigs of 20,000 bases are all phage, and contigs of
20,000 or 50,000 bases end with a phage.

The region model was learned without the file of the host. The nets of the scorer have seen these
phages, so the numbers found are too good; the ends show how well landmarks are recognised. A
lysogen is exact if both ends are at most 5 bases off, because bases may agree by chance beyond a
repeat. The regions of the class prophage are also counted.

``--part learn`` is for choosing limits: two thirds of the clusters, by a hash of their names, in
hosts without a complete chromosome, with their pieces joined. ``--part test`` inserts the other
clusters into the chromosomes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from regions_by_length import SHORTEST_HOST, learn, score, write

from virnucpro.sequences.fasta import read_fasta
from virnucpro.training.provirus import (
    PIECES,
    Chromosome,
    RegionScores,
    Span,
    Truth,
    measure_regions,
    read_truth,
)
from virnucpro.viral.host_markers import find_host_genes
from virnucpro.viral.networks import Scorer
from virnucpro.viral.provirus import regions_from_windows
from virnucpro.viral.provirus_features import WindowTable

SHORTEST = 15_000
LONGEST = 65_000
FLANKS = 120_000
SHORTEST_JOINED = 135_000  # bases of the shortest host of joined pieces
REPEAT = (14, 46)
CLOSE_GC = 0.06
EXACT = 5
COLUMNS = (
    *("F1", "found", "exact", "false", "regions", "class_prophage"),
    *("merged", "split", "ends_50", "ends_90"),
)


class Made(NamedTuple):
    sequence: str
    prophages: tuple[Span, ...]
    host: Path | None  # the file of the host; None: no host


def is_of(part: str, cluster: str) -> bool:
    """Whether a cluster of phages belongs to a part: "learn", "test" or "all"."""
    is_test = int(hashlib.sha256(cluster.encode()).hexdigest(), 16) % 3 == 0
    return part == "all" or is_test == (part == "test")


def read_phages(catalogues: list[Path], part: str) -> list[str]:
    """Read one phage for each cluster of this part."""
    first: dict[str, str] = {}
    for catalogue in catalogues:
        clusters = {}
        paths = set()
        with gzip.open(catalogue, "rt", encoding="utf-8") as lines:
            for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
                is_phage = row["label"] == "viral" and row["kind"] == "phage"
                if is_phage and SHORTEST <= int(row["length"]) <= LONGEST:
                    clusters[row["id"]] = row["cluster"] or row["id"]
                    paths.add(catalogue.parent / Path(row["file"]).name)
        for path in sorted(paths):
            for record in read_fasta(path):
                if record.id in clusters:
                    first.setdefault(clusters[record.id], record.sequence.upper())
    return [first[cluster] for cluster in sorted(first) if is_of(part, cluster)]


def joined(records: list[Chromosome]) -> Chromosome:
    """Join the pieces of a host to one sequence."""
    sequence = "".join(one.sequence for one in records)
    return Chromosome("", sequence, WindowTable.concatenate([]), Truth())


def gc(sequence: str) -> float:
    return (sequence.count("G") + sequence.count("C")) / len(sequence)


class Maker:
    """Makes lysogens from these phages and hosts, with one seed."""

    def __init__(self, phages: list[str], hosts: list[tuple[Path, Chromosome]], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.phages = phages
        self.hosts = hosts
        self.gc = np.array([gc(one.sequence) for _, one in hosts])

    def draw(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def phage(self) -> str:
        sequence = self.phages[self.draw(0, len(self.phages))]
        place = self.draw(0, len(sequence))
        return sequence[place:] + sequence[:place]

    def flanks(self, phage: str) -> tuple[Path, str]:
        """Draw a part of a host with a GC similar to the phage, without known prophages."""
        apart = abs(self.gc - gc(phage))
        near = np.flatnonzero(apart <= max(CLOSE_GC, np.sort(apart)[1]))
        path, one = self.hosts[near[self.draw(0, len(near))]]
        while True:
            start = self.draw(0, len(one.sequence) - FLANKS)
            elements = (*one.truth.prophages, *one.truth.unclear)
            if not any(a < start + FLANKS and b > start for a, b in elements):
                return path, one.sequence[start : start + FLANKS].upper()

    def decayed(self, phage: str) -> str:
        n_lost = int(self.rng.uniform(0.2, 0.5) * len(phage) / 2)
        for _ in range(self.draw(1, 4)):
            if len(phage) - n_lost < 10_000:
                break
            start = self.draw(2_000, max(2_001, len(phage) - n_lost - 2_000))
            phage = phage[:start] + phage[start + n_lost :]
        bases = np.frombuffer(phage.encode("ascii"), np.uint8).copy()
        is_drawn = self.rng.random(len(bases)) < 0.05
        bases[is_drawn] = self.rng.choice(np.frombuffer(b"ACGT", np.uint8), is_drawn.sum())
        return "".join(map(chr, bases.tolist()))

    def lysogen(self, *, is_decayed: bool) -> Made:
        phage = self.phage()
        path, host = self.flanks(phage)
        if is_decayed:
            phage = self.decayed(phage)
        place = self.draw(FLANKS // 4, 3 * FLANKS // 4)
        n_shared = self.draw(*REPEAT)
        sequence = host[: place + n_shared] + phage + host[place:]
        return Made(sequence, ((place, place + 2 * n_shared + len(phage)),), path)

    def pair(self) -> Made:
        one = self.phage()
        other = self.phage()
        path, host = self.flanks(one)
        n_shared = self.draw(*REPEAT)
        n_other = self.draw(*REPEAT)
        place = self.draw(FLANKS // 3, FLANKS // 2)
        next_place = place + n_shared + int(self.rng.choice((0, 500, 2_000, 6_000)))
        sequence = host[: place + n_shared] + one + host[place : next_place + n_other]
        start = next_place + n_shared + len(one)
        spans = (
            (place, place + 2 * n_shared + len(one)),
            (start, start + 2 * n_other + len(other)),
        )
        return Made(sequence + other + host[next_place:], spans, path)

    def throughout(self) -> Made:
        phage = self.phage()
        while len(phage) < 20_000:
            phage = self.phage()
        start = self.draw(0, len(phage) - 20_000 + 1)
        return Made(phage[start : start + 20_000], ((0, 20_000),), None)

    def at_end(self) -> Made:
        phage = self.phage()
        path, host = self.flanks(phage)
        n_bases = int(self.rng.choice((20_000, 50_000)))
        n_host = n_bases - min(n_bases // 2, len(phage))
        start = self.draw(0, FLANKS // 2)
        sequence = host[start : start + n_host] + phage[: n_bases - n_host]
        return Made(sequence, ((n_host, n_bases),), path)

    def each(self, n: int) -> Iterator[tuple[str, Made]]:
        for _ in range(n):
            yield "whole", self.lysogen(is_decayed=False)
            yield "decayed", self.lysogen(is_decayed=True)
            yield "throughout", self.throughout()
            yield "at an end", self.at_end()
        for _ in range(n // 2):
            yield "pairs", self.pair()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--each", type=int, default=40, help="lysogens per kind and seed")
    parser.add_argument("--part", choices=("all", "learn", "test"), default="all")
    options = parser.parse_args()
    files = score(options.folder, read_truth(options.table), ())
    places = [(path, one) for path, records in files.items() for one in records]
    hosts = [(path, one) for path, one in places if len(one.sequence) >= SHORTEST_HOST]
    if options.part == "learn":
        whole = {path for path, _ in hosts}
        hosts = [(path, joined(records)) for path, records in files.items() if path not in whole]
        hosts = [(path, one) for path, one in hosts if len(one.sequence) > SHORTEST_JOINED]
    models = {path: learn(files, path) for path in {None, *(path for path, _ in hosts)}}
    phages = read_phages(options.catalogues, options.part)
    scorer = Scorer.load_builtin()
    read_genes = partial(find_host_genes, scorer=scorer)
    figures: dict[str, list[RegionScores]] = {}
    n_exact = Counter[str]()
    n_judged = Counter[str]()
    for seed in options.seeds:
        for kind, made in Maker(phages, hosts, seed).each(options.each):
            [items] = WindowTable.from_scores([made.sequence], scorer, PIECES.step)
            model = models[made.host]
            found, _ = regions_from_windows(made.sequence, items, model, read_genes, is_virus=False)
            regions = [(region.start, region.end) for region in found]
            truth = Truth([*made.prophages])
            figures.setdefault(kind, []).append(measure_regions(regions, truth, len(made.sequence)))
            n_judged[kind] += sum(region.region_class == "prophage" for region in found)
            n_exact[kind] += sum(
                any(abs(a - start) <= EXACT and abs(b - end) <= EXACT for a, b in regions)
                for start, end in made.prophages
            )
    write(f"{len(phages)} phages, {len(hosts)} hosts", COLUMNS)
    for kind, each in figures.items():
        total = RegionScores.sum(each)
        ends = np.percentile(total.ends, (50, 90)) if total.ends else (np.nan, np.nan)
        found_of = f"{total.found} of {total.prophages}"
        counts = n_exact[kind], total.false, total.regions, n_judged[kind]
        words = found_of, *counts, total.merged, total.split, *(f"{end:.0f}" for end in ends)
        write(kind, [f"{total.f1:.3f}", *words])


if __name__ == "__main__":
    main()
