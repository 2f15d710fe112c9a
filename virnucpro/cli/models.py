"""``virnucpro models``: ESM-2 checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from virnucpro.cli.exits import end_cleanly, exits
from virnucpro.cli.running import is_live

models = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="ESM-2 checkpoints.")


@models.command("list")
def list_models() -> None:
    """List the models that have names, and where they lie or would lie.

    The first is part of this program, and what is used if no model is named; the last are those
    that were imported.
    """
    with exits(kept=""):
        from virnucpro.esm2.download import EMBEDDED, PUBLISHED, imported_names, locate
        from virnucpro.esm2.weights import inspect_checkpoint

        shapes = {EMBEDDED: inspect_checkpoint(locate(EMBEDDED)).shape, **PUBLISHED}
        shapes |= {name: inspect_checkpoint(locate(name)).shape for name in imported_names()}
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
    with exits(kept=""):
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
    with exits(kept=""):
        from rich.console import Console

        from virnucpro.dashboard import Dashboard, EventLog
        from virnucpro.engine.events import Progress
        from virnucpro.esm2.download import find_checkpoint

        end_cleanly()
        with ExitStack() as stack:
            events = stack.enter_context(EventLog())
            if is_live(quiet=False):
                stack.enter_context(Dashboard(events.progressing, Console(stderr=True)))
            path = find_checkpoint(
                name, lambda done, total: events(Progress("fetching", done, total, "bytes"))
            ).path
        typer.echo(f"{name} is at {path}")


@models.command("import")
def import_model(
    path: Annotated[Path, typer.Argument(help="fair-esm .pt file, or Hugging Face folder.")],
    name: Annotated[
        str | None, typer.Option(help="What to call it.", show_default="that of the file or folder")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
) -> None:
    """Copy a checkpoint to where --model finds it by its name; nothing is fetched.

    All of it is checked first, and no code in it is run.

    Example: virnucpro models import esm2_t33_650M_UR50D.pt

    Example: virnucpro models import my_finetuned_folder/ --name my_esm2
    """
    with exits(kept=""):
        from virnucpro.esm2.download import import_checkpoint
        from virnucpro.files import expanded
        from virnucpro.log import printable

        end_cleanly()
        source = expanded(path)
        plain = source.name if source.is_dir() else source.stem
        name = plain if name is None else name
        checkpoint = import_checkpoint(source, name, force=force)
        typer.echo(f"{name} is at {printable(checkpoint.path)}, sha256 {checkpoint.sha256()}")
        typer.echo(f"use it with --model {name}")


@models.command("verify")
def verify_model(model: Annotated[str, typer.Argument(help="Name, .pt file or folder.")]) -> None:
    """Load every tensor of a checkpoint and look for what is missing or not finite."""
    with exits(kept=""):
        from virnucpro.esm2.download import locate
        from virnucpro.esm2.weights import verify_checkpoint

        checkpoint = verify_checkpoint(locate(model))
        typer.echo(f"{checkpoint.path} is whole, sha256 {checkpoint.sha256()}")
