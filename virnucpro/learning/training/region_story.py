"""``virnucpro train --regions``: from chromosomes with known prophages to ``regions.json``.

The table of figures finds the regions of each chromosome by what is learned from the others, and
without the other records of its own file as a host.

The records of a file that are not in the truth are one host, whose prophages are not known: its
median tells the level of hosts at its GC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from virnucpro.callers.chain import region_model_text
from virnucpro.callers.contrast import Items
from virnucpro.callers.regions import SHORTEST_RECORD, regions_of_items
from virnucpro.ground.errors import InputError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.files import write_whole
from virnucpro.ground.log import announce, counted, printable
from virnucpro.ground.records import FastaRecord
from virnucpro.learning.evaluation.region_story import region_lines
from virnucpro.learning.evaluation.regions import (
    RegionFigures,
    Truth,
    check_none_missing,
    check_truth,
    check_unique,
    measure_regions,
    read_truth,
)
from virnucpro.learning.options import TrainOptions
from virnucpro.learning.training.region_model import SIZE, STEP, Chromosome, learn_region_model
from virnucpro.run.folder import RunDir
from virnucpro.scorer.nets import embedded_scorer, load_scorer
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.inputs import list_sources

MODEL, TABLE = "regions.json", "regions_left_out.tsv"
_FEWEST_PIECES = 100  # of a host
_FEWEST = 3  # chromosomes: one is left out, and two tell how far hosts depart


class Genome(NamedTuple):
    """The records of one file: chromosomes with known prophages, and the pieces of the others."""

    chromosomes: list[Chromosome]
    host: Items | None  # None: too few pieces


def train_regions(options: TrainOptions, truth_table: Path, on_event: OnEvent) -> list[str]:
    """Learn how regions are told, write it with the figures of what was left out, and return these.

    Raises:
        VirnucproError: see ``errors``; or there are too few chromosomes.
    """
    with RunDir(options.output_dir).in_use():
        genomes = read_genomes(options.data, truth_table, on_event)
        chromosomes = [one for genome in genomes for one in genome.chromosomes]
        each: dict[str, RegionFigures] = {}
        for one, others, hosts in left_out(genomes):
            on_event(Progress("leaving each out", len(each), len(chromosomes), "chromosomes"))
            model = learn_region_model(others, hosts, "")
            regions, _ = regions_of_items(one.sequence, one.items, model, STANDARD, is_virus=False)
            intervals = [(region.start, region.end) for region in regions]
            each[one.name] = measure_regions(intervals, one.truth, len(one.sequence))
            announce(f"{printable(one.name)} left out: F1 {each[one.name].f1:.3f}")
        lines = region_lines(each, options.seed)
        write_whole(options.output_dir / TABLE, "\n".join([*lines, ""]))
        hosts = [genome.host for genome in genomes if genome.host]
        n_prophages = sum(len(one.truth.prophages) for one in chromosomes)
        training = f"{counted(n_prophages, 'prophage')} of {len(chromosomes)} chromosomes"
        if hosts:
            training += f", and {counted(len(hosts), 'other host')}"
        announce(f"regions: learned from {training}")
        model = learn_region_model(chromosomes, hosts, training)
        write_whole(options.output_dir / MODEL, region_model_text(model))
    return lines


def left_out(
    genomes: Sequence[Genome],
) -> Iterator[tuple[Chromosome, list[Chromosome], list[Items]]]:
    """Each chromosome with the others, and with the hosts of other files than its own."""
    for home in genomes:
        hosts = [other.host for other in genomes if other is not home and other.host]
        for one in home.chromosomes:
            everyone = (other for genome in genomes for other in genome.chromosomes)
            yield one, [other for other in everyone if other is not one], hosts


def read_genomes(data: Path, truth_table: Path, on_event: OnEvent) -> list[Genome]:
    """Each file with the sequences that the truth has prophages in, and its others as one host.

    Raises:
        InputError: a chromosome is missing, there twice, or has no host; or there are too few.
    """
    truths = {name: one for name, one in read_truth(truth_table).items() if one.prophages}
    scorer = load_scorer(embedded_scorer())
    genomes: list[Genome] = []
    n_letters = 0
    for source in list_sources(data):
        chromosomes: list[Chromosome] = []
        others = []
        for record in read_fasta(source.path, source.name):
            on_event(Progress("scoring pieces", n_letters, 0, "letters"))
            n_letters += len(record.sequence)
            truth = truths.get(record.id)
            if truth is not None:
                _check(record, truth)
            if len(record.sequence) < SHORTEST_RECORD:
                continue
            items = Items.of(record.sequence, scorer, SIZE, STEP)
            if truth is None:
                others.append(items)
            else:
                chromosomes.append(Chromosome(record.id, record.sequence, items, truth))
                _check_host(chromosomes[-1])
        host = Items.joined(others)
        is_host = np.count_nonzero(host.is_known) >= _FEWEST_PIECES
        genomes.append(Genome(chromosomes, host if is_host else None))
    names = [one.name for genome in genomes for one in genome.chromosomes]
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
