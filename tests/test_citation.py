"""How a result is cited: the same facts in the program and in CITATION.cff."""

from __future__ import annotations

from typing import Any

import yaml
from runs import ROOT, invoke

from virnucpro._version import __version__
from virnucpro.results.report.html import Work, all_works

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def assert_cites(work: Work, facts: dict[str, Any]) -> None:
    """The text and the BibTeX of a work have these facts, and no other author."""
    names = [(author["family-names"], author["given-names"]) for author in facts["authors"]]
    initials = ["".join(name[0] for name in given.split()) for _, given in names]
    short = [f"{family} {letters}" for (family, _), letters in zip(names, initials, strict=True)]
    place = f"{facts['journal']} {facts['volume']}({facts['issue']}), {facts['pages']}"
    assert work.text == (
        f"{', '.join(short)} ({facts['year']}). {facts['title']}. {place}. "
        f"https://doi.org/{facts['doi']}"
    )
    fields = {
        "title": f"{{{facts['title']}}}",
        "author": " and ".join(map(", ".join, names)),
        **{name: facts[name] for name in ("year", "journal", "volume")},
        "number": facts["issue"],
        "pages": facts["pages"].replace("-", "--"),
        "doi": facts["doi"],
    }
    expected = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    assert work.bibtex.splitlines()[1:] == [*expected, "}"]


def test_the_file_for_citations_says_what_the_program_says():
    program, *papers = all_works()
    [developers] = CITATION["authors"]
    for text in (program.text, program.bibtex):
        assert developers["name"] in text and CITATION["title"] in text and __version__ in text
    assert CITATION["version"] == __version__
    for work, facts in zip(papers, CITATION["references"], strict=True):
        assert_cites(work, facts)


def test_cite_prints_text_and_bibtex_and_bibtex_alone_for_a_file():
    (code, both), (other_code, alone) = invoke("cite"), invoke("cite", "--bibtex")
    assert code == other_code == 0
    for work in all_works():
        assert work.text in both and work.bibtex in both
        is_limited = f"{work.role} (only for results that used it)" in both
        assert is_limited == bool(work.families)
    assert alone.startswith("@misc{virnucpro,\n")
    assert both.endswith(alone)
    assert alone.count("{") == alone.count("}")
    assert "author = {{The VirNucPro developers}}," in alone
