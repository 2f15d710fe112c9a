"""The chain of two states, host and virus, that tells virus-like regions, and what it learned.

Items stand along a record, each with its evidence: the log-ratio of virus over host. Rates count
bases, so items may be missing, or stand at any distance. ``viterbi`` gives the most probable path,
``posteriors`` the probability of each item to be viral (Durbin et al. 1998, Biological sequence
analysis, chapter 3).

How far an item stands out depends on the level of its host, which is not known. Each departure
from what is usual at its GC has a prior, and a likelihood over all paths (``log_likelihoods``);
the most probable one is taken. So a short record that stands out as a whole is rather a host of
an unusual level, and one whose parts differ shows its host's level itself.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, inf, log, log1p
from pathlib import Path

import numpy as np

from virnucpro.callers.contrast import Hosts, Items, Levels, signal
from virnucpro.ground.errors import InputMissingError, UnavailableError
from virnucpro.ground.files import EMBEDDED_FOLDER, read_json
from virnucpro.ground.log import printable
from virnucpro.ground.numeric import Counts, Mask, Values, sigmoid
from virnucpro.ground.records import check_counts

FORMAT = 3
_DEPARTURES = np.arange(-5.0, 5.25, 0.25)  # of a host, in spreads of hosts
_ITEMS_AT_ONCE = 10_000
_LARGEST = 1e12  # squares and products of larger values may overflow

Transition = tuple[tuple[float, float], tuple[float, float]]  # log-probabilities, from and to


@dataclass(frozen=True, slots=True)
class RegionModel:
    """The evidence for regions, learned from chromosomes with known prophages."""

    size: int  # bases of a piece
    step: int  # bases from one piece to the next
    host: Hosts  # medians and slopes that are usual in hosts
    levels: Levels  # of the signal in hosts
    gc_weight: float  # share of the slope over GC that is taken out of log-odds
    shape_weight: float  # log-odds for a standard deviation of the shape of genes
    shape_bases: int  # around a piece that its shape is the mean over
    edges: tuple[float, ...]  # between bins of the contrast to the host's level
    log_ratios: tuple[float, ...]  # of each bin, virus over host, as a piece counts among others
    weight: float  # of a piece among others
    deviation: float  # of contrasts, between pieces of a host
    distance: float  # of a virus from its host, mean contrast
    first_share: float  # probability that a record begins in a virus
    host_bases: float  # between two regions, on average
    virus_bases: float  # of a region, on average
    training: str  # what it was learned from, in a sentence

    def __post_init__(self) -> None:
        check_counts(self.size, self.step, self.shape_bases)
        if not 1 <= self.step <= self.size:
            raise ValueError(f"pieces of {self.size} bases, one every {self.step}")
        rates = (self.host_bases, self.virus_bases)
        if not all(1 <= n_bases < inf for n_bases in rates):
            raise ValueError(f"regions of {self.virus_bases} bases, {self.host_bases} apart")
        if not 0 < self.first_share < 1:
            raise ValueError(f"records begin in a virus with probability {self.first_share}")
        if len(self.log_ratios) != len(self.edges) + 1 or list(self.edges) != sorted(self.edges):
            raise ValueError(f"{len(self.log_ratios)} bins with {len(self.edges)} edges")
        if not (self.deviation > 1 / _LARGEST and self.weight > 0 and self.distance > 0):
            raise ValueError(
                f"pieces that weigh {self.weight}, deviate by {self.deviation} in a host, and "
                f"stand out by {self.distance} in a virus"
            )
        numbers = (*self.edges, *self.log_ratios, *self.levels.usual, self.distance)
        others = (self.gc_weight, self.shape_weight, self.weight, self.deviation)
        hosts = (self.host.gc, self.host.slope, *self.host.shape, *self.host.deviation, *rates)
        if not all(abs(value) < _LARGEST for value in (*numbers, *others, *hosts)):  # nor NaN
            raise ValueError(f"a value that is not finite, or not below {_LARGEST:.0e}")

    def contrast(self, items: Items, *, is_virus: bool) -> Values:
        """How far each piece stands out from the host of its record. (n,)

        A record that is a virus itself stands out from what is usual in hosts of its GC.
        """
        host = self.host.at(items, is_virus=is_virus)
        n_items = self.shape_bases // self.step
        values = signal(items, host, self.gc_weight, self.shape_weight, n_items)
        contrasts = np.asarray(values - self.levels.at(host.gc))
        return contrasts if is_virus else contrasts - self.departure(items.start, contrasts)

    def departure(self, starts: Counts, contrasts: Values) -> float:
        """The most probable departure of a host's level from what is usual at its GC."""
        is_known = ~np.isnan(contrasts)
        departures = self.levels.spread * _DEPARTURES
        likely = log_likelihoods(starts[is_known], contrasts[is_known], departures, self)
        return float(departures[np.argmax(likely - 0.5 * _DEPARTURES**2)])

    def evidence(self, contrasts: Values) -> Values:
        """Log-ratio of virus over host of each piece; 0 of one without log-odds. (n,) -> (n,)"""
        bins = np.searchsorted(self.edges, contrasts)
        return np.where(np.isnan(contrasts), 0.0, np.array(self.log_ratios)[bins])

    @property
    def virus_share(self) -> float:
        """Share of bases that lie in regions."""
        return self.virus_bases / (self.host_bases + self.virus_bases)

    def transition(self, n_bases: int) -> Transition:
        """Log-probabilities of the states so many bases on, of a chain in continuous time."""
        rate = 1 / self.host_bases + 1 / self.virus_bases
        mixed, virus = -np.expm1(-rate * n_bases), self.virus_share
        enter, leave = float(mixed * virus), float(mixed * (1 - virus))
        return (log1p(-enter), log(enter)), (log(leave), log1p(-leave))


