"""A hidden Markov model with two states, host and virus, finds virus-like regions.

Items lie along a record, each with its evidence: the log-ratio of virus over host. Rates are per
base, so items may be missing or lie at any distance. ``viral_path`` gives the most probable path
and the probability that each item is viral (Durbin et al. 1998, Biological sequence analysis,
chapter 3).

How far an item stands out depends on the level of its host, which is unknown. Each departure from
the usual level at the GC of the record has a prior, and a likelihood over all paths
(``log_likelihoods``); the most probable departure is used. So a short record that stands out as a
whole is taken for a host with an unusual level. A record with parts that differ shows the level of
its host.
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
_DEPARTURES = np.arange(-5.0, 5.25, 0.25)  # of a host, in spreads of hosts
_LARGEST = 1e12  # squares and products of larger values may overflow


@dataclass(frozen=True, slots=True)
class RegionModel:
    """Parameters of the search for regions, learned from chromosomes with known prophages."""

    size: int  # bases of a piece
    step: int  # bases from one piece to the next
    host: HostBackground  # usual medians and slopes of hosts
    levels: Levels  # of the signal in hosts
    gc_weight: float  # share of the slope over GC that is subtracted from log-odds
    shape_weight: float  # log-odds per standard deviation of the shape of genes
    shape_bases: int  # window around a piece over which its shape is averaged
    edges: tuple[float, ...]  # between bins of the contrast to the host's level
    log_ratios: tuple[float, ...]  # virus over host, per bin, scaled for dependent pieces
    genes: Levels  # of proteins in hosts
    gene_log_ratios: tuple[float, ...]  # as log_ratios, for pieces with scored genes
    weight: float  # of one piece, as neighbouring pieces are dependent
    deviation: float  # standard deviation of contrasts between pieces of a host
    distance: float  # mean contrast between a virus and its host
    first_share: float  # probability that a record begins in a virus
    host_bases: float  # between two regions, on average
    virus_bases: float  # of a region, on average
    training: str  # what it was learned from, in a sentence

    def __post_init__(self) -> None:
        check_counts(self.size, self.step, self.shape_bases)
        host, rates = self.host, (self.host_bases, self.virus_bases)
        log_ratios = (*self.log_ratios, *self.gene_log_ratios)
        numbers = (*self.edges, *log_ratios, *self.levels.usual, *self.genes.usual, self.distance)
        spreads = (self.levels.spread, self.genes.spread)
        others = (self.gc_weight, self.shape_weight, self.weight, self.deviation, *spreads)
        hosts = (host.gc, host.slope, *host.shape, *host.deviation, *rates)
        is_model = (
            1 <= self.step <= self.size
            and all(abs(value) < _LARGEST for value in (*numbers, *others, *hosts))  # nor NaN
            and min(rates) >= 1
            and len(host.shape) == len(host.deviation) == N_SHAPE
            and min(host.deviation) > 0
            and 0 < self.first_share < 1
            and len(self.edges) + 1 == len(self.log_ratios) == len(self.gene_log_ratios)
            and list(self.edges) == sorted(self.edges)
            and self.deviation > 1 / _LARGEST
            and min(self.weight, self.distance) > 0
        )
        if not is_model:
            raise ValueError("its numbers are out of range, or do not fit together")

    @property
    def text(self) -> str:
        """The content of the file that ``load`` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def contrast(self, items: WindowTable, *, is_virus: bool) -> FloatArray:
        """How far each piece stands out from the host of its record. (n,)

        A record that is a virus itself stands out from what is usual in hosts of its GC.
        """
        host = self.host.value_at(items, is_virus=is_virus)
        n_items = self.shape_bases // self.step
        values = items.signal(host, self.gc_weight, self.shape_weight, n_items)
        contrasts = np.asarray(values - self.levels.index_at(host.gc))
        return contrasts if is_virus else contrasts - self.departure(items.start, contrasts)

    def departure(self, starts: IntArray, contrasts: FloatArray) -> float:
        """The most probable departure of the host's level from the usual one at its GC."""
        is_known = ~np.isnan(contrasts)
        departures = self.levels.spread * _DEPARTURES
        likely = log_likelihoods(starts[is_known], contrasts[is_known], departures, self)
        return float(departures[np.argmax(likely - 0.5 * _DEPARTURES**2)])

    def evidence(self, contrasts: FloatArray) -> FloatArray:
        """Log-ratio of virus over host of each piece; 0 without log-odds. (n,) -> (n,)"""
        return self._binned(contrasts, self.log_ratios)

    def evidence_by_genes(self, items: WindowTable, contrasts: FloatArray) -> FloatArray:
        """As ``evidence``; where genes of a piece are scored, by both signals. (n,) -> (n,)"""
        above = items.genes - self.genes.index_at(items.median_gc)
        both = self._binned(contrasts + above, self.gene_log_ratios)
        return np.where(np.isnan(above), self.evidence(contrasts), both)

    def _binned(self, contrasts: FloatArray, log_ratios: tuple[float, ...]) -> FloatArray:
        bins = np.searchsorted(self.edges, contrasts)
        return np.where(np.isnan(contrasts), 0.0, np.array(log_ratios)[bins])

    @property
    def rates(self) -> tuple[float, float, float]:
        """The arguments of library functions."""
        return self.host_bases, self.virus_bases, self.first_share

    def transition(self, n_bases: int) -> FloatArray:
        """Log-probabilities of each change of state over ``n_bases``, from and to. (2, 2)"""
        step = np.empty((2, 2))
        call("chain_step", n_bases, self.host_bases, self.virus_bases, step)
        return step

    @staticmethod
    def load(path: Path | None = None) -> RegionModel:
        """Read a model from a file; without a path, the model of VirNucPro.

        Raises:
            InputMissingError: there is no such file.
            UnavailableError: it is damaged, or of another format.
        """
        path = path or OWN_REGION_MODEL
        if not path.is_file():
            raise InputMissingError(
                f"there is no region model {printable(path)}",
                hint="name the regions.json that `virnucpro train --regions` made",
            )
        try:
            facts = read_json(path)
            if facts.pop("format") != FORMAT:
                raise ValueError("another format")
            host = HostBackground(**_with_tuples(facts.pop("host")))
            levels, genes = (
                Levels(**_with_tuples(facts.pop(name))) for name in ("levels", "genes")
            )
            return RegionModel(host=host, levels=levels, genes=genes, **_with_tuples(facts))
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise corrupt_model_error(path, error) from error


