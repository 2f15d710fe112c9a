"""Completion of commands, options and values in bash, zsh and fish."""

from __future__ import annotations

import os

import click

from virnucpro.cli.parameters import Option
from virnucpro.cli.program_name import PROGRAM, VARIABLE


def answer_shell(app: click.Group) -> None:
    """Print completions and exit, if a shell requests them."""
    if question := os.environ.get(VARIABLE):
        from click.shell_completion import shell_complete

        raise SystemExit(shell_complete(app, {}, PROGRAM, VARIABLE, question))


def _install_completion(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if not is_wanted:
        return
    from virnucpro.cli.completion_scripts import INSTALLERS, completion_script, shell_name
    from virnucpro.cli.console import print_lines

    shell = shell_name()
    path = INSTALLERS[shell](completion_script(shell, context))
    print_lines([f"completion for {shell} is in {path}; it works in new shells"])
    context.exit()


def _show_completion(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if not is_wanted:
        return
    from virnucpro.cli.completion_scripts import completion_script, shell_name
    from virnucpro.cli.console import print_lines

    print_lines([completion_script(shell_name(), context)])
    context.exit()


COMPLETION_OPTIONS = (
    Option(
        ["--install-completion"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_install_completion,
        help="Install completion for the current shell (bash, zsh or fish).",
    ),
    Option(
        ["--show-completion"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_completion,
        help="Print the completion script for the current shell.",
    ),
)
