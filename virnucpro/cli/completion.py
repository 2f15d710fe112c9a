"""Completion of commands, options and values in bash, zsh and fish."""

from __future__ import annotations

import os
from pathlib import Path

import click

from virnucpro.cli.help_page import Option
from virnucpro.core.errors import UsageError

_PROGRAM = "virnucpro"
_VARIABLE = "_VIRNUCPRO_COMPLETE"  # a shell sets it to request completions


def answer_shell(app: click.Group) -> None:
    """Print completions and exit, if a shell requests them."""
    if question := os.environ.get(_VARIABLE):
        from click.shell_completion import shell_complete

        raise SystemExit(shell_complete(app, {}, _PROGRAM, _VARIABLE, question))


def _shell() -> str:
    """Return the name of the user's shell.

    Raises:
        UsageError: the shell is not supported.
    """
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _INSTALL:
        raise UsageError(
            f"there is no completion for the shell {name or 'that runs this command'}",
            hint=f"start this command from {', '.join(_INSTALL)}, or set SHELL to one of them",
        )
    return name


def _script(shell: str, context: click.Context) -> str:
    """Return the script that makes a shell request completions from this program."""
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None, "click knows the shells of _INSTALL"
    return completion(context.command, {}, _PROGRAM, _VARIABLE).source()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _append_once(path: Path, line: str) -> None:
    """Add a line to a shell start file, unless it is already there."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if line not in text.splitlines():
        separator = "" if not text or text.endswith("\n") else "\n"
        _write(path, f"{text}{separator}{line}\n")


def _install_bash(script: str) -> Path:
    path = Path.home() / ".bash_completions" / f"{_PROGRAM}.sh"
    _write(path, script)
    _append_once(Path.home() / ".bashrc", f"source '{path}'")
    return path


def _install_zsh(script: str) -> Path:
    path = Path.home() / ".zfunc" / f"_{_PROGRAM}"
    _write(path, script)
    _append_once(Path.home() / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    return path


def _install_fish(script: str) -> Path:
    path = Path.home() / ".config" / "fish" / "completions" / f"{_PROGRAM}.fish"
    _write(path, script)
    return path


_INSTALL = {"bash": _install_bash, "zsh": _install_zsh, "fish": _install_fish}


def _install_completion(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if not is_wanted:
        return
    from virnucpro.cli.console import print_lines

    shell = _shell()
    path = _INSTALL[shell](_script(shell, context))
    print_lines([f"completion for {shell} is in {path}; it works in new shells"])
    context.exit()


def _show_completion(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if not is_wanted:
        return
    from virnucpro.cli.console import print_lines

    print_lines([_script(_shell(), context)])
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
