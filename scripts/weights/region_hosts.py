"""Write a FASTA file for each genus of bacteria and archaea in catalogues of labelled sequences.

    python scripts/weights/region_hosts.py FOLDER CATALOGUE.tsv.gz ... [--without GENUS ...]

``virnucpro train --data FOLDER --regions`` reads each of these files as one host, in addition to
the chromosomes with known prophages, to model the scores of hosts by GC content. A catalogue has a
row for each sequence (id, file, label, kind, genus, length, ...) and is in the folder of its FASTA
files. A genus gets up to eight sequences of at least 10,000 bases, spread evenly over its rows.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import defaultdict
from pathlib import Path

MAX_CONTIGS = 8
MIN_BASES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("catalogues", type=Path, nargs="+")
    parser.add_argument("--without", nargs="*", default=())
    options = parser.parse_args()
    genera: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for catalogue in options.catalogues:
        with gzip.open(catalogue, "rt", encoding="utf-8") as lines:
            for row in csv.DictReader(lines, delimiter="\t"):
                is_host = row["label"] == "cellular" and row["kind"] in ("bacteria", "archaea")
                if is_host and row["genus"].isalpha() and int(row["length"]) >= MIN_BASES:
                    path = catalogue.parent / Path(row["file"]).name
                    genera[row["genus"]].append((path, row["id"]))
    chosen: dict[Path, dict[str, str]] = defaultdict(dict)
    for genus in genera.keys() - set(options.without):
        rows = sorted(genera[genus], key=lambda row: row[1])
        for number in range(min(MAX_CONTIGS, len(rows))):
            path, name = rows[number * len(rows) // min(MAX_CONTIGS, len(rows))]
            chosen[path][name] = genus
    options.folder.mkdir(parents=True, exist_ok=True)
    for genus in genera:
        (options.folder / f"{genus}.fa").unlink(missing_ok=True)
    for path in sorted(chosen):
        genus = ""
        with gzip.open(path, "rt", encoding="ascii") as lines:
            for line in lines:
                if line.startswith(">"):
                    genus = chosen[path].get(line[1:].split()[0], "")
                if genus:
                    with (options.folder / f"{genus}.fa").open("a", encoding="ascii") as file:
                        file.write(line)


if __name__ == "__main__":
    main()
