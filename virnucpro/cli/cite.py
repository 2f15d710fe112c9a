"""``virnucpro cite``."""

from __future__ import annotations

from collections.abc import Iterator

from virnucpro.cli.command import command
from virnucpro.cli.running import report
from virnucpro.page.citation import WORKS, as_bibtex, as_text
from virnucpro.page.options import CiteOptions


@command(CiteOptions)
def cite(options: CiteOptions) -> None:
    """Print how to cite a result: this program, its language models, and the original VirNucPro.

    Example: virnucpro cite --bibtex >> references.bib
    """
    references = "\n\n".join(map(as_bibtex, WORKS))
    report([references] if options.bibtex else [*_as_list(), references])


def _as_list() -> Iterator[str]:
    yield "Please cite:\n"
    for work in WORKS:
        only = " (only for results with --model that used it)" if work.families else ""
        yield f"- {work.role}{only}:\n  {as_text(work)}\n"
    yield "The same as BibTeX (alone: virnucpro cite --bibtex):\n"
