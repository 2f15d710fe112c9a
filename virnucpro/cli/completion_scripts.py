"""Install the completion of commands, options and values in a shell."""

from __future__ import annotations

import os
from pathlib import Path

import click

from virnucpro.cli.program_name import PROGRAM, VARIABLE
from virnucpro.core.errors import UsageError


def shell_name() -> str:
    """Return the name of the user's shell.

    Raises:
        UsageError: the shell is not supported.
    """
    name = Path(os.environ.get("SHELL", "")).name
    if name not in INSTALLERS:
        raise UsageError(
            f"there is no completion for the shell {name or 'that runs this command'}",
            hint=f"start this command from {', '.join(INSTALLERS)}, or set SHELL to one of them",
        )
    return name


def completion_script(shell: str, context: click.Context) -> str:
    """Return the script that makes a shell request completions from this program."""
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None, "click knows the shells of INSTALLERS"
    return completion(context.command, {}, PROGRAM, VARIABLE).source()


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
    path = Path.home() / ".bash_completions" / f"{PROGRAM}.sh"
    _write(path, script)
    _append_once(Path.home() / ".bashrc", f"source '{path}'")
    return path


def _install_zsh(script: str) -> Path:
    path = Path.home() / ".zfunc" / f"_{PROGRAM}"
    _write(path, script)
    _append_once(Path.home() / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    return path


def _install_fish(script: str) -> Path:
    path = Path.home() / ".config" / "fish" / "completions" / f"{PROGRAM}.fish"
    _write(path, script)
    return path


INSTALLERS = {"bash": _install_bash, "zsh": _install_zsh, "fish": _install_fish}
