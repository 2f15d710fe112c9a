"""Find virus-like regions in a record from the log-odds of windows along it.

The contrast between a window's signal and its host (``provirus_features``) has a learned log-ratio
of virus over host. A two-state hidden Markov model gives the most probable path through these
(``hmm``). Where the result is virus or ambiguous, the proteins of the genes are scored, and the
path is computed again.

Genes for ribosomal proteins and RNA polymerase have a viral composition, and genes for ribosomal
RNA have viral open reading frames. They are recognised by peptides and k-mers that occur in these
genes in all bacteria, and in no phage.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, permutations
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from virnucpro.core.logging import format_count
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray, find_runs
from virnucpro.core.types import FastaRecord, reverse_complement
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.viral.hmm import OWN_REGION_MODEL, RegionModel, corrupt_model_error, viral_path
from virnucpro.viral.host_markers import (
    RecordText,
    Repeat,
    find_host_genes,
    find_trna_ends,
    host_genes,
    open_edges,
)
from virnucpro.viral.identification import load_tables
from virnucpro.viral.known import MAX_CELLULAR_PER_VIRAL, KnownIndex
from virnucpro.viral.networks import Scorer
from virnucpro.viral.provirus_features import Genes, ReadGenes, WindowTable, median
from virnucpro.viral.types import CalledRecords, FoundRegions, Region, Track
from virnucpro.viral.windows import CanonicalView

SHORTEST_RECORD = 10_000  # bases. Shorter records are not searched
# minimum for the class prophage: bases, share of viral genes, and bases of viral genes in a block
# on one strand
_SHORTEST_PROPHAGE = 18_000


class ViralRun(NamedTuple):
    """Neighbouring viral items, and the bases between the midpoints to the items around them."""

    first: int
    end: int  # one past the last item
    start_base: int
    end_base: int

    def overlaps(self, others: Sequence[ViralRun]) -> bool:
        """Return whether it shares a base with any of the others."""
        return any(
            self.start_base < one.end_base and one.start_base < self.end_base for one in others
        )


@dataclass(frozen=True, slots=True, eq=False)
class ProvirusFinder:
    """Find regions, one record at a time."""

    _NOTE = re.compile(r"(^|; )\d+ virus-like regions?$")  # as ``add_detected`` writes it

    scorer: Scorer
    model: RegionModel
    code: GeneticCode = STANDARD
    min_posterior: float = 0.0  # lowest posterior at which a provirus counts as a virus

    @property
    def digest(self) -> str:
        """Hash everything that determines the regions."""
        parts = (self.scorer.sha256, self.model, self.code)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def add_regions(self, results: CalledRecords, place: int) -> None:
        """Find the regions in a record that is long and has a score. The note counts them."""
        record = results.records.record_at(place)
        calls = results.calls
        if calls.statuses[place] == "scored" and len(record.sequence) >= SHORTEST_RECORD:
            [[found]] = self.find([record], [[calls.are_viruses[place]]])
            self.add_detected(results, place, found)

    def add_detected(self, results: CalledRecords, place: int, found: FoundRegions) -> None:
        """Store the regions of a record, each judged by the threshold. The note counts them."""
        regions = tuple(
            region._replace(
                is_virus=region.extent == "whole" or region.posterior >= self.min_posterior
            )
            for region in found[0]
        )
        results.regions[place] = regions, found[1]
        notes = [self._NOTE.sub("", results.calls.notes[place])]
        if regions and not results.calls.are_viruses[place]:
            notes.append(format_count(results.region_extents(place).total(), "virus-like region"))
        results.calls.notes[place] = "; ".join(filter(None, notes))

    def find(
        self, records: Sequence[FastaRecord], are_viruses: Sequence[Sequence[bool]]
    ) -> list[list[FoundRegions]]:
        """Return each record's virus-like regions and evidence track, for each possible call.

        A record that is called virus is one region without host flanks. Any other circular record
        is read across its origin. The regions depend neither on the record's strand nor on the
        position where a circle was cut open.
        """
        pairs = list(enumerate(zip(records, are_viruses, strict=True)))
        keys = dict.fromkeys(
            (place, record.is_circular and not is_virus)
            for place, (record, calls) in pairs
            for is_virus in calls
        )
        readings = [
            CanonicalView.from_record(records[place].sequence, is_circle=is_circle)
            for place, is_circle in keys
        ]
        texts = [reading.text(self.model.size) for reading in readings]
        items = WindowTable.from_scores(texts, self.scorer, self.model.step, self.code)
        reading_by_key = dict(zip(keys, zip(readings, items, strict=True), strict=True))
        return [
            [
                self._score_windows(
                    *reading_by_key[place, record.is_circular and not is_virus], is_virus
                )
                for is_virus in calls
            ]
            for place, (record, calls) in pairs
        ]

    def _score_windows(
        self, reading: CanonicalView, items: WindowTable, is_virus: bool
    ) -> FoundRegions:
        """Return a record's regions and track, in coordinates on its own strand."""
        if reading.is_circle:
            found = self._extend_circular(reading, items)
        else:
            found = self._decode_path(reading.sequence, items, is_virus)
        return _mirror(found, len(reading.sequence)) if reading.is_reverse else found

    def _decode_path(self, sequence: str, items: WindowTable, is_virus: bool) -> FoundRegions:
        """Return the regions in an upper-case sequence."""
        known = dict[str, float]()  # each protein in a record is scored once
        read_genes = partial(find_host_genes, scorer=self.scorer, code=self.code, known=known)
        gene_inputs = sequence, items, self.model, read_genes, self.code
        return regions_from_windows(*gene_inputs, is_virus=is_virus)

    def _extend_circular(self, reading: CanonicalView, items: WindowTable) -> FoundRegions:
        """Return the regions in a circle, cut open where it looks least viral.

        Its windows may cross the origin.
        """
        circle = reading.sequence
        n_bases = len(reading.sequence)
        turn = min_viral_windows(items.log_odds, self.model)
        cut = int(items.start[turn])
        turned = items.select(np.roll(np.arange(len(items.start)), -turn))
        turned = turned._replace(start=(turned.start - cut) % n_bases)
        inside = turned.select(turned.start <= n_bases - self.model.size)
        regions, track = self._decode_path(circle[cut:] + circle[:cut], inside, False)
        first = (reading.first + cut) % n_bases
        placed = [part for region in regions for part in _rotate(region, first, n_bases)]
        starts = (track.start + first) % n_bases
        order = np.argsort(starts)
        ends = (track.end + first - 1) % n_bases + 1
        columns = (starts[order], ends[order], track.log_odds[order], track.posterior[order])
        return tuple(sorted(placed)), Track(*columns)

    @staticmethod
    def load_builtin(
        code: int,
        scorer: Scorer | None = None,
        model: Path | None = None,
        min_posterior: float = 0.0,
    ) -> ProvirusFinder:
        """Return the finder with the built-in or another model, for this number's genetic code.

        Raises:
            InputMissingError: the model file does not exist.
            UnavailableError: the model is damaged, or has another format or window size.
        """
        load_tables()  # identify viruses in regions later. Loading them now detects damage
        scorer = scorer or Scorer.load_builtin()
        path = model or OWN_REGION_MODEL
        region_model = RegionModel.load(path)
        size = scorer.windows.size
        if region_model.size != size:
            raise corrupt_model_error(
                path, f"its pieces have {region_model.size} bases, not {size}"
            )
        return ProvirusFinder(scorer, region_model, GeneticCode.from_number(code), min_posterior)


