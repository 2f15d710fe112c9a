"""Join the network on codons with the scorer: write its head, head.safetensors.

    python making/join_embedded_network.py manifest.tsv making/scorer_split.tsv \
        virnucpro/embedded/cnn_virnucpro train validation test locked

The network was trained without the groups of two of the ten folds. Here the nets of the scorer are
fitted without the same groups, and both score fragments of these. Their log-odds are added, and
calibrated at each length. So figures and cuts are those of groups that neither has seen. A table of
the figures goes to the standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sampling import Collection, Fragments, collect, draw
from scorer_folds import fragment_log_odds, group_folds
from scorer_words import Words, count_words
from train_embedded_network import HELD_OUT
from train_embedded_scorer import (
    PROKARYOTIC,
    SEED,
    SHARES,
    Course,
    fit,
    records_of,
    records_of_fragments,
)

from virnucpro.callers.head import (
    EncoderFacts,
    Head,
    HeadFacts,
    Join,
    JoinKnot,
    Network,
    join_log_odds,
)
from virnucpro.callers.options import FALSE_POSITIVES
from virnucpro.encoders.base import Model
from virnucpro.encoders.codons import inspect_file, load_network
from virnucpro.ground.files import HEAD_FILE
from virnucpro.ground.records import FastaRecord, Mask, Values
from virnucpro.learning.calibration import ScoredFragments, fit_logistic
from virnucpro.learning.metrics import Samples, auroc_gain
from virnucpro.learning.records import LabelledRecord, group_digest
from virnucpro.scorer.nets import ErrorRates, PieceNets, Scorer, thresholds
from virnucpro.scorer.nets import calibrate as calibrate_log_odds
from virnucpro.sequences.translate import Chunk

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
FALSE_CALLS_ALONE = 0.03  # of the head, on the shortest fragments
_CHUNKS_AT_ONCE = 6
_LETTERS = np.frombuffer(b"ACGTN", np.uint8)


def head_log_odds(fragments: Fragments, network: torch.nn.Module) -> Values:
    """The mean log-odds of the chunks of each fragment. -> (n,)"""
    chunks, owner = [], []
    for place, digits in enumerate(fragments.digits):
        record = FastaRecord("", "", _LETTERS[digits].tobytes().decode())
        cut = [chunk.sequence for chunk in Chunk.cut(record, CHUNK_SIZE)]
        chunks += cut
        owner += [place] * len(cut)
    odds = []
    with torch.inference_mode():
        for first in range(0, len(chunks), _CHUNKS_AT_ONCE):
            odds.append(network(chunks[first : first + _CHUNKS_AT_ONCE])[:, -1].numpy())
    sums = np.bincount(owner, np.concatenate(odds))
    return np.asarray(sums / np.bincount(owner))


def scored_fragments(
    n_bases: int, records: Sequence[LabelledRecord], log_odds: Values, head: Values, scorer: Scorer
) -> ScoredFragments:
    """Fragments with the log-odds of the scorer's nets, which are calibrated here, and the head."""
    base = calibrate_log_odds(scorer.knots, log_odds, np.full(len(records), n_bases))
    is_virus = np.array([record.is_virus for record in records])
    groups = np.unique([record.group for record in records], return_inverse=True)[1]
    no_chunks = np.zeros((len(records), 2), dtype=np.int64)
    scored = ScoredFragments.of(n_bases, base, is_virus, groups, no_chunks)
    return replace(scored, head=head)


def join_of(fragments: Sequence[ScoredFragments], scorer: Scorer) -> Join:
    """The weights and error rates at each length.

    Few groups are measured here, and other groups may be harder or easier. So the scorer is
    calibrated on them too, and the calibration and error rates of its ten folds are moved by what
    the network changes on these groups.
    """
    knots, rates = [], []
    own_rates = {each.n_bases: each for each in scorer.error_rates}
    for scored in fragments:
        both = scored.where(scored.has_both)
        slope, offset = calibration(both.scores, both.is_virus)
        weight, offset_of_both = calibration(both.scores + both.head, both.is_virus)
        moved_by = (offset_of_both - offset) / slope
        knot = JoinKnot(scored.n_bases, weight / slope, weight / slope, moved_by)
        knots.append(knot)
        rates.append(moved(own_rates[scored.n_bases], both, both.joined(knot)))
    return Join(scorer.sha256, tuple(knots), tuple(rates))


def calibration(log_odds: Values, is_virus: Mask) -> tuple[float, float]:
    """Platt's scaling with equal weights of both labels (Platt 1999). -> slope, offset

    It starts at 0: from steeper slopes, the steps diverge where the labels are nearly separated.
    """
    inputs = np.stack([log_odds, np.ones(len(log_odds))], axis=1)
    weights = 0.5 / np.bincount(is_virus, minlength=2)[is_virus.astype(np.int64)]
    slope, offset = fit_logistic(inputs, is_virus, weights, np.zeros(2)).tolist()
    return slope, offset