def embedded_region_model() -> Path:
    """The region model that belongs to the embedded scorer."""
    return EMBEDDED_FOLDER / "regions.json"


def load_region_model(path: Path) -> RegionModel:
    """
    Raises:
        InputMissingError: there is no such file.
        UnavailableError: it is damaged, or of another format.
    """
    if not path.is_file():
        raise InputMissingError(
            f"there is no region model {printable(path)}",
            hint="name the regions.json that `virnucpro train --regions` made",
        )
    try:
        facts = read_json(path)
        if facts.pop("format") != FORMAT:
            raise ValueError("another format")
        host, levels = facts.pop("host"), facts.pop("levels")
        edges, log_ratios = tuple(facts.pop("edges")), tuple(facts.pop("log_ratios"))
        shape, deviation = tuple(host.pop("shape")), tuple(host.pop("deviation"))
        return RegionModel(
            host=Hosts(shape=shape, deviation=deviation, **host),
            levels=Levels(tuple(levels.pop("usual")), **levels),
            edges=edges,
            log_ratios=log_ratios,
            **facts,
        )
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise unusable(path, error) from error


def unusable(path: Path, reason: object) -> UnavailableError:
    return UnavailableError(
        f"{printable(path)} is not a region model of this VirNucPro: {printable(reason)}",
        hint="name the regions.json that `virnucpro train --regions` of this version made",
    )


def region_model_text(model: RegionModel) -> str:
    """The content of the file that ``load_region_model`` reads."""
    return json.dumps({"format": FORMAT, **asdict(model)}, indent=1) + "\n"


def viterbi(starts: Counts, evidence: Values, model: RegionModel) -> Mask:
    """Whether each item is viral on the most probable path; of two equals the host's. (n,) -> (n,)

    ``starts`` are the places of the items, in bases and rising.
    """
    if not len(starts):
        return np.zeros(0, dtype=np.bool_)
    values, steps = evidence.tolist(), _steps(starts, model)
    host, virus = log1p(-model.first_share), log(model.first_share) + values[0]
    of_host, of_virus = bytearray(), bytearray()  # whether a virus came before it
    for value, ((stay, enter), (leave, last)) in zip(values[1:], steps, strict=True):
        of_host.append(virus + leave > host + stay)
        of_virus.append(virus + last > host + enter)
        host, virus = max(host + stay, virus + leave), max(host + enter, virus + last) + value
    state = virus > host
    path = bytearray([state])
    for host_before, virus_before in zip(reversed(of_host), reversed(of_virus), strict=True):
        state = bool(virus_before if state else host_before)
        path.append(state)
    is_viral: Mask = np.frombuffer(path, dtype=np.bool_)[::-1].copy()
    return is_viral


def posteriors(starts: Counts, evidence: Values, model: RegionModel) -> Values:
    """The probability of each item to be viral, by all items. (n,) -> (n,)"""
    if not len(starts):
        return np.zeros(0)
    values, steps = evidence.tolist(), _steps(starts, model)
    forward = array("d", [log(model.first_share) - log1p(-model.first_share) + values[0]])
    for value, step in zip(values[1:], steps, strict=True):
        (stay, enter), (leave, last) = step
        odds = forward[-1]
        forward.append(_log_sum(enter, odds + last) - _log_sum(stay, odds + leave) + value)
    backward = array("d", [0.0])
    for value, step in zip(values[:0:-1], reversed(steps), strict=True):
        (stay, enter), (leave, last) = step
        odds = backward[-1] + value
        backward.append(_log_sum(leave, odds + last) - _log_sum(stay, odds + enter))
    odds_of_all = np.array(forward) + np.array(backward)[::-1]
    return sigmoid(odds_of_all)


def log_likelihoods(
    starts: Counts, contrasts: Values, departures: Values, model: RegionModel
) -> Values:
    """The log-probability of a record over all paths, for each departure of its host's level.

    (n,), (n,), (k,) -> (k,), up to a constant. Contrasts of hosts and of viruses have normal
    distributions of the same width here. So a virus throughout and a host that departs as far are
    told apart by how probable each is, and not by the width of what is seen.
    """
    n_departures, per_square = len(departures), model.weight / model.deviation**2
    all_host = np.zeros(n_departures)
    host = np.full(n_departures, log1p(-model.first_share))
    virus = np.full(n_departures, log(model.first_share))
    steps: list[Transition] = [((0.0, -inf), (-inf, 0.0)), *_steps(starts, model)]
    for first in range(0, len(starts), _ITEMS_AT_ONCE):
        block = slice(first, first + _ITEMS_AT_ONCE)
        values = contrasts[block, None] - departures
        all_host -= per_square * (values**2).sum(axis=0) / 2
        log_ratios = per_square * model.distance * (values - model.distance / 2)
        for row, step in zip(log_ratios, steps[block], strict=True):
            (stay, enter), (leave, last) = step
            host, virus = (
                np.logaddexp(host + stay, virus + leave),
                np.logaddexp(host + enter, virus + last) + row,
            )
    return np.asarray(all_host + np.logaddexp(host, virus))


def _steps(starts: Counts, model: RegionModel) -> list[Transition]:
    known: dict[int, Transition] = {}
    for n_bases in set(np.diff(starts).tolist()):
        known[n_bases] = model.transition(n_bases)
    return [known[b - a] for a, b in pairwise(starts.tolist())]


def _log_sum(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    return max(a, b) + log1p(exp(-abs(a - b)))
