"""The templates of the page are compiled once per installation."""

from __future__ import annotations

import sys
from importlib.util import cache_from_source
from pathlib import Path

import jinja2
import pytest

from virnucpro.results.report import templates
from virnucpro.results.report.templates import load_templates


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder with the compiled templates of this test, which is missing."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return Path(cache_from_source(templates.__file__)).parent


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "page.html").write_text("{{ name }}!")
    return folder


def render(sources: Path) -> str:
    return load_templates(sources, {}).get_template("page.html").render(name="a<b")


def refuse_to_compile(*_: object, **__: object) -> None:
    raise AssertionError("the template is compiled again")


def test_template_is_compiled_once(compiled, sources, monkeypatch):
    compiled.mkdir(parents=True)
    assert render(sources) == "a&lt;b!"
    assert len(list(compiled.iterdir())) == 1
    monkeypatch.setattr(jinja2.Environment, "compile", refuse_to_compile)
    assert render(sources) == "a&lt;b!"


def test_changed_template_is_compiled_again(compiled, sources):
    compiled.mkdir(parents=True)
    render(sources)
    (sources / "page.html").write_text("{{ name }}?")
    assert render(sources) == "a&lt;b?"


def test_damaged_compiled_template_is_replaced(compiled, sources):
    compiled.mkdir(parents=True)
    render(sources)
    (file,) = compiled.iterdir()
    intact = file.read_bytes()
    for content in (b"", intact[: len(intact) // 2]):
        file.write_bytes(content)
        assert render(sources) == "a&lt;b!"
        assert file.read_bytes() == intact


def test_page_needs_no_place_for_compiled_templates(compiled, sources):
    assert render(sources) == "a&lt;b!"
    assert not compiled.exists()


def test_compiled_templates_follow_python(compiled, sources, monkeypatch):
    """Python keeps no compiled modules if the user says so."""
    compiled.mkdir(parents=True)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert render(sources) == "a&lt;b!"
    assert not list(compiled.iterdir())
