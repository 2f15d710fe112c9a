"""Make a command from a function and its option classes.

    @command(PredictOptions, ConsoleOptions)
    def predict(options: PredictOptions, console: ConsoleOptions) -> None:
        ...

Each option is declared once, as a field of a class (see ``core.option_schema``). The function gets
one object per class. Its docstring is the help text, and the first paragraph is the summary in the
command list. Only documented click interfaces are used: click parses the user's words, and
``build_options`` converts and checks them, as it does for calls from Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
)

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from virnucpro.cli.mistaken_words import check_words
from virnucpro.cli.parameters import Argument, Option, default_note, mark_advanced
from virnucpro.core.option_schema import (
    OptionInfo,
    annotated_hints,
    build_options,
    option,
    option_annotations,
    option_flag,
    reject_options,
)
from virnucpro.models.environment import environment_fields

T = TypeVar("T")
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """Console output of a command. These options exist on the command line only."""

    quiet: Annotated[bool, option("Show only warnings and the summary.", None, "--quiet", "-q")] = (
        False
    )
    verbose: Annotated[
        bool, option("Show the complete log on the console.", None, "--verbose", "-v")
    ] = False
    log_file: Annotated[
        Path | None, option("Also write the log to this file.", metavar="FILE", show_default=False)
    ] = None

    def __post_init__(self) -> None:
        if self.quiet:
            reject_options(self, ("verbose",), "with --quiet")


class Command(click.Command):
    """A command with our help page and hints for mistaken words.

    Attributes:
        option_groups: the classes that declare its options.
    """

    def __init__(self, name: str, option_groups: Sequence[type], **settings: Any) -> None:  # noqa: ANN401 - of click
        super().__init__(name, **settings)
        self.option_groups = option_groups

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from virnucpro.cli.help_page import write_help

        write_help(self, ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            check_words(self, ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.BadOptionUsage as error:  # click does not say in which command
            error.ctx = error.ctx or ctx
            raise


@dataclass(frozen=True, slots=True, eq=False)
class CommandSpec:
    """A command that is built on demand, because reading its options takes time."""

    run: Callable[..., None]
    groups: tuple[type, ...]
    more: tuple[click.Parameter, ...] = ()  # parameters that click alone handles

    @property
    def help(self) -> str:
        return cleandoc(self.run.__doc__ or "")

    @property
    def summary(self) -> str:
        """The first paragraph of the help, on one line."""
        return " ".join(self.help.partition("\n\n")[0].split())

    def build(self, name: str) -> click.Command:
        params: list[click.Parameter] = []
        main_options: set[str] = set()
        for group in self.groups:
            params += _parameters(group)
            main_options.update(getattr(group, "main_options", ()))
        params += self.more
        if main_options:
            mark_advanced(params, main_options)
        params.sort(key=lambda param: not param.required)
        return Command(
            name,
            self.groups,
            params=params,
            callback=partial(_call, self.run, self.groups),
            help=self.help,
            context_settings=HELP_NAMES,
        )


def command(
    *groups: type, more: Sequence[click.Parameter] = ()
) -> Callable[[Callable[..., None]], CommandSpec]:
    """Make a command from a function that takes one object per option class.

    A class may list the options that most users need in ``main_options``. ``--help`` shows the
    others in the panel "Advanced".

    Args:
        more: parameters that click alone handles.
    """
    return lambda run: CommandSpec(run, groups, tuple(more))


class Subcommand(NamedTuple):
    """A command of a group. It is loaded and built when it is used."""

    summary: str  # the first paragraph of its help
    load: Callable[[], CommandSpec | Group]


class Group(click.Group):
    """A command with subcommands."""

    def __init__(
        self,
        name: str,
        subcommands: Mapping[str, Subcommand],
        help: str,
        params: list[click.Parameter] | None = None,
    ) -> None:
        super().__init__(
            name, help=help, params=params, no_args_is_help=True, context_settings=HELP_NAMES
        )
        self._subcommands = subcommands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._subcommands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._subcommands:
            return None
        loaded = self._subcommands[cmd_name].load()
        return loaded if isinstance(loaded, Group) else loaded.build(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_known = args[0] in self._subcommands
        if not (is_known or args[0].startswith("-") or ctx.resilient_parsing):
            from virnucpro.cli.usage_errors import no_such_command

            raise no_such_command(args[0], list(self._subcommands))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from virnucpro.cli.help_page import write_help

        rows = [(name, subcommand.summary) for name, subcommand in self._subcommands.items()]
        write_help(self, ctx, formatter, {"Commands": rows})


def _call(run: Callable[..., None], groups: Sequence[type], **_: object) -> None:
    """Call a function with the option objects from the command line."""
    context = click.get_current_context()
    run(*(read_options(context, group) for group in groups))


def read_options(context: click.Context, group: type[T]) -> T:
    """Build the options of a class from a command line that click has parsed.

    Fields that describe the process (its arguments, a variable) are not options and are set here.

    Raises:
        UsageError: a value is empty, or has the wrong type or range.
    """
    names = [field.name for field in fields(group)]  # type: ignore[arg-type]
    sources = {name: context.get_parameter_source(name) for name in context.params}
    explicit = {name for name, source in sources.items() if source != ParameterSource.DEFAULT}
    values = {name: context.params[name] for name in explicit}
    values |= {
        "argv": tuple(sys.argv),
        "typed": tuple(
            name for name, source in sources.items() if source == ParameterSource.COMMANDLINE
        ),
        **environment_fields(os.environ),
    }
    return build_options(group, {name: values[name] for name in names if name in values})


def _parameters(group: type) -> Iterator[click.Parameter]:
    """Yield a parameter for each field that is an option."""
    hints = annotated_hints(group)
    options = option_annotations(hints)
    for field in fields(group):
        if field.name in options:
            kind = get_args(hints[field.name])[0]
            yield _parameter(field.name, kind, options[field.name], field.default)


def _parameter(name: str, kind: Any, info: OptionInfo, default: object) -> click.Parameter:  # noqa: ANN401 - a type
    is_repeatable = get_origin(kind) is tuple
    is_required = default is MISSING
    common: dict[str, Any] = {
        "required": is_required,
        "type": click.UNPROCESSED,
        "shell_complete": partial(_complete, kind, info),
    }
    if info.is_argument:
        metavar = f"{info.metavar}..." if is_repeatable else info.metavar
        n_words = -1 if is_repeatable else 1
        return Argument([name], about=info.help, metavar=metavar, nargs=n_words, **common)
    names = info.names or (option_flag(name),)
    common |= {"panel": info.panel, "help": f"{info.help}{default_note(kind, info, default)}"}
    if kind is bool:
        if default:
            names = (f"{names[0]}/--no-{names[0].removeprefix('--')}", *names[1:])
        common |= {"is_flag": True, "type": click.BOOL, "default": default}
    else:
        common |= {"multiple": is_repeatable, "metavar": info.metavar or _choices(kind)}
    return Option([name, *names], **common)


def _literal(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - a type
    """Return the choices of a type, if it has any."""
    kinds = (kind, *get_args(kind))
    return next((get_args(member) for member in kinds if get_origin(member) is Literal), ())


def _choices(kind: Any) -> str | None:  # noqa: ANN401 - a type
    choices = _literal(kind)
    return f"<{'|'.join(choices)}>" if choices else None


def _complete(
    kind: Any,  # noqa: ANN401 - a type
    info: OptionInfo,
    _context: click.Context,
    _parameter: click.Parameter,
    letters: str,
) -> list[CompletionItem]:
    """Complete an option value: a choice, a recognized name, or else a file."""
    words = info.complete(letters) if info.complete else _literal(kind)
    items = [CompletionItem(word) for word in words if word.startswith(letters)]
    may_be_path = info.complete is not None or Path in (kind, *get_args(kind))
    if items or not may_be_path:
        return items
    return [CompletionItem(letters, type="dir" if info.metavar == "DIR" else "file")]
