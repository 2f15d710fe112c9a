"""Write the example contigs: known proteins, back-translated into synthetic DNA.

Each contig is one protein of ``proteins.faa``, as a gene between two short random spacers; half
of the contigs lie on the reverse strand. Codons are drawn among their synonyms as often as in the
genes of a host or a virus of that kind. The same bytes come out of every run, and a contig's
bases depend on its own id and protein alone.

    python make_contigs.py [PATH]    (default: contigs.fa beside this script)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random

LINE_BASES = 60
SPACER_BASES = (6, 30)  # shortest and longest

# the standard genetic code, codons in the order of product("TCAG", repeat=3)
GENETIC_CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
# how many of 1,000 codons are TTT, TTC, TTA, TTG, TCT ..., in the order of the genetic code
CODON_USAGE = {
    # Escherichia coli K-12 MG1655, NC_000913.3: counted over 1,034 genes
    "bacterium": (
        "20.6 18.8 12.0 12.6 9.4 9.7 6.0 7.9 14.6 12.8 2.8 0.3 4.8 6.1 1.1 13.1 9.8 10.5 3.1 57.6 "
        "6.3 4.2 7.8 23.5 11.3 10.4 13.3 28.5 24.8 22.5 2.8 3.9 31.6 29.8 2.7 26.8 9.6 24.1 5.4 "
        "12.5 14.4 22.7 36.1 11.3 7.1 15.3 1.4 0.7 21.6 15.4 12.6 26.3 17.3 23.1 20.3 32.5 30.3 "
        "20.8 43.6 17.8 28.3 30.0 6.2 9.6"
    ),
    # SARS-CoV-2 Wuhan-Hu-1, MN908947.3: counted over 10 genes
    "RNA virus": (
        "34.9 14.7 23.9 19.2 22.5 6.5 19.5 1.7 24.8 18.4 1.1 0.0 22.2 6.8 0.3 11.0 30.0 10.0 9.8 "
        "5.2 20.1 3.7 15.8 1.6 11.5 5.2 26.7 12.9 8.6 3.1 2.0 1.0 28.0 10.8 15.3 19.1 34.8 8.2 "
        "30.0 3.4 35.4 18.4 37.2 20.8 16.1 4.2 14.0 5.2 39.8 10.5 16.7 12.2 36.1 9.8 19.2 3.3 "
        "29.4 18.0 34.9 13.7 34.9 11.6 12.3 2.0"
    ),
}
# kind, accession in proteins.faa, codon usage
CONTIGS = (
    ("virus", "P0DTC2", "RNA virus"),
    ("host", "NP_285727.1", "bacterium"),
    ("host", "NP_285814.1", "bacterium"),
    ("virus", "P15423", "RNA virus"),
    ("virus", "P27958", "RNA virus"),
    ("virus", "P14351", "RNA virus"),
    ("host", "NP_290646.1", "bacterium"),
    ("virus", "P08617", "RNA virus"),
    ("host", "NP_290619.1", "bacterium"),
    ("host", "NP_285878.1", "bacterium"),
    ("virus", "P03300", "RNA virus"),
    ("virus", "P03586", "RNA virus"),
    ("virus", "P03303", "RNA virus"),
    ("host", "NP_289374.1", "bacterium"),
    ("host", "NP_289372.1", "bacterium"),
    ("host", "NP_287925.1", "bacterium"),
)


def read_proteins(path: Path) -> dict[str, tuple[str, str]]:
    """Description and sequence by accession."""
    proteins = {}
    for entry in path.read_text(encoding="ascii").split(">")[1:]:
        header, *lines = entry.splitlines()
        accession, description = header.split(" ", 1)
        proteins[accession] = (description, "".join(lines))
    return proteins


def weighted_codons(usage: str) -> dict[str, tuple[list[str], list[float]]]:
    """Synonymous codons of each residue, with their weights; ``*`` stands for the stops."""
    table: dict[str, tuple[list[str], list[float]]] = {}
    weights = map(float, CODON_USAGE[usage].split())
    for codon, residue, weight in zip(
        product("TCAG", repeat=3), GENETIC_CODE, weights, strict=True
    ):
        synonyms, known = table.setdefault(residue, ([], []))
        synonyms.append("".join(codon))
        known.append(weight)
    return table


def back_translate(sequence: str, usage: str, rng: Random) -> str:
    """Draw a codon for each residue, then a stop codon."""
    table = weighted_codons(usage)
    return "".join([rng.choices(*table[residue])[0] for residue in sequence + "*"])


def draw_spacer(rng: Random) -> str:
    n_bases = rng.choices(range(SPACER_BASES[0], SPACER_BASES[1] + 1))[0]
    return "".join(rng.choices("ACGT", k=n_bases))


def reverse_complement(bases: str) -> str:
    return bases.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def fasta_lines() -> Iterator[str]:
    """The lines of the FASTA file, without line ends; ids are numbered within each kind."""
    proteins = read_proteins(Path(__file__).with_name("proteins.faa"))
    n_seen: Counter[str] = Counter()
    for kind, accession, usage in CONTIGS:
        n_seen[kind] += 1
        contig_id = f"example_{kind}_{n_seen[kind]:02d}"
        description, protein = proteins[accession]
        rng = Random(contig_id)
        bases = draw_spacer(rng) + back_translate(protein, usage, rng) + draw_spacer(rng)
        yield f">{contig_id} {accession} {description}"
        strand = reverse_complement(bases) if n_seen[kind] % 2 == 0 else bases
        for start in range(0, len(strand), LINE_BASES):
            yield strand[start : start + LINE_BASES]


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        sys.exit("usage: python make_contigs.py [PATH]")
    path = Path(arguments[0]) if arguments else Path(__file__).with_name("contigs.fa")
    text = "".join(f"{line}\n" for line in fasta_lines())
    path.write_text(text, encoding="ascii", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
