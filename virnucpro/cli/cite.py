"""``virnucpro cite``."""

from __future__ import annotations

from typing import Annotated

import typer

from virnucpro.citation import WORKS, as_bibtex, as_text


def cite(
    bibtex: Annotated[
        bool, typer.Option("--bibtex", metavar="", help="BibTeX entries only.")
    ] = False,
) -> None:
    """Print how to cite a result: this program, its language models, and the original VirNucPro.

    Example: virnucpro cite --bibtex >> references.bib
    """
    if not bibtex:
        typer.echo("Please cite:\n")
        for work in WORKS:
            only = " (only for results with --model that used it)" if work.families else ""
            typer.echo(f"- {work.role}{only}:\n  {as_text(work)}\n")
        typer.echo("The same as BibTeX (alone: virnucpro cite --bibtex):\n")
    typer.echo("\n\n".join(map(as_bibtex, WORKS)))
