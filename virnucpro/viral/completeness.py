"""Estimate how complete a viral genome is from the typical genome length in its taxon.

``scripts/weights/build_lineages.py`` finds the typical lengths, and
``scripts/weights/measure_completeness.py`` measures the estimates.
"""

from __future__ import annotations

from typing import NamedTuple

from virnucpro.viral.lineage import SEGMENTED, Taxon

CLOSED = ("DTR", "ITR", "circular")  # topologies that complete molecules have


class Completeness(NamedTuple):
    percent: float | None  # None: unknown
    method: str  # topology, "genus length", "family length", "segmented", or empty


def estimate_completeness(n_bases: int, topology: str, taxon: Taxon) -> Completeness:
    """Estimate how complete a viral sequence is.

    Args:
        n_bases: length of the sequence.
        topology: as in ``Identity``.
        taxon: the lowest named taxon.

    Returns:
        The percentage, at most 100, and the method. A segmented taxon's genome length says
        nothing about one segment.
    """
    percent = None
    if taxon.genome_length:
        percent = min(100.0, round(100 * n_bases / taxon.genome_length, 1))
    # Percent of typical length. Below it, terminal repeats do not indicate a complete genome: they
    # may belong to a transposon or a repeated segment.
    min_percent_of_closed = 50.0
    if topology in CLOSED and (percent is None or percent >= min_percent_of_closed):
        return Completeness(100.0, topology)
    if taxon.length_basis == SEGMENTED:
        return Completeness(None, SEGMENTED)
    return Completeness(percent, f"{taxon.length_basis} length" if percent is not None else "")
