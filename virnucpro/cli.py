"""The command line: options in, exit code out. No work is done here.

``virnucpro --help`` must be quick, so the modules that do the work, and torch with them, are
imported when a command needs them.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from virnucpro import __version__
from virnucpro.errors import UsageError, VirnucproError

if TYPE_CHECKING:
    from virnucpro.pipeline import Summary
    from virnucpro.request import Options

USAGE_EXIT, STORAGE_EXIT, INTERRUPTED_EXIT, TERMINATED_EXIT = 64, 74, 130, 143

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="ESM-2 checkpoints.")
app.add_typer(models, name="models")


_KEPT = "finished work is kept: go on with --resume"
_MEASURED = "the tables, and the file of --json, hold what was measured"
_FILES, _MODEL, _DEVICES = "Files", "Model", "Devices"

Input = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="FILE",
        help="FASTA file, folder, or - for standard input; plain, gz, bz2, xz or zst. Repeatable.",
        rich_help_panel=_FILES,
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
        rich_help_panel=_FILES,
        show_default=False,
    ),
]
InputTypeOption = Annotated[
    Literal["auto", "nucleotide", "protein"],
    typer.Option(help="What the input holds.", rich_help_panel=_FILES),
]
ChunkSize = Annotated[
    int | None,
    typer.Option(
        help="Bases per chunk.", rich_help_panel=_MODEL, show_default="500, or the head's"
    ),
]
MinLength = Annotated[
    int,
    typer.Option(help="Shorter records get the status too_short.", rich_help_panel=_FILES),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Name of an ESM-2 (see `virnucpro models list`), fair-esm .pt file, or Hugging Face "
        "folder.",
        rich_help_panel=_MODEL,
        show_default="esm2_virnucpro, which is part of this program",
    ),
]
Head = Annotated[
    Path | None,
    typer.Option(
        help="Classifier head (safetensors) made for the model.",
        rich_help_panel=_MODEL,
        show_default="that of esm2_virnucpro; other models need one",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        help="GPUs among the visible ones: 0,1,2 or UUIDs or all.",
        rich_help_panel=_DEVICES,
        show_default="all",
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cuda", "cpu", "mps"],
    typer.Option(help="Kind of device.", rich_help_panel=_DEVICES),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Processes with --device cpu, one core each.",
        rich_help_panel=_DEVICES,
        show_default="as many as cores and memory allow",
    ),
]
BatchSize = Annotated[
    str,
    typer.Option(
        "--esm-batch-size",
        metavar="auto|TOKENS",
        help="Tokens in one batch, at least 2048; auto: by model, device and its free memory.",
        rich_help_panel=_DEVICES,
    ),
]
PrecisionOption = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"],
    typer.Option(help="auto: bf16 where the device has it.", rich_help_panel=_DEVICES),
]
WorkerTimeout = Annotated[
    float,
    typer.Option(
        min=1,
        max=86_400,
        help="Seconds of silence, beyond what its work needs, after which a worker is replaced.",
        rich_help_panel=_DEVICES,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run folder.", rich_help_panel=_FILES)
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="DELETE the results in the folder and start again.", rich_help_panel=_FILES
    ),
]
Keep = Annotated[
    bool,
    typer.Option("--keep-intermediate", help="Keep chunks.fa and shards/.", rich_help_panel=_FILES),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No dashboard: plain lines, one every 10 seconds.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log everything.")]
LogFile = Annotated[
    Path | None,
    typer.Option(help="A second log file.", show_default="only DIR/virnucpro.log"),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"virnucpro {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Find viral sequences in FASTA with the protein language model ESM-2."""


