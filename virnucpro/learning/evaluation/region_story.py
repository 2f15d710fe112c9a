"""``virnucpro evaluate --regions``: known prophages beside the regions that predict finds.

The sequences go through ``pipeline.predict`` as any input; what is measured is read from its
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from virnucpro.callers.chain import embedded_region_model, load_region_model
from virnucpro.ground.errors import VirnucproError
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import refuse_links, write_whole
from virnucpro.ground.log import announce, printable
from virnucpro.ground.option_fields import carry
from virnucpro.learning.evaluation.regions import (
    COLUMNS,
    RegionFigures,
    Span,
    Truth,
    check_none_missing,
    check_truth,
    check_unique,
    f1_interval,
    measure_regions,
    read_genes,
    read_truth,
)
from virnucpro.learning.options import EvaluateOptions
from virnucpro.run.folder import RunDir
from virnucpro.stories.options import PredictOptions
from virnucpro.stories.pipeline import predict
from virnucpro.tables.read import read_calls, read_regions
from virnucpro.tables.sinks import RecordTable, RegionTable

TABLE = "regions_evaluation.tsv"
ALL = "all"
_RUN = "run"


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
        calls = [(call.record_id, call.length) for call in read_calls(table)]
    lengths = dict(calls)
    check_unique(name for name, _ in calls)
    check_none_missing(truths.keys() - lengths.keys())
    regions: dict[str, list[Span]] = {}
    if rundir.output(RegionTable).exists():
        with rundir.output(RegionTable).open(encoding="utf-8") as table:
            for name, region in read_regions(table):
                regions.setdefault(name, []).append(region)
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
