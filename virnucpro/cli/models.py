"""``virnucpro models``: manage checkpoints, and bundles of checkpoints with a head."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from virnucpro.cli.command import CommandSpec, ConsoleOptions, Group, Subcommand, command
from virnucpro.cli.console import loading, print_lines, show_progress
from virnucpro.cli.exit_codes import end_cleanly, exit_on_error
from virnucpro.core.device_options import ComputeOptions
from virnucpro.core.errors import VirnucproError
from virnucpro.core.logging import printable
from virnucpro.core.option_schema import argument, option, reject_options
from virnucpro.models.hugging_face import cache_folder
from virnucpro.models.options import complete_model


@dataclass(frozen=True, kw_only=True)
class _ListOptions:
    """How to list the models."""

    as_json: Annotated[bool, option("Print JSON instead of text.", None, "--json")] = False


@command(_ListOptions)
def list_models(options: _ListOptions) -> None:
    """List the named models: size, dimensions, GPU memory, and local path, if installed.

    The default model embeds in extract, and in predict with a device option, unless --model names
    another one. Built-in and imported models come last. GPU memory is an estimate, from the
    smallest batches to full ones. CUDA needs some more. A run fits its batches to the free memory.
    `virnucpro models info NAME` also shows disk and RAM.

    Example: virnucpro models list
    """
    with exit_on_error():
        from virnucpro.models.manage import describe_models

        print_lines(
            [*describe_models(as_json=options.as_json, hugging_face=cache_folder(os.environ))]
        )


@dataclass(frozen=True, kw_only=True)
class _NamedModel:
    """A model, by name or path."""

    model: Annotated[
        str,
        argument(
            "Name, or path with a separator (./model.pt).", "NAME|PATH", complete=complete_model
        ),
    ]


@command(_NamedModel)
def show_model(options: _NamedModel) -> None:
    """Describe a checkpoint: its content, its disk and memory needs, and its head.

    Example: virnucpro models info virnucpro-tiny

    A trained model, or a head alone: virnucpro models info training/model
    """
    with exit_on_error():
        from virnucpro.core.paths import expand_path
        from virnucpro.models.base import has_prefix
        from virnucpro.models.manage import describe_model
        from virnucpro.training.reports import describe_head
        from virnucpro.viral.head import HEAD_ENTRY

        path = expand_path(options.model)
        if os.sep in options.model and has_prefix(path, HEAD_ENTRY):
            print_lines([*describe_head(path)])
            return
        lines, head = describe_model(options.model, cache_folder(os.environ))
        print_lines([*lines, *(describe_head(head) if head else [])])


@command(_NamedModel, ConsoleOptions)
def download_model(options: _NamedModel, console: ConsoleOptions) -> None:
    """Download a published checkpoint, or all files of a bundle, to the torch hub folders.

    The contact head of an ESM-2 comes in a file of its own. Hashes must match the published files.
    An interrupted download continues where it stopped.

    Example: virnucpro models download esm2_t33_650M_UR50D

    The encoders and the head of the original VirNucPro: virnucpro models download virnucpro-500
    """
    with exit_on_error():
        from virnucpro.models.lookup import fetch_contact_head, model_names, open_model
        from virnucpro.viral.legacy_head import find_head

        with show_progress(console, is_one_stage=True) as events:
            names = model_names(options.model)
            cache = cache_folder(os.environ)
            opened = tuple(open_model(name, events, cache) for name in names)
            for name, model in zip(names, opened, strict=True):
                fetch_contact_head(name, model, events)
            head = find_head(options.model, opened, events) if len(names) > 1 else None
        lines = [f"{printable(model.name)} is at {printable(model.path)}" for model in opened]
        print_lines([*lines, *([f"its head is at {printable(head)}"] if head else [])])


@dataclass(frozen=True, kw_only=True)
class _ImportOptions:
    """A checkpoint, or the files of a bundle, to import."""

    path: Annotated[
        str,
        argument(
            "fair-esm .pt file, Hugging Face folder or ESM C .safetensors file; with --from, the "
            "name of a bundle.",
            "PATH|NAME",
        ),
    ]
    name: Annotated[
        str | None,
        option(
            "Give the model this name.", metavar="NAME", show_default="name of the file or folder"
        ),
    ] = None
    bundle_folder: Annotated[
        Path | None,
        option(
            "Import the files of a bundle, of dnabert-s or of an ESM C from this folder, under "
            "their published names.",
            None,
            "--from",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.bundle_folder is not None:
            reject_options(self, ("name",), "with --from: a bundle has published names")


@command(_ImportOptions)
def import_model(options: _ImportOptions) -> None:
    """Copy a checkpoint to where --model finds it by name, without a download.

    The complete file is checked first. Code in it is never run.

    Example: virnucpro models import esm2_t33_650M_UR50D.pt

    A Hugging Face folder, under a name: virnucpro models import my_finetuned_folder/ --name my_esm2

    All files of a bundle, copied from another machine: virnucpro models import virnucpro-500
    --from usb/
    """
    with exit_on_error():
        from virnucpro.models.manage import download_models

        end_cleanly()
        name, lines = download_models(options.path, options.name, options.bundle_folder)
        print_lines([*lines, f"use it with --model {name}"])


@command(_NamedModel)
def verify(options: _NamedModel) -> None:
    """Load a checkpoint and its head, if any, and check that every tensor is present and finite.

    A model with a published name must be identical to the published file.

    Example: virnucpro models verify esm2_t33_650M_UR50D
    """
    with exit_on_error():
        from virnucpro.models.manage import verify_model
        from virnucpro.viral.head import Head

        model, digest = verify_model(options.model, cache_folder(os.environ))
        lines = [f"{printable(model.path)} is complete, sha256 {digest}"]
        if model.head:
            head = Head.load(model.head)
            head.facts.check_compatible([model])
            lines.append(f"{printable(model.head)} is complete, sha256 {head.sha256}")
        print_lines(lines)


@command(_NamedModel, ComputeOptions, ConsoleOptions)
def check_model(named: _NamedModel, on: ComputeOptions, console: ConsoleOptions) -> None:
    """Compare the vectors that a model computes here with those of a float32 reference.

    The reference has the same weights: fair-esm for ESM-2, transformers for ESM C. Both embed a
    fixed panel of sequences, on every GPU named. The vectors may differ by no more than rounding
    explains for these weights and this precision.
    Run this first on a new GPU or with a new model. It needs memory for the model in float32.

    Example: virnucpro models check esm2_t33_650M_UR50D --gpus 0

    The strictest test: virnucpro models check ./model.pt --precision fp32

    The rounding of fp8, emulated where no GPU has it: virnucpro models check ./model.pt
    --device cpu --precision fp8

    Exit codes: 0 passed, 1 failed, 64 usage, 69 device or model unavailable.
    """
    with exit_on_error():
        with loading(console):
            from virnucpro.models.validation.compare_reference import check
        with show_progress(console, is_one_stage=True) as events:
            checks = check(named.model, on, events)
        print_lines([line for outcome in checks for line in outcome.report_lines()])
        if any(outcome.has_failed for outcome in checks):
            raise VirnucproError(
                "the vectors differ from the reference: do not trust results with this model, "
                "device and precision",
                hint="try `--precision fp32` and `--device cpu`, and use the one that passes; "
                "if neither does, check the file with `virnucpro models verify` "
                "and send this output to the authors of the program",
            )


_COMMANDS: dict[str, CommandSpec] = {
    "list": list_models,
    "info": show_model,
    "download": download_model,
    "import": import_model,
    "verify": verify,
    "check": check_model,
}
models = Group(
    "models",
    {
        name: Subcommand(spec.summary, partial(_COMMANDS.__getitem__, name))
        for name, spec in _COMMANDS.items()
    },
    help="Manage models: checkpoints, and bundles of checkpoints with a head.\n\n"
    "On a new GPU or with a new model, begin with: virnucpro models check esm2_t33_650M_UR50D "
    "--gpus 0",
)
