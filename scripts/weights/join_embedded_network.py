"""Join the network on codons with the scorer: write its head, head.safetensors.

    python scripts/weights/join_embedded_network.py manifest.tsv genes.tsv \
        scripts/weights/scorer_split.tsv virnucpro/embedded/cnn_virnucpro \
        train validation test locked

The network was trained without the groups of two of the ten folds. Here the nets of the scorer are
fitted without the same groups, and both score fragments of these. Their log-odds are added, with a
weight, and calibrated at each length. A table of figures goes to the standard output, in which the
fragments of each fold are called by the weights and cuts of the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sampling import Collection, Fragments, draw
from scorer_folds import fragment_log_odds
from train_embedded_network import HELD_OUT
from train_embedded_scorer import (
    PROKARYOTIC,
    SEED,
    SHARES,
    Data,
    fit,
    records_of_fragments,
)

from virnucpro.core.atomic_io import HEAD_FILE
from virnucpro.core.numeric import BoolArray, FloatArray, IntArray
from virnucpro.core.types import FastaRecord
from virnucpro.models.base import Model
from virnucpro.models.codon_cnn import inspect_file, load_network
from virnucpro.models.registry import NETWORK
from virnucpro.sequences.translate import Chunk
from virnucpro.training.evaluation.calibration import ScoredFragments, fit_logistic
from virnucpro.training.evaluation.metrics import Samples, auroc_gain
from virnucpro.training.labelled_data import LabelledRecord, group_digest
from virnucpro.viral.head import (
    EncoderInfo,
    EnsembleKnot,
    EnsembleWeights,
    Head,
    HeadInfo,
    Network,
    combine_log_odds,
)
from virnucpro.viral.networks import ErrorRates, Scorer, thresholds
from virnucpro.viral.networks import calibrate as calibrate_log_odds
from virnucpro.viral.options import FALSE_POSITIVES

CHUNK_SIZE = 1000
N_FRAGMENTS = {  # of each label
    150: 5000,
    300: 4000,
    500: 4000,
    1000: 2500,
    2000: 1200,
    3000: 900,
    10_000: 300,  # hardly any longer cells are held out
}
WEIGHT = 0.75  # of the network's log-odds, beside the scorer's
LEFT_OUT = ("archaea",)
FALSE_CALLS_ALONE = 0.03  # of the head, on the shortest fragments
_CHUNKS_AT_ONCE = 6
_LETTERS = np.frombuffer(b"ACGTN", np.uint8)


def head_log_odds(fragments: Fragments, network: torch.nn.Module) -> FloatArray:
    """The mean log-odds of the chunks of each fragment. -> (n,)"""
    chunks, owner = [], []
    for place, digits in enumerate(fragments.digits):
        record = FastaRecord("", "", _LETTERS[digits].tobytes().decode())
        cut = [chunk.sequence for chunk in Chunk.cut_evenly(record, CHUNK_SIZE)]
        chunks += cut
        owner += [place] * len(cut)
    odds = []
    with torch.inference_mode():
        for first in range(0, len(chunks), _CHUNKS_AT_ONCE):
            odds.append(network(chunks[first : first + _CHUNKS_AT_ONCE])[:, -1].numpy())
    sums = np.bincount(owner, np.concatenate(odds))
    return np.asarray(sums / np.bincount(owner))


def scored_fragments(
    n_bases: int,
    records: Sequence[LabelledRecord],
    log_odds: FloatArray,
    head: FloatArray,
    scorer: Scorer,
) -> ScoredFragments:
    """Fragments with the log-odds of the scorer's nets, which are calibrated here, and the head."""
    base = calibrate_log_odds(scorer.knots, log_odds, np.full(len(records), n_bases))
    is_virus = np.array([record.is_virus for record in records])
    groups = np.unique([record.group for record in records], return_inverse=True)[1]
    no_chunks = np.zeros((len(records), 2), dtype=np.int64)
    scored = ScoredFragments.from_scores(n_bases, base, is_virus, groups, no_chunks)
    return replace(scored, head=head)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Fragments of one length, and in parallel rows their records and the folds of these."""

    scored: ScoredFragments
    records: Sequence[LabelledRecord]
    fold: IntArray

    @property
    def is_counted(self) -> BoolArray:
        """Viruses, and cells that decide on weights and cuts: not those of kinds in ``LEFT_OUT``.

        Two of the three groups of archaea are of one order, and from 2,000 bases on most false
        calls of the scorer are theirs. Where the network helps there, cuts for all other cells must
        not fall.
        """
        return np.array([record.kingdom not in LEFT_OUT for record in self.records])

    def log_odds(self, join: EnsembleWeights) -> FloatArray:
        """The joined log-odds."""
        return combine_log_odds(join.knots, self.scored.scores, self.scored.head, self.lengths)

    def cuts(self, rates: Sequence[ErrorRates]) -> FloatArray:
        """The default cuts."""
        return thresholds(rates, self.lengths, FALSE_POSITIVES["default"])

    @property
    def lengths(self) -> IntArray:
        return np.full(len(self.records), self.scored.n_bases)


def join_of(
    measured: Sequence[Measured], scorer: Scorer, without: int | None = None
) -> EnsembleWeights:
    """The weights at each length, and the scorer's error rates, moved.

    Few groups are measured here, and other groups may be harder or easier. So the scorer is
    calibrated on them too, and the calibration and cuts of its ten folds are moved by what the
    network changes on these groups. Fragments of the fold ``without`` are left out.
    """
    knots, shifts = [], []
    own_rates = {each.n_bases: each for each in scorer.error_rates}
    for each in measured:
        decides = each.is_counted & (each.fold != without) & each.scored.has_both
        scored = each.scored.select(decides)
        slope, offset = calibration(scored.scores, scored.is_virus)
        both = scored.scores + WEIGHT * scored.head
        slope_of_both, offset_of_both = calibration(both, scored.is_virus)
        base = slope_of_both / slope
        knot = EnsembleKnot(scored.n_bases, base, WEIGHT * base, (offset_of_both - offset) / slope)
        knots.append(knot)
        shifts.append(shift_of(own_rates[scored.n_bases], scored, scored.concatenate(knot)))
    at = np.log([knot.n_bases for knot in knots])
    rates = [moved(each, at, np.array(shifts)) for each in scorer.error_rates]
    return EnsembleWeights(scorer.sha256, tuple(knots), tuple(rates))


def shift_of(rates: ErrorRates, scored: ScoredFragments, joined: FloatArray) -> FloatArray:
    """How much higher the joined log-odds are that as many cells reach. -> (2, n_shares)

    In rows: from the log-odds of each share, and from its cut.
    """
    is_cell = ~scored.is_virus
    before, after = (np.sort(each[is_cell]) for each in (scored.scores, joined))
    limits = np.clip([rates.log_odds, rates.cuts], before[0], before[-1])
    return np.asarray(np.interp(limits, before, after) - limits)


def moved(rates: ErrorRates, at: FloatArray, shifts: FloatArray) -> ErrorRates:
    """Move log-odds and cuts by shifts, which are interpolated over the logarithm of the length.

    The share of viruses stays: what is found in addition was measured on few groups.
    (n_lengths,), (n_lengths, 2, n_shares)
    """
    here = np.log(rates.n_bases)
    rows = [[np.interp(here, at, column) for column in row.T] for row in shifts.swapaxes(0, 1)]
    log_odds, cuts = (
        np.maximum.accumulate(np.add(each, row))
        for each, row in zip((rates.log_odds, rates.cuts), rows, strict=True)
    )
    cuts = np.maximum(log_odds, cuts)
    return replace(rates, log_odds=tuple(log_odds.tolist()), cuts=tuple(cuts.tolist()))


def calibration(log_odds: FloatArray, is_virus: BoolArray) -> tuple[float, float]:
    """Platt's scaling with equal weights of both labels (Platt 1999). -> slope, offset

    It starts at 0: from steeper slopes, the steps diverge where the labels are nearly separated.
    """
    inputs = np.stack([log_odds, np.ones(len(log_odds))], axis=1)
    weights = 0.5 / np.bincount(is_virus, minlength=2)[is_virus.astype(np.int64)]
    slope, offset = fit_logistic(inputs, is_virus, weights, np.zeros(2)).tolist()
    return slope, offset


def threshold_alone(shortest: ScoredFragments) -> float:
    """The score that a few of the cells reach, for records that are too short for the scorer."""
    odds = np.quantile(shortest.head[~shortest.is_virus], 1 - FALSE_CALLS_ALONE)
    return float(np.round(1 / (1 + np.exp(-odds)), 6))


def make_head(model: Model, join: EnsembleWeights, threshold: float, training: str) -> Head:
    """The head takes the last number of a vector as the log-odds."""
    weight = np.zeros((2, model.dim), dtype=np.float32)
    weight[:, -1] = -0.5, 0.5
    facts = HeadInfo(
        encoders=(EncoderInfo.from_spec(model),),
        chunk_size=CHUNK_SIZE,
        threshold=threshold,
        frame_rule="max",
        exponent=1.0,
        training=training,
        join=join,
    )
    return Head(facts=facts, protein=Network(((weight, np.zeros(2, dtype=np.float32)),)))


def digests(each: Iterable[int]) -> NDArray[np.uint64]:
    """Sorted, each once. -> (n,)"""
    return np.unique(np.array([*each], dtype=np.uint64))


def figures(each: Measured, joins: Mapping[int, EnsembleWeights], scorer: Scorer) -> Iterator[str]:
    """Rows of the table: what is called by the scorer and by both, and the AUROC of each.

    ``joins`` has for each fold the join of the other one.
    """
    scored, records = each.scored, each.records
    both, is_called = np.empty(len(records)), np.empty(len(records), dtype=np.bool_)
    for fold, join in joins.items():
        own, log_odds = each.fold == fold, each.log_odds(join)
        both[own] = log_odds[own]
        is_called[own] = (log_odds >= each.cuts(join.error_rates))[own]
    called = [scored.scores >= each.cuts(scorer.error_rates), is_called]
    kingdoms = np.array([record.kingdom for record in records])
    kinds: list[tuple[str, BoolArray]] = [
        ("all", np.ones(len(records), dtype=np.bool_)),
        ("all that decide", each.is_counted),
        ("phages and prokaryotes", np.isin(kingdoms, PROKARYOTIC)),
        *((kingdom, kingdoms == kingdom) for kingdom in SHARES),
    ]
    for name, rows in kinds:
        if not rows.any():
            continue
        cells = [str(scored.n_bases), name]
        for label in (True, False):
            own = rows & (scored.is_virus == label)
            n_groups = len(set(scored.groups[own].tolist()))
            shares = [f"{each[own].mean():.4f}" if own.any() else "" for each in called]
            cells += [str(own.sum()), str(n_groups), *shares]
        is_opposite = scored.is_virus != scored.is_virus[rows][0]
        inside = rows if len(set(scored.is_virus[rows].tolist())) == 2 else rows | is_opposite
        by_scorer, by_both = (scored_by(scored, each, inside) for each in (scored.scores, both))
        gain, (low, high) = auroc_gain(by_scorer, by_both, SEED)
        values = (by_scorer.auroc(), by_both.auroc(), gain, low, high)
        cells += ["" if value is None else f"{value:.4f}" for value in values]
        yield "\t".join(cells)


def scored_by(scored: ScoredFragments, log_odds: FloatArray, rows: BoolArray) -> Samples:
    """Some of the fragments with other scores; both labels weigh the same."""
    is_virus = scored.is_virus[rows]
    weights = 0.5 / np.bincount(is_virus, minlength=2)[is_virus.astype(np.int64)]
    scores = np.nan_to_num(log_odds[rows], nan=-np.inf)
    return Samples(scores, is_virus, scored.groups[rows], weights)


def main(manifest: Path, genes: Path, split: Path, folder: Path, parts: list[str]) -> None:
    data = Data.read(manifest, genes, split, parts, apart={})  # the folds of the network
    others = data.without(HELD_OUT)
    nets = fit(others)
    is_out = np.isin(data.fold_of_record, HELD_OUT)
    held_out, fold = data.collection.where(is_out), data.fold_of_record[is_out]
    scorer, network = Scorer.load_builtin(), load_network(folder / "model.safetensors")
    measured = []
    for n_bases, n_fragments in N_FRAGMENTS.items():
        rng = np.random.default_rng([n_bases, SEED])
        drawn = draw(held_out, n_bases, n_fragments, SHARES, rng)
        log_odds = fragment_log_odds(drawn.digits, nets)
        own, head = records_of_fragments(held_out, drawn), head_log_odds(drawn, network)
        scored = scored_fragments(n_bases, own, log_odds, head, scorer)
        measured.append(Measured(scored, own, fold[drawn.record]))
    save_and_tell(folder, scorer, others.collection, measured)


def save_and_tell(
    folder: Path, scorer: Scorer, trained: Collection, measured: Sequence[Measured]
) -> None:
    """Write the head, and the table of figures."""
    model = replace(inspect_file(folder / "model.safetensors"), name=NETWORK)
    n_groups = len({record.group for each in measured for record in each.records})
    training = f"kinds of viruses and cells; joined and measured on {n_groups} other groups"
    threshold = threshold_alone(measured[0].scored)
    head = make_head(model, join_of(measured, scorer), threshold, training)
    known = replace(
        head,
        trained_records=digests(record.digest for record in trained.records),
        trained_groups=digests({group_digest(record.group) for record in trained.records}),
    )
    known.save(folder / HEAD_FILE)
    joins = {fold: join_of(measured, scorer, without=fold) for fold in HELD_OUT}
    for each in measured:
        for line in figures(each, joins, scorer):
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [manifest, genes, split, folder, *parts] if parts:
            main(Path(manifest), Path(genes), Path(split), Path(folder), parts)
        case _:
            raise SystemExit(__doc__)