@app.command()
def predict(
    input: Input,
    output_dir: Output,
    input_type: InputTypeOption = "auto",
    chunk_size: ChunkSize = None,
    min_length: MinLength = 0,
    model: Model = None,
    head: Head = None,
    gpus: Gpus = None,
    device: DeviceOption = "auto",
    workers: Workers = None,
    esm_batch_size: BatchSize = "auto",
    precision: PrecisionOption = "auto",
    worker_timeout: WorkerTimeout = 300.0,
    resume: Resume = False,
    force: Force = False,
    keep_intermediate: Keep = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Call viruses: FASTA in, predictions.tsv and viral.fasta out.

    Example: virnucpro predict -i contigs.fa -o results/

    With another model: virnucpro predict -i contigs.fa -o results/ --model esm2_t33_650M_UR50D
    --head head.safetensors --gpus 0,1,2

    Exit codes: 0 all records accounted for, 2 some failed (see failed_files.txt), 1 nothing
    usable, 64 usage, 65 bad input, 66 input missing, 69 device or model unavailable, 73 output
    folder not usable, 74 disk full, 130/143 interrupted (go on with --resume).
    """
    _run("predict", locals())


@app.command()
def extract(
    input: Input,
    output_dir: Output,
    input_type: InputTypeOption = "auto",
    chunk_size: ChunkSize = None,
    min_length: MinLength = 0,
    model: Model = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Representation after this layer.", rich_help_panel=_MODEL, show_default="the last"
        ),
    ] = None,
    pooling: Annotated[
        Literal["mean", "bos", "none"],
        typer.Option(
            help="mean over residues, bos (the <cls> vector), none (one row per residue).",
            rich_help_panel=_MODEL,
        ),
    ] = "mean",
    format: Annotated[
        Literal["h5", "npz", "pt"],
        typer.Option(
            help="Write npz, or pt as VirNucPro's _ESM.pt, beside the h5 files.",
            rich_help_panel=_FILES,
        ),
    ] = "h5",
    gpus: Gpus = None,
    device: DeviceOption = "auto",
    workers: Workers = None,
    esm_batch_size: BatchSize = "auto",
    precision: PrecisionOption = "auto",
    worker_timeout: WorkerTimeout = 300.0,
    resume: Resume = False,
    force: Force = False,
    keep_intermediate: Keep = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Extract ESM-2 features: FASTA in, features.h5 and records.tsv out.

    Proteins are embedded as they are; nucleotides are chunked and translated as in predict.
    Exit codes are those of predict.

    Example: virnucpro extract -i proteins.faa -o features/ --model esm2_t33_650M_UR50D
    """
    _run("extract", locals())


@app.command()
def devices() -> None:
    """Say what a run would use here: GPUs by index and UUID, memory, precision, kernels."""
    with _exits():
        from virnucpro.devices import describe_machine

        for line in describe_machine(os.environ.get("CUDA_VISIBLE_DEVICES")):
            typer.echo(line)


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every feature file.")] = False,
) -> None:
    """Say what a run folder holds: done, pending, failed, and whether it verifies.

    Example: virnucpro status results/ --verify
    """
    with _exits():
        from virnucpro.status import inspect_run

        report = inspect_run(folder, verify=verify)
        for line in report.lines:
            typer.echo(line)
        raise _Finished(1 if report.n_damaged else 0)


