"""Write ``--help`` as plain text in two columns. Names and commands are never split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from textwrap import fill
from typing import Any

import click

from virnucpro.core.option_schema import OptionInfo

_NOTHING = (MISSING, None, ())  # defaults that need no note
_NAMES = 30  # width of the column with option names
# A paragraph that ends in a command, which is printed on one line so that it can be copied.
_EXAMPLE = re.compile(r"(?:(?P<about>.*:) |- )(?P<command>(?:virnucpro|torchrun|sbatch) .*)")


class Option(click.Option):
    """An option in a panel of the help page."""

    def __init__(self, names: Sequence[str], panel: str = "", **settings: Any) -> None:  # noqa: ANN401 - of click
        super().__init__(names, **settings)
        self.panel = panel or "Options"


class Argument(click.Argument):
    """An argument with a help text."""

    panel = "Arguments"

    def __init__(self, names: Sequence[str], about: str, **settings: Any) -> None:  # noqa: ANN401 - of click
        super().__init__(names, **settings)
        self.about = about

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), f"{self.about}  [required]" if self.required else self.about


def default_note(kind: Any, info: OptionInfo, default: object) -> str:  # noqa: ANN401 - a type
    """Describe the default and the range of an option."""
    notes = []
    if isinstance(info.show_default, str):
        notes.append(f"default: {info.show_default}")
    elif info.show_default and not (default in _NOTHING or default is False):
        notes.append("on by default" if kind is bool else f"default: {default}")
    if info.min is not None and info.max is not None:
        notes.append(f"from {info.min} to {info.max}")
    elif info.min is not None:
        notes.append(f"{info.min} or more")
    return f"  [{'; '.join(notes)}]" if notes else ""


def write_help(
    command: click.Command,
    ctx: click.Context,
    formatter: click.HelpFormatter,
    more: Mapping[str, Sequence[tuple[str, str]]] | None = None,
) -> None:
    """Write usage, text and panels.

    Args:
        more: further panels, each with rows of a name and a text.
    """
    command.format_usage(ctx, formatter)
    for paragraph in (command.help or "").split("\n\n"):
        text = " ".join(paragraph.split())
        example = _EXAMPLE.fullmatch(text)
        about = example["about"] if example else text
        if about:
            formatter.write(f"\n{_wrap(about, formatter.width, '  ', 2)}\n")
        if example:
            formatter.write(f"    {example['command']}\n")
    for panel, rows in (group_panels(command, ctx) | dict(more or {})).items():
        formatter.write(f"\n{panel}:\n" if rows else "")
        for names, text in rows:
            name = f"  {names}"
            if len(name) > _NAMES - 2:
                formatter.write(f"{name}\n")
                name = ""
            formatter.write(_wrap(text, formatter.width, name.ljust(_NAMES), _NAMES) + "\n")


def group_panels(
    command: click.Command, ctx: click.Context
) -> dict[str, Sequence[tuple[str, str]]]:
    """Return parameter rows (name, text) by panel."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if row := param.get_help_record(ctx):
            panels.setdefault(getattr(param, "panel", "Options"), []).append(row)
    return dict(panels)


def _wrap(text: str, width: int, first: str, indent: int) -> str:
    """Break lines at spaces only, so that option names in a text are never split."""
    return fill(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
