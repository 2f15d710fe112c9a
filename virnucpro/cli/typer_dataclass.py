"""Build commands from option classes: fields become the signature, errors become messages.

A file without an option before it is refused with a suggestion.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields
from functools import cached_property, partial, update_wrapper
from inspect import Parameter, Signature
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Context
from typer.core import TyperCommand, TyperGroup

from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import flag, make, option, options_of, refuse

_SHOWN = 3  # files in a hint
_NAMES = 30  # columns of help for the names of options
# a paragraph of help that ends in a command, which can be copied as a whole
_EXAMPLE = re.compile(r"(?:(?P<about>.*:) |- )(?P<command>(?:virnucpro|torchrun|sbatch) .*)")
_ELSEWHERE = {  # names of options in other programs of the field -> ours
    **dict.fromkeys(("-t", "--threads", "--cpu", "--cpus", "--cores"), "--workers"),
    **dict.fromkeys(("--out", "--outdir"), "--output-dir"),
    "--gpu": "--gpus",
    "--overwrite": "--force",
}


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """Console output of a command; these options exist on the command line only."""

    quiet: Annotated[bool, option("Show only warnings and the summary.", None, "--quiet", "-q")] = (
        False
    )
    verbose: Annotated[
        bool, option("Show the whole log on the console.", None, "--verbose", "-v")
    ] = False
    log_file: Annotated[
        Path | None, option("Also write the log to this file.", metavar="FILE", show_default=False)
    ] = None

    def __post_init__(self) -> None:
        if self.quiet:
            refuse(self, ("verbose",), "with --quiet")


def command(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a function with one object per option class, filled from the command line.

    Fields that describe the process (its arguments, a variable) are not options; they are set here.
    """
    return lambda run: _OnOptions(run, groups)


class _OnOptions:
    """A function that takes option classes; their fields form its signature."""

    def __init__(self, run: Callable[..., None], groups: Sequence[type]) -> None:
        update_wrapper(self, run)
        self.__annotations__ = dict[str, Any]()  # typer asks for them; the signature has the types
        self._run, self._groups = run, groups

    def __call__(self, **values: object) -> None:
        context: Any = values.pop("context")
        values |= {
            "argv": tuple(sys.argv),
            "typed": tuple(name for name in values if _is_typed(context, name)),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        self._run(*(make(group, _of(group, values)) for group in self._groups))

    @cached_property
    def __signature__(self) -> Signature:
        """Build the signature when typer first asks, so that a command does not wait for others."""
        parameters = [parameter for group in self._groups for parameter in _parameters(group)]
        parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)
        parameters.insert(0, Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context))
        return Signature(parameters)


