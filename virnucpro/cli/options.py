"""Options that commands share, with their help texts, and what is said of values without sense."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from virnucpro.cli.exits import exits
from virnucpro.errors import UsageError
from virnucpro.log import printable

FILES, MODEL, DEVICES = "Files", "Model", "Devices"
_SHOWN = 3  # files in a hint


class CommandOnInput(TyperCommand):
    """A command that gets its files with ``--input``, and says so where one stands alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's or click's
        if not ctx.resilient_parsing:
            trial = self.make_context(ctx.info_name, list(args), ctx.parent, resilient_parsing=True)
            with exits(kept=""):
                _refuse_stray(trial.args, has_input=bool(trial.params.get("input")))
        return super().parse_args(ctx, args)


def _refuse_stray(stray: list[str], *, has_input: bool) -> None:
    """
    Raises:
        UsageError: there is a file that no option precedes.
    """
    if not stray:
        return
    shown = [printable(name) for name in stray[:_SHOWN]]
    more = ["..."] if len(stray) > _SHOWN else []
    hint = f"did you mean {' '.join(f'--input {name}' for name in shown)}{' ...' if more else ''}?"
    if has_input:
        hint += " Each file needs an --input of its own; or name the folder that they are in"
    raise UsageError(f"no option precedes {' '.join(shown + more)}", hint=hint)


def refuse_empty(
    ctx: typer.Context, parameter: typer.CallbackParam, value: str | None
) -> str | None:
    """Refuse an option's value that is there and empty, as of a variable that is not set."""
    if value == "" and not ctx.resilient_parsing:
        with exits(kept=""):
            raise UsageError(
                f"{parameter.opts[0]} is empty", hint="is the variable set that it came from?"
            )
    return value


def complete_model(incomplete: str) -> list[str]:
    """The names of models that begin so."""
    from virnucpro.encoders.published import EMBEDDED, PUBLISHED

    return [name for name in (EMBEDDED, *PUBLISHED) if name.startswith(incomplete)]


Input = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="FILE",
        help="FASTA file (plain, gz, bz2, xz or zst), folder, sample sheet (.tsv or .csv with the "
        "columns sample and path), or - for standard input. Repeatable.",
        rich_help_panel=FILES,
        show_default=False,
    ),
]
Output = Annotated[
    str,
    typer.Option(
        "--output-dir",
        "-o",
        metavar="DIR",
        help="Run folder.",
        rich_help_panel=FILES,
        show_default=False,
    ),
]
InputTypeOption = Annotated[
    Literal["auto", "nucleotide", "protein"],
    typer.Option(help="What the input holds.", rich_help_panel=FILES),
]
ChunkSize = Annotated[
    int | None,
    typer.Option(help="Bases per chunk.", rich_help_panel=MODEL, show_default="500, or the head's"),
]
MinLength = Annotated[
    int,
    typer.Option(help="Shorter records get the status too_short.", rich_help_panel=FILES),
]


def _model(default: str) -> Any:  # noqa: ANN401 - as typer has it
    return typer.Option(
        metavar="NAME|PATH",
        help="Name of an ESM-2 (see `virnucpro models list`); or path, with a separator in it, of "
        "a fair-esm .pt file or Hugging Face folder: ./model.pt.",
        rich_help_panel=MODEL,
        show_default=default,
        callback=refuse_empty,
        autocompletion=complete_model,
    )


Model = Annotated[str | None, _model("esm2_virnucpro, which is part of this program")]
ModelToPredict = Annotated[
    str | None,
    _model("none for nucleotides, which the scorer reads; esm2_virnucpro with --head or proteins"),
]
Head = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Classifier head (safetensors) made for the model.",
        rich_help_panel=MODEL,
        callback=refuse_empty,
        show_default="that of esm2_virnucpro; other models need one",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        help="GPUs among the visible ones: 0,1,2 or UUIDs or all.",
        rich_help_panel=DEVICES,
        callback=refuse_empty,
        show_default="all",
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cuda", "cpu", "mps"],
    typer.Option(help="Kind of device.", rich_help_panel=DEVICES),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Processes with --device cpu, one core each.",
        rich_help_panel=DEVICES,
        show_default="as many as cores and memory allow",
    ),
]
BatchSize = Annotated[
    str,
    typer.Option(
        "--esm-batch-size",
        metavar="auto|TOKENS",
        help="Tokens in one batch; a longer sequence goes through alone. auto: by model, device "
        "and its free memory.",
        rich_help_panel=DEVICES,
    ),
]
PrecisionOption = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"],
    typer.Option(help="auto: bf16 where the device has it.", rich_help_panel=DEVICES),
]
WorkerTimeout = Annotated[
    float,
    typer.Option(
        min=1,
        max=86_400,
        help="Seconds of silence, beyond what its work needs, after which a worker is replaced.",
        rich_help_panel=DEVICES,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run folder.", rich_help_panel=FILES)
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="DELETE the results in the folder and start again.", rich_help_panel=FILES
    ),
]
PerFile = Annotated[
    bool,
    typer.Option(
        "--per-file",
        help="Tables of each input file too, in DIR/samples/NAME/.",
        rich_help_panel=FILES,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="End at the first input file that cannot be read, instead of leaving it out.",
        rich_help_panel=FILES,
    ),
]
RenameDuplicates = Annotated[
    bool,
    typer.Option(
        "--rename-duplicates",
        help="Number ids that occur twice in a file (id, id_2, ...), instead of leaving it out.",
        rich_help_panel=FILES,
    ),
]
Keep = Annotated[
    bool,
    typer.Option("--keep-intermediate", help="Keep chunks.fa and shards/.", rich_help_panel=FILES),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No dashboard: only warnings and the summary.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log everything.")]
LogFile = Annotated[
    Path | None,
    typer.Option(help="A second log file.", show_default="only DIR/virnucpro.log"),
]
