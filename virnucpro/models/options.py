"""Options for a model, and for the commands about models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from virnucpro.core.option_schema import MODEL, OptionInfo, option
from virnucpro.models.registry import DEFAULT_MODEL, NAMES

Encoding = Literal["esm2", "onehot", "blosum62", "composition"]
Architecture = Literal["mlp", "cnn", "lstm", "unet"]


def complete_model(incomplete: str) -> list[str]:
    """List the model names that begin with these letters."""
    return [name for name in NAMES if name.startswith(incomplete)]


def model_option(default: str) -> OptionInfo:
    return option(
        "Embed with this model: a name (see `virnucpro models list`), or the path (with a "
        "separator, such as ./model.pt) of a fair-esm .pt file, a Hugging Face folder, an ESM C "
        ".safetensors file, or a model of `virnucpro train`.",
        MODEL,
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
            MODEL,
            metavar="BASES",
            show_default="500 or the head's",
        ),
    ] = None
    model: Annotated[str | None, model_option(DEFAULT_MODEL)] = None


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options for ``bench``: the work to measure, and the devices."""

    models: Annotated[
        str | None,
        option(
            "Measure these sizes of ESM-2, in order: 8M, 35M, 150M, 650M, 3B, 15B; weights are "
            "random.",
            metavar="SIZE,...",
            show_default="all but 15B on a GPU, else 8M,35M",
        ),
    ] = None
    precisions: Annotated[
        str | None,
        option(
            "Measure VirNucPro in these precisions, in order: bf16, fp16, fp32, fp8. "
            "fair-esm is always measured in fp32.",
            metavar="NAME,...",
            show_default="all of the device; on a GPU not fp32 and fp8",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cuda", "cpu", "mps"],
        option("Use this kind of device; on a CPU, one core is measured."),
    ] = "auto"
    json: Annotated[
        Path | None,
        option(
            "Write all figures to this JSON file as they come.", metavar="FILE", show_default=False
        ),
    ] = None
    quick: Annotated[bool, option("Measure only 8M, in less than a minute.")] = False
    quiet: Annotated[bool, option("Show only results, no progress.", None, "--quiet", "-q")] = False
    cuda_visible_devices: str | None = None  # from the environment
