"""Evaluate and train region models on known prophages (``evaluate`` and ``train --regions``).

To evaluate, the sequences go through ``predict`` like any input, and regions are read from its
tables. Coordinates are bases, 0-based and half-open. A prophage is found if regions cover at least
half of it. A region is false if less than half of it is prophage, ignoring unclear bases.

To train, the table of figures leaves out one chromosome at a time: a model trained on the others
finds its regions, without the other records of its file as a host. Every chromosome counts the
same, so that the longest one does not dominate. Its viral pieces count by the square root of their
number. Records in a file that are not in the truth form one host with unknown prophages. Its median
gives the usual level at its GC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import numpy as np

from virnucpro.core.errors import InputError, VirnucproError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import LOGGER, announce, format_count, printable
from virnucpro.core.numeric import BoolArray, FloatArray
from virnucpro.core.option_schema import convert_options
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import FastaRecord
from virnucpro.models.family import ModelFile
from virnucpro.results.names import tsv_line
from virnucpro.results.outputs import RunOutput, open_run_dir
from virnucpro.results.table_readers import read_calls, read_regions
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode
from virnucpro.sequences.inputs import InputFile
from virnucpro.store.run_dir import RunDir
from virnucpro.training.evaluation.metrics import INTERVAL
from virnucpro.training.labelled_data import read_cells, read_lines
from virnucpro.training.options import EvaluateOptions, TrainOptions
from virnucpro.viral.hmm import RegionModel
from virnucpro.viral.host_markers import find_host_genes
from virnucpro.viral.networks import Scorer
from virnucpro.viral.provirus import SHORTEST_RECORD, regions_from_windows
from virnucpro.viral.provirus_features import HostBackground, Levels, WindowTable
from virnucpro.workflows.predict import predict
from virnucpro.workflows.predict_options import PredictOptions

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSettings:
    """How sequences are cut into pieces, and how these are compared with their host."""

    size: int = 1_000  # bases
    step: int = 500  # bases between the starts of two pieces
    gc_weight: float = 0.7
    shape_weight: float = 1.5
    shape_bases: int = 9_500
    edges: tuple[float, ...] = tuple(np.arange(-4, 7.5, 0.5).tolist())  # of bins of the contrast


PIECES = PieceSettings()


def evaluate_regions(
    options: EvaluateOptions, truth_table: Path, on_event: EventHandler
) -> list[str]:
    """Find regions in the sequences, and write how well they agree with the truth.

    Returns:
        The table lines.

    Raises:
        VirnucproError: see ``errors``. Also raised if a sequence in the truth was not called.
    """
    run = "run"
    evaluated_table = "regions_evaluation.tsv"
    truths = read_truth(truth_table)
    genes = read_genes(options.genes) if options.genes is not None else {}
    model = RegionModel.load(options.region_model)
    announce(f"regions were learned from {model.training}; figures for any of these are too good")
    SafeDir(options.output_dir).refuse_links([run, evaluated_table])
    run_folder = options.output_dir / run
    asked = convert_options(
        options,
        PredictOptions,
        input=(options.data,),
        input_type="nucleotide",
        output_dir=run_folder,
        model=None,
        head=None,
        regions=True,
    )
    if predict(asked, on_event).exit_code:
        raise VirnucproError(
            f"not everything was read: see {printable(run_folder)}",
            hint="figures of a part would mislead: run the same command with --resume",
        )
    scores = _measure(open_run_dir(run_folder), truths, genes)
    return _write_table(options.output_dir / evaluated_table, scores, options.seed)


def _measure(
    rundir: RunDir, truths: dict[str, Truth], genes: dict[str, list[Span]]
) -> dict[str, RegionScores]:
    """Score each sequence in the run. A sequence that the truth omits has no prophage."""
    again = "run the same command with --resume"
    calls = list(read_calls(rundir.output(RunOutput.RECORD_TABLE.file), again))
    _check_names([call.record_id for call in calls], truths)
    regions: dict[str, list[Span]] = {}
    if rundir.output(RunOutput.REGION_TABLE.file).exists():
        for (_, name), region in read_regions(rundir.output(RunOutput.REGION_TABLE.file), again):
            regions.setdefault(name, []).append((region.start, region.end))
    figures = {}
    for name, n_bases in ((call.record_id, call.length) for call in calls):
        truth = truths.get(name, Truth())
        _check_truth(name, truth, n_bases)
        record_regions = sorted(regions.get(name, []))
        figures[name] = measure_regions(record_regions, truth, n_bases, genes.get(name, ()))
    return figures


def _write_table(path: Path, scores_by_name: dict[str, RegionScores], seed: int) -> list[str]:
    """Write a row per sequence, and a total row with the F1 interval. Return the lines."""
    figures = list(scores_by_name.values())
    low, high = f1_interval(figures, seed)
    all_records = "all"
    rows = [
        ("seq_id", *RegionScores.columns, "f1_low", "f1_high"),
        *((name, *scores.row(), "", "") for name, scores in scores_by_name.items()),
        (all_records, *RegionScores.sum(figures).row(), f"{low:.3f}", f"{high:.3f}"),
    ]
    lines = list(map(tsv_line, rows))
    SafeDir(path.parent).write_file(path, "".join(lines))
    return [line.removesuffix("\n") for line in lines]


@dataclass(frozen=True, slots=True)
class Truth:
    """Known intervals in one sequence."""

    prophages: list[Span] = field(default_factory=list)
    # Neither virus nor host: excluded from every count.
    unclear: list[Span] = field(default_factory=list)


def read_truth(path: Path) -> dict[str, Truth]:
    """Read each sequence's intervals from a table with columns ``seq_id start end kind``.

    Other columns are ignored. ``prophage`` counts. ``remnant`` and ``unclear`` are excluded from
    every count. Other kinds are skipped.

    Raises:
        InputError, InputMissingError: the table cannot be read, or a row is invalid.
    """
    truths: dict[str, Truth] = {}
    other_kinds: set[str] = set()
    expected = (
        "a table of the columns seq_id, start, end (bases from 0, half-open) and kind: prophage"
    )
    for line, row in read_cells(path, ("seq_id", "start", "end", "kind"), expected):
        try:
            span = _parse_span(row["start"], row["end"], first=0)
        except ValueError as error:
            raise InputError(
                f"{printable(path)}:{line}: no interval from {printable(row['start'])} to "
                f"{printable(row['end'])}",
                hint="count bases from 0; the end is the base after the interval",
            ) from error
        truth = truths.setdefault(row["seq_id"], Truth())
        match row["kind"]:
            case "prophage":
                truth.prophages.append(span)
            case "remnant" | "unclear":
                truth.unclear.append(span)
            case other:
                other_kinds.add(other)
    if not any(truth.prophages for truth in truths.values()):
        raise InputError(f"{printable(path)} has no row of the kind prophage", hint=expected)
    if other_kinds:
        LOGGER.warning(
            "rows of other kinds, skipped: %s", ", ".join(map(printable, sorted(other_kinds)))
        )
    return truths


def _check_names(names: Sequence[str], truths: Iterable[str]) -> None:
    """Check that sequence names are unique and include every name in the truth.

    Raises:
        InputError: several sequences have the same name, or a name in the truth is missing.
    """
    name, n_sequences = max(Counter(names).items(), key=itemgetter(1), default=("", 0))
    if n_sequences > 1:
        raise InputError(
            f"{n_sequences} sequences have the id {printable(name)}",
            hint="make the ids unique: the truth names sequences by id",
        )
    if missing := sorted({*truths} - {*names}):
        raise InputError(
            f"no sequence has the id {', '.join(map(printable, missing[:8]))} of the truth",
            hint="name the FASTA files of all sequences in the truth with --data",
        )


def _check_truth(name: str, truth: Truth, n_bases: int) -> None:
    """Check the intervals of one sequence.

    Raises:
        InputError: an interval is outside the sequence.
    """
    last = max((end for _, end in (*truth.prophages, *truth.unclear)), default=0)
    if last > n_bases:
        raise InputError(
            f"{printable(name)} has {n_bases:,} bases, but an interval ends at {last:,}",
            hint="give the sequence that the coordinates refer to",
        )


def read_genes(path: Path) -> dict[str, list[Span]]:
    """Read coding sequences from a GFF3 file, plain or packed.

    Returns:
        Sequence id -> intervals.

    Raises:
        InputError, InputMissingError: the file cannot be read, or is not GFF3.
    """
    genes: dict[str, list[Span]] = {}
    for number, line in read_lines(path, None):
        if line.startswith("##FASTA"):
            break
        if line.startswith("#"):
            continue
        values = line.split("\t")
        try:
            if values[2] == "CDS":
                span = _parse_span(values[3], values[4], first=1)
                genes.setdefault(unquote(values[0]), []).append(span)
        except (IndexError, ValueError) as error:
            raise InputError(
                f"{printable(path)}:{number} is not a line of GFF3",
                hint="give GFF3 with CDS features and the sequence ids of the truth",
            ) from error
    return genes


def _parse_span(start: str, end: str, *, first: int) -> Span:
    """Return the interval between two numbers, where ``first`` is the first base of a sequence.

    Raises:
        ValueError: this is not an interval.
    """
    longest = 10**15  # bases; no sequence is longer
    span = int(start) - first, int(end)
    if not 0 <= span[0] < span[1] <= longest:
        raise ValueError(span)
    return span


_Counts = tuple[int, int, int]  # bases or genes: called rightly, called wrongly, missed


@dataclass(frozen=True, slots=True)
class RegionScores:
    """Counts for one sequence, or sums over several."""

    bases: _Counts = (0, 0, 0)
    genes: _Counts = (0, 0, 0)
    prophages: int = 0
    found: int = 0
    regions: int = 0
    false: int = 0
    n_bases: int = 0
    split: int = 0  # prophages with more than one region
    merged: int = 0  # regions with more than one prophage
    ends: tuple[int, ...] = ()  # distances in bases from the ends of found prophages to regions'

    columns: ClassVar = (
        "precision",
        "recall",
        "f1",
        "prophages",
        "found",
        "regions",
        "false",
        "false_per_mbp",
        "end_median",
        "end_90",
        "split",
        "merged",
        "gene_precision",
        "gene_recall",
        "gene_f1",
    )

    @classmethod
    def sum(cls, sequence_scores: Sequence[RegionScores]) -> RegionScores:
        columns = {
            column.name: [getattr(scores, column.name) for scores in sequence_scores]
            for column in fields(cls)
        }
        ends = tuple(chain.from_iterable(columns.pop("ends")))
        counts = {name: np.sum(values, axis=0).tolist() for name, values in columns.items()}
        return cls(**counts, ends=ends)

    @property
    def f1(self) -> float:
        """F1 over bases. NaN if there is neither a prophage nor a region."""
        return _rates(*self.bases)[2]

    def row(self) -> list[str]:
        """Return values for ``columns``, "" if not defined."""
        ends = np.percentile(self.ends, (50, 90)).tolist() if self.ends else (np.nan, np.nan)
        values = (
            *(f"{rate:.3f}" for rate in _rates(*self.bases)),
            *map(str, (self.prophages, self.found, self.regions, self.false)),
            f"{1e6 * self.false / self.n_bases:.2f}" if self.n_bases else "nan",
            *(f"{end:.0f}" for end in ends),
            *map(str, (self.split, self.merged)),
            *(f"{rate:.3f}" for rate in _rates(*self.genes)),
        )
        return ["" if value == "nan" else value for value in values]


def _rates(right: int, false: int, missed: int) -> tuple[float, float, float]:
    """Return precision, recall and F1. NaN if the denominator is 0."""
    totals = np.array([right + false, right + missed, 2 * right + false + missed])
    with np.errstate(invalid="ignore"):
        precision, recall, f1 = (np.array([right, right, 2 * right]) / totals).tolist()
    return precision, recall, f1


def measure_regions(
    regions: Sequence[Span], truth: Truth, n_bases: int, genes: Sequence[Span] = ()
) -> RegionScores:
    """Compare one sequence's regions with the truth."""
    is_virus = _mask(truth.prophages, n_bases)
    counts = is_virus | ~_mask(truth.unclear, n_bases)
    is_called = _mask(regions, n_bases)
    touching = [
        [region for region in regions if region[0] < end and region[1] > start]
        for start, end in truth.prophages
    ]
    ends: list[int] = []
    for (start, end), own in zip(truth.prophages, touching, strict=True):
        if is_called[start:end].mean() >= 0.5:
            ends += [abs(own[0][0] - start), abs(own[-1][1] - end)]
    counted = [(a, b) for a, b in regions if counts[a:b].any()]
    n_merged = 0
    for a, b in regions:
        n_touched = sum(a < end and b > start for start, end in truth.prophages)
        n_merged += n_touched > 1
    middles = np.array([(start + end) // 2 for start, end in genes], dtype=np.int64)
    middles = middles[middles < n_bases]
    return RegionScores(
        bases=_count(is_called & counts, is_virus),
        genes=_count((is_called & counts)[middles], is_virus[middles]),
        prophages=len(truth.prophages),
        found=len(ends) // 2,
        regions=len(counted),
        false=sum(bool(is_virus[a:b][counts[a:b]].mean() < 0.5) for a, b in counted),
        n_bases=n_bases,
        split=sum(len(own) > 1 for own in touching),
        merged=n_merged,
        ends=tuple(ends),
    )


def _count(is_called: BoolArray, is_virus: BoolArray) -> _Counts:
    right = int(np.count_nonzero(is_called & is_virus))
    false = int(np.count_nonzero(is_called & ~is_virus))
    missed = int(np.count_nonzero(~is_called & is_virus))
    return right, false, missed


def _mask(intervals: Iterable[Span], n_bases: int) -> BoolArray:
    """Return True for bases in the intervals. (n_bases,)"""
    inside = np.zeros(n_bases, dtype=np.bool_)
    for start, end in intervals:
        inside[start:end] = True
    return inside


def f1_interval(sequence_scores: Sequence[RegionScores], seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the base F1, by drawing sequences with replacement.

    A draw with neither a prophage nor a region has no F1, and is excluded.
    """
    draws = 2_000
    rng = np.random.default_rng(seed)
    counts = np.array([scores.bases for scores in sequence_scores])
    sums = counts[rng.integers(0, len(sequence_scores), (draws, len(sequence_scores)))].sum(axis=1)
    sums = sums[sums.any(axis=1)]
    values = 2 * sums[:, 0] / (sums @ [2, 1, 1])
    low, high = np.percentile(values, INTERVAL).tolist()
    return low, high


@dataclass(frozen=True, slots=True, eq=False)
class Chromosome:
    """A chromosome with its scored pieces and its known intervals."""

    name: str
    sequence: str
    items: WindowTable
    truth: Truth

    @classmethod
    def from_record(
        cls, record: FastaRecord, scorer: Scorer, truth: Truth, code: GeneticCode = STANDARD
    ) -> Chromosome:
        """Score a record's pieces, and the genes in all pieces."""
        sequence = record.sequence.upper()
        [items] = WindowTable.from_scores([sequence], scorer, PIECES.step, code)
        everything = np.ones(len(items.start), dtype=np.bool_)
        read_genes = partial(find_host_genes, scorer=scorer, code=code)
        items = items.with_genes(sequence, everything, PIECES.size, read_genes)
        return cls(record.id, sequence, items, truth)

    @property
    def is_virus(self) -> BoolArray:
        """(n_items,) True for pieces with their middle in a prophage."""
        return self._has_middle(self.truth.prophages) & self.items.is_known

    @property
    def is_host(self) -> BoolArray:
        """(n_items,) True for pieces with their middle outside all intervals in the truth."""
        elements = (*self.truth.prophages, *self.truth.unclear)
        return ~self._has_middle(elements) & self.items.is_known

    def _has_middle(self, intervals: Sequence[Span]) -> BoolArray:
        return _mask(intervals, len(self.sequence))[self.items.start + PIECES.size // 2]


# The records of one file: chromosomes with known prophages, and pieces of all other records.
# None: too few pieces.
_Genome = tuple[list[Chromosome], WindowTable | None]


def train_regions(options: TrainOptions, truth_table: Path, on_event: EventHandler) -> list[str]:
    """Write a region model, and the figures for each left-out chromosome.

    Returns:
        The table lines.

    Raises:
        VirnucproError: see ``errors``. Also raised if there are too few chromosomes.
    """
    left_out_table = "regions_left_out.tsv"
    with open_run_dir(options.output_dir).locked_for_run(create=True):
        scorer = Scorer.load_builtin()
        read_genes = partial(find_host_genes, scorer=scorer)
        genomes = _read_genomes(options.data, truth_table, scorer, on_event)
        chromosomes = list(chain.from_iterable(members for members, _ in genomes))
        n_chromosomes = len(chromosomes)
        scores: dict[str, RegionScores] = {}
        for left_out, other_chromosomes, hosts in leave_one_out(genomes):
            n_done = len(scores)
            work = (n_done, n_chromosomes - n_done)
            on_event(Progress("leaving each out", n_done, n_chromosomes, "chromosomes", work))
            model = learn_region_model(other_chromosomes, hosts, "")
            regions, _ = regions_from_windows(
                left_out.sequence, left_out.items, model, read_genes, is_virus=False
            )
            intervals = [(region.start, region.end) for region in regions]
            figures = measure_regions(intervals, left_out.truth, len(left_out.sequence))
            scores[left_out.name] = figures
            announce(f"{printable(left_out.name)} left out: F1 {figures.f1:.3f}")
        lines = _write_table(options.output_dir / left_out_table, scores, options.seed)
        hosts = [host for _, host in genomes if host]
        n_prophages = sum(len(chromosome.truth.prophages) for chromosome in chromosomes)
        training = f"{format_count(n_prophages, 'prophage')} of {len(chromosomes)} chromosomes"
        if hosts:
            training += f", and {format_count(len(hosts), 'other host')}"
        announce(f"regions: learned from {training}")
        model = learn_region_model(chromosomes, hosts, training)
        SafeDir(options.output_dir).write_file(options.output_dir / ModelFile.REGIONS, model.text)
    return lines


def leave_one_out(
    genomes: Sequence[_Genome],
) -> Iterator[tuple[Chromosome, list[Chromosome], list[WindowTable]]]:
    """Yield each chromosome, all other chromosomes, and the hosts from all other files."""
    chromosomes = list(chain.from_iterable(members for members, _ in genomes))
    for genome in genomes:
        hosts = [other[1] for other in genomes if other is not genome and other[1]]
        for left_out in genome[0]:
            remaining = [chromosome for chromosome in chromosomes if chromosome is not left_out]
            yield left_out, remaining, hosts


def _read_genomes(
    data: Path, truth_table: Path, scorer: Scorer, on_event: EventHandler
) -> list[_Genome]:
    """Read each file: chromosomes with known prophages, and all other records as one host.

    Other records that are too short for regions are skipped.

    Raises:
        InputError: a chromosome is missing, occurs twice, or has no host, or there are too few.
    """
    min_chromosomes = 3  # chromosomes: one is left out, and two show how much hosts differ
    min_pieces = 100  # per host
    truths = {name: truth for name, truth in read_truth(truth_table).items() if truth.prophages}
    genomes: list[_Genome] = []
    n_letters = 0
    for file in InputFile.complete(data):
        chromosomes: list[Chromosome] = []
        host_tables: list[WindowTable] = []
        for record in read_fasta(Path(file.path), file.name):
            on_event(Progress("scoring pieces", n_letters, 0, "letters"))
            n_letters += len(record.sequence)
            if truth := truths.get(record.id):
                chromosomes.append(_find_chromosome(record, truth, scorer))
            elif len(record.sequence) >= SHORTEST_RECORD:
                host_tables.append(Chromosome.from_record(record, scorer, Truth()).items)
        host = WindowTable.concatenate(host_tables)
        is_host = np.count_nonzero(host.is_known) >= min_pieces
        genomes.append((chromosomes, host if is_host else None))
    names = [chromosome.name for members, _ in genomes for chromosome in members]
    _check_names(names, truths)
    if len(names) < min_chromosomes:
        raise InputError(
            f"{format_count(len(names), 'chromosome')} with prophages; {min_chromosomes} are "
            "needed, as each is left out once",
            hint="add more to the truth",
        )
    return genomes


def _find_chromosome(record: FastaRecord, truth: Truth, scorer: Scorer) -> Chromosome:
    """Score a chromosome with known prophages, after checking it.

    Raises:
        InputError: it is too short, shorter than its truth, or has no piece of the host.
    """
    n_bases = len(record.sequence)
    _check_truth(record.id, truth, n_bases)
    if n_bases < SHORTEST_RECORD:
        raise InputError(
            f"{printable(record.id)} has {n_bases:,} bases; regions are learned from "
            f"{SHORTEST_RECORD:,} or more",
            hint="leave it out of the truth",
        )
    chromosome = Chromosome.from_record(record, scorer, truth)
    if not chromosome.is_host.any():
        raise InputError(
            f"{printable(record.id)} has no piece of its host: all known bases are prophage, "
            "remnant or unclear",
            hint="leave it out of the truth, or give the whole chromosome",
        )
    return chromosome


def learn_region_model(
    chromosomes: Sequence[Chromosome], hosts: Sequence[WindowTable], training: str
) -> RegionModel:
    """Learn a region model from chromosomes.

    The model expects regions to be as rare as in these chromosomes. Each chromosome must have a
    host piece. A prophage may be too short for a piece.

    Args:
        hosts: further hosts, which only add their levels.

    Raises:
        InputError: no prophage has a piece, or chromosomes do not differ.
    """
    weight = 0.7 * PIECES.step / PIECES.size  # per piece, because neighbours overlap and are alike
    genes_weight = 0.6 * weight  # per piece with its genes, which span several pieces
    backgrounds = [HostBackground.from_items(chromosome.items) for chromosome in chromosomes]
    usual = HostBackground.mean(backgrounds)
    own = [_levels(chromosome.items, usual, chromosome.is_host) for chromosome in chromosomes]
    levels = [*(_levels(items, usual, items.is_known) for items in hosts), *own]
    gc, level, gene_level = np.array(levels).T
    # How much pieces differ from their own host.
    contrasts = [
        _signal(chromosome.items, usual) - host_level
        for chromosome, (_, host_level, _) in zip(chromosomes, own, strict=True)
    ]
    virus, host = _split_by_side(chromosomes, contrasts)
    distance = _mean_distance(chromosomes, virus)
    host_bases, virus_bases = _mean_lengths(chromosomes)
    first_share = 0.1  # share of records that begin in a virus; makes phage lambda alone a region
    try:
        genes = Levels.from_values(gc, gene_level)
        gene_contrasts = _add_genes(contrasts, chromosomes, own, genes)
        return RegionModel(
            size=PIECES.size,
            step=PIECES.step,
            host=usual,
            levels=Levels.from_values(gc, level),
            gc_weight=PIECES.gc_weight,
            shape_weight=PIECES.shape_weight,
            shape_bases=PIECES.shape_bases,
            edges=PIECES.edges,
            log_ratios=_log_ratios(virus, host, weight),
            genes=genes,
            gene_log_ratios=_log_ratios(*_split_by_side(chromosomes, gene_contrasts), genes_weight),
            weight=weight,
            deviation=round(float(np.mean([values.std() for values in host])), 4),
            distance=round(distance, 4),
            first_share=first_share,
            host_bases=host_bases,
            virus_bases=virus_bases,
            training=training,
        )
    except ValueError as error:
        raise InputError(
            f"no region model can be learned from these chromosomes: {error}",
            hint="give chromosomes of several species, with prophages unlike their hosts",
        ) from error


def _mean_distance(chromosomes: Sequence[Chromosome], virus: Sequence[FloatArray]) -> float:
    """Return the mean contrast of prophage pieces, with equal weight for each chromosome.

    Raises:
        InputError: no prophage has a piece.
    """
    distances = [values.mean() for values in virus if len(values)]
    if not distances:
        names = ", ".join(printable(chromosome.name) for chromosome in chromosomes[:8])
        raise InputError(
            f"no prophage of {names} has a piece of {PIECES.size:,} bases of its own",
            hint="add chromosomes with longer prophages to the truth",
        )
    return float(np.mean(distances))


def _add_genes(
    contrasts: Sequence[FloatArray],
    chromosomes: Sequence[Chromosome],
    host_levels: Sequence[tuple[float, float, float]],
    genes: Levels,
) -> list[FloatArray]:
    """Add the genes of each piece, relative to their usual level at the host's GC."""
    gene_contrasts: list[FloatArray] = []
    rows = zip(contrasts, chromosomes, host_levels, strict=True)
    for contrast, chromosome, (host_gc, _, _) in rows:
        gene_contrasts.append(contrast + chromosome.items.genes - genes.index_at(host_gc))
    return gene_contrasts


def _split_by_side(
    chromosomes: Sequence[Chromosome], piece_values: Sequence[FloatArray]
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Return prophage piece and host piece values, by chromosome, without NaN."""
    virus: list[FloatArray] = []
    host: list[FloatArray] = []
    for chromosome, values in zip(chromosomes, piece_values, strict=True):
        is_valid = ~np.isnan(values)
        virus.append(values[chromosome.is_virus & is_valid])
        host.append(values[chromosome.is_host & is_valid])
    return virus, host


def _mean_lengths(chromosomes: Sequence[Chromosome]) -> tuple[int, int]:
    """Return the mean number of host bases, and of prophage bases, per prophage."""
    n_bases = sum(len(chromosome.sequence) for chromosome in chromosomes)
    n_regions = sum(len(chromosome.truth.prophages) for chromosome in chromosomes)
    masks = (
        _mask(chromosome.truth.prophages, len(chromosome.sequence)) for chromosome in chromosomes
    )
    n_virus = sum(int(np.count_nonzero(is_virus)) for is_virus in masks)
    return round((n_bases - n_virus) / n_regions), round(n_virus / n_regions)


def _log_ratios(
    virus_contrasts: Sequence[FloatArray], host_contrasts: Sequence[FloatArray], weight: float
) -> tuple[float, ...]:
    """Return log ratios of virus over host by contrast bin, times the piece weight."""
    nothing = np.zeros(len(PIECES.edges) + 1)
    virus = sum(
        (_counts(values) / max(1, len(values)) ** 0.5 for values in virus_contrasts), start=nothing
    )
    host = sum((_counts(values) / max(1, len(values)) for values in host_contrasts), start=nothing)
    return tuple(np.round(np.log(_shares(virus) / _shares(host)) * weight, 4).tolist())


def _signal(items: WindowTable, usual: HostBackground) -> FloatArray:
    host = usual.value_at(items, is_virus=False)
    return items.signal(
        host, PIECES.gc_weight, PIECES.shape_weight, PIECES.shape_bases // PIECES.step
    )


def _levels(
    items: WindowTable, usual: HostBackground, is_host: BoolArray
) -> tuple[float, float, float]:
    """Return the median GC of a host, and the median signal and genes over its own pieces."""
    genes = items.genes[is_host]
    gene_level = np.median(genes[~np.isnan(genes)]) if not np.isnan(genes).all() else np.nan
    return items.median_gc, float(np.median(_signal(items, usual)[is_host])), float(gene_level)


def _counts(contrasts: FloatArray) -> FloatArray:
    """Count the pieces in each bin. (n_pieces,) -> (n_bins,)"""
    bins = np.searchsorted(PIECES.edges, contrasts)
    return np.bincount(bins, minlength=len(PIECES.edges) + 1).astype(np.float64)


def _shares(counts: FloatArray) -> FloatArray:
    """Return the smoothed share of each bin, above 0. They sum to 1."""
    least = 0.02  # share of all pieces that is spread evenly over the bins
    kernel = np.exp(-0.5 * np.arange(-3, 4) ** 2)  # over bins
    padded = np.pad(counts / counts.sum(), len(kernel) // 2, mode="edge")
    smooth = np.convolve(padded, kernel / kernel.sum(), "valid") + least / len(counts)
    return np.asarray(smooth / smooth.sum())
