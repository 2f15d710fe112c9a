"""``virnucpro evaluate --regions``: known prophages beside the regions that predict finds.

The sequences go through ``pipeline.predict`` as any input; what is measured is read from its
tables. Coordinates are bases, 0-based and half-open. A prophage is found if half of it or more
lies in regions; a region is false if less than half of what counts of it is prophage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from virnucpro.callers.chain import embedded_region_model, load_region_model
from virnucpro.ground.errors import InputError, VirnucproError
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import refuse_links, write_whole
from virnucpro.ground.log import LOGGER, announce, printable
from virnucpro.ground.numeric import Mask
from virnucpro.ground.options import carry
from virnucpro.learning.evaluation.metrics import INTERVAL
from virnucpro.learning.labelled.records import read_cells, read_lines
from virnucpro.learning.options import EvaluateOptions
from virnucpro.run.folder import RunDir
from virnucpro.stories.options import PredictOptions
from virnucpro.stories.pipeline import predict
from virnucpro.tables.sinks import RecordTable, RegionTable

TABLE = "regions_evaluation.tsv"
ALL = "all"
_RUN = "run"
Span = tuple[int, int]
COUNTED, LEFT_OUT = "prophage", ("remnant", "unclear")  # kinds of a row of the truth
COLUMNS = (
    *("precision", "recall", "f1", "prophages", "found", "regions", "false", "false_per_mbp"),
    *("end_median", "end_90", "split", "merged", "gene_precision", "gene_recall", "gene_f1"),
)
_TRUTH = "a table of the columns seq_id, start, end (bases from 0, half-open) and kind: prophage"
_PLACE = re.compile(r"[0-9]{1,15}")  # no sequence is longer
_DRAWS = 2_000


def evaluate_regions(options: EvaluateOptions, truth_table: Path, on_event: OnEvent) -> list[str]:
    """Find regions in the sequences, write how they agree with the truth, and return its lines.

    Raises:
        VirnucproError: see ``errors``; or a sequence of the truth was not called.
    """
    truths = read_truth(truth_table)
    genes = read_genes(options.genes) if options.genes is not None else {}
    model = load_region_model(options.region_model or embedded_region_model())
    announce(f"regions were learned from {model.training}; of any of these, figures are too good")
    refuse_links(options.output_dir, [_RUN, TABLE])
    run_folder = options.output_dir / _RUN
    asked = carry(
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
    each = dict(_measure(RunDir(run_folder), truths, genes))
    lines = region_lines(each, options.seed)
    write_whole(options.output_dir / TABLE, "\n".join([*lines, ""]))
    return lines


def _measure(
    rundir: RunDir, truths: dict[str, Truth], genes: dict[str, list[Span]]
) -> list[tuple[str, RegionFigures]]:
    """Each sequence of the run with its figures; one without a row of the truth has no prophage."""
    with rundir.output(RecordTable).open(encoding="utf-8") as table:
        calls = [(call.record_id, call.length) for call in RecordTable.read(table)]
    lengths = dict(calls)
    check_unique(name for name, _ in calls)
    check_none_missing(truths.keys() - lengths.keys())
    regions: dict[str, list[Span]] = {}
    if rundir.output(RegionTable).exists():
        with rundir.output(RegionTable).open(encoding="utf-8") as table:
            for (_, name), region in RegionTable.read(table):
                regions.setdefault(name, []).append((region.start, region.end))
    figures = []
    for name, n_bases in lengths.items():
        truth = truths.get(name, Truth())
        check_truth(name, truth, n_bases)
        of_record = sorted(regions.get(name, []))
        figures.append((name, measure_regions(of_record, truth, n_bases, genes.get(name, ()))))
    return figures


def region_lines(each: dict[str, RegionFigures], seed: int) -> list[str]:
    """A table: a row for each sequence, and one for all, with the interval of its F1."""
    columns = ("seq_id", *COLUMNS, "f1_low", "f1_high")
    rows: list[Sequence[str]] = [(name, *one.row(), "", "") for name, one in each.items()]
    figures = list(each.values())
    interval = (f"{value:.3f}" for value in f1_interval(figures, seed))
    rows.append((ALL, *RegionFigures.sum(figures).row(), *interval))
    return ["\t".join(row) for row in (columns, *rows)]


@dataclass(frozen=True, slots=True)
class Truth:
    """Known intervals of one sequence."""

    prophages: tuple[Span, ...] = ()
    unclear: tuple[Span, ...] = ()  # neither virus nor host: left out of every count


def read_truth(path: Path) -> dict[str, Truth]:
    """The intervals of a table by sequence; columns ``seq_id start end kind``, others are free.

    ``prophage`` counts, ``remnant`` and ``unclear`` are left out of every count, other kinds are
    passed over.

    Raises:
        InputError, InputMissingError: it cannot be read, or a row makes no sense.
    """
    truths: dict[str, Truth] = {}
    others = set()
    for line, row in read_cells(path, ("seq_id", "start", "end", "kind"), _TRUTH):
        name, kind, digits = row["seq_id"], row["kind"], (row["start"], row["end"])
        is_place = all(map(_PLACE.fullmatch, digits))
        start, end = map(int, digits) if is_place else (0, 0)
        if start >= end:
            raise InputError(
                f"{printable(path)}:{line}: no interval from {printable(digits[0])} to "
                f"{printable(digits[1])}",
                hint="count bases from 0; the end is the base behind the interval",
            )
        truth = truths.get(name, Truth())
        if kind == COUNTED:
            truth = replace(truth, prophages=(*truth.prophages, (start, end)))
        elif kind in LEFT_OUT:
            truth = replace(truth, unclear=(*truth.unclear, (start, end)))
        else:
            others.add(kind)
        truths[name] = truth
    if not any(truth.prophages for truth in truths.values()):
        raise InputError(f"{printable(path)} has no row of the kind {COUNTED}", hint=_TRUTH)
    if others:
        LOGGER.warning("passed over, of other kinds: %s", ", ".join(map(printable, sorted(others))))
    return truths


def check_none_missing(names: Set[str]) -> None:
    """
    Raises:
        InputError: there are names of the truth that no sequence has.
    """
    if names:
        raise InputError(
            f"the sequences have no {', '.join(map(printable, sorted(names)[:8]))} of the truth",
            hint="name the FASTA files of all sequences of the truth with --data",
        )


def check_unique(names: Iterable[str]) -> None:
    """
    Raises:
        InputError: several sequences have the same name.
    """
    name, n_sequences = max(Counter(names).items(), key=itemgetter(1), default=("", 0))
    if n_sequences > 1:
        raise InputError(
            f"{n_sequences} sequences are called {printable(name)}",
            hint="give each an id of its own: the truth names sequences by their ids",
        )


def check_truth(name: str, truth: Truth, n_bases: int) -> None:
    """
    Raises:
        InputError: an interval lies outside the sequence.
    """
    last = max((end for _, end in (*truth.prophages, *truth.unclear)), default=0)
    if last > n_bases:
        raise InputError(
            f"{printable(name)} has {n_bases:,} bases, and an interval of the truth up to {last:,}",
            hint="give the sequence that the coordinates are of",
        )


def read_genes(path: Path) -> dict[str, list[Span]]:
    """The coding sequences of a GFF3 file, plain or packed, by sequence.

    Raises:
        InputError, InputMissingError: it cannot be read, or is not GFF3.
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
                if not (_PLACE.fullmatch(values[3]) and _PLACE.fullmatch(values[4])):
                    raise ValueError("no place")
                place = (int(values[3]) - 1, int(values[4]))
                genes.setdefault(unquote(values[0]), []).append(place)
        except (IndexError, ValueError) as error:
            raise InputError(
                f"{printable(path)}:{number} is not a line of GFF3",
                hint="give GFF3 with CDS features, whose sequence ids are those of the truth",
            ) from error
    return genes