def _mirror(found: FoundRegions, n_bases: int) -> FoundRegions:
    """Convert results from the other strand of a record to its own strand."""
    regions, track = found
    placed = [
        region._replace(
            start=n_bases - region.end,
            end=n_bases - region.start,
            att=reverse_complement(region.att),
        )
        for region in regions
    ]
    starts = n_bases - track.end
    ends = n_bases - track.start
    order = np.argsort(starts)
    columns = (starts[order], ends[order], track.log_odds[order], track.posterior[order])
    return tuple(sorted(placed)), Track(*columns)


def min_viral_windows(log_odds: FloatArray, model: RegionModel) -> int:
    """Return the circle item with the least viral surroundings, ``virus_bases`` on either side."""
    reach = min(len(log_odds) // 2, round(model.virus_bases / model.step))
    is_known = ~np.isnan(log_odds)
    values = np.where(is_known, log_odds, median(log_odds[is_known]) if is_known.any() else 0.0)
    sums = np.cumsum(np.concatenate([values, values[: 2 * reach]]))
    window = sums[2 * reach : 2 * reach + len(values)] - sums[: len(values)]
    return int((np.argmin(window) + reach) % len(values))


def _rotate(region: Region, first: int, n_bases: int) -> list[Region]:
    """Rotate a region in a circle cut open at ``first``, in two parts if it crosses the origin."""
    start = region.start + first
    end = region.end + first
    if start >= n_bases:
        start = start - n_bases
        end = end - n_bases
    if end <= n_bases:
        return [region._replace(start=start, end=end)]
    joined = region._replace(over_origin=True)
    return [joined._replace(start=start, end=n_bases), joined._replace(start=0, end=end - n_bases)]


def regions_from_windows(
    sequence: str,
    items: WindowTable,
    model: RegionModel,
    read_genes: ReadGenes,
    code: GeneticCode = STANDARD,
    *,
    is_virus: bool,
) -> FoundRegions:
    """Return the regions in an upper-case record, from its overlapping windows.

    A region may cover the complete record in two cases: the record is called virus, or it is short
    and its proteins are far more viral than the proteins in any host.
    """
    starts = items.start
    n_bases = len(sequence)
    is_throughout = not is_virus and is_provirus_throughout(sequence, items, model, read_genes)
    contrasts = model.contrast(items, is_virus=is_virus or is_throughout)
    evidence = by_genes = model.evidence(contrasts)
    by_pieces = by_all = _ViralRuns.from_path(starts, evidence, n_bases, model)
    if not is_virus and (is_read := _is_read(by_pieces.posterior)).any():
        items = items.with_genes(sequence, is_read, model.size, read_genes)
        by_genes = model.evidence_by_genes(items, contrasts)
        by_all = _ViralRuns.from_path(starts, by_genes, n_bases, model)
    candidates = [*by_all.viral, *by_all.weak]
    guarded = near_host_genes(sequence, starts + model.size // 2, candidates, code)
    if guarded.any():
        evidence[guarded] = by_genes[guarded] = min(model.log_ratios)
        by_pieces = _ViralRuns.from_path(starts, evidence, n_bases, model)
        by_all = _ViralRuns.from_path(starts, by_genes, n_bases, model)
    runs, weak, posterior = by_all
    track = Track(starts, starts + model.size, items.log_odds, posterior)
    if not (runs or weak or is_virus):
        return (), track
    n_regions = len(runs) + len(weak)
    repeats = Repeats.from_sequence(sequence, starts, evidence, model, n_regions)
    if is_virus:
        whole = ViralRun(0, len(posterior), 0, n_bases)
        runs = [runs[0]._replace(end=runs[-1].end, end_base=runs[-1].end_base) if runs else whole]
        reach = n_bases  # a large virus may have long parts that do not look viral by composition
    else:
        parts = chain.from_iterable(map(repeats.parts_of, by_all.parts(starts, model)))
        runs = repeats.confirmed(list(parts), by_pieces.parts(starts, model))
        runs = sorted([*runs, *filter(repeats.test_repeat, weak)])
        reach = repeats.reach
    ends = refine_ends(extend_known(runs, sequence, reach), repeats, code)
    regions = []
    for run, (start, end, att) in zip(runs, ends, strict=True):
        mean = float(posterior[run.first : run.end].mean())
        if is_virus:
            regions.append(Region(start, end, "whole", mean))
        elif is_throughout or (start, end) != (0, n_bases):
            genes = read_genes(sequence[start:end])
            why = describe_evidence(sequence, (start, end), att, genes[2])
            judged = classify_region(end - start, genes)
            regions.append(
                Region(start, end, "provirus", mean, att, evidence=why, region_class=judged)
            )
    return tuple(regions), track


def is_provirus_throughout(
    sequence: str, items: WindowTable, model: RegionModel, read_genes: ReadGenes
) -> bool:
    """Return whether the proteins in a short record show that it is part of a provirus.

    Such a record contains no host sequence to compare with. Among hosts with the same GC, proteins
    vary far less than window composition.
    """
    longest_throughout = 50_000  # bases of a record that may be a provirus without flanks
    min_rise = 1.0  # mean log-odds above the usual level in hosts with its GC
    # log-odds of its proteins above those in hosts: first for some bases in its middle, then for
    # all; the latter vary more in records of fewer than 20,000 bases
    first_read = 5_000
    min_first_rise = 1.0
    min_gene_rise = 2.3
    usual_record = 20_000
    n_bases = len(sequence)
    is_known = items.is_known
    if n_bases > longest_throughout or not is_known.any():
        return False
    gc = items.median_gc
    if items.log_odds[is_known].mean() - model.levels.index_at(gc) < min_rise:
        return False

    def rises(part: str, least: float) -> bool:
        start, end, log_odds, _ = read_genes(part)
        gene_lengths = np.where(np.isnan(log_odds), 0, end - start)
        total = np.nansum(log_odds * gene_lengths)
        return bool(total > (model.genes.index_at(gc) + least) * gene_lengths.sum())

    middle = sequence[(n_bases - first_read) // 2 :][:first_read]
    least = min_gene_rise * max(1.0, (usual_record / n_bases) ** 0.5)
    return rises(middle, min_first_rise) and rises(sequence, least)


def _is_read(posterior: FloatArray) -> BoolArray:
    """Mask the windows whose genes are scored: near possible viruses, none if all are viral."""
    min_window_posterior = 0.02  # lowest posterior of a window whose genes are scored
    items_around = 4  # windows on either side whose genes are scored, too
    is_read = np.zeros(len(posterior), dtype=np.bool_)
    if (posterior > 0.5).all():
        return is_read
    for first, end in find_runs(posterior > min_window_posterior):
        is_read[max(0, first - items_around) : end + items_around] = True
    return is_read


def describe_evidence(sequence: str, ends: tuple[int, int], att: str, log_odds: FloatArray) -> str:
    """Describe further evidence for a provirus, as attributes of GFF3.

    The attributes are the length of its direct repeat, a tRNA that ends at one of its ends, and the
    number of genes with a protein that is more likely viral than not.
    """
    trna_reach = 125  # bases between a region's end and the end of a tRNA
    words = [f"att_length={len(att)}"] if att else []
    near = (sequence[max(0, place - trna_reach) : place + trna_reach] for place in ends)
    if any(map(find_trna_ends, near)):
        words.append("trna=yes")
    return ";".join([*words, f"viral_genes={np.count_nonzero(log_odds > 0)}/{len(log_odds)}"])


def classify_region(n_bases: int, genes: Genes) -> Literal["prophage", "uncertain"]:
    """Classify a provirus: prophage if it looks like a complete tailed phage, else uncertain.

    A prophage is long enough, and many genes are viral. A block of these on one strand is as long
    as the genes for head and tail, which are neighbours in phages.
    """
    min_gene_share = 0.4
    min_block_bases = 6_000
    log_odds = genes[2]
    is_long = n_bases >= _SHORTEST_PROPHAGE
    is_viral = np.count_nonzero(log_odds > 0) >= min_gene_share * len(log_odds)
    return "prophage" if is_long and is_viral and _block(genes) >= min_block_bases else "uncertain"


def _block(genes: Genes) -> float:
    """Count the viral gene bases in the best block on one strand.

    Other genes on that strand subtract half their bases. Genes on the other strand subtract all.
    """
    order = np.argsort(genes[0])
    start, end, log_odds, strand = (column[order] for column in genes)
    most = 0.0
    for own in range(2):
        weights = np.where(strand == own, np.where(log_odds > 0, 1.0, -0.5), -1.0)
        sums = np.concatenate([[0.0], np.cumsum(weights * (end - start))])
        most = max(most, float((sums - np.minimum.accumulate(sums)).max()))
    return most


class _ViralRuns(NamedTuple):
    """The runs with viral items, and each item's posterior."""

    viral: list[ViralRun]  # on the most probable path
    weak: list[ViralRun]  # posteriors above 0.5, but not on this path
    posterior: FloatArray  # (n,)

    @classmethod
    def from_path(
        cls, starts: IntArray, evidence: FloatArray, n_bases: int, model: RegionModel
    ) -> _ViralRuns:
        is_viral, posterior = viral_path(starts, evidence, model)
        is_likely = posterior > 0.5
        if not (is_viral | is_likely).any():
            return cls([], [], posterior)
        bounds = [0, *_middles(starts, model).tolist(), n_bases]

        def runs(mask: BoolArray) -> list[ViralRun]:
            return [
                ViralRun(first, end, bounds[first], bounds[end]) for first, end in find_runs(mask)
            ]

        likely = [run for run in runs(is_likely) if not is_viral[run.first : run.end].any()]
        return cls(runs(is_viral), likely, posterior)

    def parts(self, starts: IntArray, model: RegionModel) -> list[ViralRun]:
        """Return the viral runs, each split by ``split_runs``."""
        return [
            part for run in self.viral for part in split_runs(run, starts, self.posterior, model)
        ]


def split_runs(
    run: ViralRun, starts: IntArray, posterior: FloatArray, model: RegionModel
) -> list[ViralRun]:
    """Split a run at inner items with posteriors below 0.5.

    State changes are rare, so the most probable path alone bridges 10,000-base gaps between
    neighbouring viruses.
    """
    is_host = posterior[run.first : run.end] < 0.5
    gaps = [
        (run.first + first, run.first + end)
        for first, end in find_runs(is_host)
        if first and end < len(is_host)
    ]
    bounds = _middles(starts, model)  # after each item but the last
    parts = []
    for first, end in gaps:
        parts.append(run._replace(end=first, end_base=int(bounds[first - 1])))
        run = run._replace(first=end, start_base=int(bounds[end - 1]))
    return [*parts, run]


def _middles(starts: IntArray, model: RegionModel) -> IntArray:
    """Return the base midway between each two neighbouring items. (n,) -> (n - 1,)"""
    return np.asarray((starts[1:] + starts[:-1] + model.size) // 2)


def near_host_genes(
    sequence: str, middles: IntArray, runs: Sequence[ViralRun], code: GeneticCode
) -> BoolArray:
    """Mask the items whose middle is near a host gene in one of the runs. They are ascending."""
    is_near = np.zeros(len(middles), dtype=np.bool_)
    for run in runs:
        for start, end in host_genes(sequence, code, slice(run.start_base, run.end_base)):
            first = np.searchsorted(middles, start, side="left")
            last = np.searchsorted(middles, end, side="right")
            is_near[first:last] = True
    return is_near


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """The direct repeats in a record, and the evidence between them."""

    # Repeats between an end of a region and its inside split it if fewer than this many are
    # expected by chance: for each repeat, and for the product of two.
    _MAX_BY_CHANCE_EACH = 0.01
    MAX_BY_CHANCE_ALONE = 1e-4  # for a repeat that decides alone. One in 20 host positions has one
    SHORTEST_NEIGHBOUR = 15_000  # bases in a virus next to another

    record: RecordText
    middles: IntArray  # of items
    sums: FloatArray  # cumulative evidence before each item, and the total
    reach: int  # maximum bases between a repeat's end and a run's end
    cost: float  # minimum evidence for a virus on the most probable path: the cost of two changes
    _known: dict[tuple[ViralRun, tuple[int, int]], Repeat | None] = field(default_factory=dict)

    @classmethod
    def from_sequence(
        cls,
        sequence: str,
        starts: IntArray,
        evidence: FloatArray,
        model: RegionModel,
        n_regions: int = 0,
    ) -> Repeats:
        """Search a record for repeats, up to one usual region length from each end.

        ``n_regions`` is the number of regions around which copies will be counted, if it is known.
        With many, the bases are indexed at once.
        """
        sums = np.concatenate([[0.0], np.cumsum(evidence)])
        (_, enter), (leave, _) = model.transition(model.step)
        reach = round(model.virus_bases)
        cost = -enter - leave
        record = RecordText(sequence, n_regions)
        return cls(record, starts + model.size // 2, sums, reach, cost)

    def from_window(self, run: ViralRun, bounds: tuple[int, int] | None = None) -> Repeat | None:
        """Return the best repeat around a run that encloses more than half its evidence.

        Without bounds, it may be anywhere. A run at a record's end has none.
        """
        start, end = ends = run.start_base, run.end_base
        n_bases = len(self.record.bases)
        bounds = bounds or (0, n_bases)
        if start <= 0 or end >= n_bases:
            return None
        if (run, bounds) not in self._known:
            repeats = Repeat.from_ends(self.record, ends, bounds, self.reach)
            least = self._evidence(*ends) / 2
            most = (one for one in repeats if self._evidence(one.start, one.end) > least)
            self._known[run, bounds] = next(most, None)
        return self._known[run, bounds]

    def parts_of(self, run: ViralRun) -> list[ViralRun]:
        """Split a long run into neighbouring viruses by their repeats, or return the run."""
        if run.end_base - run.start_base < 2 * self.SHORTEST_NEIGHBOUR:
            return [run]
        ends = run.start_base, run.end_base
        if self.from_window(run) and self._evidence(*ends) < 2 * self.cost:
            return [run]
        inner = Repeat.at_one_end(self.record, ends, self.SHORTEST_NEIGHBOUR, self.reach)
        parts = self._pair_ends(run, inner) or self._single_ends(run, inner)
        if len(parts) < 2:
            return parts or [run]
        return list(chain.from_iterable(map(self.parts_of, sorted(parts))))

    def _pair_ends(self, run: ViralRun, inner: Sequence[Repeat]) -> list[ViralRun]:
        """Return two neighbours with a repeat each, if less likely than one repeat around the run.

        The second begins near the first one's end, so it has fewer possible positions. Neither
        repeat may be expected by chance.
        """
        max_by_chance_two = 1e-6
        longest_gap = 10_000  # host bases between two neighbouring viruses
        start = run.start_base
        end = run.end_base
        share = min(1.0, longest_gap / max(1, end - start - 2 * self.SHORTEST_NEIGHBOUR))
        least = min(max_by_chance_two, self._expected_by_chance(run))
        parts = list[ViralRun]()
        for one, other in permutations(inner, 2):
            is_near = -len(one.bases) <= other.start - one.end <= longest_gap
            by_chance = one.n_by_chance * other.n_by_chance * share
            is_rare = max(one.n_by_chance, other.n_by_chance) * share < self._MAX_BY_CHANCE_EACH
            if is_near and is_rare and by_chance < least:
                least = by_chance
                second = max(one.end, other.start)  # copies may extend by chance and overlap
                parts = [self._part(run, start, one.end), self._part(run, second, end)]
        return parts

    def _single_ends(self, run: ViralRun, inner: Sequence[Repeat]) -> list[ViralRun]:
        """Return the run's part within a repeat, and any remainder that is viral by itself.

        A repeat between one end and the inside counts in two cases: it encloses most of
        the evidence and is unlikely by chance, or a remainder has a repeat, too.
        """
        around = self.from_window(run)
        rare = [one for one in inner if one.n_by_chance < self._MAX_BY_CHANCE_EACH]
        if around is None and not rare:
            return []
        repeat = around or rare[0]
        start = run.start_base
        end = run.end_base
        part = self._part(run, max(start, repeat.start), min(end, repeat.end))
        rests = self._remaining_kmers(run, [part])
        has_most = self._evidence(repeat.start, repeat.end) > self._evidence(start, end) / 2
        is_sure = has_most and repeat.n_by_chance < self.MAX_BY_CHANCE_ALONE
        if around or is_sure or any(self.from_window(rest) for rest in rests):
            return [part, *rests]
        return []

    def _part(self, run: ViralRun, start: int, end: int) -> ViralRun:
        """Return a run's part, with the items whose middle is in it."""
        first, last = np.searchsorted(self.middles, (start, end)).tolist()
        return ViralRun(
            run.first if start == run.start_base else first,
            run.end if end == run.end_base else last,
            *(start, end),
        )

    def _remaining_kmers(self, run: ViralRun, others: Sequence[ViralRun]) -> list[ViralRun]:
        """Return a run's parts outside the others (in order) that are viral by themselves."""
        starts = [run.start_base, *(one.end_base for one in others)]
        ends = [*(one.start_base for one in others), run.end_base]
        return [
            self._part(run, start, end)
            for start, end in zip(starts, ends, strict=True)
            if end - start >= self.SHORTEST_NEIGHBOUR and self._evidence(start, end) > self.cost
        ]

    def confirmed(self, runs: Sequence[ViralRun], others: Sequence[ViralRun]) -> list[ViralRun]:
        """Replace runs by those in ``others`` that overlap them and have a better repeat."""
        bounded = [
            one
            for one in others
            if one.overlaps(runs)
            and self._expected_by_chance(one)
            < min(self._expected_by_chance(run) for run in runs if one.overlaps([run]))
        ]
        kept = (
            self._remaining_kmers(run, inside)
            if (inside := [one for one in bounded if one.overlaps([run])])
            else [run]
            for run in runs
        )
        return sorted([*chain.from_iterable(kept), *bounded])

    def _expected_by_chance(self, run: ViralRun) -> float:
        """Return the expected number of repeats as good as the run's, infinite without one."""
        repeat = self.from_window(run)
        return np.inf if repeat is None else repeat.n_by_chance

    def test_repeat(self, run: ViralRun) -> bool:
        """Return whether a weak run has the usual length, or a repeat unlikely by chance."""
        is_long = run.end_base - run.start_base >= self.reach
        return is_long or self._expected_by_chance(run) < self.MAX_BY_CHANCE_ALONE

    def _evidence(self, start: int, end: int) -> float:
        first, last = np.searchsorted(self.middles, (start, end)).tolist()
        return float(self.sums[last] - self.sums[first])


def extend_known(runs: Sequence[ViralRun], sequence: str, reach: int) -> list[ViralRun]:
    """Move the ends of runs outwards, over bases that known viruses have, at most ``reach`` bases.

    The composition of windows shows the end of a virus within some thousand bases. Its k-mers show
    it within some hundred. So a short repeat near the end is less likely by chance.
    """
    known_piece = 500  # bases that are looked up together in the index of known viruses
    extended = list[ViralRun]()
    for number, run in enumerate(runs):
        low = extended[-1].end_base if extended else 0
        high = runs[number + 1].start_base if number + 1 < len(runs) else len(sequence)
        before = range(run.start_base, max(low, run.start_base - reach), -known_piece)
        behind = range(run.end_base, min(high, run.end_base + reach), known_piece)
        n_before = _count_known([sequence[max(low, i - known_piece) : i] for i in before])
        n_behind = _count_known([sequence[i : min(high, i + known_piece)] for i in behind])
        start = max(low, run.start_base - n_before * known_piece)
        end = min(high, run.end_base + n_behind * known_piece)
        extended.append(run._replace(start_base=start, end_base=end))
    return extended


def _count_known(pieces: Sequence[str]) -> int:
    """Count the pieces up to the last known one, before the first two that are both unknown.

    Most ends have two unknown pieces next to them, so few pieces are looked up at first.
    """
    min_known_kmers = 3  # k-mers of viruses in a known piece. One in 80 pieces of K-12 has two
    n_known = 0
    first = 0
    n_at_once = 2
    while first < len(pieces) and first <= n_known + 1:
        hits = KnownIndex.load_builtin().look_up(pieces[first : first + n_at_once])
        is_viral = hits.n_cellular < MAX_CELLULAR_PER_VIRAL * hits.n_viral
        is_known = (hits.n_viral >= min_known_kmers) & is_viral
        for number in (first + np.flatnonzero(is_known)).tolist():
            if number > n_known + 1:
                return n_known
            n_known = number + 1
        first += n_at_once
        n_at_once *= 2
    return n_known


def refine_ends(
    runs: Sequence[ViralRun], repeats: Repeats, code: GeneticCode = STANDARD
) -> list[tuple[int, int, str]]:
    """Move each run's ends within the record to markers near them: (start, end, repeat).

    The markers are a direct repeat around both ends, or the nearest open reading frame edge
    for each end. No end passes the midpoint to the next end, so separate runs stay separate.
    """
    sequence = repeats.record.bases
    moved: list[tuple[int, int, str]] = []
    for i, run in enumerate(runs):
        start = run.start_base
        end = run.end_base
        low = min(start, (runs[i - 1].end_base + start) // 2 + 1) if i else 0
        if moved and moved[-1][2]:  # a repeat fixes the end of the previous run
            low = moved[-1][1] + 1
        middle = (start + end) // 2
        high = (end + runs[i + 1].start_base) // 2 if i + 1 < len(runs) else len(sequence)
        repeat = repeats.from_window(run, (low, high))
        if repeat is not None:
            moved.append((repeat.start, repeat.end, repeat.bases))
            continue
        left = _to_edge(start, low, middle, sequence, code)
        right = _to_edge(end, middle + 1, high, sequence, code)
        moved.append((left, right, ""))
    return moved


def _to_edge(place: int, low: int, high: int, sequence: str, code: GeneticCode) -> int:
    """Return the nearest open reading frame edge within these bounds, or ``place`` itself."""
    if not 0 < place < len(sequence):
        return place
    edges = [edge for edge in open_edges(sequence, place, code) if low <= edge <= high]
    return min(edges, key=lambda edge: (abs(edge - place), edge), default=place)
