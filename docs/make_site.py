"""Build the documentation as a site of plain HTML files that need no network.

    python docs/make_site.py [DIR]        (default: site)

The pages are the Markdown files in ``docs/`` and some others. Commands come from ``--help``, the
Python reference from docstrings, so that neither is written twice. A link to a source file that is
not a page becomes its name. If MkDocs warns, for example about a link or heading that does not
exist, the build fails. Pages are written as plain files, so that another builder can take them from
``DIR/source``.
"""

from __future__ import annotations

import argparse
import re
import shutil
from os.path import relpath
from pathlib import Path

import click
from make_man import EXAMPLE, entries, walk
from mkdocs.commands.build import build
from mkdocs.config import load_config

import virnucpro
from virnucpro.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
DOC_PAGES = sorted((ROOT / "docs").glob("*.md"))
# file of the source: page of the site
PAGES = {path: path.name for path in DOC_PAGES} | {
    ROOT / "README.md": "OVERVIEW.md",
    ROOT / "CONTRIBUTING.md": "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md": "CHANGELOG.md",
    ROOT / "SECURITY.md": "SECURITY.md",
    ROOT / "examples/README.md": "EXAMPLES.md",
}
PICTURES = sorted([*(ROOT / "docs").glob("*.png"), *(ROOT / "docs").glob("*.svg")])
STYLE = ROOT / "docs/site.css"
# the functions first, then the values they return
FUNCTIONS = [
    *("predict", "extract", "embed"),
    *("read_predictions", "read_features", "iter_features"),
]
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<file>[^)\s#]+)(?P<heading>#[^)\s]*)?\)")


def main(folder: Path) -> None:
    """Write the pages to ``folder/source`` and the site to ``folder/html``."""
    source = folder.resolve() / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for path, name in PAGES.items():
        (source / name).write_text(page(path), encoding="utf-8")
    (source / "COMMANDS.md").write_text(commands(), encoding="utf-8")
    (source / "API.md").write_text(api_reference(), encoding="utf-8")
    for file in [*PICTURES, STYLE]:
        shutil.copy(file, source)
    config = load_config(
        str(ROOT / "docs/mkdocs.yml"),
        site_name=f"VirNucPro {virnucpro.__version__}",
        docs_dir=str(source),
        site_dir=str(source.parent / "html"),
        strict=True,
    )
    build(config)
    for path in (source.parent / "html").glob("*.html"):
        marked = mark_options(path.read_text(encoding="utf-8"))
        path.write_text(marked, encoding="utf-8")


def mark_options(text: str) -> str:
    """Mark the options in the code of a page. Its style breaks no line after their hyphens."""

    def mark(code: re.Match[str]) -> str:
        parts = re.split(r"(<[^>]+>)", code[0])
        for i, part in enumerate(parts):
            if not part.startswith("<"):
                parts[i] = OPTION.sub(r'<span class="option">\g<0></span>', part)
        return "".join(parts)

    return CODE.sub(mark, text)


def page(path: Path) -> str:
    """The text of a file, with links to pages of the site."""

    def lead(link: re.Match[str]) -> str:
        target = (path.parent / link["file"]).resolve(strict=True)
        if target in PICTURES:
            return f"[{link['text']}]({target.name})"
        if target in PAGES:
            return f"[{link['text']}]({PAGES[target]}{link['heading'] or ''})"
        name = relpath(target, ROOT)
        shown = name.replace("/", "/<wbr>")  # where a line may break
        return link["text"] if name in link["text"] else f"{link['text']} (<code>{shown}</code>)"

    return LINK.sub(lead, path.read_text(encoding="utf-8"))


def api_reference() -> str:
    """The public functions and types; mkdocstrings replaces each line by the docstring."""
    # a function gets its list of options when its module is imported; the fields of a type are
    # in its source alone
    inspected = "    options: {force_inspection: true}\n"
    types = sorted(set(virnucpro.__all__) - set(FUNCTIONS))
    sections = "".join(f"::: {_defining_name(name)}\n{inspected}\n" for name in FUNCTIONS)
    sections += "".join(f"::: {_defining_name(name)}\n\n" for name in types)
    return (
        "# Python reference\n\nImport these names from `virnucpro`. "
        f"The [Python guide](PYTHON.md) has an example.\n\n{sections}"
    )


def _defining_name(name: str) -> str:
    """The full name of a public function or type, with the module that defines it."""
    return f"{getattr(virnucpro, name).__module__}.{name}"


def commands() -> str:
    """All commands with their options, as ``--help`` has them."""
    each = walk("virnucpro", app)
    sections = "".join(_section(*one) for one in each if not isinstance(one[1], click.Group))
    return f"# Commands\n\n`virnucpro COMMAND --help` prints the same.\n\n{sections}"


def _section(name: str, command: click.Command) -> str:
    rows = ["| option | effect |", "|---|---|"]
    for _, option, effect in entries(name, command):
        rows.append(f"| `{_cell(option)}` | {_cell(_literal(effect))} |")
    table = "\n".join(rows)
    return f"## {name}\n\n{_prose(command.help or '')}\n\n{table}\n\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _prose(text: str) -> str:
    """A help text, its examples as code."""

    def code(example: re.Match[str]) -> str:
        return f"{example['what']}:\n\n```sh\n{' '.join(example['command'].split())}\n```"

    return EXAMPLE.sub(code, _literal(text))


def _literal(text: str) -> str:
    return text.replace("*", "\\*")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation as a site of files.")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path("site"))
    main(parser.parse_args().folder)
