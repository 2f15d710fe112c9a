"""Virus-like regions of a record, from the log-odds of pieces along it.

Hosts differ in the log-odds of their own pieces, so these are taken relative to the host's level,
and binned; each bin has a learned log-ratio of virus over host. A chain of two states, host and
virus, whose learned rates count bases, gives the most probable path (Viterbi) and the posterior of
each item (forward-backward). Items may be missing: those at hand carry their places.

The genes of ribosomal proteins and of RNA polymerase look viral by their spelling. Peptides that
every bacterium has in them, and no phage, tell them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, isfinite, log, log1p
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from virnucpro.errors import UnavailableError
from virnucpro.files import EMBEDDED_FOLDER
from virnucpro.log import printable
from virnucpro.records import Region
from virnucpro.scorer.features import GENE_LIKE
from virnucpro.scorer.nets import Scorer
from virnucpro.scorer.pieces import Pieces, encode
from virnucpro.scorer.score import PieceScores, score_windows
from virnucpro.scorer.stretches import code_of, codon_codes, find_stretches
from virnucpro.sequences.genetic_code import STANDARD, GeneticCode

FORMAT = 1
SHORTEST_RECORD = 10_000  # bases; in a shorter one no regions are looked for
MOST_MOVED = 1_000  # bases, of an end to an open stretch
# of RpoB, RpoC, S19, L2, S11 and S12, aligned over bacteria of several phyla
HOST_PEPTIDES = re.compile(
    rb"GDK[FLM]A[GSN]RHG[QN]KG|NADFDGDQM|GH[KM][LI][GA]EF[AS][PL]TR|NP[VI]DHPHGGGEG"
    rb"|PHNGCRPPK[KR]R|KPNSA[LM]RK"
)
HOST_REACH = 10_000  # bases on either side of a host's peptide that are taken for the host's

Values = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]
Transition = tuple[tuple[float, float], tuple[float, float]]  # log-probabilities, from and to


@dataclass(frozen=True, slots=True)
class RegionModel:
    """The evidence for regions, learned from chromosomes with known prophages."""

    size: int  # bases of a piece
    step: int  # bases from one piece to the next
    host_level: float  # the median log-odds of a host's pieces, the mean over hosts
    edges: tuple[float, ...]  # between bins of log-odds above the host's level
    log_ratios: tuple[float, ...]  # of each bin, virus over host, as a piece counts among others
    host_bases: float  # between two regions, on average
    virus_bases: float  # of a region, on average
    training: str  # what it was learned from, in a sentence

    def __post_init__(self) -> None:
        if not 1 <= self.step <= self.size or min(self.host_bases, self.virus_bases) <= 0:
            raise ValueError(f"pieces of {self.size} bases, one every {self.step}")
        if len(self.log_ratios) != len(self.edges) + 1 or list(self.edges) != sorted(self.edges):
            raise ValueError(f"{len(self.log_ratios)} bins with {len(self.edges)} edges")
        if not all(map(isfinite, (self.host_level, *self.edges, *self.log_ratios))):
            raise ValueError("a value that is not finite")

    def evidence(self, log_odds: Values, level: float) -> Values:
        """Log-ratio of virus over host of each piece; 0 of one without log-odds. (n,) -> (n,)"""
        bins = np.searchsorted(self.edges, log_odds - level)
        return np.where(np.isnan(log_odds), 0.0, np.array(self.log_ratios)[bins])

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
        UnavailableError: the file is missing, damaged, or of another format.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts.pop("format") != FORMAT:
            raise ValueError("another format")
        edges, log_ratios = tuple(facts.pop("edges")), tuple(facts.pop("log_ratios"))
        return RegionModel(edges=edges, log_ratios=log_ratios, **facts)
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"{printable(path)} is not a region model of VirNucPro: {printable(error)}",
            hint="reinstall VirNucPro, or leave --regions out",
        ) from error


def region_model_text(model: RegionModel) -> str:
    """The content of the file that ``load_region_model`` reads."""
    return json.dumps({"format": FORMAT, **asdict(model)}, indent=1) + "\n"


# The chain


def viterbi(starts: Counts, evidence: Values, model: RegionModel) -> Mask:
    """Whether each item is viral on the most probable path; of two equals the host's. (n,) -> (n,)

    ``starts`` are the places of the items, in bases and rising.
    """
    if not len(starts):
        return np.zeros(0, dtype=np.bool_)
    values, steps = evidence.tolist(), _steps(starts, model)
    host, virus = log1p(-model.virus_share), log(model.virus_share) + values[0]
    before: list[tuple[bool, bool]] = []  # of host and of virus: whether a virus came before it
    for value, ((stay, enter), (leave, last)) in zip(values[1:], steps, strict=True):
        before.append((virus + leave > host + stay, virus + last > host + enter))
        host, virus = max(host + stay, virus + leave), max(host + enter, virus + last) + value
    state = virus > host
    path = [state]
    for of_host, of_virus in reversed(before):
        state = of_virus if state else of_host
        path.append(state)
    return np.array(path[::-1], dtype=np.bool_)


def posteriors(starts: Counts, evidence: Values, model: RegionModel) -> Values:
    """The probability of each item to be viral, by all items. (n,) -> (n,)"""
    if not len(starts):
        return np.zeros(0)
    values, steps = evidence.tolist(), _steps(starts, model)
    forward = [log(model.virus_share) - log1p(-model.virus_share) + values[0]]
    for value, step in zip(values[1:], steps, strict=True):
        (stay, enter), (leave, last) = step
        odds = forward[-1]
        forward.append(_log_sum(enter, odds + last) - _log_sum(stay, odds + leave) + value)
    backward = [0.0]
    for value, step in zip(values[:0:-1], reversed(steps), strict=True):
        (stay, enter), (leave, last) = step
        odds = backward[-1] + value
        backward.append(_log_sum(leave, odds + last) - _log_sum(stay, odds + enter))
    odds_of_all = np.array(forward) + np.array(backward[::-1])
    return np.asarray(0.5 * (1 + np.tanh(odds_of_all / 2)))


def _steps(starts: Counts, model: RegionModel) -> list[Transition]:
    known: dict[int, Transition] = {}
    for n_bases in set(np.diff(starts).tolist()):
        known[n_bases] = model.transition(n_bases)
    return [known[b - a] for a, b in pairwise(starts.tolist())]


def _log_sum(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    return max(a, b) + log1p(exp(-abs(a - b)))


# From pieces to regions


class Run(NamedTuple):
    """Neighbouring viral items and the bases from the middle before them to that behind them."""

    first: int
    end: int  # item behind the last
    start_base: int
    end_base: int


@dataclass(frozen=True, slots=True, eq=False)
class RegionFinder:
    """Finds the regions of records, one record at a time."""

    scorer: Scorer
    model: RegionModel
    code: GeneticCode = STANDARD

    def find(self, sequence: str, *, is_virus: bool) -> tuple[Region, ...] | None:
        """The virus-like regions of a record; None for one that is too short to look.

        A record that is called a virus is one region, without a host's flanks.
        """
        if len(sequence) < SHORTEST_RECORD:
            return None
        size, step = self.model.size, self.model.step
        pieces = score_windows(sequence, self.scorer, size, step, self.code)
        return regions_of_pieces(sequence, pieces, self.model, self.code, is_virus=is_virus)


def regions_of_pieces(
    sequence: str, pieces: PieceScores, model: RegionModel, code: GeneticCode, *, is_virus: bool
) -> tuple[Region, ...]:
    """The regions of a record, of its overlapping pieces."""
    starts, n_bases = pieces.start, len(sequence)
    level = model.host_level if is_virus else median_level(pieces.log_odds, model.host_level)
    evidence = model.evidence(pieces.log_odds, level)
    runs = viral_runs(starts, evidence, n_bases, model)
    guarded = near_host_peptides(sequence, starts + model.size // 2, runs, code)
    if guarded.any():
        evidence[guarded] = min(model.log_ratios)
        runs = viral_runs(starts, evidence, n_bases, model)
    posterior = posteriors(starts, evidence, model)
    if is_virus:
        runs = [_hull(runs) if runs else Run(0, len(posterior), 0, n_bases)]
    ends = move_ends([(run.start_base, run.end_base) for run in runs], sequence, code)
    return tuple(
        Region(
            start,
            end,
            "whole" if is_virus else "provirus",
            float(posterior[run.first : run.end].mean()),
        )
        for run, (start, end) in zip(runs, ends, strict=True)
    )


def median_level(log_odds: Values, otherwise: float) -> float:
    """The log-odds that a host's own pieces have in this record, which is mostly host."""
    known = log_odds[~np.isnan(log_odds)]
    return float(np.median(known)) if len(known) else otherwise


