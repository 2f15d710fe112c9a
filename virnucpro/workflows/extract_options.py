"""Options for ``extract``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from virnucpro.core.model_outputs import Include, Pooling
from virnucpro.core.option_schema import Panel, option, reject_options
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Command, FeatureFormat
from virnucpro.workflows.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(RunOptions):
    """Options for ``extract``."""

    command: ClassVar[Command] = "extract"
    table_options: ClassVar = ("model", "per_file", "layers", "pooling", "include", "format")
    # the options that most users need; --help lists the others in the panel Advanced
    main_options: ClassVar = (
        "input",
        "output_dir",
        "resume",
        "force",
        "format",
        "model",
        "layers",
        "pooling",
        "store",
        "gpus",
        "device",
        "precision",
    )

    layers: Annotated[
        tuple[str, ...],
        option(
            "Write the vectors after these layers: numbers from 1, from -1 for the last layer "
            "backwards, or all. Repeatable.",
            Panel.MODEL,
            "--layers",
            "--layer",
            metavar="N,...|all",
            show_default="the last",
            has_commas=True,
        ),
    ] = ()
    pooling: Annotated[
        tuple[Pooling, ...],
        option(
            "Combine the residues of a protein into one vector by their mean, maximum (max) or "
            "standard deviation (std). bos: take the vector of the start token, <cls>. none: keep "
            "one vector per residue. Repeatable.",
            Panel.MODEL,
            show_default="mean",
            has_commas=True,
        ),
    ] = ()
    include: Annotated[
        tuple[Include, ...],
        option(
            "Also write contacts between residues, logits of each residue, perplexity (by one pass "
            "for each residue, masked), or perplexity-single-pass (an approximation without "
            "masks). Repeatable.",
            Panel.MODEL,
            metavar="OUTPUT,...",
            has_commas=True,
        ),
    ] = ()
    format: Annotated[
        FeatureFormat,
        option(
            "Also write feature files in this format, next to the h5 files: npz, parquet, or pt "
            "(the _ESM.pt and _DNABERT_S.pt of the original VirNucPro).",
            Panel.FILES,
            metavar="FORMAT",
        ),
    ] = "h5"

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        for name, value in (("pooling", "none"), ("include", "contacts"), ("include", "logits")):
            if value in getattr(self, name):
                where = with_options(f"with {{{name}:{value}}}: a cache has one row per sequence")
                reject_options(self, ("cache",), where)
