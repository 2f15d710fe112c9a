"""Options that commands share, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

FILES, MODEL, DEVICES = "Files", "Model", "Devices"

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
Model = Annotated[
    str | None,
    typer.Option(
        help="Name of an ESM-2 (see `virnucpro models list`), fair-esm .pt file, or Hugging Face "
        "folder.",
        rich_help_panel=MODEL,
        show_default="esm2_virnucpro, which is part of this program",
    ),
]
Head = Annotated[
    Path | None,
    typer.Option(
        help="Classifier head (safetensors) made for the model.",
        rich_help_panel=MODEL,
        show_default="that of esm2_virnucpro; other models need one",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        help="GPUs among the visible ones: 0,1,2 or UUIDs or all.",
        rich_help_panel=DEVICES,
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
        help="Tokens in one batch, at least 2048; auto: by model, device and its free memory.",
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
