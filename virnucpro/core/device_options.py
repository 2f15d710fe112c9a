"""Declare the options for devices, which embedding and training share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from virnucpro.core.option_schema import Panel, count, option
from virnucpro.core.option_text import with_options


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """A device, and the precision of its matrix products."""

    gpus: Annotated[
        str | None,
        option(
            "Use these of the visible GPUs: numbers (0,1,2) or UUIDs.",
            Panel.DEVICES,
            metavar="all|LIST",
            show_default="all",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cuda", "cpu", "mps"], option("Use this kind of device.", Panel.DEVICES)
    ] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"],
        option(
            "Compute matrix products in this precision; auto: bf16 where it is faster than fp32, "
            "fp16 on older GPUs with tensor cores, else fp32. fp8 is for ESM-2 3B and 15B on GPUs "
            "of compute capability 8.9 and newer: weights take half the memory. int8 is for CPUs "
            "with VNNI or AMX, where it is faster, and GPUs from 8.0 on. Both make vectors less "
            "exact (`virnucpro models check` shows by how much).",
            Panel.DEVICES,
        ),
    ] = "auto"
    # not options: read from the environment
    cuda_visible_devices: str | None = None
    hugging_face: Path | None = None  # Hugging Face cache folder
    hdf5_vol_connector: str | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)  # SLURM variables


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(ComputeOptions):
    """The devices of a run."""

    workers: Annotated[
        int | None,
        count(
            with_options(
                "Use this number of single-core processes: to embed with {device:cpu}; to score in "
                "predict without a model; to make shards and tables where GPUs embed."
            ),
            Panel.DEVICES,
            show_default="as many as cores, memory and input allow",
        ),
    ] = None
