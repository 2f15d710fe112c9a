"""``virnucpro regions``."""

from __future__ import annotations

from virnucpro.cli.command import command
from virnucpro.cli.exits import exits
from virnucpro.cli.running import as_command, loading, report, watched
from virnucpro.ground.options import ConsoleOptions
from virnucpro.stories.options import RegionsOptions

_KEPT = "the folder is as it was: run the same command again"


@command(RegionsOptions, ConsoleOptions)
def regions(options: RegionsOptions, console: ConsoleOptions) -> None:
    """Find virus-like regions, such as prophages, in the records of a finished run.

    DIR gets the files that predict makes of them unless it has --no-regions: regions.tsv, .bed,
    .gff3 and .fasta, tracks.tsv.gz, the notes in predictions.tsv, and the proviruses in viruses.tsv
    and viruses.fasta. Nothing is embedded, and no call changes. The inputs must be where they were.

    Example: virnucpro regions results/

    Exit codes are those of predict.
    """
    with exits(lambda: _KEPT):
        with loading(console):
            from virnucpro.callers.regions import SHORTEST_RECORD
            from virnucpro.stories.regions import find_regions
            from virnucpro.stories.summary import virus_line
            from virnucpro.tables.sinks import RegionTable

        with watched(console) as events:
            tally = find_regions(options, events)
        table = options.folder / RegionTable.file
        lines = [virus_line(tally), *as_command(["head", str(table)])]
        if not table.exists():
            why = f"no scored record has {SHORTEST_RECORD:,} bases"
            lines = [virus_line(tally), f"virus-like regions: none; {why}"]
        report(lines, console.quiet)