@dataclass(frozen=True, slots=True)
class RegionFigures:
    """Counts for one sequence, or sums over several."""

    bases_right: int = 0
    bases_false: int = 0
    bases_missed: int = 0
    prophages: int = 0
    found: int = 0
    regions: int = 0
    false: int = 0
    n_bases: int = 0
    split: int = 0  # prophages with more than one region
    merged: int = 0  # regions with more than one prophage
    genes_right: int = 0
    genes_false: int = 0
    genes_missed: int = 0
    ends: tuple[int, ...] = ()  # bases between the ends of prophages that were found and of regions

    @classmethod
    def sum(cls, each: Sequence[RegionFigures]) -> RegionFigures:
        counts = {
            field.name: sum(getattr(one, field.name) for one in each)
            for field in fields(cls)
            if field.name != "ends"
        }
        return cls(**counts, ends=tuple(chain.from_iterable(one.ends for one in each)))

    @property
    def f1(self) -> float:
        """F1 of bases; NaN where there is neither prophage nor region."""
        return _rates(self.bases_right, self.bases_false, self.bases_missed)[2]

    def row(self) -> list[str]:
        """The values of ``COLUMNS``; empty where there is nothing to tell."""
        ends = np.percentile(self.ends, (50, 90)).tolist() if self.ends else (np.nan, np.nan)
        genes = (self.genes_right, self.genes_false, self.genes_missed)
        values = (
            *(
                f"{rate:.3f}"
                for rate in _rates(self.bases_right, self.bases_false, self.bases_missed)
            ),
            *map(str, (self.prophages, self.found, self.regions, self.false)),
            f"{1e6 * self.false / self.n_bases:.2f}" if self.n_bases else "nan",
            *(f"{end:.0f}" for end in ends),
            *map(str, (self.split, self.merged)),
            *(f"{rate:.3f}" for rate in _rates(*genes)),
        )
        return ["" if value == "nan" else value for value in values]


