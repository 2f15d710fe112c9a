"""Name a virus lineage by the k-mers that it shares with known viruses.

Each k-mer in the index of known viruses (``known``) has the lowest common taxon of all viruses with
this k-mer. A virus gets the lowest taxon with enough k-mers, both in number and as a share of those
that distinguish taxa at this rank. The latter include k-mers from unclassified viruses.

The names, genome types and host sources come from ICTV's Virus Metadata Resource, in
``embedded/lineage.json``. ``scripts/weights/build_lineages.py`` writes this file, and
``scripts/weights/measure_lineages.py`` measures the names and their thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, open_regular_file, parse_json
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.numeric import FloatArray, IntArray
from virnucpro.viral.known import KnownIndex, NodeHits, Nodes
from virnucpro.viral.windows import Windows

FORMAT = 1
RANKS = ("realm", "kingdom", "phylum", "class", "order", "family", "genus")
FAMILY = RANKS.index("family")
SEGMENTED = "segmented"  # instead of a rank: genomes in the taxon have several molecules


class Limits(NamedTuple):
    """The evidence that a taxon needs to be named."""

    min_kmers: int  # k-mers from the taxon
    min_share: float  # share of the k-mers that distinguish taxa at the rank
    kmers_per_hit: int = 1_200  # a long sequence needs one k-mer from the taxon for so many


# chosen on validation species by ``measure_lineages.py``
LIMITS = Limits(min_kmers=3, min_share=0.8)
# most viruses without a family have no cluster
CLUSTER_LIMITS = Limits(min_kmers=3, min_share=0.7, kmers_per_hit=400)


class Support(NamedTuple):
    """The evidence for a taxon or cluster in each record, in columns, (n_records,)."""

    n_hits: IntArray
    share: FloatArray  # among the hits that distinguish it from others at its rank


class Taxon(NamedTuple):
    """A taxon from ICTV."""

    lineage: tuple[str, ...]  # names from the realm down. A rank without a name in ICTV is empty
    genome_type: str  # for nearly all isolates, such as "ssRNA(+)", else empty
    host_source: str  # such as "plants", or "soil (S)" for an environment, else empty
    genome_length: int = 0  # bases, the median over species. 0: unknown, or species differ too much
    length_basis: str = ""  # rank of the taxon with this length, or SEGMENTED

    @property
    def taxonomy(self) -> str:
        """Return the names from the root to the family, with empty fields for unnamed ranks.

        The root precedes the realm, as geNomad writes it.

        >>> Taxon(("Ribozyviria", "", "", "", "", "Kolmioviridae", "Deltavirus"), "", "").taxonomy
        'Viruses;Ribozyviria;;;;;Kolmioviridae'
        """
        n_ranks = FAMILY + 1
        names = (*self.lineage, *[""] * n_ranks)[:n_ranks]
        return ";".join(("Viruses", *names)) if self.lineage else ""

    @property
    def family(self) -> str:
        """Return the family, or an empty string if it has no name."""
        return (*self.lineage, *[""] * len(RANKS))[FAMILY]

    @property
    def genus(self) -> str:
        return self.lineage[-1] if len(self.lineage) == len(RANKS) else ""


class Relative(NamedTuple):
    """The taxon of a virus, and its closest family or cluster."""

    taxon: Taxon  # the lowest with enough evidence
    n_taxon_kmers: int  # k-mers from this taxon
    family: str  # family, or else cluster. Empty: neither
    family_kmers: int
    family_share: float


@dataclass(frozen=True, eq=False)
class Lineages:
    """The taxa that VirNucPro can name."""

    release: str  # ICTV taxonomy
    taxa: tuple[Taxon, ...]  # the first one has no name
    # the ancestor of each taxon at each rank, (n_taxa, n_ranks), or 0
    ancestors: NDArray[np.int64]
    sha256: str = ""

    def find_taxon(self, name: str) -> Taxon:
        """Return the taxon with this name.

        Raises:
            LookupError: there is none.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Taxon]:
        return {taxon.lineage[-1]: taxon for taxon in self.taxa if taxon.lineage}

    def name(
        self, hits: NodeHits, n_kmers: IntArray, nodes: Nodes, limits: Limits = LIMITS
    ) -> IntArray:
        """Return the lowest taxon that each record's k-mers support, or 0.

        Args:
            hits: of the records, by node.
            n_kmers: (n_records,) k-mers that were looked up.
            nodes: the taxa and depths behind the node numbers.
            limits: the evidence that a name needs.
        """
        named = np.zeros(len(n_kmers), dtype=np.int64)
        taxon = nodes.taxa[hits.node].astype(np.int64)
        depth = nodes.depths[hits.node]
        for rank in reversed(range(len(RANKS))):
            distinguishes = depth > rank
            record = hits.record[distinguishes]
            n_hits = hits.n_hits[distinguishes]
            total = np.bincount(record, n_hits, minlength=len(n_kmers))
            keys = record * len(self.taxa) + self.ancestors[taxon[distinguishes], rank]
            pairs, pair_index = np.unique(keys, return_inverse=True)
            support = np.bincount(pair_index, n_hits, minlength=len(pairs))
            record_index, candidate = np.divmod(pairs, len(self.taxa))
            needed = np.maximum(limits.min_kmers, n_kmers[record_index] / limits.kmers_per_hit)
            is_named = (candidate > 0) & (named[record_index] == 0) & (support >= needed)
            is_named &= support >= limits.min_share * total[record_index]
            named[record_index[is_named]] = candidate[is_named]
        return named

    def support(self, hits: NodeHits, nodes: Nodes, taxa: IntArray) -> Support:
        """Return the evidence for one taxon in each record, 0 without a taxon. (n_records,)"""
        record_taxa = taxa[hits.record]
        rank = self._ranks[record_taxa]
        distinguishes = (record_taxa > 0) & (nodes.depths[hits.node] > rank)
        is_inside = distinguishes & (self.ancestors[nodes.taxa[hits.node], rank] == record_taxa)
        n_hits, total = (
            np.bincount(hits.record[chosen], hits.n_hits[chosen], minlength=len(taxa))
            for chosen in (is_inside, distinguishes)
        )
        return Support(n_hits.astype(np.int64), n_hits / np.maximum(1, total))

    @cached_property
    def _ranks(self) -> IntArray:
        """Return the rank of each taxon: an index in ``RANKS``. (n_taxa,)"""
        return np.array([max(0, len(taxon.lineage) - 1) for taxon in self.taxa])


