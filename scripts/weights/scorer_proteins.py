"""Find the proteins of labelled sequences, for ``train_protein_scorer.py``. Needs pyrodigal.

    python scripts/weights/scorer_proteins.py manifest.tsv > proteins.tsv

``scorer_manifest.py`` writes the manifest. Genes of prokaryotes, their viruses and eukaryotic dsDNA
viruses are predicted. In other sequences, an open frame counts as a protein if it is long for its
kind and longer frames hardly cover it, which excludes frames on the wrong strand of a gene; a
transcript has one protein. At most about a million bases of a kind are read per group, and twice
that for kinds with few groups.
"""

from __future__ import annotations

import csv
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pyrodigal

from virnucpro.core.types import reverse_complement
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.training.labelled_data import Labelled, read_data_manifest, read_records

GENE_FINDER_KINGDOMS = (
    *("phages", "archaeal viruses", "dsDNA viruses of eukaryotes"),
    *("bacteria", "plasmids", "bins", "archaea"),
)
# residues of the shortest open frame that counts as a protein
MIN_FRAME_RESIDUES = {
    "transcripts": 100,
    "RNA+ viruses": 100,
    "RNA- viruses": 100,
    "dsRNA viruses": 100,
    "ssDNA viruses of eukaryotes": 100,
    "reverse-transcribing viruses": 100,
    "organelles": 120,
    "protists": 200,
    "fungi": 200,
    "animals": 200,
    "plants": 200,
}
MIN_GENE_RESIDUES = 40
MAX_COVERED_SHARE = 0.3  # of a frame that longer ones may cover
MAX_GROUP_BASES = 1_000_000
FEW_GROUPS = ("archaea", "bins", "protists", "fungi", "animals", "plants", "plasmids")
COLUMNS = ("group", "kingdom", "label", "record", "protein")

_KNOWN = dict(zip(STANDARD.codons, STANDARD.letters, strict=True))
_RESIDUE_OF = {codon: _KNOWN.get(codon, "X") for codon in map("".join, product("ACGTN", repeat=3))}


def select_records(pairs: Iterator[Labelled]) -> Iterator[Labelled]:
    """Yield the records of each group, in the order of a hash, until there are enough bases."""
    groups: dict[str, list[Labelled]] = defaultdict(list)
    for labelled, record in pairs:
        if labelled.kingdom in GENE_FINDER_KINGDOMS or labelled.kingdom in MIN_FRAME_RESIDUES:
            groups[labelled.group].append((labelled, record))
    for _, members in sorted(groups.items()):
        n_bases: dict[str, int] = defaultdict(int)
        for labelled, record in sorted(members, key=lambda pair: _hash_rank(pair[0].id)):
            max_bases = 2 * MAX_GROUP_BASES if labelled.kingdom in FEW_GROUPS else MAX_GROUP_BASES
            if n_bases[labelled.kingdom] < max_bases:
                n_bases[labelled.kingdom] += len(record.sequence)
                yield labelled, record


def _hash_rank(name: str) -> bytes:
    return hashlib.blake2b(name.encode()).digest()


def find_proteins(kingdom: str, sequence: str, finder: pyrodigal.GeneFinder) -> Iterator[str]:
    """Yield the proteins of a sequence, without a final stop."""
    if kingdom in GENE_FINDER_KINGDOMS:
        for gene in finder.find_genes(sequence.encode()):
            protein = gene.translate().rstrip("*")
            if len(protein) >= MIN_GENE_RESIDUES and "*" not in protein:
                yield protein
    else:
        proteins = nonoverlapping_frames(sequence, MIN_FRAME_RESIDUES[kingdom])
        yield from proteins[:1] if kingdom == "transcripts" else proteins


def nonoverlapping_frames(sequence: str, shortest: int) -> list[str]:
    """Return the open frames of both strands that longer ones hardly cover, longest first."""
    is_covered = bytearray(len(sequence))
    proteins = []
    for start, end, protein in sorted(
        open_frames(sequence, shortest), key=lambda frame: (-len(frame[2]), frame)
    ):
        if sum(is_covered[start:end]) <= MAX_COVERED_SHARE * (end - start):
            is_covered[start:end] = b"\x01" * (end - start)
            proteins.append(protein)
    return proteins


def open_frames(sequence: str, shortest: int) -> Iterator[tuple[int, int, str]]:
    """Yield the first base, end and residues of each frame from its first start codon to its stop.

    A frame that is open at the start of the sequence begins there.
    """
    n_bases = len(sequence)
    for strand, bases in enumerate((sequence, reverse_complement(sequence))):
        known = re.sub("[^ACGT]", "N", bases.upper().replace("U", "T"))
        for frame in range(3):
            codons = (known[i : i + 3] for i in range(frame, n_bases - 2, 3))
            residues = "".join(map(_RESIDUE_OF.__getitem__, codons))
            for match in re.finditer(r"[^*]+", residues):
                first = match.start()
                if first:
                    start = residues.find("M", first, match.end())
                    first = match.end() if start < 0 else start
                protein = residues[first : match.end()]
                if len(protein) >= shortest and protein.count("X") <= 0.1 * len(protein):
                    low = frame + 3 * first
                    high = frame + 3 * match.end()
                    low, high = (low, high) if strand == 0 else (n_bases - high, n_bases - low)
                    yield low, high, protein


def main(manifest: Path) -> None:
    table = csv.writer(sys.stdout, delimiter="\t", lineterminator="\n")
    table.writerow(COLUMNS)
    finder = pyrodigal.GeneFinder(meta=True)
    for labelled, record in select_records(read_records(read_data_manifest(manifest))):
        for protein in find_proteins(labelled.kingdom, record.sequence, finder):
            row = (labelled.group, labelled.kingdom, labelled.label, labelled.id, protein)
            table.writerow(row)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
