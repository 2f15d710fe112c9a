"""Declare, build and validate command options.

A class declares the options of one command, or options that several commands share: name, type,
default and help text. Options are declared nowhere else. ``cli.command`` builds a command line
from the class. ``virnucpro.api`` constructs the object directly. A field that is ``Annotated``
with an ``OptionInfo`` is an option, and the caller fills all other fields. Each package declares
its classes in its module ``options``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import OptionName, join_texts, join_words, with_options
from virnucpro.core.paths import expand_path

T = TypeVar("T")


class Panel(StrEnum):
    """The panels of ``--help``, in order."""

    ARGUMENTS = "Arguments"
    FILES = "Files"
    SAMPLES = "Samples"
    CALLS = "Calls"
    MODEL = "Model"
    TRAINING = "Training"
    DEVICES = "Devices"
    CLUSTER = "Several machines"
    OTHERS = "Options"  # of the options that name none, such as --quiet
    ADVANCED = "Advanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """How an option appears on the command line and in help texts."""

    help: str
    panel: str = ""  # of --help
    names: tuple[str, ...] = ()  # such as ("--output-dir", "-o"); empty: derived from the field
    metavar: str = ""  # represents the value in --help
    min: float | None = None
    max: float | None = None
    show_default: bool | str = True  # a text replaces the default value in --help
    complete: Callable[[str], Sequence[str]] | None = None  # prefix -> possible values
    is_argument: bool = False  # positional on the command line
    has_commas: bool = False  # a comma separates values, in addition to repeating the option


# Any class of options


def option_names(*groups: type) -> set[str]:
    """Return the field names of all options in these classes."""
    return set().union(*(option_annotations(annotated_hints(group)) for group in groups))


@cache
def annotated_hints(group: Callable[..., object]) -> dict[str, Any]:
    """Return the type hints of a class, with their annotations."""
    return get_type_hints(group, include_extras=True)


def reject_options(options: Any, names: Iterable[str], where: str, else_: str = "") -> None:  # noqa: ANN401
    """Reject options that have no effect instead of ignoring them.

    Raises:
        UsageError: one of them differs from its default.
    """
    changed = changed_options(options, names)
    if changed:
        listed = join_texts(
            " and ", (join_words([OptionName(name, is_bare=True)]) for name in changed)
        )
        hint = with_options("leave out {both}", both=listed)
        raise UsageError(
            with_options("{both}: no effect {where}", both=listed, where=where),
            hint=join_texts("; or ", [hint, else_] if else_ else [hint]),
            option=changed[0],
        )


def changed_options(options: Any, names: Iterable[str]) -> list[str]:  # noqa: ANN401
    """Return the names of options that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(options)}
    return sorted(name for name in names if getattr(options, name) != defaults[name])


def option_flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


def build_options(options: Callable[..., T], values: Mapping[str, object]) -> T:
    """Build options from values as a user writes them: a path or number as text, or a list.

    Raises:
        UsageError: a value is empty, or has the wrong type or range.
    """
    hints = annotated_hints(options)
    infos = option_annotations(hints)
    checked = {
        name: _convert_value(
            _option_name(name, infos[name]),
            get_args(hints[name])[0],
            _split_commas(value) if infos[name].has_commas else value,
        )
        if name in infos
        else value
        for name, value in values.items()
    }
    for name, info in infos.items():
        _check_range(name, info, checked.get(name))
    return options(**checked)


def _split_commas(value: object) -> list[object]:
    """Split the texts of a value at commas. Numbers stay as they are."""
    items: list[object] = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        items += item.split(",") if isinstance(item, str) else [item]
    return items


def option_annotations(hints: Mapping[str, Any]) -> dict[str, OptionInfo]:
    """Return the options of a class by field name."""
    return {
        name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated
    }


