"""Options for ``bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from virnucpro.core.option_schema import option


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
            "Measure VirNucPro in these precisions, in order: bf16, fp16, fp32, fp8, int8. "
            "fair-esm is always measured in fp32.",
            metavar="NAME,...",
            show_default="all of the device; on a GPU not fp32 and fp8, on a CPU not int8",
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