def _rates(right: int, false: int, missed: int) -> tuple[float, float, float]:
    """Precision, recall and F1; NaN for what has nothing below the line."""

    def share(part: float, total: float) -> float:
        return part / total if total else np.nan

    return (
        share(right, right + false),
        share(right, right + missed),
        share(2 * right, 2 * right + false + missed),
    )


def measure_regions(
    regions: Sequence[Span], truth: Truth, n_bases: int, genes: Sequence[Span] = ()
) -> RegionFigures:
    """The regions of one sequence beside what is known of it."""
    is_virus = mask(truth.prophages, n_bases)
    counts = is_virus | ~mask(truth.unclear, n_bases)
    is_called = mask(regions, n_bases)
    hits = [
        [one for one in regions if one[0] < end and one[1] > start]
        for start, end in truth.prophages
    ]
    ends: list[int] = []
    found = 0
    for (start, end), touching in zip(truth.prophages, hits, strict=True):
        if is_called[start:end].mean() >= 0.5:
            found += 1
            ends += [abs(touching[0][0] - start), abs(touching[-1][1] - end)]
    counted = [(a, b) for a, b in regions if counts[a:b].any()]
    middles = np.array([(start + end) // 2 for start, end in genes], dtype=np.int64)
    middles = middles[middles < n_bases]
    gene_virus, gene_called = is_virus[middles], is_called[middles] & counts[middles]
    return RegionFigures(
        bases_right=_count(is_called & is_virus),
        bases_false=_count(is_called & ~is_virus & counts),
        bases_missed=_count(~is_called & is_virus),
        prophages=len(truth.prophages),
        found=found,
        regions=len(counted),
        false=sum(bool(is_virus[a:b][counts[a:b]].mean() < 0.5) for a, b in counted),
        n_bases=n_bases,
        split=sum(len(touching) > 1 for touching in hits),
        merged=sum(
            sum(a < end and b > start for start, end in truth.prophages) > 1 for a, b in regions
        ),
        genes_right=_count(gene_called & gene_virus),
        genes_false=_count(gene_called & ~gene_virus),
        genes_missed=_count(~gene_called & gene_virus),
        ends=tuple(ends),
    )


def mask(intervals: Iterable[Span], n_bases: int) -> Mask:
    """A mask of the bases that lie in the intervals. (n_bases,)"""
    inside = np.zeros(n_bases, dtype=np.bool_)
    for start, end in intervals:
        inside[start:end] = True
    return inside


def _count(chosen: Mask) -> int:
    return int(np.count_nonzero(chosen))


def f1_interval(each: Sequence[RegionFigures], seed: int) -> tuple[float, float]:
    """95 % of the F1 of bases, when sequences are drawn again with replacement.

    A draw without a prophage and a region has none, and is left out.
    """
    rng = np.random.default_rng(seed)
    counts = np.array([(one.bases_right, one.bases_false, one.bases_missed) for one in each])
    sums = counts[rng.integers(0, len(each), (_DRAWS, len(each)))].sum(axis=1)
    sums = sums[sums.any(axis=1)]
    values = 2 * sums[:, 0] / (sums @ [2, 1, 1])
    low, high = np.percentile(values, INTERVAL).tolist()
    return low, high
