"""``virnucpro report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from virnucpro.cli.exits import exits


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder.")],
) -> None:
    """Write DIR/report.html: the run on one page, which opens without a network.

    Only files of the run folder are read, and nothing is embedded or scored. The same run gives
    the same page.

    Example: virnucpro report results/
    """
    with exits(kept=""):
        from virnucpro.log import printable
        from virnucpro.report.run import report_run

        typer.echo(f"report: {printable(report_run(folder))}")
