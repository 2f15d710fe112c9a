"""The documentation as a site: every page, every link, and no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import make_site
import pytest

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|link)[^>]*\b(?:src|href)=\"?(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs/make_site.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    made = {path.stem for path in site.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} < made
    assert {"index", "COMMANDS", "CONTRIBUTING", "CHANGELOG", "EXAMPLES"} < made


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert len(pages) > 15
    for path in pages:
        assert not LOADED.search(path.read_text(encoding="utf-8")), path.name


def test_the_commands_of_the_site_have_the_options_of_the_program(site: Path) -> None:
    page = (site / "COMMANDS.html").read_text(encoding="utf-8")
    for name in ("predict", "models-check", "train", "work"):
        assert f'id="virnucpro-{name}"' in page
    assert "--threshold SCORE" in page
    assert "virnucpro predict -i contigs.fa -o results/" in re.sub(r"<[^>]+>", "", page)


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See [this](GONE.md).")
    with pytest.raises(FileNotFoundError, match=r"GONE\.md"):
        make_site.page(page)
