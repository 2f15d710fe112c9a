"""The command line: turns options into calls, and outcomes into exit codes.

``virnucpro --help`` must be quick, so a command imports its modules only when it runs. They import
torch only in the process that computes with it.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from importlib import import_module

import click

from virnucpro._version import __version__
from virnucpro.cli.command import CommandSpec, Group, Subcommand
from virnucpro.cli.completion import COMPLETION_OPTIONS, answer_shell
from virnucpro.cli.early_exit import INTERRUPTED_EXIT, NOTHING_BEGAN
from virnucpro.cli.exit_codes import GONE, USAGE_EXIT, CommandExit, exit_on_error, print_error
from virnucpro.cli.parameters import Option

# Command -> module in this package with a function of that name, and the first paragraph of its
# help. The paragraph is repeated here so that `virnucpro --help` does not import all options.
COMMANDS = {
    "predict": (
        "predict",
        "Find viruses in FASTA or FASTQ, and write viruses.tsv, viruses.fasta and predictions.tsv.",
    ),
    "extract": (
        "extract",
        "Embed FASTA or FASTQ with ESM-2, and write features.h5 and records.tsv.",
    ),
    "export": (
        "export",
        "Write the vectors of a finished run in the layout of another program.",
    ),
    "work": (
        "work",
        "Run one part of a planned run. Parts can run concurrently on any number of machines.",
    ),
    "regions": (
        "predict",
        "Find virus-like regions, such as prophages, in the records of a finished run.",
    ),
    "report": ("info", "Write DIR/report.html: one page about a run, to read offline."),
    "manifest": ("train", "Write a manifest of labelled sequences for train and evaluate."),
    "train": ("train", "Train a head for an encoder, fine-tune both, or pretrain an encoder."),
    "summary": (
        "info",
        "Print mean and standard deviation of the held-out figures of several trainings or seeds.",
    ),
    "evaluate": (
        "train",
        "Measure the scorer or a head on labelled sequences that it was not trained on.",
    ),
    "compare": (
        "info",
        "Compare two results row by row: missing rows, changed labels, score differences.",
    ),
    "devices": (
        "info",
        "List the devices that a run would use: GPUs, memory, precision, kernels.",
    ),
    "status": (
        "info",
        "Describe a run folder: finished, pending and failed work, and the processes working on "
        "it.",
    ),
    "bench": ("info", "Measure how fast this device embeds proteins."),
    "cite": (
        "info",
        "Print how to cite a result: this program, its language models, and the original "
        "VirNucPro.",
    ),
    "models": (
        "models",
        "Manage models: checkpoints, and bundles of checkpoints with a head.",
    ),
}


def _load(name: str) -> CommandSpec | Group:
    module, _ = COMMANDS[name]
    loaded: CommandSpec | Group = getattr(import_module(f"virnucpro.cli.{module}"), name)
    return loaded


def _show_version(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        from virnucpro.cli.console import print_lines

        print_lines([f"virnucpro {__version__}"])
        context.exit()


_VERSION = Option(
    ["--version", "-V"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
app = Group(
    "virnucpro",
    {name: Subcommand(summary, partial(_load, name)) for name, (_, summary) in COMMANDS.items()},
    help="Find viruses in FASTA and FASTQ, and embed proteins with ESM-2 on all GPUs.\n\n"
    "Find viruses: virnucpro predict -i contigs.fa -o results/\n\n"
    "Embed proteins on three GPUs, or continue such a run: virnucpro extract "
    "-i proteins.faa -o embeddings/ --gpus 0,1,2 --resume\n\n"
    "`virnucpro COMMAND --help` lists the options of a command.",
    params=[_VERSION, *COMPLETION_OPTIONS],
)


def main() -> None:
    """Run the command line, and exit with a documented code."""
    _open_standard_streams()
    gc.set_threshold(50_000)  # modules and record columns are long-lived, so collect rarely
    try:
        with exit_on_error():
            _run(sys.argv[1:])
        raise SystemExit(0)
    except CommandExit as finished:
        raise SystemExit(finished.exit_code) from None
    except click.exceptions.Exit as ended:
        raise SystemExit(ended.exit_code) from None
    except BrokenPipeError:  # the reader of the output has closed the pipe
        raise SystemExit(0 if {"-h", "--help"} & {*sys.argv} else 1) from None
    finally:
        _forget_closed_streams()
        gc.freeze()  # the process ends, so Python need not look for cycles among its objects


def _run(words: list[str]) -> None:
    """Run the command that these words name.

    Raises:
        CommandExit: with the exit code of the command, or after a usage error.
        Exit: after an option such as --help.
    """
    answer_shell(app)
    try:
        with app.make_context("virnucpro", words) as context:
            app.invoke(context)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        raise CommandExit(USAGE_EXIT) from None
    except click.ClickException as error:
        from virnucpro.cli.usage_errors import explain_error

        raise explain_error(error) from None
    except KeyboardInterrupt:  # before a command has started
        print_error("interrupted", NOTHING_BEGAN)
        raise CommandExit(INTERRUPTED_EXIT) from None


def _open_standard_streams() -> None:
    """Point closed streams to /dev/null, so that no later file takes their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _forget_closed_streams() -> None:
    """Drop unread output, which would make Python exit with its own code (120)."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            if error.errno in GONE:
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
