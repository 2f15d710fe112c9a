"""The documentation site: every page, every link, and no network access."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import make_dashboard
import make_site
import pytest

import virnucpro
from virnucpro import __version__

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|link)[^>]*\b(?:src|href)=\"?(https?:)?//")


@pytest.fixture(scope="module")
def site(made_once: Callable[..., Path]) -> Path:
    return made_once("site", build_site) / "html"


def build_site(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/make_site.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_site_has_every_page(site: Path) -> None:
    made = {path.stem for path in site.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} < made
    assert {"OVERVIEW", "COMMANDS", "API", "CONTRIBUTING", "CHANGELOG", "EXAMPLES"} < made
    assert not {path for path in made if path.startswith("2026")}  # experiments are no pages


def test_start_page_has_three_doors(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    for door in ("USING.html#find-viruses", "EMBEDDINGS.html", "TRAINING.html"):
        assert f'<strong><a href="{door}">' in page
    assert f"VirNucPro {__version__}" in page
    assert 'title="Switch to dark colours"' in page


def test_reference_has_every_public_name(site: Path) -> None:
    page = (site / "API.html").read_text(encoding="utf-8")
    headings = set(re.findall(r'<span class="doc doc-object-name[^>]*>(\w+)</span>', page))
    assert set(virnucpro.__all__) <= headings
    text = re.sub(r"<[^>]+>", "", page)
    assert "min_length: int = 0" in text  # the options of predict
    assert "false_discovery_rate" in text  # a field of a call


def test_long_code_lines_wrap(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="site.css"' in page
    assert page.count('<div class="language-sh highlight">') == 3  # others keep their columns
    assert "white-space: pre-wrap" in (site / "site.css").read_text(encoding="utf-8")


def test_printed_tables_keep_their_columns(site: Path) -> None:
    page = (site / "OVERVIEW.html").read_text(encoding="utf-8")
    assert '<div class="language-text highlight">' in page
    assert ".language-text pre > code" in (site / "site.css").read_text(encoding="utf-8")


def test_options_are_marked_in_code() -> None:
    code = '<a href="x--y"><code><span class="w"> </span>a --no-report=1 -i</code> --text</a>'
    marked = make_site.mark_options(code)
    assert marked.count('<span class="option">') == 2
    assert '<span class="option">--no-report</span>=1 <span class="option">-i</span>' in marked
    assert re.sub(r"<[^>]+>", "", marked) == re.sub(r"<[^>]+>", "", code)


def test_pages_load_nothing_from_a_network(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert len(pages) > 15
    for path in pages:
        assert not LOADED.search(path.read_text(encoding="utf-8")), path.name


def test_site_commands_have_real_options(site: Path) -> None:
    page = (site / "COMMANDS.html").read_text(encoding="utf-8")
    for name in ("predict", "models-check", "train", "work"):
        assert f'id="virnucpro-{name}"' in page
    text = re.sub(r"<[^>]+>", "", page)
    assert "--threshold SCORE" in text
    assert "virnucpro predict -i contigs.fa -o results/" in text


def test_broken_link_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See [this](GONE.md).")
    with pytest.raises(FileNotFoundError, match=r"GONE\.md"):
        make_site.page(page)


def test_dashboard_picture_loads_nothing() -> None:
    drawn = make_dashboard.draw(make_dashboard.simulate_run())
    shown = (ROOT / "docs/dashboard.svg").read_text(encoding="utf-8")
    for picture in (drawn, shown):
        assert "url(http" not in picture and "@import" not in picture
        for device in ("cuda:0", "cuda:1", "cuda:2"):
            assert device in picture
