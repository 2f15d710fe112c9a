"""Find the lowest common taxon of the viruses with each k-mer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ictv_taxa import Lineage, named_part
from known_kmers import (
    RATE_OF_SEVERAL,
    LabelledSequence,
    are_genomes_short,
    coding_marks,
    is_sampled,
    max_hash,
    pointer_to,
)
from numpy.typing import NDArray

from virnucpro.core.numeric import BoolArray, IntArray
from virnucpro.viral.features import RESIDUE_BY_CODON
from virnucpro.viral.lineage import RANKS


@dataclass(frozen=True, slots=True, eq=False)
class KmerPairs:
    """K-mers and the viruses that have them in coding stretches, in order of k-mers, (n,)."""

    hashes: NDArray[np.uint64]
    virus: IntArray
    is_short: BoolArray  # of a virus with a short genome

    @classmethod
    def from_viruses(cls, viruses: Sequence[LabelledSequence], library: ctypes.CDLL) -> KmerPairs:
        blocks = []
        for number, marks in coding_marks(viruses, range(len(viruses))):
            hashes = _coding_kmers(library, viruses[number], marks)
            blocks.append((hashes, np.full(len(hashes), number)))
        hashes, virus = map(np.concatenate, zip(*blocks, strict=True))
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], virus[order], np.array(are_genomes_short(viruses))[virus[order]])


def _coding_kmers(
    library: ctypes.CDLL, virus: LabelledSequence, marks: NDArray[np.uint8]
) -> NDArray[np.uint64]:
    hashes = np.empty(2 * len(virus.digits) + 1, dtype=np.uint64)
    n_kmers = np.zeros(1, dtype=np.int64)
    library.list_coding_kmers(
        *(pointer_to(virus.digits), ctypes.c_int64(len(virus.digits)), pointer_to(marks)),
        *(pointer_to(RESIDUE_BY_CODON), ctypes.c_uint64(max_hash(RATE_OF_SEVERAL))),
        *(pointer_to(hashes), pointer_to(n_kmers)),
    )
    return np.unique(hashes[: n_kmers[0]])


@dataclass(frozen=True, slots=True, eq=False)
class TaxonCodes:
    """The lineages of viruses as integer codes.

    A code is that of a lineage down to a rank, also if it ends with an unknown name.
    """

    codes: IntArray  # (n_viruses, n_ranks)
    taxa: IntArray  # (n_codes,) the lowest named taxon: index in ``Lineages.taxa``
    depths: IntArray  # (n_codes,) as in ``known.Nodes``

    @classmethod
    def from_lineages(
        cls, lineages: Sequence[Lineage], numbers: Mapping[Lineage, int]
    ) -> TaxonCodes:
        number_by_part: dict[Lineage, int] = {(): 0}
        codes = [
            [
                number_by_part.setdefault(lineage[: rank + 1], len(number_by_part))
                for rank in range(len(RANKS))
            ]
            for lineage in lineages
        ]
        taxa = [numbers.get(named_part(part), 0) for part in number_by_part]
        depths = [len(_without_empty_end(part)) for part in number_by_part]
        return cls(np.array(codes), np.array(taxa), np.array(depths))


def _without_empty_end(part: Lineage) -> Lineage:
    while part and not part[-1]:
        part = part[:-1]
    return part


@dataclass(frozen=True, slots=True, eq=False)
class CommonTaxa:
    """The lowest common taxa of the viruses with each k-mer, in order of k-mers, (n_kmers,)."""

    hashes: NDArray[np.uint64]
    taxa: IntArray
    depths: IntArray

    @classmethod
    def from_pairs(
        cls, pairs: KmerPairs, is_indexed: BoolArray, species: IntArray, lineages: TaxonCodes
    ) -> CommonTaxa:
        """Make the index of some viruses. is_indexed, species: (n_viruses,)"""
        is_chosen = is_indexed[pairs.virus]
        hashes = pairs.hashes[is_chosen]
        virus = pairs.virus[is_chosen]
        first = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
        has_several = _differ(species[virus], first)
        is_short = np.logical_or.reduceat(pairs.is_short[is_chosen], first)
        in_index = is_sampled(hashes[first], 1 + has_several.astype(np.uint8), is_short)
        code = np.zeros(len(first), dtype=np.int64)
        for rank in range(len(RANKS)):
            virus_codes = lineages.codes[virus, rank]
            code = np.where(_differ(virus_codes, first), code, virus_codes[first])
        code = code[in_index]
        return cls(hashes[first[in_index]], lineages.taxa[code], lineages.depths[code])

    def find(self, hashes: NDArray[np.uint64]) -> IntArray:
        """Return the positions of those k-mers that are in the index."""
        positions = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        is_indexed: BoolArray = self.hashes[positions] == hashes
        return np.asarray(positions[is_indexed])


def _differ(values: IntArray, first: IntArray) -> BoolArray:
    """Return whether the viruses with each k-mer have several values. first: (n_kmers,)"""
    lowest = np.minimum.reduceat(values, first)
    return np.asarray(lowest != np.maximum.reduceat(values, first))
