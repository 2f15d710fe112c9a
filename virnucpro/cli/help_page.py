"""Write ``--help`` as plain text in two columns. Names and commands are never split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING
from textwrap import fill
from typing import Any

import click

from virnucpro.core.option_schema import (
    CALLS,
    CLUSTER,
    DEVICES,
    FILES,
    MODEL,
    SAMPLES,
    TRAINING,
    OptionInfo,
)

_ARGUMENTS = "Arguments"
_OTHERS = "Options"  # options without a panel, such as --quiet
_ADVANCED = "Advanced"
_ORDER = (_ARGUMENTS, FILES, SAMPLES, CALLS, MODEL, TRAINING, DEVICES, CLUSTER, _OTHERS, _ADVANCED)
_NOTHING = (MISSING, None, ())  # defaults that need no note
_NAMES = 30  # width of the column with option names
_NARROW = 72  # on fewer columns, the names get less
_NARROW_NAMES = 20
# A paragraph that ends in a command, which is printed on one line so that it can be copied.
_EXAMPLE = re.compile(r"(?:(?P<about>.*:) |- )(?P<command>(?:virnucpro|torchrun|sbatch) .*)")


class Option(click.Option):
    """An option in a panel of the help page. Advanced options have one panel, the last."""

    is_advanced = False

    def __init__(self, names: Sequence[str], panel: str = "", **settings: Any) -> None:  # noqa: ANN401 - of click
        super().__init__(names, **settings)
        self.panel = panel or _OTHERS


class Argument(click.Argument):
    """An argument with a help text."""

    panel = _ARGUMENTS
    is_advanced = False

    def __init__(self, names: Sequence[str], about: str, **settings: Any) -> None:  # noqa: ANN401 - of click
        super().__init__(names, **settings)
        self.about = about

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), f"{self.about}  [required]" if self.required else self.about


def mark_advanced(params: Iterable[click.Parameter], main: Collection[str]) -> None:
    """Mark the options in panels that are not in ``main``. General options are never advanced.

    Raises:
        ValueError: there is no such main option.
    """
    options = {param.name: param for param in params if isinstance(param, Option)}
    if missing := set(main) - options.keys():
        raise ValueError(f"there is no option {' or '.join(sorted(missing))}")
    for name, param in options.items():
        param.is_advanced = name not in main and param.panel != _OTHERS


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
        more: panels before the others, each with rows of a name and a text.
    """
    command.format_usage(ctx, formatter)
    for paragraph in (command.help or "").split("\n\n"):
        text = " ".join(paragraph.split())
        example = _EXAMPLE.fullmatch(text)
        about = example["about"] if example else text
        if about:
            formatter.write(f"\n{_wrap(about, formatter.width, '  ', 2)}\n")
        if example:
            formatter.write(wrap_command(example["command"], formatter.width))
    _write_panels(formatter, {**(more or {}), **group_panels(command, ctx)})


def _write_panels(
    formatter: click.HelpFormatter, panels: Mapping[str, Sequence[tuple[str, str]]]
) -> None:
    """Write panels of rows: a name, and a text in the second column."""
    n_names = _NAMES if formatter.width >= _NARROW else _NARROW_NAMES
    for panel, rows in panels.items():
        formatter.write(f"\n{panel}:\n" if rows else "")
        for names, text in rows:
            name = f"  {names}"
            if len(name) > n_names - 2:
                formatter.write(f"{name}\n")
                name = ""
            formatter.write(_wrap(text, formatter.width, name.ljust(n_names), n_names) + "\n")


def group_panels(
    command: click.Command, ctx: click.Context
) -> dict[str, Sequence[tuple[str, str]]]:
    """Return parameter rows (name, text) by panel. The advanced ones are sorted by subject."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in sorted(command.get_params(ctx), key=_rank):
        if row := param.get_help_record(ctx):
            is_advanced = getattr(param, "is_advanced", False)
            panel = _ADVANCED if is_advanced else getattr(param, "panel", _OTHERS)
            panels.setdefault(panel, []).append(row)
    return dict(panels)


def _rank(param: click.Parameter) -> tuple[bool, int, int]:
    """Return the sort key of a parameter. An unknown panel comes before the general options."""
    panel = getattr(param, "panel", _OTHERS)
    place = _ORDER.index(panel if panel in _ORDER else _OTHERS)
    return getattr(param, "is_advanced", False), place, panel == _OTHERS


def wrap_command(text: str, width: int) -> str:
    """Write a command that can be copied. A long one continues on the next line after a backslash.

    >>> print(wrap_command("virnucpro predict -i contigs.fa -o results/ --gpus 0,1,2", 40), end="")
        virnucpro predict -i contigs.fa \\
            -o results/ --gpus 0,1,2
    """
    n_letters = width - 10  # after the deepest indent, before a backslash
    words: list[str] = []
    for word in re.split(r" (?=-)", text):
        words += [word] if len(word) <= n_letters else word.split()
    lines = [words[0]]
    for word in words[1:]:
        if 4 + len(f"{lines[-1]} {word} \\") + 4 * (len(lines) > 1) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "    " + " \\\n        ".join(lines) + "\n"


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
