"""Make rows for the genes of viruses as text."""

from __future__ import annotations

from itertools import chain

import numpy as np

from virnucpro.core.numeric import IntArray
from virnucpro.results.names import gff3_seqid, gff3_value
from virnucpro.results.tsv import (
    decimal_texts,
    format_decimals,
    format_fields,
    format_integers,
    format_rows,
    letters,
    quoted_texts,
    texts,
)
from virnucpro.viral.types import CalledRecords, Genes, Viruses


def gene_table(results: CalledRecords) -> bytes | None:
    """Format a table row per gene. None: no virus has a gene."""
    viruses = results.viruses
    genes = viruses.genes
    if genes is None or not len(genes.start):
        return None
    virus_indices = genes.virus.tolist()
    records = [viruses.record_indices[virus] for virus in virus_indices]
    record_names = results.records.names
    return format_rows(
        quoted_texts(_name_genes(viruses.names, genes)),
        quoted_texts([viruses.names[virus] for virus in virus_indices]),
        quoted_texts([record_names[record] for record in records]),
        quoted_texts([results.calls.samples[record] for record in records]),
        format_integers(genes.start + 1),
        format_integers(_ends_in_circle(viruses, genes)),
        texts(_strands(genes)),
        format_integers(list(map(len, genes.proteins))),
        texts(_name_partial(genes)),
        texts(genes.start_codons),
        format_decimals(genes.coding_score, 2),
        format_decimals(genes.log_odds, 2),
        format_integers(genes.n_known_kmers),
        quoted_texts(genes.known_families),
    )


def gene_gff3(results: CalledRecords) -> bytes | None:
    """Format a GFF3 row per gene, after its virus if it is the first. None: no virus has a gene.

    A gene may cross the origin in a circle.
    """
    viruses = results.viruses
    genes = viruses.genes
    if genes is None or not len(genes.start):
        return None
    ids = [gff3_value(name) for name in viruses.names]
    seqids = [gff3_seqid(name) for name in viruses.names]
    firsts = [seqids[virus] for virus in genes.virus.tolist()]
    n_before = np.cumsum(genes.n_per_virus) - genes.n_per_virus
    for virus in np.flatnonzero(genes.n_per_virus).tolist():
        is_circle = viruses.identities[virus].topology == "circular"
        landmark = f"ID={ids[virus]}{';Is_circular=true' if is_circle else ''}"
        n_bases = len(viruses.letters[virus])
        region = f"{seqids[virus]}\tvirnucpro\tregion\t1\t{n_bases}\t.\t.\t.\t{landmark}\n"
        firsts[n_before[virus]] = region + seqids[virus]
    optional = (
        [partial and f";partial={partial}" for partial in _name_partial(genes)],
        [codon and f";start_codon={codon}" for codon in genes.start_codons],
        [odds and f";log_odds={odds}" for odds in decimal_texts(genes.log_odds, 2)],
    )
    families = [family and f";known_family={gff3_value(family)}" for family in genes.known_families]
    return format_fields(
        ("", texts(firsts)),
        ("\tvirnucpro\tCDS\t", format_integers(genes.start + 1)),
        ("\t", format_integers(genes.end)),
        ("\t", format_decimals(genes.coding_score, 2)),
        ("\t", texts(_strands(genes))),
        ("\t0\tID=", texts(_name_genes(ids, genes))),
        *(("", texts(values)) for values in optional),
        (";n_known_kmers=", format_integers(genes.n_known_kmers)),
        ("", texts(families)),
    )


def protein_fasta(results: CalledRecords) -> bytes | None:
    """Format the proteins, with position and strand of each gene as Prodigal writes them.

    None: no virus has a gene.
    """
    viruses = results.viruses
    genes = viruses.genes
    if genes is None or not len(genes.start):
        return None
    names = texts(_name_genes(viruses.names, genes))
    return format_fields(
        (">", names),
        (" # ", format_integers(genes.start + 1)),
        (" # ", format_integers(_ends_in_circle(viruses, genes))),
        (" # ", format_integers(np.where(genes.is_reverse, -1, 1))),
        (" # ID=", names),
        ("", letters(genes.proteins)),
    )


def _name_genes(names: list[str], genes: Genes) -> list[str]:
    """Number the genes in each virus, after its name."""
    pairs = zip(names, genes.n_per_virus.tolist(), strict=True)
    numbered = ((f"{name}_{number}" for number in range(1, n + 1)) for name, n in pairs)
    return list(chain.from_iterable(numbered))


def _ends_in_circle(viruses: Viruses, genes: Genes) -> IntArray:
    """Return the last bases, counted from 1. One may precede its gene's start in a circle. (n,)"""
    n_bases = np.array(list(map(len, viruses.letters)), dtype=np.int64)[genes.virus]
    return np.where(genes.end > n_bases, genes.end - n_bases, genes.end)


def _strands(genes: Genes) -> list[str]:
    return ["-" if is_reverse else "+" for is_reverse in genes.is_reverse.tolist()]


def _name_partial(genes: Genes) -> list[str]:
    """Name the ends of each gene that lie outside the sequence."""
    words = ("", "start", "end", "both")
    return [words[number] for number in (genes.lacks_start + 2 * genes.lacks_end).tolist()]
