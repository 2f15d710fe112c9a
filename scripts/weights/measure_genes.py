"""Compare the predicted genes of viruses with those of Prodigal, and with known proteins.

    python scripts/weights/measure_genes.py VIRUSES.fa.gz ... --group phage \
        [--proteins PROTEINS.faa.gz ...] [--sample 60] > table.tsv

Genes are the same if their strand and their stop agree, so precision and recall are those of 3'
ends. Genes without a stop in the sequence are left out. `starts` is the share of genes with the
same stop that also have the same start. Prodigal runs with pyrodigal, in its metagenomic mode. Only
this script needs it.

A known protein is found in a sequence if it is the end of a translated open reading frame, from a
start codon to a stop. It has 40 residues or more. Not all proteins of a sequence are known, so
there is no precision.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyrodigal

from virnucpro.core.types import reverse_complement
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.viral.genes import find_genes

MIN_VIRUS_BASES = 3_000
MIN_PROTEIN_RESIDUES = 40
SUFFIX_RESIDUES = 25  # the end of a protein, by which candidates are selected
START_CODONS = ("ATG", "GTG", "TTG")
SEED = 1
Genes = dict[tuple[int, str, int], int]  # sequence, strand and end -> start, both on the strand


def virnucpro_genes(sequences: Sequence[str], group: str) -> Genes:
    """Return the genes that VirNucPro finds in viruses of this group."""
    n = len(sequences)
    found = find_genes(sequences, [False] * n, [group] * n, STANDARD)
    columns = (found.virus, found.is_reverse, found.start, found.end, found.lacks_end)
    genes: Genes = {}
    for number, is_reverse, start, end, lacks_end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if not lacks_end:
            stop = len(sequences[number]) - start if is_reverse else end
            genes[number, "-" if is_reverse else "+", stop] = stop - (end - start)
    return genes


def prodigal_genes(sequences: Sequence[str]) -> Genes:
    """Return the genes that Prodigal finds."""
    finder = pyrodigal.GeneFinder(meta=True)
    genes: Genes = {}
    for number, sequence in enumerate(sequences):
        for gene in finder.find_genes(sequence.encode()):
            is_forward = gene.strand == 1
            if gene.partial_end if is_forward else gene.partial_begin:
                continue
            end = gene.end if is_forward else len(sequence) - gene.begin + 1
            strand = "+" if is_forward else "-"
            genes[number, strand, end] = end - (gene.end - gene.begin + 1)
    return genes


def known_genes(sequences: Sequence[str], proteins: Mapping[str, set[str]]) -> Genes:
    """Return the genes of known proteins."""
    genes: Genes = {}
    for number, sequence in enumerate(sequences):
        for strand, bases in (("+", sequence), ("-", reverse_complement(sequence))):
            for frame in range(3):
                for start, end in find_known_proteins(bases, frame, proteins):
                    genes[number, strand, end] = start
    return genes


def find_known_proteins(
    bases: str, frame: int, proteins: Mapping[str, set[str]]
) -> Iterator[tuple[int, int]]:
    """Yield start and end of the genes of known proteins in a frame."""
    codons = [bases[i : i + 3] for i in range(frame, len(bases) - 2, 3)]
    residues = "".join(STANDARD.meanings.get(codon, "X") for codon in codons)
    first = 0
    for stretch in residues.split("*")[:-1]:  # the last one has no stop
        end = first + len(stretch)
        for protein in proteins.get(stretch[-SUFFIX_RESIDUES:], ()):
            start = end - len(protein)
            is_same = start >= first and residues[start + 1 : end] == protein[1:]
            if is_same and codons[start] in START_CODONS:
                yield frame + 3 * start, frame + 3 * end + 3
        first = end + 1


def read_proteins(paths: Sequence[Path]) -> dict[str, set[str]]:
    """Read proteins by their last residues."""
    proteins: dict[str, set[str]] = {}
    for path in paths:
        for record in read_fasta(path):
            if len(record.protein) >= MIN_PROTEIN_RESIDUES:
                proteins.setdefault(record.protein[-SUFFIX_RESIDUES:], set()).add(record.protein)
    return proteins


def compare(predicted: Genes, reference: Genes) -> tuple[float, float, float]:
    """Return precision, recall, and the share of equal starts among equal stops."""
    shared = predicted.keys() & reference.keys()
    n_starts = sum(predicted[key] == reference[key] for key in shared)
    return (
        divide(len(shared), len(predicted)),
        divide(len(shared), len(reference)),
        divide(n_starts, len(shared)),
    )


def divide(n: int, total: int) -> float:
    return n / total if total else float("nan")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("viruses", nargs="+", type=Path)
    parser.add_argument("--group", default="phage", help="as in the table of viruses")
    parser.add_argument("--proteins", nargs="*", type=Path, default=[])
    parser.add_argument("--sample", type=int, help="measure a random sample of this many viruses")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    records = [record for path in arguments.viruses for record in read_fasta(path)]
    sequences = [
        record.sequence.upper() for record in records if len(record.sequence) >= MIN_VIRUS_BASES
    ]
    if arguments.sample:
        sequences = random.Random(SEED).sample(sequences, arguments.sample)
    predicted = virnucpro_genes(sequences, arguments.group)
    prodigal = prodigal_genes(sequences)
    known = known_genes(sequences, read_proteins(arguments.proteins))
    print("genes\treference\tn_reference\tprecision\trecall\tstarts")
    for name, genes, reference_name, reference in (
        ("virnucpro", predicted, "prodigal", prodigal),
        ("virnucpro", predicted, "known proteins", known),
        ("prodigal", prodigal, "known proteins", known),
    ):
        precision, recall, starts = compare(genes, reference)
        shown_precision = f"{precision:.3f}" if reference is prodigal else ""
        row = (
            name,
            reference_name,
            len(reference),
            shown_precision,
            f"{recall:.3f}",
            f"{starts:.3f}",
        )
        print(*row, sep="\t")
    print(f"{len(sequences)} sequences, {sum(map(len, sequences)):,} bases", file=sys.stderr)


if __name__ == "__main__":
    main()
