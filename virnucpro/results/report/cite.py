"""The lines of ``virnucpro cite``: what a run used, and the works to cite for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from virnucpro._version import __version__
from virnucpro.core.logging import escape_markup
from virnucpro.models.names import TINY_MODEL, TINY_NOTICE, current_name
from virnucpro.results.outputs import open_run_dir
from virnucpro.results.report.citation import Work, all_works, select_works
from virnucpro.results.report.run_json import RunJson


def cite_program(*, bibtex_only: bool) -> Iterator[str]:
    """Yield all works as text and as BibTeX."""
    yield from _as_lines(all_works(), "virnucpro cite --bibtex", bibtex_only=bibtex_only)


def cite_run(folder: Path, *, bibtex_only: bool) -> Iterator[str]:
    """Yield what a run used, and the works to cite for it, as text and as BibTeX.

    Raises:
        InputMissingError: the folder has no run.
        ResumeError: ``run.json`` is damaged.
    """
    rundir = open_run_dir(folder)
    if not rundir.manifest.is_file():
        raise rundir.missing_run_error("give the --output-dir of a run")
    facts = RunJson.read(rundir.manifest)
    works = select_works(_families(facts), facts.text("virnucpro_version") or __version__)
    if not bibtex_only:
        yield f"The run in {escape_markup(folder)} used:\n"
        yield from (f"- {part}" for part in _parts(facts))
        yield ""
    command = f"virnucpro cite {shlex.quote(escape_markup(folder))} --bibtex"
    yield from _as_lines(works, command, bibtex_only=bibtex_only, names_run=True)


def _as_lines(
    works: Sequence[Work], command: str, *, bibtex_only: bool, names_run: bool = False
) -> Iterator[str]:
    if not bibtex_only:
        yield "Please cite:\n"
        for work in works:
            only = " (only for results that used it)" if work.families and not names_run else ""
            yield f"- {work.role}{only}:\n  {work.text}\n"
        yield f"As BibTeX (alone: {command}):\n"
    yield "\n\n".join(work.bibtex for work in works)


def _families(facts: RunJson) -> set[str]:
    """Return a run's encoder families, with ESM-2 if a trained encoder contains it."""
    learned_on_esm2 = "esm2-"  # name prefix of trained encoders that read residues through ESM-2
    encoders = facts.iter_section("recipe", "encoders")
    families = {encoder.text("family") for encoder in encoders}
    if any(encoder.text("model").startswith(learned_on_esm2) for encoder in encoders):
        families.add("esm2")
    return families


def _parts(facts: RunJson) -> Iterator[str]:
    """Yield the program, models, head and scorer in a run, one line each."""
    command = facts.text("recipe", "command")
    yield f"VirNucPro {facts.text('virnucpro_version')}: virnucpro {command}"
    for encoder in facts.iter_section("recipe", "encoders"):
        name = current_name(encoder.text("model"))
        notice = f" ({TINY_NOTICE})" if name == TINY_MODEL else ""
        yield (
            f"model {name}{notice}: layer {encoder.number('layer')}, {encoder.text('pooling')} "
            f"pooling, {encoder.text('precision')}, SHA-256 {encoder.text('sha256')}"
        )
    if digest := facts.text("recipe", "head_sha256"):
        file = facts.text("tables", "head")
        yield f"head{f' {file}' if file else ' of the model'}: SHA-256 {digest}"
    if digest := facts.text("recipe", "scorer_sha256"):
        yield f"scorer, a part of VirNucPro: SHA-256 {digest}"
