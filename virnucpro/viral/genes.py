"""Find the genes of viruses: open reading frames with a start, and what each one resembles.

A gene scores the log-odds of its codons against the codons of other frames over the same bases,
which are learned from the sequence itself (``native/genes.c``). Its start is the most probable
start codon by the codons after it and, in phages and viruses of archaea, by the ribosome binding
site before it. ``scripts/weights/measure_genes.py`` measures the genes.

A sequence and its reverse complement have the same genes, and so has a circular record that was cut
open elsewhere. Spliced genes and frameshifts are not assembled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.open_codes import N_CODES, Digits, encode, genetic_code
from virnucpro.viral.known import MIN_FAMILY_HITS, MIN_FAMILY_SHARE, KnownIndex
from virnucpro.viral.networks import Scorer
from virnucpro.viral.proteins import SHORTEST, Proteins
from virnucpro.viral.scoring import score_proteins
from virnucpro.viral.types import Genes
from virnucpro.viral.windows import (
    CanonicalView,
    Windows,
    find_reversed,
    is_stop,
    opposite_strand,
    residue_letters,
)

# kinds of starts, as in ``native/genes.c``
_START_CODONS = ("ATG", "GTG", "TTG")
_EDGE = len(_START_CODONS)


class _Views(NamedTuple):
    """The canonical view of each virus, as digits. A gene may cross the origin of a circle, which
    is read twice.
    """

    pieces: Windows
    n_bases: IntArray  # (n_viruses,) in the virus
    is_circle: BoolArray  # (n_viruses,)
    is_reverse: BoolArray  # (n_viruses,)
    first: IntArray  # (n_viruses,) base on the strand of the view at which it begins

    @classmethod
    def from_sequences(cls, viruses: Sequence[str], are_circles: Sequence[bool]) -> _Views:
        forward = Windows.from_sequences(viruses)
        is_circle = np.array(are_circles, dtype=np.bool_) & (forward.lengths > 0)
        is_reverse = np.array(find_reversed(forward), dtype=np.bool_)
        first = np.zeros(len(viruses), dtype=np.int64)
        ends = forward.starts + forward.lengths
        digits = list(map(forward.digits.__getitem__, map(slice, forward.starts, ends)))
        for index in np.flatnonzero(is_reverse & ~is_circle).tolist():
            digits[index] = opposite_strand(digits[index])
        for index in np.flatnonzero(is_circle).tolist():
            view = CanonicalView.from_record(viruses[index], is_circle=True)
            digits[index] = np.tile(encode(view.sequence), 2)
            is_reverse[index] = view.is_reverse
            first[index] = view.first
        lengths = np.where(is_circle, 2, 1) * forward.lengths
        row = np.concatenate([np.empty(0, dtype=np.uint8), *digits])
        pieces = Windows.concatenate(row, lengths)
        return cls(pieces, forward.lengths, is_circle, is_reverse, first)


class _Candidates(NamedTuple):
    """Genes in the canonical views, in columns, view by view. (n,)"""

    virus: IntArray
    strand: IntArray  # 0 forward, 1 reverse
    left: IntArray
    right: IntArray
    start_kind: IntArray
    lacks_end: IntArray
    score: FloatArray

    def take(self, chosen: BoolArray | IntArray) -> _Candidates:
        return _Candidates._make(column[chosen] for column in self)


def find_genes(
    viruses: Sequence[str],
    are_circles: Sequence[bool],
    groups: Sequence[str],
    code: GeneticCode = STANDARD,
) -> Genes:
    """Find the genes in each viral sequence, in order of their first base.

    Args:
        groups: as in ``Identity``.
    """
    views = _Views.from_sequences(viruses, are_circles)
    prokaryotic_groups = ("phage", "archaeal virus")  # whose ribosomes bind before a start
    has_sites = np.array([group in prokaryotic_groups for group in groups], dtype=np.uint8)
    candidates = _cut_circles(_find_in_views(views.pieces, has_sites, code), views)
    first, end, is_reverse = _place_genes(candidates, views)
    order = np.lexsort((end, first, candidates.virus))
    candidates = candidates.take(order)
    proteins = _translate(views.pieces, candidates, code)
    start_codons = [*_START_CODONS, ""]
    return Genes(
        np.bincount(candidates.virus, minlength=len(viruses)),
        first[order],
        end[order],
        is_reverse[order],
        candidates.start_kind == _EDGE,
        candidates.lacks_end == 1,
        [start_codons[kind] for kind in candidates.start_kind.tolist()],
        proteins,
        candidates.score,
        _log_odds(proteins),
        *_known_kmers(proteins),
    )


def _find_in_views(pieces: Windows, has_sites: Digits, code: GeneticCode) -> _Candidates:
    n_genes = np.zeros(len(pieces), dtype=np.int64)
    bases_per_gene = 30  # fewer than a gene adds to the one before it
    most = int((pieces.lengths // bases_per_gene + 2).sum())
    rows = np.empty((most, len(_Candidates._fields) - 2), dtype=np.int64)
    scores = np.empty(most)
    shortest_gene = 30  # codons without the stop; a third less at an end of the sequence
    tables = is_stop(code), _start_kinds(code), has_sites
    call("find_genes", *pieces.arguments(code), *tables, shortest_gene, n_genes, rows, scores)
    virus = np.repeat(np.arange(len(pieces)), n_genes)
    return _Candidates._make([virus, *rows[: len(virus)].T, scores[: len(virus)]])


@cache
def _start_kinds(code: GeneticCode) -> Digits:
    """Return the kind of each codon as a start, without and with binding sites. (2, 125)"""
    kinds = np.full((2, N_CODES), _EDGE, dtype=np.uint8)
    kinds[:, genetic_code(_START_CODONS[0])] = 0
    prokaryotic_codes = (1, 4, 11, 15, 25)  # 1: bacterial records are often read with it
    if code.number in prokaryotic_codes:
        for number, codon in enumerate(_START_CODONS):
            kinds[1, genetic_code(codon)] = number
    return kinds


def _cut_circles(candidates: _Candidates, views: _Views) -> _Candidates:
    """Return the genes in circles from those in their sequence read twice.

    The middle is used, where no end is near. If the first gene and the last one overlap there, the
    better one is kept.
    """
    is_circular = views.is_circle[candidates.virus]
    n_bases = views.n_bases[candidates.virus]
    middle = n_bases // 2
    is_inside = (candidates.left >= middle) & (candidates.left < middle + n_bases)
    is_complete = (candidates.start_kind != _EDGE) & (candidates.lacks_end == 0)
    is_short = candidates.right - candidates.left <= n_bases
    inside = candidates.take(~is_circular | is_inside & is_complete & is_short)
    is_kept = np.ones(len(inside.virus), dtype=np.bool_)
    max_overlap = 60  # bases, as in ``native/genes.c``
    for virus in np.flatnonzero(views.is_circle).tolist():
        first, end = np.searchsorted(inside.virus, [virus, virus + 1]).tolist()
        last = end - 1
        if last <= first:
            continue
        overlap = inside.right[last] - inside.left[first] - views.n_bases[virus]
        if overlap > max_overlap:
            is_first_better = inside.score[first] >= inside.score[last]
            is_kept[last if is_first_better else first] = False
    return inside.take(is_kept)


def _place_genes(candidates: _Candidates, views: _Views) -> tuple[IntArray, IntArray, BoolArray]:
    """Return first base, end and strand of each gene in its virus. (n,), (n,), (n,)"""
    n_bases = views.n_bases[candidates.virus]
    first = views.first[candidates.virus]
    is_turned = views.is_reverse[candidates.virus]
    start = (
        np.where(is_turned, n_bases - candidates.right - first, candidates.left + first) % n_bases
    )
    return start, start + candidates.right - candidates.left, (candidates.strand == 1) != is_turned


def _translate(pieces: Windows, candidates: _Candidates, code: GeneticCode) -> list[str]:
    """Translate genes without their stop. A start codon is M."""
    starts = pieces.starts[candidates.virus]
    left = starts + candidates.left
    right = starts + candidates.right
    columns = (candidates.strand, left, right, candidates.start_kind, candidates.lacks_end)
    n_residues = (right - left) // 3 - (candidates.lacks_end == 0)
    letters = np.empty(int(n_residues.sum()), dtype=np.uint8)
    tables = np.stack(columns, axis=1), len(left), np.frombuffer(residue_letters(code), np.uint8)
    call("translate_genes", pieces.codon_codes(code), *tables, letters)
    text = letters.tobytes().decode("ascii")
    ends = accumulate(n_residues.tolist(), initial=0)
    return [text[first:end] for first, end in pairwise(ends)]


def _log_odds(proteins: Sequence[str]) -> FloatArray:
    """Return the log-odds of each protein, NaN if it is too short or has no known residue. (n,)"""
    unique = dict.fromkeys(protein for protein in proteins if len(protein) >= SHORTEST)
    scores = score_proteins(unique, Scorer.load_builtin()).tolist()
    log_odds = dict(zip(unique, scores, strict=True))
    return np.array([log_odds.get(protein, np.nan) for protein in proteins], dtype=np.float64)


def _known_kmers(proteins: Sequence[str]) -> tuple[IntArray, list[str]]:
    """Return each protein's k-mers of known viruses, and the family of most, if there is one."""
    index = KnownIndex.load_builtin()
    hits = index.look_up_proteins(Proteins.from_sequences(proteins))
    n_viral = np.bincount(hits.record, hits.n_viral, minlength=len(proteins)).astype(np.int64)
    is_majority = hits.n_owner > MIN_FAMILY_SHARE * hits.n_viral
    has_family = (hits.n_owner >= MIN_FAMILY_HITS) & is_majority
    owners = np.zeros(len(proteins), dtype=np.int64)
    order = np.argsort(hits.n_owner, kind="stable")  # of several windows, the one with most hits
    chosen = order[has_family[order]]
    owners[hits.record[chosen]] = hits.owner[chosen]
    return n_viral, [index.owners[owner] for owner in owners.tolist()]
