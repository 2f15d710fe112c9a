"""Options for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from virnucpro.core.option_schema import OptionInfo, Panel, option
from virnucpro.models.names import DEFAULT_MODEL

Encoding = Literal["esm2", "onehot", "blosum62", "composition"]
Architecture = Literal["mlp", "cnn", "lstm", "unet"]


def complete_model(incomplete: str) -> list[str]:
    """List the model names that begin with these letters."""
    from virnucpro.models.registry import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def model_option(default: str) -> OptionInfo:
    return option(
        "Embed with this model: a name (see `virnucpro models list`), or the path (with a "
        "separator, such as ./model.pt) of a fair-esm .pt file, a Hugging Face folder, an ESM C "
        ".safetensors file, or a model of `virnucpro train`.",
        Panel.MODEL,
        metavar="NAME|PATH",
        show_default=default,
        complete=complete_model,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for a language model and its input chunks."""

    chunk_size: Annotated[
        int | None,
        option(
            "Cut nucleotides into chunks of this length.",
            Panel.MODEL,
            metavar="BASES",
            show_default="500 or the head's",
        ),
    ] = None
    model: Annotated[str | None, model_option(DEFAULT_MODEL)] = None
