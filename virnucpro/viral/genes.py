"""Find the genes of viruses: open reading frames with a start, and what each one resembles.

A gene scores the log-odds of its codons against the codons of other frames over the same bases,
which are learned from the sequence itself (``native/genes.c``). Its start is the most probable
start codon by the codons after it and, in phages and viruses of archaea, by the ribosome binding
site before it. ``scripts/weights/measure_genes.py`` measures the genes.

A sequence and its reverse complement have the same genes, and so has a circular record that was cut
open elsewhere. Spliced genes and frameshifts are not assembled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from math import isnan
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.types import reverse_complement
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.open_codes import N_CODES, Digits, genetic_code
from virnucpro.viral.known import FEWEST_OF_FAMILY, LEAST_SHARE, KnownIndex
from virnucpro.viral.networks import Scorer
from virnucpro.viral.proteins import SHORTEST, Proteins
from virnucpro.viral.scoring import score_proteins
from virnucpro.viral.types import Gene, Partial
from virnucpro.viral.windows import (
    CanonicalView,
    Windows,
    codon_codes,
    find_reversed,
    is_stop,
    opposite_strand,
    residue_letters,
)

SHORTEST_GENE = 30  # codons without the stop; a third less at an end of the sequence


class _Columns(NamedTuple):
    """Genes in a sequence, in columns, (n,)."""

    strand: IntArray  # 0 forward, 1 reverse
    left: IntArray
    right: IntArray
    lacks_start: IntArray
    lacks_end: IntArray
    score: FloatArray

    def take(self, chosen: BoolArray | slice) -> _Columns:
        return _Columns._make(column[chosen] for column in self)


def find_genes(
    viruses: Sequence[str],
    are_circles: Sequence[bool],
    groups: Sequence[str],
    code: GeneticCode = STANDARD,
) -> list[tuple[Gene, ...]]:
    """Find the genes in each viral sequence, in order of their first base.

    Args:
        groups: as in ``Identity``.
    """
    are_reverse = find_reversed(Windows.from_sequences(viruses))
    views = [
        CanonicalView.from_record(sequence, is_circle=True)
        if is_circle and sequence
        else CanonicalView.from_linear(sequence, is_reverse=is_reverse)
        for sequence, is_circle, is_reverse in zip(viruses, are_circles, are_reverse, strict=True)
    ]
    prokaryotic_groups = ("phage", "archaeal virus")  # whose ribosomes bind before a start
    has_sites = np.array([group in prokaryotic_groups for group in groups], dtype=np.uint8)
    # a gene may cross the origin of a circle, which is read twice
    pieces = Windows.from_sequences([view.sequence * (1 + view.is_circle) for view in views])
    n_genes, columns = _find_columns(pieces, has_sites, code)
    gene_ends = np.cumsum(n_genes)
    genes: list[list[Gene]] = [[] for _ in views]
    for place in np.flatnonzero(n_genes).tolist():
        view = views[place]
        own = columns.take(slice(gene_ends[place] - n_genes[place], gene_ends[place]))
        if view.is_circle:
            own = _cut_circle(own, len(view.sequence))
        first = pieces.starts[place]
        digits = pieces.digits[first : first + pieces.lengths[place]]
        genes[place] = list(_place_genes(view, own, _translate(digits, own, code)))
    return _add_evidence(genes)


def _find_columns(
    pieces: Windows, has_sites: Digits, code: GeneticCode
) -> tuple[IntArray, _Columns]:
    """Return the number of genes in each piece, (n_pieces,), and the genes, piece by piece."""
    n_genes = np.zeros(len(pieces), dtype=np.int64)
    bases_per_gene = 30  # fewer than a gene adds to the one before it
    most = int((pieces.lengths // bases_per_gene + 2).sum())
    rows = np.empty((most, len(_Columns._fields) - 1), dtype=np.int64)
    scores = np.empty(most)
    tables = is_stop(code), _start_kinds(code), has_sites
    call("find_genes", *pieces.arguments(code), *tables, SHORTEST_GENE, n_genes, rows, scores)
    total = int(n_genes.sum())
    return n_genes, _Columns._make([*rows[:total].T.copy(), scores[:total]])


@cache
def _start_kinds(code: GeneticCode) -> Digits:
    """Return the kind of each codon as a start, without and with binding sites. (2, 125)"""
    start_codons = ("ATG", "GTG", "TTG")  # as in ``native/genes.c``
    kinds = np.full((2, N_CODES), len(start_codons), dtype=np.uint8)
    kinds[:, genetic_code(start_codons[0])] = 0
    prokaryotic_codes = (1, 4, 11, 15, 25)  # 1: bacterial records are often read with it
    if code.number in prokaryotic_codes:
        for number, codon in enumerate(start_codons):
            kinds[1, genetic_code(codon)] = number
    return kinds


def _cut_circle(columns: _Columns, n_bases: int) -> _Columns:
    """Return the genes in a circle from those in its sequence read twice.

    The middle is used, where no end is near. If the first gene and the last one overlap there, the
    better one is kept.
    """
    first = n_bases // 2
    is_inside = (columns.left >= first) & (columns.left < first + n_bases)
    is_complete = (columns.lacks_start | columns.lacks_end) == 0
    inside = columns.take(is_inside & is_complete & (columns.right - columns.left <= n_bases))
    max_overlap = 60  # bases, as in ``native/genes.c``
    if len(inside.left) < 2 or inside.right[-1] - max_overlap <= inside.left[0] + n_bases:
        return inside
    is_first_better = inside.score[0] >= inside.score[-1]
    return inside.take(slice(0, -1) if is_first_better else slice(1, None))


def _translate(digits: Digits, columns: _Columns, code: GeneticCode) -> list[str]:
    """Translate genes without their stop. A start codon is M."""
    if not len(columns.left):
        return []
    letters = residue_letters(code)
    strands = [codon_codes(one).tobytes() for one in (digits, opposite_strand(digits))]
    is_reverse = columns.strand == 1
    starts = np.where(is_reverse, len(digits) - columns.right, columns.left)
    ends = starts + columns.right - columns.left - np.where(columns.lacks_end, 0, 3)
    rows = (columns.strand.tolist(), starts.tolist(), ends.tolist(), columns.lacks_start.tolist())
    proteins = []
    for strand, start, end, lacks_start in zip(*rows, strict=True):
        protein = strands[strand][start:end:3].translate(letters).decode("ascii")
        proteins.append(protein if lacks_start else "M" + protein[1:])
    return proteins


def _place_genes(view: CanonicalView, columns: _Columns, proteins: Sequence[str]) -> Iterator[Gene]:
    """Convert the genes in the canonical view to genes in the sequence, by their first base."""
    n_bases = len(view.sequence)
    text = view.sequence * (1 + view.is_circle)
    genes = []
    rows = zip(*(column.tolist() for column in columns), proteins, strict=True)
    partials: tuple[tuple[Partial, Partial], ...] = (("", "end"), ("start", "both"))
    for strand, left, right, lacks_start, lacks_end, score, protein in rows:
        codon = reverse_complement(text[right - 3 : right]) if strand else text[left : left + 3]
        start = n_bases - right - view.first if view.is_reverse else left + view.first
        is_forward = bool(strand) == view.is_reverse
        gene = Gene(
            start=start % n_bases,
            end=start % n_bases + right - left,
            strand="+" if is_forward else "-",
            partial=partials[lacks_start][lacks_end],
            start_codon="" if lacks_start else codon,
            protein=protein,
            coding_score=round(score, 2),
        )
        genes.append(gene)
    yield from sorted(genes, key=attrgetter("start", "end"))


def _add_evidence(genes: Sequence[Sequence[Gene]]) -> list[tuple[Gene, ...]]:
    """Add what each gene resembles: its log-odds, and k-mers of known viruses."""
    flat = list(chain.from_iterable(genes))
    proteins = dict.fromkeys(gene.protein for gene in flat if len(gene.protein) >= SHORTEST)
    scores = score_proteins(proteins, Scorer.load_builtin()).tolist()
    log_odds = dict(zip(proteins, scores, strict=True))
    known = zip(flat, _known_kmers([gene.protein for gene in flat]), strict=True)
    complete = [
        gene._replace(
            log_odds=_number(log_odds.get(gene.protein)), n_known_kmers=n, known_family=family
        )
        for gene, (n, family) in known
    ]
    ends = list(accumulate(map(len, genes), initial=0))
    return [tuple(complete[first:end]) for first, end in pairwise(ends)]


def _number(value: float | None) -> float | None:
    """Round log-odds. None: the protein is too short, or has no known residue."""
    return None if value is None or isnan(value) else round(value, 2)


def _known_kmers(proteins: Sequence[str]) -> list[tuple[int, str]]:
    """Return each protein's k-mers of known viruses, and the family of most, if there is one."""
    index = KnownIndex.load_builtin()
    hits = index.look_up_proteins(Proteins.from_sequences(proteins))
    n_viral = np.bincount(hits.record, hits.n_viral, minlength=len(proteins)).astype(np.int64)
    is_most = hits.n_owner > LEAST_SHARE * hits.n_viral
    has_family = (hits.n_owner >= FEWEST_OF_FAMILY) & is_most
    owners = np.zeros(len(proteins), dtype=np.int64)
    order = np.argsort(hits.n_owner, kind="stable")  # of several windows, the one with most hits
    chosen = order[has_family[order]]
    owners[hits.record[chosen]] = hits.owner[chosen]
    names = [index.owners[owner] for owner in owners.tolist()]
    return list(zip(n_viral.tolist(), names, strict=True))
