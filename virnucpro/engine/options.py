"""Declare the options of the engine and of ``work``: devices, batches, and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from virnucpro.core.device_options import DeviceOptions
from virnucpro.core.option_schema import (
    CLUSTER,
    DEVICES,
    folder,
    option,
    reject_options,
)
from virnucpro.core.option_text import with_options


@dataclass(frozen=True, kw_only=True)
class EngineOptions(DeviceOptions):
    """Options for embedding."""

    esm_batch_size: Annotated[
        str,
        option(
            "Embed this number of tokens per batch; a longer sequence gets a batch of its own. "
            "auto: chosen by model, device and free memory.",
            DEVICES,
            metavar="auto|TOKENS",
        ),
    ] = "auto"
    worker_timeout: Annotated[
        float,
        option(
            "Replace a worker that is silent for longer than this, beyond the time its batch "
            "needs.",
            DEVICES,
            metavar="SECONDS",
            min=1,
            max=86_400,
        ),
    ] = 300.0


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options for a vector cache that runs may share."""

    cache: Annotated[
        Path | None,
        option(
            "Reuse vectors from this folder and add new ones; runs, users and machines may share "
            "it.",
            DEVICES,
            metavar="DIR",
            show_default="none",
        ),
    ] = None
    cache_size: Annotated[
        float,
        option(
            with_options(
                "Limit the folder of {cache} to this many gigabytes; the least recently read "
                "vectors are deleted first."
            ),
            DEVICES,
            metavar="GB",
            min=0,
        ),
    ] = 20.0

    def __post_init__(self) -> None:
        if self.cache is None:
            reject_options(self, ("cache_size",), with_options("without {cache}"))


@dataclass(frozen=True, kw_only=True)
class WorkOptions(CacheOptions, EngineOptions):
    """Options for one part of a planned run."""

    folder: Annotated[Path, folder("Run folder, planned with --plan-only.")]
    part: Annotated[
        str | None,
        option(
            "Do part I of N of the run. N alone: I is the number of this task in its array.",
            CLUSTER,
            metavar="I/N",
            show_default="the task of SLURM's array, else all",
        ),
    ] = None
    # not an option: set by the run
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = "auto"
    array: Mapping[str, str] = field(default_factory=dict)  # job array environment variables
