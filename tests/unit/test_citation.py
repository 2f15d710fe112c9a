"""Citations: the program and CITATION.cff have the same data."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_helpers import CONTIGS, ROOT, invoke

from virnucpro._version import __version__
from virnucpro.core.atomic_io import hash_file
from virnucpro.models.names import TINY_NOTICE
from virnucpro.results.report.citation import Work, all_works

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def assert_cites(work: Work, facts: dict[str, Any]) -> None:
    """Check that the text and the BibTeX of a work have these data, and no other author."""
    names = [(author["family-names"], author["given-names"]) for author in facts["authors"]]
    initials = ["".join(name[0] for name in given.split()) for _, given in names]
    short = [f"{family} {letters}" for (family, _), letters in zip(names, initials, strict=True)]
    if "journal" not in facts:
        assert_cites_preprint(work, facts, ", ".join(short))
        return
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


def assert_cites_preprint(work: Work, facts: dict[str, Any], authors: str) -> None:
    source = f"{facts['title']}. {facts['notes']}. {facts['url']}"
    assert work.text == f"{authors} ({facts['year']}). {source}"
    names = [f"{author['family-names']}, {author['given-names']}" for author in facts["authors"]]
    assert work.bibtex.splitlines()[1:] == [
        f"  title = {{{{{facts['title']}}}}},",
        f"  author = {{{' and '.join(names)}}},",
        f"  year = {{{facts['year']}}},",
        f"  note = {{{facts['notes']}}},",
        f"  url = {{{facts['url']}}},",
        "}",
    ]


def test_citation_file_matches_the_program():
    program, *papers = all_works()
    [developers] = CITATION["authors"]
    for text in (program.text, program.bibtex):
        assert developers["name"] in text and CITATION["title"] in text and __version__ in text
    assert CITATION["version"] == __version__
    for work, facts in zip(papers, CITATION["references"], strict=True):
        assert_cites(work, facts)


def test_cite_prints_text_and_bibtex():
    (code, both) = invoke("cite")
    (other_code, alone) = invoke("cite", "--bibtex")
    assert code == other_code == 0
    for work in all_works():
        assert work.text in both and work.bibtex in both
        is_limited = f"{work.role} (only for results that used it)" in both
        assert is_limited == bool(work.families)
    assert alone.startswith("@misc{virnucpro,\n")
    assert both.endswith(alone)
    assert alone.count("{") == alone.count("}")
    assert "author = {{The VirNucPro developers}}," in alone


# Works that a run used

PROGRAM = "virnucpro"
ESM2 = "lin2023esm2"
ORIGINAL = "li2025virnucpro"
DNABERT_S = "zhou2025dnaberts"


def run_of(folder: Path, options: str) -> Path:
    code, said = invoke("predict", "-q", "-i", CONTIGS, "-o", folder, *shlex.split(options))
    assert code == 0, said
    return folder


def cited_keys(folder: Path) -> list[str]:
    code, said = invoke("cite", folder, "--bibtex")
    assert code == 0
    entries = [line for line in said.splitlines() if line.startswith("@")]
    return [entry.partition("{")[2].rstrip(",") for entry in entries]


def test_cite_of_a_run_by_the_scorer(tmp_path):
    folder = run_of(tmp_path / "run", "")
    code, said = invoke("cite", folder)
    assert code == 0 and said.startswith(f"The run in {folder} used:\n")
    recipe = json.loads((folder / "run.json").read_text())["recipe"]
    assert f"- scorer, a part of VirNucPro: SHA-256 {recipe['scorer_sha256']}\n" in said
    assert "ESM-2" not in said and "(only for results that used it)" not in said
    assert cited_keys(folder) == [PROGRAM, ORIGINAL]


def test_cite_of_a_run_with_a_head(tiny, tmp_path):
    options = f"--model {tiny.model} --head {tiny.head_file} --device cpu --workers 1"
    folder = run_of(tmp_path / "run", f"{options} --precision fp32")
    code, said = invoke("cite", folder)
    assert code == 0 and "- model esm2_tiny: layer 2, mean pooling, fp32, SHA-256 " in said
    assert f"- head {tiny.head_file}: SHA-256 {hash_file(tiny.head_file)}\n" in said
    assert cited_keys(folder) == [PROGRAM, ESM2, ORIGINAL]


def test_cite_names_the_demonstration_model(tmp_path):
    folder = run_of(tmp_path / "run", "--model virnucpro-tiny --device cpu --workers 1")
    assert f"- model virnucpro-tiny ({TINY_NOTICE}): layer 6" in invoke("cite", folder)[1]


@pytest.mark.parametrize(
    ("family", "model", "expected"),
    [
        ("dnabert-s", "dnabert-s", [PROGRAM, ORIGINAL, DNABERT_S]),
        ("learned", "esm2-cnn", [PROGRAM, ESM2, ORIGINAL]),
        ("learned", "onehot-cnn", [PROGRAM, ORIGINAL]),
    ],
)
def test_cite_follows_the_recipe(tmp_path, family, model, expected):
    recipe = {"command": "predict", "encoders": [{"family": family, "model": model}]}
    facts = {"virnucpro_version": "9.8.7", "recipe": recipe}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert cited_keys(tmp_path) == expected
    code, said = invoke("cite", tmp_path)
    assert code == 0 and "VirNucPro, version 9.8.7." in said


def test_cite_without_a_run_is_refused(tmp_path):
    code, said = invoke("cite", tmp_path)
    assert code == 66 and "contains no run" in said
    (tmp_path / "run.json").write_text("{")
    assert invoke("cite", tmp_path)[0] == 73