def _is_typed(context: Any, name: str) -> bool:  # noqa: ANN401 - typer's or click's
    """Whether the user typed this option, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _of(group: type, values: dict[str, object]) -> dict[str, object]:
    """The values of one option class, without those that the user did not give."""
    return {field.name: values[field.name] for field in fields(group) if field.name in values}


def _parameters(group: type) -> Iterator[Parameter]:
    """Yield a parameter for each field that is an option."""
    hints = get_type_hints(group, include_extras=True)
    options = options_of(hints)
    for field in fields(group):
        if field.name not in options:
            continue
        kind, option = get_args(hints[field.name])[0], copy(options[field.name])
        # for an option with a --no-... form, help shows the name as the default
        if kind is bool and not isinstance(option.default, str):
            option.param_decls = option.param_decls or (flag(field.name),)
        default = Parameter.empty if field.default is MISSING else field.default
        annotation = Annotated[_as_typed(kind), option]  # type: ignore[valid-type]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _as_typed(kind: Any) -> Any:  # noqa: ANN401 - a type
    """Take a path as text: an empty path would become the current folder."""
    if get_origin(kind) is tuple:
        return list[_as_typed(get_args(kind)[0])]  # type: ignore[misc]
    if Path in (kind, *get_args(kind)):
        return str | None if NoneType in get_args(kind) else str
    return kind


def _plain(params: list[Any]) -> list[Any]:
    """Make parameters pass on the words of the user, which ``make`` converts and checks.

    typer would import pydantic for that, which takes longer than importing typer. Help shows no
    type for a flag or an argument.
    """
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        if hasattr(param, "type_descriptor"):  # older versions convert without pydantic
            param.process_value = partial(_process, param)
    return params


def _process(param: Any, context: Any, value: object) -> object:  # noqa: ANN401 - typer's or click's
    if value is None and param.required:  # typer says what is missing
        return type(param).process_value(param, context, value)
    value = () if value is None and param.multiple else value
    return param.callback(context, param, value) if param.callback else value


def _write_help(command: Any, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's or click's
    """Write the help in two columns of plain text; names are whole at every width."""
    command.format_usage(ctx, formatter)
    for paragraph in command.help.split("\n\n"):
        text = " ".join(paragraph.split())
        example = _EXAMPLE.fullmatch(text)
        about = example["about"] if example else text
        if about:
            formatter.write(f"\n{_wrapped(about, formatter.width, '  ', 2)}\n")
        if example:
            formatter.write(f"    {example['command']}\n")
    for panel, rows in _panels(command, ctx).items():
        formatter.write(f"\n{panel}:\n" if rows else "")
        for names, text in rows:
            name = f"  {names}"
            if len(name) > _NAMES - 2:
                formatter.write(f"{name}\n")
                name = ""
            formatter.write(_wrapped(text, formatter.width, name.ljust(_NAMES), _NAMES) + "\n")


def _panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:  # noqa: ANN401 - typer's
    """The rows of help, name and text, by panel."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        usual = "Arguments" if param.param_type_name == "argument" else "Options"
        if row := param.get_help_record(ctx):
            # older versions of typer: no panel of --help, and brackets as rich reads them
            panel, text = getattr(param, "rich_help_panel", None), row[1].replace(r"\[", "[")
            panels.setdefault(panel or usual, []).append((row[0], text))
    if isinstance(command, Group):
        panels["Commands"] = [
            (name, (one.help or "").partition("\n\n")[0]) for name, one in command.commands.items()
        ]
    return panels


def _wrapped(text: str, width: int, first: str, indent: int) -> str:
    """Break lines at spaces only: an option in a text stays whole."""
    return fill(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


class Command(TyperCommand):
    """A command, which suggests its own options for those of other programs.

    One with ``--input`` suggests it when a file has no option before it.
    """

    format_help = _write_help

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer's or click's
        return _plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's or click's
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's or click's
        own = {name for param in self.params for name in param.opts}
        if not ctx.resilient_parsing and not {"-h", "--help"}.intersection(args):
            _refuse_names_of_others(args, own)
        if not ctx.resilient_parsing and "--input" in own:
            trial = self.make_context(ctx.info_name, list(args), ctx.parent, resilient_parsing=True)
            _refuse_stray(trial.args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A command with subcommands."""

    format_help = _write_help

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer's or click's
        return _plain(super().get_params(ctx))


def _refuse_names_of_others(args: list[str], own: set[str]) -> None:
    """
    Raises:
        UsageError: an option has another name here.
    """
    for arg in takewhile("--".__ne__, args):
        name = "-t" if re.fullmatch(r"-t\d+", arg) else arg.partition("=")[0]
        if (ours := _ELSEWHERE.get(name, f"-{name}")) in own:
            raise UsageError(f"there is no option {name}", hint=f"did you mean {ours}?")


def _refuse_stray(stray: list[str]) -> None:
    """
    Raises:
        UsageError: a file has no option before it.
    """
    names = [printable(name) for name in stray[:_SHOWN]] + ["..."] * (len(stray) > _SHOWN)
    if names:
        raise UsageError(
            f"unexpected: {' '.join(names)}",
            hint=f"did you mean --input {names[0]}? Each file needs its own --input; or name the "
            "folder that contains them, and the folder for results with --output-dir",
        )
