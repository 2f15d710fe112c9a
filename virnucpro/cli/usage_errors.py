"""Turn errors of click into ours. Imported only after such an error."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import click

from virnucpro.core.errors import UsageError
from virnucpro.core.logging import printable


def explain_error(error: click.ClickException) -> UsageError:
    """Convert a click error into our error."""
    see = "virnucpro --help"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        see = f"{error.ctx.command_path} --help"
    see = f"see `{see}`"
    match error:
        case click.NoSuchOption(option_name=name, possibilities=similar):
            hint = f"did you mean {' or '.join(sorted(similar))}?" if similar else see
            return UsageError(f"there is no option {printable(name)}", hint)
        case click.MissingParameter(param=param) if param is not None:
            name = param.opts[0] if isinstance(param, click.Option) else param.metavar or ""
            return UsageError(f"{name.removesuffix('...')} is missing", hint=see)
    message = error.format_message().rstrip(".")
    return UsageError(f"{message[:1].lower()}{message[1:]}", hint=see)


def no_such_command(name: str, names: Sequence[str]) -> UsageError:
    similar = get_close_matches(name, names)
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"give one of {', '.join(names)}"
    return UsageError(f"there is no command {printable(name)}", hint)
