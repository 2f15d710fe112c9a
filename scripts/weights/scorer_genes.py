"""Write archaeal genes for the training set of the scorer, and their manifest.

    apt-get download metaphlan2-data && dpkg-deb -x metaphlan2-data_*.deb .
    pip install taxoniq ncbi-refseq-accession-db
    python scripts/weights/scorer_genes.py var/lib/metaphlan2-data/markers.fasta genes.fa \
        > genes.tsv

The genes are markers of MetaPhlAn 2 (Truong et al. 2015, doi:10.1038/nmeth.3589; MIT licence), each
found in one species alone. Their accessions are looked up in NCBI's taxonomy. A group is a family.
Families with a genus among the labelled sequences are left out, so that they remain held out in
cross-validation.

Genes of bacteria and of viruses are left out too: with both, networks ranked phages and prokaryotes
less accurately. docs/experiments/2026-11.md has the measurements.
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
from train_embedded_scorer import ARCHAEAL_GENES

from virnucpro.sequences.fasta import read_fasta, write_record

LABELLED_FAMILIES = (  # families of genera among the labelled sequences
    "Desulfurococcaceae",
    "Haloarculaceae",
    "Haloferacaceae",
    "Methanobacteriaceae",
    "Thermococcaceae",
)
MIN_GENE_BASES = 300
MAX_GENES_PER_SPECIES = 40
SEED = 3
_ACCESSION = re.compile(r"gi\|\d+\|ref\|([^|]+)\|:(\S+)")


@cache
def lineage(accession: str) -> dict[str, str]:
    """Return the names of a sequence's taxa by rank. Empty if unknown."""
    try:
        taxon = taxoniq.Taxon(accession_id=accession)
    except KeyError:
        return {}
    return {parent.rank.name: parent.scientific_name for parent in taxon.ranked_lineage}


def archaeal_genes(markers: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield the species, family, id and sequence of each gene."""
    for record in read_fasta(markers):
        match = _ACCESSION.match(record.id)
        if not match or len(record.sequence) < MIN_GENE_BASES:
            continue
        accession, location = match.groups()
        names = lineage(accession)
        has_new_family = "family" in names and names["family"] not in LABELLED_FAMILIES
        if "Archaea" in names.values() and has_new_family:
            gene_id = re.sub(r"\W", "_", f"{accession}_{location}")
            yield names.get("species", accession), names["family"], gene_id, record.sequence


def main(markers: Path, genes: Path) -> None:
    by_species = defaultdict[str, list[list[str]]](list)
    for species, *gene in archaeal_genes(markers):
        by_species[species].append(gene)
    rng = random.Random(SEED)
    sys.stdout.write("\t".join(("path", "id", "label", "group", "weight", "kingdom")) + "\n")
    with genes.open("w", encoding="utf-8") as out:
        for _, genes_of_species in sorted(by_species.items()):
            n_genes = min(MAX_GENES_PER_SPECIES, len(genes_of_species))
            for family, gene_id, sequence in rng.sample(genes_of_species, n_genes):
                write_record(out, gene_id, sequence)
                row = (str(genes), gene_id, "other", f"family {family}", "1", ARCHAEAL_GENES)
                sys.stdout.write("\t".join(row) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [markers, genes]:
            main(Path(markers), Path(genes))
        case _:
            raise SystemExit(__doc__)
