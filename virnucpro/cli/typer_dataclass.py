"""Build commands from option classes: fields become the signature, errors become messages.

A file without an option before it is refused with a suggestion.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from virnucpro.core.machine import slurm_variables
from virnucpro.core.option_schema import flag, make, option, options_of, refuse

_SHOWN = 3  # files in a hint
_NAMES = 30  # columns of help for the names of options
# a paragraph of help that ends in a command, which can be copied as a whole
_EXAMPLE = re.compile(r"(?:(?P<about>.*:) |- )(?P<command>(?:virnucpro|torchrun|sbatch) .*)")
# options of other programs of the field -> option here, and what to type
_ELSEWHERE = {
    **dict.fromkeys(("-t", "--threads", "--cpus", "--cores"), ("--workers", "--workers")),
    **dict.fromkeys(("--out", "--outdir"), ("--output-dir", "--output-dir")),
    "--cpu": ("--device", "--device cpu"),
    "--gpu": ("--gpus", "--gpus"),
    "--overwrite": ("--force", "--force"),
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
            "slurm": slurm_variables(os.environ),
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
        if not ctx.resilient_parsing:
            self._check_words(ctx, args)
        return super().parse_args(ctx, args)

    def _check_words(self, ctx: Any, args: list[str]) -> None:  # noqa: ANN401 - typer's or click's
        """Refuse mistaken words with a hint. The parser decides which words are values.

        Raises:
            UsageError: a word is no option here, or an option is the value of another option.
        """
        names = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        values, rest = self._parsed(ctx, args)
        taken = [
            (param.opts[0], word) for param in self.params for word in _words_in(values, param)
        ]
        _refuse_single_hyphen(args, names, [word for _, word in taken])
        if values.get("help"):
            return
        for name, word in taken:
            if self._is_option(ctx, word):
                raise UsageError(
                    f"{name} has no value: the next word is the option {printable(word)}",
                    hint=f"give a value after {name}; a file of this name is ./{printable(word)}",
                )
        unknown = [word for word in rest if word.startswith("-") and word != "-"]
        for word in unknown:
            _refuse_option_of_others(word, names)
        if "--input" in names and not unknown:
            _refuse_stray(rest)

    def _parsed(self, ctx: Any, args: list[str]) -> tuple[dict[str, Any], list[str]]:  # noqa: ANN401
        """The values that the parser finds, by parameter, and the words that it does not know."""
        trial = type(ctx)(
            self,
            parent=ctx.parent,
            info_name=ctx.info_name,
            resilient_parsing=True,
            ignore_unknown_options=True,
            help_option_names=ctx.help_option_names,
        )
        values, rest, _ = self.make_parser(trial).parse_args(list(args))
        return values, rest

    def _is_option(self, ctx: Any, word: str) -> bool:  # noqa: ANN401 - typer's or click's
        """Whether the parser takes the whole word as an option, if it may be one."""
        values, rest = self._parsed(ctx, [word, "value"]) if word.startswith("-") else ({}, [])
        return bool(values) and word != "-" and rest in ([], ["value"])


def _words_in(values: Mapping[str, Any], param: Any) -> list[str]:  # noqa: ANN401 - typer's or click's
    """The words that the parser took as values of an option."""
    given = values.get(param.name) if param.param_type_name == "option" else None
    return [word for word in (given if isinstance(given, list) else [given]) if type(word) is str]


class Group(TyperGroup):
    """A command with subcommands."""

    format_help = _write_help

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer's or click's
        return _plain(super().get_params(ctx))


def _refuse_single_hyphen(
    args: Sequence[str], names: Collection[str], values: Collection[str]
) -> None:
    """Refuse a long option with one hyphen; the parser would read ``-input`` as ``-i nput``.

    Raises:
        UsageError: there is one.
    """
    for arg in takewhile("--".__ne__, args):
        word = arg.partition("=")[0]
        is_long = len(word) > 2 and word[0] == "-" != word[1]
        if is_long and f"-{word}" in names and arg not in values:
            raise UsageError(f"there is no option {word}", hint=f"did you mean -{word}?")


def _refuse_option_of_others(word: str, names: Collection[str]) -> None:
    """
    Raises:
        UsageError: the word is an option of another program.
    """
    name = "-t" if re.fullmatch(r"-t\d+", word) else word.partition("=")[0]
    ours, typed = _ELSEWHERE.get(name, ("", ""))
    if ours in names:
        raise UsageError(f"there is no option {name}", hint=f"did you mean {typed}?")


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
