"""Find virus-like regions with a hidden Markov model with two states, host and virus.

The items are windows along a record. Each has its evidence: the log-ratio virus over host. Rates
are per base, so items may be missing or at any distance. ``viral_path`` returns the most probable
path and the probability that each item is viral (Durbin et al. 1998, Biological sequence analysis,
chapter 3).

The contrast between an item and its host depends on the host's level, which is unknown. Each
departure from the usual level at the record's GC has a prior, and a likelihood over all paths
(``log_likelihoods``). The most probable departure is used. Thus a short record with a uniformly
high signal is assigned to a host with an unusual level. In a record with different parts, the host
level is visible.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from virnucpro.core.atomic_io import EMBEDDED_FOLDER, read_json
from virnucpro.core.errors import InputMissingError, UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.native import call
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray, sigmoid
from virnucpro.core.types import check_counts
from virnucpro.viral.provirus_features import N_SHAPE, HostBackground, Levels, WindowTable

OWN_REGION_MODEL = EMBEDDED_FOLDER / "regions.json"
FORMAT = 4


@dataclass(frozen=True, slots=True)
class RegionModel:
    """Region search parameters, learned from chromosomes with known prophages."""

    _DEPARTURES = np.arange(-5.0, 5.25, 0.25)  # of a host, in standard deviations between hosts

    size: int  # bases in a window
    step: int  # bases from one window to the next
    host: HostBackground  # usual medians and slopes in hosts
    levels: Levels  # of the signal, in hosts
    gc_weight: float  # share of the slope over GC that is subtracted from log-odds
    shape_weight: float  # log-odds per standard deviation of gene shape
    shape_bases: int  # bases around a window over which its shape is averaged
    edges: tuple[float, ...]  # between bins for the contrast to the host level
    log_ratios: tuple[float, ...]  # virus over host, per bin, scaled for dependent windows
    genes: Levels  # of proteins, in hosts
    gene_log_ratios: tuple[float, ...]  # as log_ratios, for windows with scored genes
    weight: float  # of one window, as neighbouring windows are dependent
    deviation: float  # standard deviation between windows in a host, for contrasts
    distance: float  # mean contrast between a virus and its host
    first_share: float  # probability that a record begins in a virus
    host_bases: float  # mean distance between two regions
    virus_bases: float  # mean region length
    training: str  # training data, in a sentence

    def __post_init__(self) -> None:
        check_counts(self.size, self.step, self.shape_bases)
        host = self.host
        rates = (self.host_bases, self.virus_bases)
        log_ratios = (*self.log_ratios, *self.gene_log_ratios)
        numbers = (*self.edges, *log_ratios, *self.levels.usual, *self.genes.usual, self.distance)
        spreads = (self.levels.spread, self.genes.spread)
        others = (self.gc_weight, self.shape_weight, self.weight, self.deviation, *spreads)
        hosts = (host.gc, host.slope, *host.shape, *host.deviation, *rates)
        largest = 1e12  # squares and products of larger values may overflow
        is_model = (
            1 <= self.step <= self.size
            and all(abs(value) < largest for value in (*numbers, *others, *hosts))  # not NaN
            and min(rates) >= 1
            and len(host.shape) == len(host.deviation) == N_SHAPE
            and min(host.deviation) > 0
            and 0 < self.first_share < 1
            and len(self.edges) + 1 == len(self.log_ratios) == len(self.gene_log_ratios)
            and list(self.edges) == sorted(self.edges)
            and self.deviation > 1 / largest
            and min(self.weight, self.distance) > 0
        )
        if not is_model:
            raise ValueError("its numbers are out of range, or do not fit together")

    @property
    def text(self) -> str:
        """Return the file content that ``load`` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def contrast(self, items: WindowTable, *, is_virus: bool) -> FloatArray:
        """Return the contrast between each window and its record's host. (n,)

        A record that is itself a virus is compared with the usual level in hosts with its GC.
        """
        host = self.host.value_at(items, is_virus=is_virus)
        n_items = self.shape_bases // self.step
        values = items.signal(host, self.gc_weight, self.shape_weight, n_items)
        contrasts = np.asarray(values - self.levels.index_at(host.gc))
        return contrasts if is_virus else contrasts - self.departure(items.start, contrasts)

    def departure(self, starts: IntArray, contrasts: FloatArray) -> float:
        """Return the host level's most probable departure from the usual level at its GC."""
        is_known = ~np.isnan(contrasts)
        departures = self.levels.spread * self._DEPARTURES
        likely = log_likelihoods(starts[is_known], contrasts[is_known], departures, self)
        return float(departures[np.argmax(likely - 0.5 * self._DEPARTURES**2)])

    def evidence(self, contrasts: FloatArray) -> FloatArray:
        """Return the log-ratio virus over host per window, 0 without log-odds. (n,) -> (n,)"""
        return self._binned(contrasts, self.log_ratios)

    def evidence_by_genes(self, items: WindowTable, contrasts: FloatArray) -> FloatArray:
        """Return ``evidence``, from both signals where a window has scored genes. (n,) -> (n,)"""
        above = items.genes - self.genes.index_at(items.median_gc)
        log_ratios = self._binned(contrasts + above, self.gene_log_ratios)
        return np.where(np.isnan(above), self.evidence(contrasts), log_ratios)

    def _binned(self, contrasts: FloatArray, log_ratios: tuple[float, ...]) -> FloatArray:
        bins = np.searchsorted(self.edges, contrasts)
        return np.where(np.isnan(contrasts), 0.0, np.array(log_ratios)[bins])

    @property
    def rates(self) -> tuple[float, float, float]:
        """Return the arguments for library functions."""
        return self.host_bases, self.virus_bases, self.first_share

    def transition(self, n_bases: int) -> FloatArray:
        """Return state-change log-probabilities over ``n_bases``, from and to. (2, 2)"""
        step = np.empty((2, 2))
        call("chain_step", n_bases, self.host_bases, self.virus_bases, step)
        return step

    @staticmethod
    def load(path: Path | None = None) -> RegionModel:
        """Read a model from a file, by default the built-in model.

        Raises:
            InputMissingError: the file does not exist.
            UnavailableError: it is damaged, or in another format.
        """
        path = path or OWN_REGION_MODEL
        if not path.is_file():
            raise InputMissingError(
                f"there is no region model {printable(path)}",
                hint="name the regions.json that `virnucpro train --regions` made",
            )
        try:
            fields = read_json(path)
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            host = HostBackground(**_with_tuples(fields.pop("host")))
            levels, genes = (
                Levels(**_with_tuples(fields.pop(name))) for name in ("levels", "genes")
            )
            return RegionModel(host=host, levels=levels, genes=genes, **_with_tuples(fields))
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise corrupt_model_error(path, error) from error


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the lists in JSON data to tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }


