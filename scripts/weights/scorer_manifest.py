"""Turn catalogues of labelled sequences into a manifest for ``train_embedded_scorer.py``.

    python scripts/weights/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv

A catalogue has a row for each sequence (id, file, label, kind, family, genus, cluster, ...) and
lies in the folder of its FASTA files. A group is never divided between parts of a split. It holds
viruses that share a family, a cluster of related genomes, a genus or a genome; bacteria that share
a family; or other cells that share a genus. Sequences without such a name are grouped by file. Left
out are sequences that are neither clearly viral nor clearly cellular, and those similar to
sequences reserved for a test elsewhere.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

NAMELESS = ("", "?", "Unknown")
COLUMNS = ("path", "id", "label", "group", "weight", "kingdom")
LABELS = {"viral": "virus", "cellular": "other"}
KINGDOMS = {
    "phage": "phages",
    "archaeal_virus": "archaeal viruses",
    "euk_ssRNA_+": "RNA+ viruses",
    "euk_ssRNA": "RNA+ viruses",
    "euk_RNA": "RNA+ viruses",
    "euk_unknown": "RNA+ viruses",
    "euk_ssRNA_-": "RNA- viruses",
    "euk_ssRNA_+_-": "RNA- viruses",
    "euk_dsRNA": "dsRNA viruses",
    "euk_dsDNA": "dsDNA viruses of eukaryotes",
    "euk_DNA": "ssDNA viruses of eukaryotes",
    "euk_ssDNA": "ssDNA viruses of eukaryotes",
    "euk_ssDNA_+_-": "ssDNA viruses of eukaryotes",
    "euk_ssDNA_-": "ssDNA viruses of eukaryotes",
    "euk_dsDNA-RT": "reverse-transcribing viruses",
    "euk_ssRNA-RT": "reverse-transcribing viruses",
    "bacteria": "bacteria",
    "plasmid": "plasmids",
    "mag": "bins",
    "archaea": "archaea",
    "fungi": "fungi",
    "plant": "plants",
    "protozoa": "protists",
    "invertebrate": "animals",
    "vertebrate": "animals",
    "eukaryote": "transcripts",
    "mRNA": "transcripts",
    "rRNA_operon": "ribosomal operons",
    "organelle": "organelles",
}
SAME_GENUS = {
    "hg38.fa": "Homo",
    "Homo? (Augustus tutorial)": "Homo",
    "BRAKER example": "Arabidopsis",
}
# kinds with few sequences, most easily mistaken for viruses: they count more
DOUBLE = ("archaea", "plasmids")

Row = dict[str, str]


class Groups:
    """Sets of names that belong together, directly or through others (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def root(self, name: str) -> str:
        parent = self._parents.setdefault(name, name)
        if parent != name:
            parent = self._parents[name] = self.root(parent)
        return parent

    def join(self, names: list[str]) -> None:
        """Join the sets of these names. The root is the first name in order, families first."""
        roots = {self.root(name) for name in names}
        first, *others = sorted(roots, key=lambda name: ("family" not in name, name))
        for other in others:
            self._parents[other] = first


def names_of(row: Row) -> list[str]:
    """The names by which a sequence is grouped with others; at least one."""
    names = {name: value for name, value in row.items() if value not in NAMELESS}
    genus = names.get("genus")
    if row["label"] == "viral":
        ties = ("family", "cluster", "genome_group", "genus")
        found = [f"{tie} {names[tie]}" for tie in ties if tie in names]
    else:
        found = [f"genus {SAME_GENUS.get(genus, genus)}"] if genus else []
        if row["kind"] == "bacteria" and "family" in names:
            found.append(f"family {names['family']}")
    return found or [f"file {row['source_path']}"]


def kingdom_of(row: Row) -> str:
    is_plasmid = row["label"] == "cellular" and "plasmid" in row["organism"].lower()
    return "plasmids" if is_plasmid else KINGDOMS[row["kind"]]


def read_rows(catalogues: list[Path]) -> Iterator[tuple[Path, Row]]:
    for catalogue in catalogues:
        with gzip.open(catalogue, "rt", encoding="utf-8") as lines:
            for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
                if row["label"] in LABELS and row.get("near_heldout", "0") != "1":
                    yield catalogue.parent.absolute() / Path(row["file"]).name, row


def main(catalogues: list[Path]) -> None:
    rows = list(read_rows(catalogues))
    groups = Groups()
    for _, row in rows:
        groups.join(names_of(row))
    members: dict[str, list[tuple[Path, Row]]] = defaultdict(list)
    for path, row in rows:
        members[groups.root(names_of(row)[0])].append((path, row))
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    for group, sequences in sorted(members.items()):
        for path, row in sequences:
            kingdom = kingdom_of(row)
            weight = 2.0 if kingdom in DOUBLE else 1.0
            cells = (path, row["id"], LABELS[row["label"]], group, weight, kingdom)
            sys.stdout.write("\t".join(map(str, cells)) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main([Path(path) for path in sys.argv[1:]])
