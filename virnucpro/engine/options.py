"""Declare the options of the engine: devices, batches, workers, and the vector cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from virnucpro.core.device_options import DeviceOptions
from virnucpro.core.option_schema import Panel, option, reject_options
from virnucpro.core.option_text import with_options


@dataclass(frozen=True, kw_only=True)
class EngineOptions(DeviceOptions):
    """Options for embedding."""

    esm_batch_size: Annotated[
        str,
        option(
            "Embed this number of tokens per batch. A longer sequence gets its own batch. auto: "
            "choose by model, device and free memory.",
            Panel.DEVICES,
            metavar="auto|TOKENS",
        ),
    ] = "auto"
    worker_timeout: Annotated[
        float,
        option(
            "Replace a worker that is silent for longer than this, beyond the time its batch "
            "needs.",
            Panel.DEVICES,
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
            "Reuse vectors from this folder, and add new ones. Runs, users and machines may share "
            "it.",
            Panel.DEVICES,
            metavar="DIR",
            show_default="none",
        ),
    ] = None
    cache_size: Annotated[
        float,
        option(
            with_options(
                "Limit the folder of {cache} to this many gigabytes. The least recently read "
                "vectors are deleted first."
            ),
            Panel.DEVICES,
            metavar="GB",
            min=0,
        ),
    ] = 20.0

    def __post_init__(self) -> None:
        if self.cache is None:
            reject_options(self, ("cache_size",), with_options("without {cache}"))
