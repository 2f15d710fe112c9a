"""Write genes of archaea to train the scorer with, and their manifest.

    apt-get download metaphlan2-data && dpkg-deb -x metaphlan2-data_*.deb .
    pip install taxoniq ncbi-refseq-accession-db
    python scripts/weights/scorer_genes.py var/lib/metaphlan2-data/markers.fasta genes.fa \
        > genes.tsv

The genes are markers of MetaPhlAn 2 (Truong et al. 2015, doi:10.1038/nmeth.3589; MIT licence), each
found in one species alone. Their accessions are looked up in NCBI's taxonomy. A group is a family.
Families of which the labelled sequences have a genus are left out, so that these stay new to the
folds that do not have them.

Genes of bacteria and of viruses are left out too: with both, networks told phages from prokaryotes
less well. docs/experiments/2026-11.md has what they bring.
"""

from __future__ import annotations

import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import taxoniq
from train_embedded_scorer import GENES

from virnucpro.sequences.fasta import read_fasta, write_record

KNOWN = (  # families of genera among the labelled sequences
    "Desulfurococcaceae",
    "Haloarculaceae",
    "Haloferacaceae",
    "Methanobacteriaceae",
    "Thermococcaceae",
)
SHORTEST = 300  # bases
MAX_GENES = 40  # genes of a species
SEED = 3
_ACCESSION = re.compile(r"gi\|\d+\|ref\|([^|]+)\|:(\S+)")


@cache
def lineage(accession: str) -> dict[str, str]:
    """The names of a sequence's taxa, by rank; empty if it is unknown."""
    try:
        taxon = taxoniq.Taxon(accession_id=accession)
    except KeyError:
        return {}
    return {each.rank.name: each.scientific_name for each in taxon.ranked_lineage}


def archaeal_genes(markers: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield the species, family, id and sequence of each gene."""
    for record in read_fasta(markers):
        match = _ACCESSION.match(record.id)
        if not match or len(record.sequence) < SHORTEST:
            continue
        accession, place = match.groups()
        names = lineage(accession)
        if "Archaea" in names.values() and names.get("family", KNOWN[0]) not in KNOWN:
            gene_id = re.sub(r"\W", "_", f"{accession}_{place}")
            yield names.get("species", accession), names["family"], gene_id, record.sequence


def main(markers: Path, genes: Path) -> None:
    by_species = defaultdict[str, list[list[str]]](list)
    for species, *gene in archaeal_genes(markers):
        by_species[species].append(gene)
    rng = random.Random(SEED)
    sys.stdout.write("\t".join(("path", "id", "label", "group", "weight", "kingdom")) + "\n")
    with genes.open("w", encoding="utf-8") as out:
        for _, own in sorted(by_species.items()):
            for family, gene_id, sequence in rng.sample(own, min(MAX_GENES, len(own))):
                write_record(out, gene_id, sequence)
                row = (str(genes), gene_id, "other", f"family {family}", "1", GENES)
                sys.stdout.write("\t".join(row) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [markers, genes]:
            main(Path(markers), Path(genes))
        case _:
            raise SystemExit(__doc__)