def find_relatives(pieces: Windows) -> list[Relative]:
    """Return each sequence's taxon and closest family or cluster, from the built-in index.

    Raises:
        UnavailableError: a package file is missing, damaged, or does not match the others.
    """
    index = KnownIndex.load_builtin()
    lineages = load_builtin_lineages()
    hits, n_kmers = index.count_nodes(pieces)
    taxa = lineages.name(hits, n_kmers, index.nodes)
    families = lineages.ancestors[taxa, FAMILY]
    taxon_support = lineages.support(hits, index.nodes, taxa)
    family_support = lineages.support(hits, index.nodes, families)
    clusters, cluster_support = name_clusters(hits, n_kmers, index.nodes, index.owners)
    relatives = []
    for record, (taxon, family) in enumerate(zip(taxa.tolist(), families.tolist(), strict=True)):
        support = family_support if family else cluster_support
        relatives.append(
            Relative(
                taxon=lineages.taxa[taxon],
                n_taxon_kmers=int(taxon_support.n_hits[record]),
                family=lineages.taxa[family].family or clusters[record],
                family_kmers=int(support.n_hits[record]),
                family_share=float(support.share[record]),
            )
        )
    return relatives


def name_clusters(
    hits: NodeHits, n_kmers: IntArray, nodes: Nodes, owners: Sequence[str]
) -> tuple[list[str], Support]:
    """Return the cluster that owns most k-mers in each record, or an empty string.

    Args:
        hits: of the records, by node.
        n_kmers: (n_records,) k-mers that were looked up.
        nodes: the owners behind the node numbers.
        owners: names of families and clusters.
    """
    n_records = len(n_kmers)
    n_owners = len(owners)
    total = np.bincount(hits.record, hits.n_hits, minlength=n_records)
    keys = hits.record * n_owners + nodes.owners[hits.node]
    pairs, pair_index = np.unique(keys, return_inverse=True)
    n_hits = np.bincount(pair_index, hits.n_hits, minlength=len(pairs)).astype(np.int64)
    record, owner = np.divmod(pairs, n_owners)
    is_cluster = np.array(
        [owners[number].startswith("cluster:") for number in owner.tolist()], bool
    )
    limits = CLUSTER_LIMITS
    needed = np.maximum(limits.min_kmers, n_kmers[record] / limits.kmers_per_hit)
    is_named = is_cluster & (n_hits >= needed)
    is_named &= n_hits >= limits.min_share * total[record]  # at most one per record
    names = [""] * n_records
    counts = np.zeros(n_records, dtype=np.int64)
    counts[record[is_named]] = n_hits[is_named]
    record_and_owner = zip(record[is_named].tolist(), owner[is_named].tolist(), strict=True)
    for record_index, number in record_and_owner:
        names[record_index] = owners[number]
    return names, Support(counts, counts / np.maximum(1, total))


