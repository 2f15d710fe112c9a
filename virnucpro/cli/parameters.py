"""The parameters of a command, with what the help page shows of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import MISSING
from typing import Any

import click

from virnucpro.core.option_schema import OptionInfo, Panel


class Option(click.Option):
    """An option in a panel of the help page. Advanced options have one panel, the last."""

    is_advanced = False

    def __init__(self, names: Sequence[str], panel: str = "", **settings: Any) -> None:  # noqa: ANN401 - of click
        super().__init__(names, **settings)
        self.panel = panel or Panel.OTHERS


class Argument(click.Argument):
    """An argument with a help text."""

    panel = Panel.ARGUMENTS
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
        param.is_advanced = name not in main and param.panel != Panel.OTHERS


def default_note(kind: Any, info: OptionInfo, default: object) -> str:  # noqa: ANN401 - a type
    """Describe the default and the range of an option."""
    notes = []
    without_value = (MISSING, None, ())  # defaults that need no note
    if isinstance(info.show_default, str):
        notes.append(f"default: {info.show_default}")
    elif info.show_default and not (default in without_value or default is False):
        notes.append("on by default" if kind is bool else f"default: {default}")
    if info.min is not None and info.max is not None:
        notes.append(f"from {info.min} to {info.max}")
    elif info.min is not None:
        notes.append(f"{info.min} or more")
    return f"  [{'; '.join(notes)}]" if notes else ""
