"""How a result is cited: the same facts in the program and in CITATION.cff."""

from __future__ import annotations

from pathlib import Path

import yaml
from typer.testing import CliRunner

from virnucpro import __version__
from virnucpro.cli.main import app
from virnucpro.page.html import Work, all_works, as_bibtex, as_text

CITATION = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text())


def as_in_cff(work: Work) -> dict[str, object]:
    people = [author.partition(", ") for author in work.authors]
    facts = {
        "title": work.title,
        "authors": [
            {"family-names": family, "given-names": given} if given else {"name": family}
            for family, _, given in people
        ],
        "year": work.year if work.journal else None,
        "journal": work.journal,
        "volume": work.volume,
        "issue": work.issue,
        "pages": work.pages,
        "doi": work.doi,
        "version": work.version,
    }
    return {name: fact for name, fact in facts.items() if fact}


def test_the_file_for_citations_says_what_the_program_says():
    program, *papers = all_works()
    assert as_in_cff(program).items() <= CITATION.items()
    assert CITATION["version"] == __version__
    assert CITATION["references"] == [{"type": "article", **as_in_cff(work)} for work in papers]


def test_cite_prints_text_and_bibtex_and_bibtex_alone_for_a_file():
    both = CliRunner().invoke(app, ["cite"])
    alone = CliRunner().invoke(app, ["cite", "--bibtex"])
    assert both.exit_code == alone.exit_code == 0
    for work in all_works():
        assert as_text(work) in both.stdout and as_bibtex(work) in both.stdout
        assert work.doi in as_text(work)
        is_limited = f"{work.role} (only for results that used it)" in both.stdout
        assert is_limited == bool(work.families)
    assert alone.stdout.startswith("@misc{virnucpro,\n")
    assert both.stdout.endswith(alone.stdout)
    assert alone.stdout.count("{") == alone.stdout.count("}")
    assert "author = {{The VirNucPro developers}}," in alone.stdout
