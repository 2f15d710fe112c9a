"""Write ``--help`` as plain text in two columns. Names and commands are never split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import fill

import click

from virnucpro.core.option_schema import Panel

# A paragraph that ends in a command, which is printed on one line so that it can be copied.
_EXAMPLE = re.compile(r"(?:(?P<about>.*:) |- )(?P<command>(?:virnucpro|torchrun|sbatch) .*)")


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
    narrow = 72  # on fewer columns, the names get less
    narrow_names = 20
    widest_name = 30  # width of the column with option names
    n_names = widest_name if formatter.width >= narrow else narrow_names
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
            panel = Panel.ADVANCED if is_advanced else getattr(param, "panel", Panel.OTHERS)
            panels.setdefault(panel, []).append(row)
    return dict(panels)


def _rank(param: click.Parameter) -> tuple[bool, int, int]:
    """Return the sort key of a parameter. An unknown panel comes before the general options."""
    panel = getattr(param, "panel", Panel.OTHERS)
    panels = list(Panel)
    place = panels.index(panel if panel in panels else Panel.OTHERS)
    return getattr(param, "is_advanced", False), place, panel == Panel.OTHERS


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
