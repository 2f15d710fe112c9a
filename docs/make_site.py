"""Build the documentation as a site of plain HTML files that need no network.

    python docs/make_site.py [DIR]        (default: site)

The pages are the Markdown files of ``docs/``. The first page is the README, and the commands are
those of ``--help``, so that neither is written twice. A link to a file of the source that is not
a page becomes its name. What MkDocs warns of, such as a link or heading that does not exist, ends
the build. The pages are written as plain files, not by a plugin, so that another builder can
take them from ``DIR/source``.
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

from virnucpro.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
OF_DOCS = sorted((ROOT / "docs").glob("*.md"))
# file of the source: page of the site
PAGES = {path: path.name for path in OF_DOCS} | {
    ROOT / "README.md": "index.md",
    ROOT / "CONTRIBUTING.md": "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md": "CHANGELOG.md",
    ROOT / "examples/README.md": "EXAMPLES.md",
}
PICTURES = sorted((ROOT / "docs").glob("*.png"))
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<file>[^)\s#]+)(?P<heading>#[^)\s]*)?\)")


def main(folder: Path) -> None:
    """Write the pages to ``folder/source`` and the site to ``folder/html``."""
    source = folder.resolve() / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for path, name in PAGES.items():
        (source / name).write_text(page(path), encoding="utf-8")
    (source / "COMMANDS.md").write_text(commands(), encoding="utf-8")
    for picture in PICTURES:
        shutil.copy(picture, source)
    config = load_config(
        str(ROOT / "docs/mkdocs.yml"),
        docs_dir=str(source),
        site_dir=str(source.parent / "html"),
        strict=True,
    )
    build(config)


def page(path: Path) -> str:
    """The text of a file, with links to pages of the site."""

    def lead(link: re.Match[str]) -> str:
        target = (path.parent / link["file"]).resolve(strict=True)
        if target in PICTURES:
            return f"[{link['text']}]({target.name})"
        if target in PAGES:
            return f"[{link['text']}]({PAGES[target]}{link['heading'] or ''})"
        name = relpath(target, ROOT)
        return link["text"] if name in link["text"] else f"{link['text']} (`{name}`)"

    return LINK.sub(lead, path.read_text(encoding="utf-8"))


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
