"""Options for ``predict`` and ``regions``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from virnucpro.core.errors import UsageError
from virnucpro.core.option_schema import (
    Panel,
    changed_options,
    folder,
    option,
    option_flag,
    option_names,
    reject_options,
)
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Command, EmbeddingRule
from virnucpro.engine.options import CacheOptions, EngineOptions
from virnucpro.models.names import DEFAULT_MODEL
from virnucpro.models.options import model_option
from virnucpro.viral.options import CallsBy, Head, RegionModel, ThresholdOptions
from virnucpro.workflows.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ThresholdOptions, RunOptions):
    """Options for ``predict``."""

    command: ClassVar[Command] = "predict"
    threshold_options: ClassVar = tuple(field.name for field in fields(ThresholdOptions))
    table_options: ClassVar = ("model", "head", "calls", "embed", "per_file")
    # the options that most users need; --help lists the others in the panel Advanced
    main_options: ClassVar = (
        "input",
        "output_dir",
        "min_length",
        "per_file",
        "resume",
        "force",
        "preset",
        "threshold",
        "prevalence",
        "model",
        "gpus",
        "workers",
    )

    model: Annotated[
        str | None,
        model_option(
            with_options(
                "none: nothing is embedded; {default} with {head}, {calls:head}, {embed}, "
                "{cache}, {executor}, or any device option except {workers}; with {resume} as "
                "before",
                default=DEFAULT_MODEL,
            )
        ),
    ] = None
    gpus: Annotated[
        str | None,
        option(
            with_options(
                "Embed on these of the visible GPUs: numbers (0,1,2) or UUIDs. Only a model uses a "
                "GPU. Without {model}, this option adds vectors by the default model, which change "
                "no call."
            ),
            Panel.DEVICES,
            metavar="all|LIST",
            show_default="none; all if a model embeds",
        ),
    ] = None
    head: Head = None
    calls: CallsBy = "auto"
    embed: Annotated[
        EmbeddingRule | None,
        option(
            "Embed only some records, by their score. viral: records that any preset calls virus, "
            "and those close to that; uncertain: the same, minus records that every preset calls "
            "virus. The scorer alone calls all others.",
            Panel.MODEL,
            show_default=with_options("all; with {resume} as before"),
        ),
    ] = None

    keep_vectors: Annotated[
        Literal["auto", "yes", "no"],
        option(
            with_options(
                "Keep the vectors that a head reads, 4 bytes per number. no: keep only the scores. "
                "auto: keep them if no head calls, or if any device option except {workers}, "
                "{store}, {cache} or {executor} is given; with {resume} as before."
            ),
            Panel.MODEL,
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        ThresholdOptions.__post_init__(self)
        RunOptions.__post_init__(self)
        if self.calls == "scorer":
            reject_options(self, ("head",), with_options("with {calls:scorer}"))

    @property
    def asks_for_vectors(self) -> bool:
        """True if a model, a head, --embed or any engine option was given."""
        return self.model is not None or bool(self.given_to_embed)

    @property
    def given_to_embed(self) -> list[str]:
        """The options that make a run embed without naming a model."""
        given = self._given_to_engine | self._given({"embed", "head"})
        calls = ["--calls head"] if self.calls == "head" else []
        return sorted([*map(option_flag, given), *calls])

    @property
    def _given_to_engine(self) -> set[str]:
        names = option_names(EngineOptions, CacheOptions) - {"workers"}
        return self._given(names | {"executor", "executor_config"})

    def _given(self, names: set[str]) -> set[str]:
        return names.intersection(self.typed).union(changed_options(self, names))

    def keeps_vectors(self, recorded: bool | None, *, has_head: bool) -> bool:
        """Return True if the run keeps its vectors.

        Args:
            recorded: whether the run to resume keeps them. None: a new run.
            has_head: whether a head reads them.

        Raises:
            UsageError: nothing would be left of the vectors.
        """
        if self.keep_vectors == "no" and not has_head:
            raise UsageError(
                with_options("{keep_vectors:no} leaves nothing of vectors that no head reads"),
                hint=with_options("leave it out, or name a {head}"),
                option="keep_vectors",
            )
        if self.keep_vectors != "auto":
            return self.keep_vectors == "yes"
        if recorded is not None:
            return recorded
        return not has_head or bool(self._given_to_engine | self._given({"store"}))

    def check_type(self, input_type: str) -> None:
        super().check_type(input_type)
        if input_type == "protein":
            reject_options(self, ("region_model",), "on proteins, which have no regions")


@dataclass(frozen=True, kw_only=True)
class RegionsOptions:
    """A finished run, and how to find regions in it."""

    folder: Annotated[Path, folder("Run folder of a finished `virnucpro predict`.")]
    region_model: RegionModel = None
    argv: tuple[str, ...] = ()  # the command, for the log
