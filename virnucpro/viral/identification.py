"""Identify each virus by its sequence: kind, family, topology, lineage and completeness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.viral.completeness import estimate_completeness
from virnucpro.viral.lineage import Relative, Taxon, find_relatives, load_builtin_lineages
from virnucpro.viral.phage_hosts import find_host_genus
from virnucpro.viral.taxonomy import group_of_taxon, load_builtin_groups, topologies
from virnucpro.viral.types import Identity
from virnucpro.viral.windows import Windows

TAILED_CLASS = "Caudoviricetes"


def load_tables() -> None:
    """Read the built-in tables that identify viruses, to detect damage early.

    Raises:
        UnavailableError: a table is missing or damaged.
    """
    load_builtin_groups()
    load_builtin_lineages()


def identify_viruses(
    viruses: Sequence[str],
    are_circles: Sequence[bool | None] | None = None,
    code: GeneticCode = STANDARD,
) -> list[Identity]:
    """Identify each viral sequence. Without a known base, its identity is empty.

    In ``are_circles``, None marks a region, which has no topology.
    """
    return list(_identities(viruses, are_circles, code))


def _identities(
    viruses: Sequence[str], are_circles: Sequence[bool | None] | None, code: GeneticCode
) -> Iterator[Identity]:
    sequences = Windows.from_sequences(viruses)
    relatives = find_relatives(sequences)
    groups = _find_groups(sequences, relatives, code)
    ends = topologies(sequences, are_circles or [None] * len(viruses))
    for bases, relative, group, end in zip(viruses, relatives, groups, ends, strict=True):
        if not group[0]:
            yield Identity()
            continue
        share = round(relative.family_share, 3) if relative.family else None
        identity = Identity(*group, relative.family, relative.family_kmers, share, *end)
        taxon = relative.taxon
        named = taxon if taxon.lineage else tailed_phage_class(identity, len(bases))
        completeness = estimate_completeness(len(bases), identity.topology, named)
        yield identity._replace(
            taxonomy=named.taxonomy,
            genus=named.genus,
            genome_type=named.genome_type,
            host_source=named.host_source,
            host_genus=find_host_genus(named),
            completeness=completeness.percent,
            completeness_method=completeness.method,
        )


def _find_groups(
    sequences: Windows, relatives: Sequence[Relative], code: GeneticCode
) -> list[tuple[str, float | None]]:
    """Return the group of each virus and its probability, empty without a known base."""
    predictor = load_builtin_groups()
    groups: list[tuple[str, float | None]] = [
        (group_of_taxon(relative.taxon), predictor.certainty(relative.n_taxon_kmers))
        for relative in relatives
    ]
    others = [index for index, (group, _) in enumerate(groups) if not group]
    unnamed = sequences.select(sequences.starts[others], sequences.lengths[others])
    for index, group in zip(others, predictor.predict(unnamed, code), strict=True):
        groups[index] = group
    return groups


def tailed_phage_class(identity: Identity, n_bases: int) -> Taxon:
    """Return the class of a virus without a named taxon, if its kind and length match it."""
    # ``measure_tailed_phages.py`` measures the precision at these limits.
    min_probability = 0.95
    min_bases = 15_000
    is_tailed = (
        identity.group == "phage"
        and (identity.group_probability or 0) >= min_probability
        and n_bases >= min_bases
    )
    lineages = load_builtin_lineages()
    return lineages.find_taxon(TAILED_CLASS) if is_tailed else lineages.taxa[0]