def corrupt_model_error(path: Path, reason: object) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not a region model of this VirNucPro: {printable(reason)}",
        hint="name the regions.json that `virnucpro train --regions` of this version made",
    )


def viral_path(
    starts: IntArray, evidence: FloatArray, model: RegionModel
) -> tuple[BoolArray, FloatArray]:
    """Return whether each item is viral on the most probable path, and its probability to be viral.

    ``starts`` are item positions in bases, ascending. A tie goes to the host.
    (n,), (n,) -> (n,), (n,)
    """
    path = np.empty(len(starts), dtype=np.bool_)
    odds = np.empty(len(starts))
    call("viral_path", evidence, starts, len(starts), *model.rates, path.view(np.uint8), odds)
    return path, sigmoid(odds)


def log_likelihoods(
    starts: IntArray, contrasts: FloatArray, departures: FloatArray, model: RegionModel
) -> FloatArray:
    """Return a record's log-probability over all paths, for each departure of the host level.

    (n,), (n,), (k,) -> (k,), up to a constant. Contrasts in hosts and in viruses have normal
    distributions with the same width here. So their prior probabilities, not their widths,
    distinguish a record that is entirely viral from a host with the same departure.
    """
    likelihoods = np.empty(len(departures))
    numbers = model.weight / model.deviation**2, model.distance
    items = contrasts, starts, len(starts), *model.rates
    call("log_likelihoods", *items, departures, len(departures), *numbers, likelihoods)
    return likelihoods