def convert_options(options: object, to: Callable[..., T], **changes: object) -> T:
    """Build another class of options from the shared fields. ``changes`` override them."""
    names = {field.name for field in fields(to)} - changes.keys()  # type: ignore[arg-type]
    shared = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return to(**shared, **changes)


def _option_name(name: str, info: OptionInfo) -> OptionName:
    """Return the name of a field for messages."""
    word = info.metavar if info.is_argument else info.names[0] if info.names else ""
    return OptionName(name, word=word, is_bare=True)


def _wrong(option: OptionName, problem: str, hint: str) -> UsageError:
    return UsageError(join_words([option, f" {problem}"]), hint, option=option.name)


def _convert_value(option: OptionName, hint: Any, value: object) -> object:  # noqa: ANN401 - a type
    """Convert a value to the type of its option.

    Raises:
        UsageError: the value is empty, has the wrong type, or is not an allowed choice.
    """
    if value == "":
        raise _wrong(option, "is empty", "check that the shell variable in it is set")
    if get_origin(hint) is tuple:
        values = value if isinstance(value, (list, tuple)) else [value]
        item_hint = get_args(hint)[0]
        return tuple(_convert_value(option, item_hint, item) for item in values)
    value = value.item() if hasattr(value, "item") else value  # a NumPy number
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    value = _parse_number(value, kinds)
    for kind in kinds:
        if _accepts(kind, value):
            return _to_type(kind, value)
    words = " or ".join(_allowed_values(kinds))
    raise _wrong(option, f"is {printable(repr(value))}", f"give {words}")


def _allowed_values(kinds: Sequence[Any]) -> Iterator[str]:
    """Yield the choices or type names that an option accepts, for messages."""
    type_names = {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
        NoneType: "",
    }
    for kind in kinds:
        if choices := get_args(kind):
            yield from choices
        elif type_name := type_names[kind]:
            yield type_name


def _parse_number(value: Any, kinds: Sequence[Any]) -> object:  # noqa: ANN401
    """Parse a number if the option accepts one, or else return the value unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        if kind in kinds:
            with suppress(ValueError):
                return kind(value)
    return value


def _accepts(kind: Any, value: object) -> bool:  # noqa: ANN401 - a type
    accepted_types = {  # option type -> accepted value types
        float: (int, float),
        str: (str, int),
        Path: (str, Path),
    }
    if isinstance(value, bool):  # bool is a subclass of int
        return kind is bool
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return isinstance(value, accepted_types.get(kind, kind))


def _to_type(kind: Any, value: Any) -> object:  # noqa: ANN401 - a type
    if kind is Path:
        return expand_path(value)
    return str(value) if kind is str and isinstance(value, int) else value


def _check_range(name: str, info: OptionInfo, value: object) -> None:
    """Check the range of a number.

    Raises:
        UsageError: the number is out of range.
    """
    if not isinstance(value, (int, float)):
        return
    option = _option_name(name, info)
    if not math.isfinite(value):
        raise _wrong(option, f"is {value}", "give a finite number")
    if not (info.min is None or info.min <= value) or not (info.max is None or value <= info.max):
        most = "" if info.max is None else f", and at most {info.max}"
        raise _wrong(option, f"is {value}", f"give {info.min} or more{most}")


# Annotations for fields, and option classes that several packages share


def option(help: str, panel: str | None = None, *names: str, **more: Any) -> OptionInfo:  # noqa: ANN401 - fields of ``OptionInfo``
    return OptionInfo(help=help, panel=panel or "", names=names, **more)


def argument(help: str, metavar: str, **more: Any) -> OptionInfo:  # noqa: ANN401 - fields of ``OptionInfo``
    return OptionInfo(help=help, metavar=metavar, is_argument=True, **more)


def folder(help: str) -> OptionInfo:
    return argument(help, "DIR")


def count(help: str, panel: str | None = None, **more: Any) -> OptionInfo:  # noqa: ANN401 - fields of ``OptionInfo``
    return option(help, panel, metavar="N", **more)