@cache
def load_builtin_lineages() -> Lineages:
    """Return the built-in lineages, which each process reads once.

    Raises:
        UnavailableError: as ``load_lineages``, or they do not match the index.
    """
    path = EMBEDDED_FOLDER / "lineage.json"
    lineages = load_lineages(path)
    if lineages.sha256 != KnownIndex.load_builtin().lineages_sha256:
        raise UnavailableError(
            f"{printable(path)} does not belong to the index of known viruses",
            hint="reinstall VirNucPro: both files are part of it",
        )
    return lineages


def load_lineages(path: Path) -> Lineages:
    """Read lineages from their JSON file.

    Raises:
        UnavailableError: the file is missing, damaged, or in another format.
    """
    try:
        with open_regular_file(path) as handle:
            content = handle.read()
        facts = parse_json(content)
        if facts["format"] != FORMAT or facts["ranks"] != list(RANKS):
            raise ValueError(f"its format is {facts['format']}")
        taxa, ancestors = _expand(facts["taxa"])
        return Lineages(str(facts["release"]), taxa, ancestors, sha256(content).hexdigest())
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not the table of lineages: {printable(error)}",
            hint="reinstall VirNucPro: this file is part of it",
        ) from error


def _expand(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Taxon, ...], NDArray[np.int64]]:
    """Return the taxa, and the ancestor of each at each rank, from rows that name their parents.

    A row contains the parent's index, which precedes it, the rank, the name, and the other
    fields of ``Taxon``.
    """
    taxa = [Taxon((), "", "")]
    ancestors = [[0] * len(RANKS)]
    for number, (parent, rank, name, genome_type, host_source, n_bases, basis) in enumerate(
        rows, 1
    ):
        if not 0 <= parent < number:
            raise ValueError(f"the parent of taxon {number} is {parent}")
        depth = RANKS.index(rank)
        parent_lineage = taxa[parent].lineage
        n_unnamed = depth - len(parent_lineage)
        lineage = (*parent_lineage, *[""] * n_unnamed, str(name))
        taxa.append(Taxon(lineage, str(genome_type), str(host_source), int(n_bases), str(basis)))
        ancestors.append(ancestors[parent].copy())
        ancestors[number][depth] = number
    return tuple(taxa), np.array(ancestors, dtype=np.int64)