def moved(rates: ErrorRates, scored: ScoredFragments, joined: Values) -> ErrorRates:
    """The scorer's rates at the joined log-odds that as many cells reach."""
    is_virus = scored.is_virus
    before, after = (np.sort(each[~is_virus]) for each in (scored.scores, joined))

    def at(log_odds: Sequence[float]) -> Values:
        beyond = np.clip(log_odds, before[0], before[-1])
        return np.asarray(np.interp(log_odds, before, after) + (log_odds - beyond))

    thresholds_of_both = (scored.scores, np.array(rates.log_odds)), (joined, at(rates.log_odds))
    n_before, n_after = (
        1 + np.count_nonzero(each[is_virus][:, None] >= limits, axis=0)
        for each, limits in thresholds_of_both
    )
    true_positives = np.minimum(1, rates.true_positives * (n_after / n_before))
    return replace(
        rates,
        log_odds=tuple(at(rates.log_odds).tolist()),
        cuts=tuple(at(rates.cuts).tolist()),
        true_positives=tuple(true_positives.tolist()),
    )


def threshold_alone(shortest: ScoredFragments) -> float:
    """The score that a few of the cells reach, for records that are too short for the scorer."""
    odds = np.quantile(shortest.head[~shortest.is_virus], 1 - FALSE_CALLS_ALONE)
    return float(np.round(1 / (1 + np.exp(-odds)), 6))


def make_head(model: Model, join: Join, threshold: float, training: str) -> Head:
    """The head takes the last number of a vector as the log-odds."""
    weight = np.zeros((2, model.dim), dtype=np.float32)
    weight[:, -1] = -0.5, 0.5
    facts = HeadFacts(
        encoders=(EncoderFacts.of(model),),
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


def figures(
    scored: ScoredFragments, records: Sequence[LabelledRecord], join: Join, scorer: Scorer
) -> Iterator[str]:
    """Rows of the table: what is called by the scorer and by both, and the AUROC of each."""
    at = np.full(len(records), scored.n_bases)
    both = join_log_odds(join.knots, scored.scores, scored.head, at)
    cuts = [
        thresholds(rates, at, FALSE_POSITIVES["default"])
        for rates in (scorer.error_rates, join.error_rates)
    ]
    called = [scored.scores >= cuts[0], both >= cuts[1]]
    kingdoms = np.array([record.kingdom for record in records])
    kinds: list[tuple[str, Mask]] = [
        ("all", np.ones(len(records), dtype=np.bool_)),
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


def scored_by(scored: ScoredFragments, log_odds: Values, rows: Mask) -> Samples:
    """Some of the fragments with other scores; both labels weigh the same."""
    is_virus = scored.is_virus[rows]
    weights = 0.5 / np.bincount(is_virus, minlength=2)[is_virus.astype(np.int64)]
    scores = np.nan_to_num(log_odds[rows], nan=-np.inf)
    return Samples(scores, is_virus, scored.groups[rows], weights)


def held_out(
    manifest: Path, split: Path, parts: list[str]
) -> tuple[Collection, Collection, list[PieceNets]]:
    """The records of the folds that are held out, all others, and the scorer's nets for these."""
    collection = collect(records_of(manifest, split, parts))
    fold_of_group = group_folds(collection.records)
    fold = np.array([fold_of_group[record.group] for record in collection.records])
    counts, is_inside = count_words(collection, fold), ~np.isin(fold, HELD_OUT)
    words = Words.of(counts, set(HELD_OUT))
    others = collection.where(is_inside)
    return collection.where(~is_inside), others, fit(Course(others, fold[is_inside], words))


def main(manifest: Path, split: Path, folder: Path, parts: list[str]) -> None:
    scorer, model = Scorer.own(), inspect_file(folder / "model.safetensors")
    network = load_network(model.path)
    collection, others, nets = held_out(manifest, split, parts)
    fragments, records = [], []
    for n_bases, n_fragments in N_FRAGMENTS.items():
        rng = np.random.default_rng([n_bases, SEED])
        drawn = draw(collection, n_bases, n_fragments, SHARES, rng)
        log_odds = fragment_log_odds(drawn.digits, nets)
        own = records_of_fragments(collection, drawn)
        head = head_log_odds(drawn, network)
        fragments.append(scored_fragments(n_bases, own, log_odds, head, scorer))
        records.append(own)
    save_and_tell(folder, model, scorer, others, fragments, records)


def save_and_tell(
    folder: Path,
    model: Model,
    scorer: Scorer,
    trained: Collection,
    fragments: Sequence[ScoredFragments],
    records: Sequence[Sequence[LabelledRecord]],
) -> None:
    join = join_of(fragments, scorer)
    n_groups = len({record.group for each in records for record in each})
    training = f"kinds of viruses and cells; joined and measured on {n_groups} other groups"
    head = make_head(model, join, threshold_alone(fragments[0]), training)
    known = replace(
        head,
        trained_records=digests(record.digest for record in trained.records),
        trained_groups=digests({group_digest(record.group) for record in trained.records}),
    )
    known.save(folder / HEAD_FILE)
    for scored, own in zip(fragments, records, strict=True):
        for line in figures(scored, own, join, scorer):
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [manifest, split, folder, *parts] if parts:
            main(Path(manifest), Path(split), Path(folder), parts)
        case _:
            raise SystemExit(__doc__)
