"""``virnucpro report``."""

from __future__ import annotations

from virnucpro.cli import running
from virnucpro.cli.command import command
from virnucpro.cli.exits import exits
from virnucpro.page.options import ReportOptions


@command(ReportOptions)
def report(options: ReportOptions) -> None:
    """Write DIR/report.html: a run, a training or an evaluation on one page, without a network.

    Only files of the folder are read, and nothing is embedded or scored. The same folder gives
    the same page.

    Example: virnucpro report results/
    """
    with exits():
        from virnucpro.ground.log import printable
        from virnucpro.learning.pages import report_folder

        running.report([f"report: {printable(report_folder(options.folder))}"])
