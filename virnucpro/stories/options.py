"""The options of ``predict``, ``extract`` and the commands on a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from virnucpro.callers.options import CallsBy, CutOptions, EmbedBy, Head, RegionModel
from virnucpro.encoders.options import ModelOptions, model_option
from virnucpro.engine.options import CacheOptions, EngineOptions, PlaceOptions
from virnucpro.ground.config import Command, FeatureFormat, Pooling
from virnucpro.ground.option_fields import flag, given_of, names_of, refuse
from virnucpro.ground.options import (
    FILES,
    MODEL,
    FolderOptions,
    SequenceOptions,
    count,
    folder,
    option,
)


@dataclass(frozen=True, kw_only=True)
class RunOptions(
    CacheOptions, PlaceOptions, EngineOptions, ModelOptions, FolderOptions, SequenceOptions
):
    """The options that ``predict`` and ``extract`` share."""

    command: ClassVar[Command]
    typed: tuple[str, ...] = ()  # names of the options on the command line, defaults too

    report: Annotated[
        bool,
        option(
            "Write DIR/report.html, the run on one page that needs no network.",
            FILES,
            "--report/--no-report",
        ),
    ] = True

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)
        for name in ("plan_only", "no_embed"):
            if getattr(self, name):
                refuse(self, ("cache",), f"with {flag(name)}, where nothing is embedded")
        self.check_type(self.input_type)

    @property
    def asks_for_vectors(self) -> bool:
        """True if the run is to embed."""
        return True

    def check_without_engine(self) -> None:
        """Refuse options that are not read where nothing is embedded.

        Raises:
            UsageError: one of them was given.
        """
        refuse(self, ("keep_intermediate",), "where nothing is embedded", "add --model")

    def check_type(self, input_type: str) -> None:
        """Refuse options that are not read where the input is of this type.

        Raises:
            UsageError: one of them was given.
        """
        if input_type == "protein":
            refuse(self, ("chunk_size", "genetic_code"), "on proteins, which are not cut")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(CutOptions, RunOptions):
    """The options of ``predict``."""

    command: ClassVar[Command] = "predict"

    model: Annotated[
        str | None,
        model_option(
            "none: nothing is embedded; esm2_virnucpro with any option of devices but --workers"
        ),
    ] = None
    head: Head = None
    calls: CallsBy = "auto"
    embed: EmbedBy = None

    def __post_init__(self) -> None:
        CutOptions.__post_init__(self)
        RunOptions.__post_init__(self)
        if self.calls == "scorer":
            refuse(self, ("head",), "with --calls scorer")

    @property
    def asks_for_vectors(self) -> bool:
        """True if a model, a head, --embed or any option of the engine was given."""
        of_engine = names_of(EngineOptions, PlaceOptions, CacheOptions) - {"workers"}
        of_engine |= {"model", "head", "embed"}
        is_typed = not of_engine.isdisjoint(self.typed)
        return is_typed or bool(given_of(self, of_engine)) or self.calls == "head"

    def check_type(self, input_type: str) -> None:
        super().check_type(input_type)
        if input_type == "protein":
            refuse(self, ("region_model",), "on proteins, which have no regions")


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(RunOptions):
    """The options of ``extract``."""

    command: ClassVar[Command] = "extract"

    layer: Annotated[
        int | None,
        count("Take the representation after this layer.", MODEL, show_default="the last"),
    ] = None
    pooling: Annotated[
        Pooling,
        option(
            r"Pool residues into one vector. mean: their average; bos: the vector of the start "
            r"token, "
            r"\<cls>; none: one vector per residue.",
            MODEL,
        ),
    ] = "mean"
    format: Annotated[
        FeatureFormat,
        option(
            "Write feature files in this format too, beside the h5 ones: npz, or pt as VirNucPro's "
            "_ESM.pt and _DNABERT_S.pt.",
            FILES,
        ),
    ] = "h5"

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.pooling == "none":
            refuse(self, ("cache",), "with --pooling none: a cache holds one vector of a sequence")


@dataclass(frozen=True, kw_only=True)
class RegionsOptions:
    """A finished run, and how regions are found in it."""

    folder: Annotated[Path, folder("Run folder of a finished `virnucpro predict`.")]
    region_model: RegionModel = None
    argv: tuple[str, ...] = ()  # the command, for the log
