"""Explain unrecognized words on the command line.

The click parser decides which words are options, values or neither. Only words that it does not
recognize are compared with options of other programs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import click

from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable

# Option of a similar program -> our option, and what to type.
_SIMILAR_WORDS = {
    **dict.fromkeys(("-t", "--threads", "--cpus", "--cores"), ("--workers", "--workers")),
    **dict.fromkeys(("--out", "--outdir"), ("--output-dir", "--output-dir")),
    "--cpu": ("--device", "--device cpu"),
    "--gpu": ("--gpus", "--gpus"),
    "--overwrite": ("--force", "--force"),
}


def check_words(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Reject mistaken words with a hint.

    Raises:
        UsageError: a word is not an option, or an option was taken as the value of another option.
    """
    names = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    values, rest = _parse_words(command, ctx, args)
    taken = [
        (param.opts[0], word) for param in command.params for word in _option_words(param, values)
    ]
    _refuse_single_hyphen(args, names, [word for _, word in taken])
    if values.get("help"):
        return
    for name, word in taken:
        if _is_option(command, ctx, word):
            raise UsageError(
                f"{name} has no value: the next word is the option {printable(word)}",
                hint=f"give a value after {name}; a file of this name is ./{printable(word)}",
            )
    unknown = [word for word in rest if word.startswith("-") and word != "-"]
    for word in unknown:
        _refuse_foreign_option(word, names)
    if rest and not unknown:
        raise _unexpected_argument_error(rest, ctx, has_input="--input" in names)


def _parse_words(
    command: click.Command, ctx: click.Context, args: Sequence[str]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the values that the parser finds, by parameter, and the words that it rejects."""
    trial = click.Context(
        command,
        parent=ctx.parent,
        info_name=ctx.info_name,
        resilient_parsing=True,
        ignore_unknown_options=True,
        help_option_names=ctx.help_option_names,
    )
    values, rest, _ = command.make_parser(trial).parse_args(list(args))
    return values, rest


def _is_option(command: click.Command, ctx: click.Context, word: str) -> bool:
    """Return whether the parser takes the complete word as an option."""
    if word == "-" or not word.startswith("-"):
        return False
    values, rest = _parse_words(command, ctx, [word, "value"])
    return bool(values) and rest in ([], ["value"])


def _option_words(param: click.Parameter, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words that the parser took as values of an option."""
    value = values.get(param.name or "") if isinstance(param, click.Option) else None
    for word in value if isinstance(value, list) else [value]:
        if isinstance(word, str):
            yield word


def _refuse_single_hyphen(
    args: Sequence[str], names: Collection[str], values: Collection[str]
) -> None:
    """Reject a long option with one hyphen, since the parser would read ``-input`` as ``-i nput``.

    Raises:
        UsageError: there is such an option.
    """
    for arg in takewhile("--".__ne__, args):
        word = arg.partition("=")[0]
        is_long = len(word) > 2 and word[0] == "-" != word[1]
        if is_long and f"-{word}" in names and arg not in values:
            raise UsageError(f"there is no option {word}", hint=f"did you mean -{word}?")


def _refuse_foreign_option(word: str, names: Collection[str]) -> None:
    """Reject an option of another program.

    Raises:
        UsageError: the word is such an option.
    """
    name = "-t" if re.fullmatch(r"-t\d+", word) else word.partition("=")[0]
    ours, typed = _SIMILAR_WORDS.get(name, ("", ""))
    if ours in names:
        raise UsageError(f"there is no option {name}", hint=f"did you mean {typed}?")


def _unexpected_argument_error(
    words: Sequence[str], ctx: click.Context, *, has_input: bool
) -> UsageError:
    """Return the error for words that are neither options nor values."""
    n_shown = 3  # files in a hint
    names = [printable(word) for word in words[:n_shown]] + ["..."] * (len(words) > n_shown)
    hint = f"see `{ctx.command_path} --help`"
    if has_input:
        hint = (
            f"did you mean --input {names[0]}? Each file needs its own --input; or name the "
            "folder that contains them, and the folder for results with --output-dir"
        )
    return UsageError(f"unexpected: {' '.join(names)}", hint)
