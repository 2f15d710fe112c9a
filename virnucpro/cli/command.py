"""Commands made of classes of options: fields become the signature, errors become messages.

Also what a command says of a file that no option precedes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields
from functools import cached_property, partial, update_wrapper
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import BadParameter, Context
from typer.core import TyperCommand, TyperGroup

from virnucpro.ground.errors import UsageError
from virnucpro.ground.log import printable
from virnucpro.ground.options import flag, make, option, options_of, refuse

_SHOWN = 3  # files in a hint


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """The output of a command on the console; options of the command line alone."""

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
    """Call a function with an object of each class of options, made from the command line.

    Fields of the process (its arguments, a variable) are no options, and are filled here.
    """
    return lambda run: _OnOptions(run, groups)


class _OnOptions:
    """A function on classes of options, with their fields as its signature."""

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
        """Made when typer first asks, so that the commands of a module do not wait for others."""
        parameters = [parameter for group in self._groups for parameter in _parameters(group)]
        parameters.sort(key=lambda parameter: parameter.default is not Parameter.empty)
        parameters.insert(0, Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context))
        return Signature(parameters)


def _is_typed(context: Any, name: str) -> bool:  # noqa: ANN401 - typer's or click's
    """Whether the user typed an option, be it with its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _of(group: type, values: dict[str, object]) -> dict[str, object]:
    """The values of one class, without those that were not said."""
    return {field.name: values[field.name] for field in fields(group) if field.name in values}


def _parameters(group: type) -> Iterator[Parameter]:
    """A parameter for each field that is an option."""
    hints = get_type_hints(group, include_extras=True)
    options = options_of(hints)
    for field in fields(group):
        if field.name not in options:
            continue
        kind, option = get_args(hints[field.name])[0], copy(options[field.name])
        # the default of an option with a --no-... is its name
        if kind is bool and not isinstance(option.default, str):
            option.param_decls = option.param_decls or (flag(field.name),)
        default = Parameter.empty if field.default is MISSING else field.default
        annotation = Annotated[_as_typed(kind), option]  # type: ignore[valid-type]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _as_typed(kind: Any) -> Any:  # noqa: ANN401 - a type
    """A path is taken as text: an empty one would become the current folder."""
    if get_origin(kind) is tuple:
        return list[_as_typed(get_args(kind)[0])]  # type: ignore[misc]
    if Path in (kind, *get_args(kind)):
        return str | None if NoneType in get_args(kind) else str
    return kind


def _plain(params: list[Any]) -> list[Any]:
    """The same parameters, which take text, plain numbers and defaults by themselves.

    Typer would import pydantic to convert them, which takes longer than typer itself. Help shows no
    type of a flag or an argument.
    """
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        if hasattr(param, "type_descriptor"):  # older ones convert without pydantic
            param.process_value = partial(_process, param)
    return params


def _process(param: Any, context: Any, value: object) -> object:  # noqa: ANN401 - typer's or click's
    source = context.get_parameter_source(param.name)
    is_default = source is not None and source.name == "DEFAULT" and not param.required
    number = _number(param, value)
    if not is_default and number is None and not _is_text(param, value):
        return type(param).process_value(param, context, value)
    value = () if value is None and param.multiple else value if number is None else number
    return param.callback(context, param, value) if param.callback else value


# how numbers are usually written; typer converts, or refuses, whatever is written otherwise
_NUMBERS = {
    int: re.compile("0|[1-9][0-9]{0,14}"),
    float: re.compile(r"(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?"),
}


def _number(param: Any, value: object) -> float | None:  # noqa: ANN401 - typer's or click's
    """The number that a text stands for, if an option takes it."""
    kind, option = param.type_descriptor.annotation, param.type_descriptor.parameter_info
    if option.parser or not isinstance(value, str) or kind not in _NUMBERS:
        return None
    if not _NUMBERS[kind].fullmatch(value):
        return None
    number: float = kind(value)
    is_small = option.min is not None and number < option.min
    return None if is_small or (option.max is not None and number > option.max) else number


def _is_text(param: Any, value: object) -> bool:  # noqa: ANN401 - typer's or click's
    """Whether a value is text, or one of the choices, of an option that takes that."""
    kind = param.type_descriptor.annotation
    if kind == list[str]:
        return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
    return isinstance(value, str) and (kind is str or value in get_args(kind))


class Command(TyperCommand):
    """A command that explains a wrong value in plain words, not in those of a library.

    One that takes files with ``--input`` says so if a file stands alone.
    """

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer's or click's
        return _plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's or click's
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's or click's
        if not ctx.resilient_parsing and any(param.name == "input" for param in self.params):
            trial = self.make_context(ctx.info_name, list(args), ctx.parent, resilient_parsing=True)
            _refuse_stray(trial.args, {name for name, value in trial.params.items() if value})
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            text = error.message.removeprefix("Value error, ").partition(", unable to parse")[0]
            error.message = text.replace("Input should be", "it must be")
            raise


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer's or click's
        return _plain(super().get_params(ctx))


def _refuse_stray(stray: list[str], named: Collection[str]) -> None:
    """Refuse files that no option precedes.

    The last of several may be meant as the output folder, if none is named and it is no file.

    Raises:
        UsageError: there is a file that no option precedes.
    """
    if not stray:
        return
    names = [printable(name) for name in stray[:_SHOWN]]
    more = ["..."] if len(stray) > _SHOWN else []
    suggestion = [f"--input {name}" for name in names] + more
    last = Path(stray[-1])
    can_be_folder = not (more or last.suffix or last.is_file() or "output_dir" in named)
    if can_be_folder and (len(stray) > 1 or "input" in named):
        suggestion[-1] = f"--output-dir {names[-1]}"
    hint = f"did you mean {' '.join(suggestion)}?"
    if "input" in named and suggestion[0].startswith("--input"):
        hint += " Each file needs an --input of its own; or name the folder that they are in"
    raise UsageError(f"unexpected: {' '.join(names + more)}", hint=hint)