def viral_runs(starts: Counts, evidence: Values, n_bases: int, model: RegionModel) -> list[Run]:
    """The runs of viral items on the most probable path through a record of so many bases."""
    path = viterbi(starts, evidence, model)
    changes = np.flatnonzero(np.diff(path, prepend=False, append=False)).tolist()
    bounds = [0, *((starts[1:] + starts[:-1] + model.size) // 2).tolist(), n_bases]
    return [
        Run(first, end, bounds[first], bounds[end])
        for first, end in zip(changes[::2], changes[1::2], strict=True)
    ]


def near_host_peptides(
    sequence: str, middles: Counts, runs: Sequence[Run], code: GeneticCode
) -> Mask:
    """Which items, by their middles, are near a host's peptide that lies in one of the runs."""
    is_near = np.zeros(len(middles), dtype=np.bool_)
    for run in runs:
        for place in host_peptides(sequence[run.start_base : run.end_base], code):
            is_near |= abs(middles - run.start_base - place) <= HOST_REACH
    return is_near


def _hull(runs: Sequence[Run]) -> Run:
    """From the first to the last."""
    return Run(runs[0].first, runs[-1].end, runs[0].start_base, runs[-1].end_base)


def host_peptides(sequence: str, code: GeneticCode = STANDARD) -> list[int]:
    """Where, in bases, translations of the six frames hold a peptide that is a host's."""
    if not sequence:
        return []
    length = len(sequence)
    pieces = Pieces.of(encode(sequence), np.array([0]), np.array([length]))
    letters = bytearray(b"X" * 256)
    for codon, letter in zip(code.codons, code.letters, strict=True):
        letters[code_of(codon)] = ord(letter)
    places = []
    for strand, codes in enumerate(codon_codes(pieces.digits)[0]):
        translation = codes.tobytes().translate(bytes(letters))
        for frame in range(3):
            for match in HOST_PEPTIDES.finditer(translation[frame::3]):
                place = frame + 3 * match.start()
                places.append(place if strand == 0 else length - place)
    return sorted(places)


def move_ends(
    runs: Sequence[tuple[int, int]], sequence: str, code: GeneticCode = STANDARD
) -> list[tuple[int, int]]:
    """Move each end within the record to the nearest edge of an open stretch, where one is near.

    No end passes the middle between it and the next, so what was apart stays apart.
    """
    ends = [end for run in runs for end in run]
    moved = []
    for i, end in enumerate(ends):
        if 0 < end < len(sequence):
            low = max(end - MOST_MOVED, (ends[i - 1] + end) // 2 + 1 if i else 0)
            high = (
                min(end + MOST_MOVED, (end + ends[i + 1]) // 2)
                if i + 1 < len(ends)
                else (min(end + MOST_MOVED, len(sequence)))
            )
            edges = [edge for edge in open_edges(sequence, end, code) if low <= edge <= high]
            end = min(edges, key=lambda edge: (abs(edge - ends[i]), edge), default=end)
        moved.append(end)
    return list(zip(moved[::2], moved[1::2], strict=True))


def open_edges(sequence: str, place: int, code: GeneticCode = STANDARD) -> list[int]:
    """Both edges of each gene-like open stretch near a place, but for those that are cut off."""
    first = max(0, place - 2 * MOST_MOVED)
    part = sequence[first : place + 2 * MOST_MOVED]
    kept = find_stretches(Pieces.of(encode(part), np.array([0]), np.array([len(part)])), code).kept
    long = kept.where(kept.n_codons >= GENE_LIKE)
    left = np.where(long.strand == 0, long.start, len(part) - long.start - 3 * long.n_codons)
    edges = np.concatenate([left, left + 3 * long.n_codons])
    whole: list[int] = (first + edges[(edges > 2) & (edges < len(part) - 2)]).tolist()
    return whole
