"""Declare the options of ``work``, which does one part of a planned run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from virnucpro.core.option_schema import Panel, folder, option
from virnucpro.engine.options import CacheOptions, EngineOptions


@dataclass(frozen=True, kw_only=True)
class WorkOptions(CacheOptions, EngineOptions):
    """Options for one part of a planned run."""

    folder: Annotated[Path, folder("Run folder, planned with --plan-only.")]
    part: Annotated[
        str | None,
        option(
            "Run part I of N. With N alone, I is the number of this task in its array.",
            Panel.CLUSTER,
            metavar="I/N",
            show_default="the task of SLURM's array, else all",
        ),
    ] = None
    # not an option: set by the run
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"] = "auto"
    array: Mapping[str, str] = field(default_factory=dict)  # job array environment variables
