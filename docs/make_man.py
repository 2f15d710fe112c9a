"""Write the manual pages: ``virnucpro.1``, and one per command, such as ``virnucpro-predict.1``.

    python docs/make_man.py [DIR]        (default: packaging/man)

The pages are made from what ``--help`` prints, so that nothing is written twice. They are not kept
in the repository: ``packaging/release.sh`` makes them, and a wheel that is built where they are
has them in ``share/man/man1``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import click

from virnucpro import __version__
from virnucpro.cli.help_page import group_panels
from virnucpro.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(
    r"(?P<what>[^.:\n][^.:]*): (?P<command>(?:virnucpro|sbatch)\s[^`]+?)(?=\n\n|$)"
)
ITEM = re.compile(r"(?:- )?(?P<command>(?:virnucpro|torchrun|sbatch) [^`]+)")  # of an example
CODE = re.compile(r"`([^`]+)`")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in walk("virnucpro", app):
        path = folder / f"{name.replace(' ', '-')}.1"
        path.write_text(page(name, command), encoding="utf-8")


def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command with its full name, and all commands in it."""
    yield name, command
    for word, inner in inner_commands(command):
        yield from walk(f"{name} {word}", inner)


def inner_commands(command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group, by name."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            inner = command.get_command(context, word)
            assert inner is not None, "a listed command exists"
            yield word, inner


def entries(name: str, command: click.Command) -> Iterator[tuple[str, str, str]]:
    """The arguments and options of a command: panel of ``--help``, names and value, effect."""
    context = command.make_context(name, [], resilient_parsing=True)
    for panel, rows in group_panels(command, context).items():
        for names, effect in rows:
            yield panel, names, effect


def page(name: str, command: click.Command) -> str:
    """The manual page of a command, as the source of man(7)."""
    first, _, more = (command.help or "").partition("\n\n")
    dashed = name.replace(" ", "-")
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    # https://reproducible-builds.org/specs/source-date-epoch
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now()
    lines = [
        f'.TH {_text(dashed.upper())} 1 {now:%Y-%m-%d} "VirNucPro {__version__}" "User Commands"',
        *(".SH NAME", rf"{_text(dashed)} \- {_text(first.rstrip('.'))}"),
        *(".SH SYNOPSIS", rf"\fB{_text(name)}\fR {_text(usage)}"),
        *_description(more),
        *_commands(name, command),
        *_options(name, command),
        *(".SH SEE ALSO", rf"\fB{_text('virnucpro')}\fR(1); \fB{_text(f'{name} --help')}\fR"),
    ]
    return "\n".join(lines) + "\n"


def _description(text: str) -> Iterator[str]:
    """The paragraphs of a help text, examples as they are typed."""
    if text:
        yield ".SH DESCRIPTION"
    is_first = True
    for paragraph in filter(None, text.split("\n\n")):
        if paragraph.startswith("Exit code"):
            yield ".SH EXIT STATUS"
            is_first = True
        example = EXAMPLE.fullmatch(paragraph) or ITEM.fullmatch(paragraph)
        words = example.groupdict() if example else {"what": paragraph}
        if "what" in words:
            yield from () if is_first else (".PP",)
            yield _text(words["what"]) + (":" if example else "")
        if "command" in words:
            command = " ".join(words["command"].split())
            yield from (".PP", ".RS 4", rf"\fB{_text(command)}\fR", ".RE")
        is_first = False


def _commands(name: str, command: click.Command) -> Iterator[str]:
    inner = list(inner_commands(command))
    if inner:
        yield ".SH COMMANDS"
    for word, each in inner:
        first = (each.help or "").partition("\n\n")[0]
        yield from (".TP", rf"\fB{_text(f'{name} {word}')}\fR", _text(first))


def _options(name: str, command: click.Command) -> Iterator[str]:
    """The options, in the panels of ``--help``."""
    rows = [*entries(name, command)]
    if rows:
        yield ".SH OPTIONS"
    for panel, each in groupby(rows, key=lambda row: row[0]):
        yield f".SS {_text(panel)}"
        for _, option, effect in each:
            yield from (".TP", rf"\fB{_text(option)}\fR", _text(effect))


def _text(text: str) -> str:
    """Text for man(7): nothing in it is a request or an escape."""
    text = " ".join(text.split()).replace("\\", r"\e").replace("-", r"\-")
    text = text.replace("^", r"\(ha").replace("~", r"\(ti")
    text = CODE.sub(r"\\fB\1\\fR", text)
    return rf"\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or [str(ROOT / "packaging/man")]))
