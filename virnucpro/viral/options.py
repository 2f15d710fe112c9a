"""Options for calls: the classifier, and the threshold between viral and other records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from virnucpro.core.errors import UsageError
from virnucpro.core.option_schema import Panel, option, reject_options
from virnucpro.core.option_text import with_options

Head = Annotated[
    Path | None,
    option(
        "Call with this classifier head (safetensors), made for the model by `virnucpro train`.",
        Panel.MODEL,
        metavar="PATH",
        show_default="the head in the folder of a trained model; else the scorer calls",
    ),
]


CallsBy = Annotated[
    Literal["auto", "scorer", "head"],
    option(
        "Call by the scorer alone or by the head alone. auto: by both where training combined "
        "them, else by the scorer.",
        Panel.CALLS,
    ),
]


RegionModel = Annotated[
    Path | None,
    option(
        "Find regions with this model (regions.json), made by `virnucpro train --regions`.",
        Panel.CALLS,
        metavar="PATH",
        show_default="the built-in model",
    ),
]


Evidence = Literal["both", "score", "known"]


_Preset = Literal["sensitive", "default", "conservative"]


# the largest share of cellular records that a preset calls viral, at every length
FALSE_POSITIVES: Mapping[_Preset, float] = {
    "sensitive": 0.10,
    "default": 0.03,
    "conservative": 0.005,
}


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions:
    """Thresholds between viral and other records, and for regions. Scores do not depend on them."""

    threshold: Annotated[
        float | None,
        option(
            "Call a record virus from this score on, and count a provirus as a virus from this "
            "posterior on.",
            Panel.CALLS,
            metavar="SCORE",
            min=0,
            max=1,
            show_default=with_options("by {preset}, or the head's"),
        ),
    ] = None
    preset: Annotated[
        _Preset,
        option(
            "Use thresholds, one per length, that are set to call at most 10, 3 or 0.5 % of "
            "unknown hosts. Some kinds of hosts are called more often.",
            Panel.CALLS,
        ),
    ] = "default"
    evidence: Annotated[
        Evidence,
        option(
            "Call a record by its score, by the k-mers that it shares with known viruses (known), "
            "or by either (both).",
            Panel.CALLS,
        ),
    ] = "both"
    prevalence: Annotated[
        float,
        option(
            "Compute the column fdr for this share of viral records in the sample.",
            Panel.CALLS,
            metavar="SHARE",
        ),
    ] = 0.05
    regions: Annotated[
        bool,
        option(
            "Search nucleotide records of 10,000 bases or more for virus-like regions, such as "
            "prophages.",
            Panel.CALLS,
        ),
    ] = True
    region_model: RegionModel = None
    genes: Annotated[
        bool,
        option("Find the genes of each virus, and write them and their proteins.", Panel.CALLS),
    ] = True

    @property
    def min_posterior(self) -> float:
        """Return the lowest posterior at which a provirus counts as a virus."""
        if self.threshold is not None:
            return self.threshold
        # the lowest posterior at which a provirus counts as a virus, see docs/REGIONS.md
        min_posteriors = {
            "sensitive": 0.0,
            "default": 0.5,
            "conservative": 0.9,
        }
        return min_posteriors.get(self.preset, 0.0)

    def __post_init__(self) -> None:
        if self.threshold is not None:
            reject_options(self, ("preset",), with_options("with {threshold}"))
        if not 0 < self.prevalence < 1:
            raise UsageError(
                with_options(
                    "{prevalence} is {value}; it must lie between 0 and 1", value=self.prevalence
                ),
                hint="give the share of viral records that you expect, for example 0.05",
                option="prevalence",
            )
        if not self.regions:
            reject_options(self, ("region_model",), with_options("with {regions:no}"))
