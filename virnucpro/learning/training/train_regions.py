"""``virnucpro train --regions``: from chromosomes with known prophages to ``regions.json``.

The table of figures finds the regions of each chromosome by what is learned from the others, and
without the other records of its own file as a host.

A chromosome counts as much as any other, so that the longest one does not decide alone; its viral
pieces count by the square root of their number. The records of a file that are not in the truth
are one host, whose prophages are not known: its median tells which level is usual at its GC.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from virnucpro.callers.chain import RegionModel
from virnucpro.callers.contrast import Hosts, Items, Levels, signal
from virnucpro.callers.regions import SHORTEST_RECORD, regions_of_items
from virnucpro.ground.errors import InputError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.files import write_whole
from virnucpro.ground.log import announce, counted, printable
from virnucpro.ground.numeric import Mask, Values
from virnucpro.ground.records import FastaRecord
from virnucpro.learning.evaluation.evaluate_regions import (
    RegionFigures,
    Span,
    Truth,
    check_none_missing,
    check_truth,
    check_unique,
    mask,
    measure_regions,
    read_truth,
    region_lines,
)
from virnucpro.learning.options import TrainOptions
from virnucpro.run.folder import RunDir
from virnucpro.scorer.landmarks import genes_of
from virnucpro.scorer.nets import Scorer, own_scorer
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.inputs import Source, list_sources

MODEL, TABLE = "regions.json", "regions_left_out.tsv"
_FEWEST_PIECES = 100  # of a host
_FEWEST = 3  # chromosomes: one is left out, and two tell how far hosts depart
SIZE, STEP = 1_000, 500
EDGES = tuple(np.arange(-4, 7.5, 0.5).tolist())  # contrast to the host
GC_WEIGHT, SHAPE_WEIGHT, SHAPE_BASES = 0.7, 1.5, 9_500
FIRST_SHARE = 0.1  # of records that begin in a virus; so phage lambda alone is one
WEIGHT = 0.7 * STEP / SIZE  # of a piece for its bases, each in several: neighbours are alike
GENES_WEIGHT = 0.6 * WEIGHT  # of a piece by its genes, too, which lie on several pieces
_KERNEL = np.exp(-0.5 * np.arange(-3, 4) ** 2)  # over bins
_LEAST = 0.02  # of all, spread evenly over the bins


@dataclass(frozen=True, slots=True, eq=False)
class Chromosome:
    """A chromosome and what is known of it."""

    name: str
    sequence: str
    items: Items
    truth: Truth

    @classmethod
    def of(
        cls, record: FastaRecord, scorer: Scorer, truth: Truth, code: GeneticCode = STANDARD
    ) -> Chromosome:
        """A record with its pieces scored, and the genes of all."""
        sequence = record.sequence.upper()
        items = Items.of(sequence, scorer, SIZE, STEP, code)
        everything = np.ones(len(items.start), dtype=np.bool_)
        read_genes = partial(genes_of, scorer=scorer, code=code)
        items = items.with_genes(sequence, everything, SIZE, read_genes)
        return cls(record.id, sequence, items, truth)

    @property
    def is_virus(self) -> Mask:
        """A mask of the pieces whose middles lie in a prophage. (n_items,)"""
        return self._has_middle(self.truth.prophages) & self.items.is_known

    @property
    def is_host(self) -> Mask:
        """A mask of the pieces whose middles lie in no element of the truth. (n_items,)"""
        elements = (*self.truth.prophages, *self.truth.unclear)
        return ~self._has_middle(elements) & self.items.is_known

    def _has_middle(self, intervals: Sequence[Span]) -> Mask:
        return mask(intervals, len(self.sequence))[self.items.start + SIZE // 2]


# the records of one file: chromosomes with known prophages, and the pieces of the others; None: few
Genome = tuple[list[Chromosome], Items | None]


def train_regions(options: TrainOptions, truth_table: Path, on_event: OnEvent) -> list[str]:
    """Learn how regions are told, write it with the figures of what was left out, and return these.

    Raises:
        VirnucproError: see ``errors``; or there are too few chromosomes.
    """
    with RunDir(options.output_dir).in_use():
        scorer = own_scorer()
        read_genes = partial(genes_of, scorer=scorer)
        genomes = read_genomes(options.data, truth_table, scorer, on_event)
        chromosomes = [one for own, _ in genomes for one in own]
        each: dict[str, RegionFigures] = {}
        for one, others, hosts in left_out(genomes):
            on_event(Progress("leaving each out", len(each), len(chromosomes), "chromosomes"))
            model = learn_region_model(others, hosts, "")
            regions, _ = regions_of_items(
                one.sequence, one.items, model, read_genes, is_virus=False
            )
            intervals = [(region.start, region.end) for region in regions]
            each[one.name] = measure_regions(intervals, one.truth, len(one.sequence))
            announce(f"{printable(one.name)} left out: F1 {each[one.name].f1:.3f}")
        lines = region_lines(each, options.seed)
        write_whole(options.output_dir / TABLE, "\n".join([*lines, ""]))
        hosts = [host for _, host in genomes if host]
        n_prophages = sum(len(one.truth.prophages) for one in chromosomes)
        training = f"{counted(n_prophages, 'prophage')} of {len(chromosomes)} chromosomes"
        if hosts:
            training += f", and {counted(len(hosts), 'other host')}"
        announce(f"regions: learned from {training}")
        model = learn_region_model(chromosomes, hosts, training)
        write_whole(options.output_dir / MODEL, model.text)
    return lines


def left_out(
    genomes: Sequence[Genome],
) -> Iterator[tuple[Chromosome, list[Chromosome], list[Items]]]:
    """Each chromosome with the others, and with the hosts of other files than its own."""
    for home in genomes:
        hosts = [other[1] for other in genomes if other is not home and other[1]]
        for one in home[0]:
            everyone = (other for own, _ in genomes for other in own)
            yield one, [other for other in everyone if other is not one], hosts


def read_genomes(data: Path, truth_table: Path, scorer: Scorer, on_event: OnEvent) -> list[Genome]:
    """Each file with the sequences that the truth has prophages in, and its others as one host.

    Raises:
        InputError: a chromosome is missing, there twice, or has no host; or there are too few.
    """
    truths = {name: one for name, one in read_truth(truth_table).items() if one.prophages}
    n_letters = 0

    def counted_records(source: Source) -> Iterator[FastaRecord]:
        nonlocal n_letters
        for record in read_fasta(source.path, source.name):
            on_event(Progress("scoring pieces", n_letters, 0, "letters"))
            n_letters += len(record.sequence)
            yield record

    genomes = [_genome_of(counted_records(source), truths, scorer) for source in list_sources(data)]
    names = [one.name for own, _ in genomes for one in own]
    check_unique(names)
    check_none_missing(truths.keys() - names)
    n_chromosomes = len(names)
    if n_chromosomes < _FEWEST:
        raise InputError(
            f"{counted(n_chromosomes, 'chromosome')} with prophages; {_FEWEST} are needed, "
            "as each is left out once",
            hint="add more to the truth",
        )
    return genomes


def _genome_of(
    records: Iterable[FastaRecord], truths: Mapping[str, Truth], scorer: Scorer
) -> Genome:
    """The records of one file; those that are too short for regions are passed over.

    Raises:
        InputError: a chromosome does not fit its truth, or has no host.
    """
    chromosomes: list[Chromosome] = []
    others = []
    for record in records:
        truth = truths.get(record.id)
        if truth is not None:
            _check(record, truth)
        if len(record.sequence) < SHORTEST_RECORD:
            continue
        chromosome = Chromosome.of(record, scorer, truth or Truth())
        if truth is None:
            others.append(chromosome.items)
        else:
            chromosomes.append(chromosome)
            _check_host(chromosome)
    host = Items.joined(others)
    is_host = np.count_nonzero(host.is_known) >= _FEWEST_PIECES
    return chromosomes, host if is_host else None


def _check(record: FastaRecord, truth: Truth) -> None:
    """
    Raises:
        InputError: the record is too short, or shorter than its truth.
    """
    n_bases = len(record.sequence)
    check_truth(record.id, truth, n_bases)
    if n_bases < SHORTEST_RECORD:
        raise InputError(
            f"{printable(record.id)} has {n_bases:,} bases; regions are learned from "
            f"{SHORTEST_RECORD:,} and more",
            hint="leave it out of the truth",
        )


def _check_host(chromosome: Chromosome) -> None:
    """
    Raises:
        InputError: no piece is the host's.
    """
    if not chromosome.is_host.any():
        raise InputError(
            f"{printable(chromosome.name)} has no piece of its host: all known bases are prophage, "
            "remnant or unclear",
            hint="leave it out of the truth, or give the chromosome around",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Contrasts:
    """How far the pieces of a chromosome stand out from its own host."""

    gc: float
    level: float  # of the host
    gene_level: float  # log-odds of its proteins
    virus: Values  # of each piece in a prophage
    host: Values  # of each piece outside
    virus_genes: Values  # log-odds of the proteins on each; NaN for none
    host_genes: Values

    @classmethod
    def of(cls, chromosome: Chromosome, usual: Hosts) -> _Contrasts:
        is_host = chromosome.is_host
        items, is_virus = chromosome.items, chromosome.is_virus
        levels = _levels(items, usual, is_host)
        contrasts = _signal(items, usual) - levels[1]
        genes = items.genes[is_virus], items.genes[is_host]
        return cls(*levels, contrasts[is_virus], contrasts[is_host], *genes)

    def by_genes(self, contrasts: Values, genes: Values, usual: Levels) -> Values:
        """How far pieces with genes stand out by both together. (n,), (n,) -> (m,)"""
        both = contrasts + genes - usual.at(self.gc)
        return np.asarray(both[~np.isnan(both)])


def learn_region_model(
    chromosomes: Sequence[Chromosome], hosts: Sequence[Items], training: str
) -> RegionModel:
    """Regions are as rare as in these chromosomes; hosts add their level to those of these.

    Each chromosome has a piece of its host; a prophage may be too short for a piece.

    Raises:
        InputError: no prophage has a piece, or chromosomes do not differ.
    """
    usual = Hosts.mean([Hosts.of(one.items) for one in chromosomes])
    contrasts = [_Contrasts.of(one, usual) for one in chromosomes]
    with_virus = [one for one in contrasts if len(one.virus)]
    if not with_virus:
        names = ", ".join(printable(one.name) for one in chromosomes[:8])
        raise InputError(
            f"no prophage of {names} has a piece of {SIZE:,} bases of its own",
            hint="add chromosomes with longer prophages to the truth",
        )
    levels = [_levels(items, usual, items.is_known) for items in hosts]
    levels += [(one.gc, one.level, one.gene_level) for one in contrasts]
    gc, level, gene_level = np.array(levels).T
    host_bases, virus_bases = _mean_lengths(chromosomes)
    try:
        genes = Levels.of(gc, gene_level)
        return RegionModel(
            size=SIZE,
            step=STEP,
            host=usual,
            levels=Levels.of(gc, level),
            gc_weight=GC_WEIGHT,
            shape_weight=SHAPE_WEIGHT,
            shape_bases=SHAPE_BASES,
            edges=EDGES,
            log_ratios=_log_ratios(
                [one.virus for one in with_virus], [one.host for one in contrasts], WEIGHT
            ),
            genes=genes,
            gene_log_ratios=_log_ratios(
                [one.by_genes(one.virus, one.virus_genes, genes) for one in with_virus],
                [one.by_genes(one.host, one.host_genes, genes) for one in contrasts],
                GENES_WEIGHT,
            ),
            weight=WEIGHT,
            deviation=round(float(np.mean([one.host.std() for one in contrasts])), 4),
            distance=round(float(np.mean([one.virus.mean() for one in with_virus])), 4),
            first_share=FIRST_SHARE,
            host_bases=host_bases,
            virus_bases=virus_bases,
            training=training,
        )
    except ValueError as error:
        raise InputError(
            f"no region model can be learned from these chromosomes: {error}",
            hint="give chromosomes of several species, whose prophages stand out from their hosts",
        ) from error


def _mean_lengths(chromosomes: Sequence[Chromosome]) -> tuple[int, int]:
    """Bases of host, and of prophage, for each prophage."""
    n_bases = sum(len(one.sequence) for one in chromosomes)
    n_regions = sum(len(one.truth.prophages) for one in chromosomes)
    masks = (mask(one.truth.prophages, len(one.sequence)) for one in chromosomes)
    n_virus = sum(int(np.count_nonzero(is_virus)) for is_virus in masks)
    return round((n_bases - n_virus) / n_regions), round(n_virus / n_regions)


def _log_ratios(
    of_viruses: Sequence[Values], of_hosts: Sequence[Values], weight: float
) -> tuple[float, ...]:
    """Log ratios of virus over host, as one piece among others counts, by bin of its contrast."""
    virus, host = np.zeros(len(EDGES) + 1), np.zeros(len(EDGES) + 1)
    for values in of_viruses:
        virus += _counts(values) / max(1, len(values)) ** 0.5
    for values in of_hosts:
        host += _counts(values) / max(1, len(values))
    return tuple(np.round(np.log(_shares(virus) / _shares(host)) * weight, 4).tolist())


def _signal(items: Items, usual: Hosts) -> Values:
    host = usual.at(items, is_virus=False)
    return signal(items, host, GC_WEIGHT, SHAPE_WEIGHT, SHAPE_BASES // STEP)


def _levels(items: Items, usual: Hosts, is_host: Mask) -> tuple[float, float, float]:
    """The median GC of a host, and the medians over its own pieces: signal, and proteins."""
    genes = items.genes[is_host]
    of_genes = np.median(genes[~np.isnan(genes)]) if not np.isnan(genes).all() else np.nan
    return items.median_gc, float(np.median(_signal(items, usual)[is_host])), float(of_genes)


def _counts(contrasts: Values) -> Values:
    """Numbers of pieces in each bin. (n_pieces,) -> (n_bins,)"""
    bins = np.searchsorted(EDGES, contrasts)
    return np.bincount(bins, minlength=len(EDGES) + 1).astype(np.float64)


def _shares(counts: Values) -> Values:
    """Smooth shares above 0 of all bins; they add up to 1."""
    padded = np.pad(counts / counts.sum(), len(_KERNEL) // 2, mode="edge")
    smooth = np.convolve(padded, _KERNEL / _KERNEL.sum(), "valid") + _LEAST / len(counts)
    return np.asarray(smooth / smooth.sum())
