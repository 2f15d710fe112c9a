"""Turn the catalogue of labelled sequences into a manifest for ``virnucpro train``.

    python scripts/weights/embedded_manifest.py CATALOGUE.tsv.gz > manifest.tsv

The catalogue has a row for each sequence (id, file, label, kind, family, genus, cluster, ...) and
is in the folder of its FASTA files. The groups are families of viruses (clusters of related
genomes for viruses without a family), families of bacteria, and genera of all other cells, of which
there are few. Sequences that are neither clearly viral nor clearly cellular are left out.
"""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path

COLUMNS = ("path", "id", "label", "group", "weight", "kingdom")
LABELS = {"viral": "virus", "cellular": "other"}
KINGDOMS = {
    "phage": "phages",
    "archaeal_virus": "archaeal viruses",
    "euk_ssRNA_+": "RNA+ viruses",
    "euk_ssRNA_-": "RNA- viruses",
    "euk_ssRNA_+_-": "RNA- viruses",
    "euk_dsRNA": "dsRNA viruses",
    "euk_dsDNA": "DNA viruses",
    "euk_ssDNA": "DNA viruses",
    "euk_ssDNA_+_-": "DNA viruses",
    "euk_dsDNA-RT": "reverse-transcribing viruses",
    "euk_ssRNA-RT": "reverse-transcribing viruses",
    "bacteria": "bacteria",
    "archaea": "archaea",
    "organelle": "organelles",
}
REST = "eukaryotes"
SAME_GENUS = {
    "hg38.fa": "Homo",
    "Homo? (Augustus tutorial)": "Homo",
    "BRAKER example": "Arabidopsis",
}
# kinds with few sequences, most easily mistaken for viruses: they count more
RARE = {"eukaryote": 2.0, "archaea": 2.0}  # "eukaryote" is transcripts
PLASMID_WEIGHT = 2.0


def group_of(row: dict[str, str]) -> str:
    by_genus = row["label"] == "cellular" and row["kind"] != "bacteria"
    names = ("genus",) if by_genus else ("family", "cluster", "genome_group", "genus")
    for name in (*names, "source_path"):
        if row[name] not in ("", "?"):
            return f"{name}:{SAME_GENUS.get(row[name], row[name])}"
    raise SystemExit(f"{row['id']}: nothing to group it by")


def weight_of(row: dict[str, str]) -> float:
    is_plasmid = row["label"] == "cellular" and "plasmid" in row["organism"].lower()
    return PLASMID_WEIGHT if is_plasmid else RARE.get(row["kind"], 1.0)


def main(catalogue: Path) -> None:
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    with gzip.open(catalogue, "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            if row["label"] in LABELS:
                cells = (
                    catalogue.parent.absolute() / Path(row["file"]).name,
                    row["id"],
                    LABELS[row["label"]],
                    group_of(row),
                    weight_of(row),
                    KINGDOMS.get(row["kind"], REST),
                )
                sys.stdout.write("\t".join(map(str, cells)) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
