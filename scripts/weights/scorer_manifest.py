"""Turn catalogues of labelled sequences into a manifest for ``train_embedded_scorer.py``.

    python scripts/weights/scorer_manifest.py CATALOGUE.tsv.gz ... > manifest.tsv

A catalogue has a row for each sequence (id, file, label, kind, family, genus, cluster, ...) and
is in the folder of its FASTA files. A group is never divided between parts of a split. It consists
of viruses that share a family, a cluster of related genomes, a genus or a genome, of bacteria that
share a family, or of other cells that share a genus. Sequences without such a name are grouped by
file. Sequences that are neither clearly viral nor clearly cellular are left out, as are those
similar to sequences reserved for a test elsewhere.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MISSING_NAMES = ("", "?", "Unknown")
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
DOUBLE_WEIGHT_KINGDOMS = ("archaea", "plasmids")

Row = dict[str, str]


class UnionFind:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def find(self, name: str) -> str:
        parent = self._parents.setdefault(name, name)
        if parent != name:
            parent = self._parents[name] = self.find(parent)
        return parent

    def union(self, names: list[str]) -> None:
        """Merge the sets of these names. The root is the first name in order, families first."""
        roots = {self.find(name) for name in names}
        new_root, *other_roots = sorted(roots, key=lambda name: ("family" not in name, name))
        for other in other_roots:
            self._parents[other] = new_root


def grouping_keys(row: Row) -> list[str]:
    """Return the keys by which a sequence is grouped with others, at least one."""
    names = {name: value for name, value in row.items() if value not in MISSING_NAMES}
    genus = names.get("genus")
    if row["label"] == "viral":
        ranks = ("family", "cluster", "genome_group", "genus")
        keys = [f"{rank} {names[rank]}" for rank in ranks if rank in names]
    else:
        keys = [f"genus {SAME_GENUS.get(genus, genus)}"] if genus else []
        if row["kind"] == "bacteria" and "family" in names:
            keys.append(f"family {names['family']}")
    return keys or [f"file {row['source_path']}"]


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
    groups = UnionFind()
    for _, row in rows:
        groups.union(grouping_keys(row))
    members: dict[str, list[tuple[Path, Row]]] = defaultdict(list)
    for path, row in rows:
        members[groups.find(grouping_keys(row)[0])].append((path, row))
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    for group, sequences in sorted(members.items()):
        for path, row in sequences:
            kingdom = kingdom_of(row)
            weight = 2.0 if kingdom in DOUBLE_WEIGHT_KINGDOMS else 1.0
            cells = (path, row["id"], LABELS[row["label"]], group, weight, kingdom)
            sys.stdout.write("\t".join(map(str, cells)) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main([Path(path) for path in sys.argv[1:]])