@app.command()
def bench(
    models: Annotated[
        str | None,
        typer.Option(
            help="Sizes of ESM-2, in order: 8M, 35M, 150M, 650M, 3B, 15B; weights are made up.",
            show_default="all but 15B on a GPU, else 8M,35M",
        ),
    ] = None,
    profiles: Annotated[
        str | None,
        typer.Option(
            help="Lengths of the proteins: six-frame-500, reads-150, proteins.", show_default="all"
        ),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help="limits, encoder, files (with the first profile), front-end, coordinator.",
            show_default="all",
        ),
    ] = None,
    device: DeviceOption = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores for every program, on a CPU.", show_default="all that it may use"
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="In one measurement.", show_default="some full batches"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="After one to warm up; just one of what takes over 5 s.", show_default="5"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of proteins and weights.")] = 1,
    json: Annotated[
        Path | None,
        typer.Option(help="Write every figure there, as it comes.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="8M, one profile, 3 repeats: under a minute.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not say what is done.")] = False,
) -> None:
    """Measure this machine: its limits, the encoder beside fair-esm and transformers, files to
    files, the front end, and the coordinator.

    Ratios are to the first row, fair-esm's own extract loop; without it
    (pip install "virnucpro[oracle]") to the first of ours.

    Example: virnucpro bench --quick --json bench.json
    """
    given = locals()
    path, quiet = given.pop("json"), given.pop("quiet")
    with _exits(_MEASURED):
        from virnucpro.bench.programme import BenchOptions, resolve, run
        from virnucpro.bench.report import Report, make_console

        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        _end_cleanly(_MEASURED)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        programme = resolve(BenchOptions(**given, cuda_visible_devices=visible))
        report = Report(sys.argv, seed, path)
        _spare_the_collector()
        try:
            run(programme, report.add, lambda line: None if quiet else typer.echo(line, err=True))
        finally:
            report.print_tables(make_console(is_terminal=sys.stdout.isatty()))


@models.command("list")
def list_models() -> None:
    """List the models that have names, and where they lie or would lie.

    The first is part of this program, and what is used if no model is named.
    """
    with _exits():
        from virnucpro.esm2.download import EMBEDDED, PUBLISHED, locate
        from virnucpro.esm2.weights import inspect_checkpoint

        shapes = {EMBEDDED: inspect_checkpoint(locate(EMBEDDED)).shape, **PUBLISHED}
        for name, shape in shapes.items():
            path = locate(name)
            state = "here" if path.exists() else "not here"
            size = f"{shape.n_parameters / 1e6:,.1f} M"
            typer.echo(f"{name:<22}{size:>10} parameters  {state}: {path}")


@models.command("info")
def show_model(model: Annotated[str, typer.Argument(help="Name, .pt file or folder.")]) -> None:
    """Say what a checkpoint is, as told by its content.

    Example: virnucpro models info esm2_virnucpro
    """
    with _exits():
        from virnucpro.esm2.download import locate
        from virnucpro.esm2.weights import inspect_checkpoint

        checkpoint = inspect_checkpoint(locate(model))
        shape = checkpoint.shape
        typer.echo(f"path        {checkpoint.path}")
        typer.echo(f"layers      {shape.n_layers}")
        typer.echo(f"dimensions  {shape.dim} in {shape.n_heads} heads of {shape.head_dim}")
        typer.echo(f"parameters  {shape.n_parameters / 1e6:,.1f} M")
        typer.echo(f"encoder id  {checkpoint.encoder_id}")


@models.command("download")
def download_model(name: Annotated[str, typer.Argument(help="A published name.")]) -> None:
    """Fetch a published checkpoint into the folder that torch hub uses.

    Example: virnucpro models download esm2_t33_650M_UR50D
    """
    with _exits():
        from rich.console import Console

        from virnucpro.dashboard import Dashboard, EventLog
        from virnucpro.engine.events import Progress
        from virnucpro.esm2.download import find_checkpoint

        with ExitStack() as stack:
            events = stack.enter_context(EventLog())
            if _is_live(quiet=False):
                stack.enter_context(Dashboard(events.progressing, Console(stderr=True)))
            path = find_checkpoint(
                name, lambda done, total: events(Progress("fetching", done, total, "bytes"))
            ).path
        typer.echo(f"{name} is at {path}")


@models.command("verify")
def verify_model(model: Annotated[str, typer.Argument(help="Name, .pt file or folder.")]) -> None:
    """Load every tensor of a checkpoint and look for what is missing or not finite."""
    with _exits():
        from virnucpro.esm2.download import locate
        from virnucpro.esm2.weights import verify_checkpoint

        checkpoint = verify_checkpoint(locate(model))
        typer.echo(f"{checkpoint.path} is whole, sha256 {checkpoint.sha256()}")


class _Finished(Exception):  # noqa: N818 - an end, not an error
    """A command came to its end, with this exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@contextmanager
def _exits(kept: str = _KEPT) -> Iterator[None]:
    """Turn what may happen in a command into a message and an exit code."""
    try:
        yield
    except VirnucproError as error:
        _complain(str(error), error.hint)
        raise _Finished(error.exit_code) from error
    except KeyboardInterrupt as error:
        _complain("interrupted", kept)
        raise _Finished(INTERRUPTED_EXIT) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        is_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        _complain(f"{where}{error.strerror or error}", f"make room; {kept}" if is_disk else "")
        raise _Finished(STORAGE_EXIT) from error


def _complain(message: str, hint: str) -> None:
    typer.secho(f"error: {message}", fg="red", err=True, color=None if _has_colours() else False)
    if hint:
        typer.echo(f"hint:  {hint}", err=True)


def _has_colours() -> bool:
    return "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _is_live(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _run(command: Literal["predict", "extract"], given: dict[str, Any]) -> None:
    """One ``predict`` or ``extract`` with what was given on the command line."""
    quiet, verbose, log_file = (given.pop(name) for name in ("quiet", "verbose", "log_file"))
    with _exits(), ExitStack() as stack:
        from rich.console import Console

        from virnucpro.dashboard import ConsoleHandler, Dashboard, EventLog
        from virnucpro.engine.processes import ProcessExecutor
        from virnucpro.log import ConsoleFilter, logging_to, logging_to_file
        from virnucpro.pipeline import run
        from virnucpro.request import Options, resolve

        # GPUs are numbered as NVML numbers them, by their place on the bus
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        _end_cleanly()
        console, is_live = Console(stderr=True), _is_live(quiet)
        handler = ConsoleHandler(console) if is_live else logging.StreamHandler()
        if not verbose:
            handler.addFilter(ConsoleFilter(with_figures=not is_live))
        stack.enter_context(logging_to(handler, logging.DEBUG if verbose else logging.INFO))
        if log_file is not None:
            stack.enter_context(logging_to_file(log_file))
        options = Options(
            command=command,
            input=[_path(name, "--input") for name in given.pop("input")],
            output_dir=_path(given.pop("output_dir"), "--output-dir"),
            argv=tuple(sys.argv),
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            **given,
        )
        events = stack.enter_context(EventLog())
        if is_live:
            stack.enter_context(Dashboard(events.progressing, console))
        _spare_the_collector()
        config, head = resolve(options, events)
        executor = ProcessExecutor(config.resources.devices)
        summary = run(config, head, executor, events)
    with _exits():
        _report(summary, options)
    raise _Finished(summary.exit_code)


def _spare_the_collector() -> None:
    """Garbage is not looked for among what the imports made: that doubles the time of planning."""
    gc.collect()
    gc.freeze()


def _path(given: str, option: str) -> Path:
    if not given:
        raise UsageError(f"{option} is empty", hint="is the variable set that it came from?")
    return Path(given).expanduser()


def _end_cleanly(kept: str = _KEPT) -> None:
    """End by an exception, so that processes are stopped and temporary files deleted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, partial(_stop, kept))


def _stop(kept: str, number: int, _: object) -> None:
    """Ctrl-C, SIGTERM or a lost terminal: end once, undisturbed by the next."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    with suppress(OSError):  # the terminal may be gone
        _complain("terminated", kept)
    raise SystemExit(TERMINATED_EXIT)


def _report(summary: Summary, options: Options) -> None:
    try:
        for line in summary.lines(options.output_dir):
            typer.echo(line)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # nobody reads: the run is as done as it was
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123


def main() -> None:
    """The entry point. Usage errors exit with 64: 2 means that something failed in a run."""
    try:
        app()
    except _Finished as finished:
        raise SystemExit(finished.exit_code) from None
    except SystemExit as error:
        raise SystemExit(USAGE_EXIT if error.code == 2 else error.code) from None