def _with_tuples(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts from JSON, with lists turned into tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }


def corrupt_model_error(path: Path, reason: object) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not a region model of this VirNucPro: {printable(reason)}",
        hint="name the regions.json that `virnucpro train --regions` of this version made",
    )


def viral_path(
    starts: IntArray, evidence: FloatArray, model: RegionModel
) -> tuple[BoolArray, FloatArray]:
    """Whether each item is viral on the most probable path, and the probability that it is viral.

    ``starts`` are the positions of the items in bases, ascending. A tie goes to the host.
    (n,), (n,) -> (n,), (n,)
    """
    path, odds = np.empty(len(starts), dtype=np.bool_), np.empty(len(starts))
    call("viral_path", evidence, starts, len(starts), *model.rates, path.view(np.uint8), odds)
    return path, sigmoid(odds)


def log_likelihoods(
    starts: IntArray, contrasts: FloatArray, departures: FloatArray, model: RegionModel
) -> FloatArray:
    """The log-probability of a record over all paths, for each departure of its host's level.

    (n,), (n,), (k,) -> (k,), up to a constant. Contrasts of hosts and of viruses have normal
    distributions of the same width here. So their prior probabilities, not their widths, tell a
    record that is all virus from a host that departs as far.
    """
    likelihoods = np.empty(len(departures))
    numbers = model.weight / model.deviation**2, model.distance
    items = contrasts, starts, len(starts), *model.rates
    call("log_likelihoods", *items, departures, len(departures), *numbers, likelihoods)
    return likelihoods
