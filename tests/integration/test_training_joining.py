"""The weights of a head next to the scorer, how they are fitted, and the reported gain."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from conftest import random_dna
from labelled_data_helpers import options, relabelled, train_here
from run_helpers import rows
from sklearn.metrics import roc_auc_score

from virnucpro.core.numeric import BoolArray, FloatArray
from virnucpro.core.types import FastaRecord
from virnucpro.sequences.genetic_code import STANDARD
from virnucpro.sequences.translate import Chunk
from virnucpro.training.evaluation.calibration import (
    N_FOLDS,
    ScoredFragments,
    _folds,
    choose_knot,
    fit_join,
    fit_join_knot,
    fold_log_odds,
)
from virnucpro.training.evaluation.metrics import auroc_gain
from virnucpro.training.export import TrainingResults, measure_gain, read_fragments
from virnucpro.training.frame_dataset import FrameStore, Rows, read_ids, write_frames
from virnucpro.training.labelled_data import LabelledRecord, group_digest, read_split
from virnucpro.viral.head import EnsembleKnot, EnsembleWeights, Head
from virnucpro.viral.networks import ErrorRates, Scorer, thresholds
from virnucpro.viral.scoring import score_sequences


@cache
def scorer() -> Scorer:
    return Scorer.load_builtin()


def of_500_bases() -> ErrorRates:
    (rates,) = (rates for rates in scorer().error_rates if rates.n_bases == 500)
    return rates


def fragments(n: int = 600, informs: float = 1.0, seed: int = 1) -> ScoredFragments:
    """Make log-odds of a scorer, and of a head that adds this much information."""
    rng = np.random.default_rng(seed)
    is_virus = np.arange(n) % 2 == 0
    side = np.where(is_virus, 1.0, -1.0)
    base = side + rng.normal(size=n)
    head = informs * side + rng.normal(size=n)
    head[::3] = np.nan  # no frame
    return scored(500, base, head, is_virus, np.arange(n) % 40 * 2 + is_virus)


def scored(n_bases: int, base: FloatArray, head: FloatArray, is_virus: BoolArray, group: Rows):
    """Make fragments without chunks."""
    chunks = np.zeros((len(base), 2), dtype=np.int64)
    return replace(ScoredFragments.from_scores(n_bases, base, is_virus, group, chunks), head=head)


def regrouped(data: ScoredFragments, groups: Rows) -> ScoredFragments:
    return replace(data, groups=groups).select(np.ones(len(data), dtype=np.bool_))


def auroc_of(data: ScoredFragments, log_odds: FloatArray) -> float:
    return data.group_by(log_odds).auroc()


def test_weights_minimise_the_penalised_loss():
    data = fragments()
    both = data.select(data.has_both)
    knot = fit_join_knot(data)

    def cost(base: float, head: float, offset: float) -> float:
        odds = base * both.scores + head * both.head + offset
        pull = 0.5e-3 * ((base - 1) ** 2 + head**2 + offset**2)
        return replace(both, scores=odds).cross_entropy() + pull

    best = np.array([knot.base, knot.head, knot.offset])
    for step in [*np.eye(3), *-np.eye(3)]:
        assert cost(*(best + 0.01 * step).tolist()) > cost(*best.tolist())


def test_weights_stay_finite_if_separable():
    data = fragments()
    certain = replace(data, scores=np.where(data.is_virus, 3.0, -3.0))
    assert 0 < fit_join_knot(certain).base < 20


def test_useful_head_has_a_weight():
    data = fragments()
    knot = choose_knot(data)
    assert knot.head > 0.5
    joined = data.concatenate(knot)
    no_frame = np.isnan(data.head)
    assert joined[no_frame].tolist() == data.scores[no_frame].tolist()
    assert auroc_of(data, joined) > auroc_of(data, data.scores) + 0.02
    assert auroc_of(data, fold_log_odds(data)) > auroc_of(data, data.scores) + 0.02


def test_useless_head_has_no_weight():
    data = fragments(informs=0.0, seed=3)
    knot = choose_knot(data)
    assert knot == EnsembleKnot(500, 1.0, 0.0, 0.0)
    both = data.has_both
    assert data.concatenate(knot)[both].tolist() == data.scores[both].tolist()


@pytest.mark.parametrize("seed", [1, 2, 9])
def test_chance_gain_gives_no_weight(seed):
    """Its gain alone would be enough, but the interval over groups reaches below 0."""
    data = fragments(informs=0.25, seed=seed)
    before = data.group_by(data.scores)
    after = data.group_by(fold_log_odds(data))
    gain, (low, _) = auroc_gain(before, after, 0)
    assert low < 0 < gain and fit_join_knot(data).head > 0.5
    assert choose_knot(data) == EnsembleKnot(500, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["scores", "head"])
def test_inverted_log_odds_have_no_weight(name):
    data = fragments()
    knot = fit_join_knot(replace(data, **{name: -getattr(data, name)}))
    turned = {"scores": knot.base, "head": knot.head}
    assert turned[name] == 0 < knot.base + knot.head


def test_groups_and_labels_count_evenly():
    data = fragments(40)
    large = regrouped(data, np.where(data.is_virus & (np.arange(40) < 30), 0, data.groups))
    virus_weights = large.weights[data.is_virus]
    assert virus_weights.sum() == pytest.approx(0.5) == large.weights[~data.is_virus].sum()
    n_large = int((large.groups[data.is_virus] == 0).sum())
    share = virus_weights[large.groups[data.is_virus] == 0].sum() / virus_weights[-1]
    assert share == pytest.approx(n_large**0.25)


def test_folds_keep_groups_together():
    data = fragments(60)
    few = regrouped(data, np.arange(60) // 2 % 2 * 2 + data.is_virus)  # two of each label
    mixed = regrouped(data, np.arange(60) // 4)  # groups with both labels
    for one in (data, few, mixed):
        fold = _folds(one)
        assert all(len(set(fold[one.groups == group])) == 1 for group in set(one.groups))
        for number in set(fold.tolist()):
            rest = one.select(fold != number)
            assert set(rest.is_virus[rest.has_both]) == {True, False}
    assert set(_folds(data).tolist()) == set(range(N_FOLDS))


def test_no_join_without_groups_to_measure_on():
    data = fragments()
    one_group = regrouped(data, data.is_virus.astype(np.int64))
    assert fit_join([one_group], scorer()) is None
    join = fit_join([one_group, replace(data, n_bases=1000)], scorer())
    assert join is not None and [knot.n_bases for knot in join.knots] == [1000]
    assert join.scorer_sha256 == scorer().sha256


@pytest.mark.parametrize("share", [0.1, 0.03, 0.001])
@pytest.mark.parametrize("more", [-0.5, 4.0])
def test_joined_threshold_keeps_the_share_of_cells(share, more):
    """Below the share of cells that a threshold may call, and far above."""
    data = fragments()
    data = replace(data, scores=np.where(data.is_virus, data.scores, data.scores + more))
    join = fit_join([data], scorer())
    assert join is not None and join.knots[0].head > 0
    cells = data.select(data.has_both & ~data.is_virus)
    called = cells.concatenate(join.knots[0]) >= join.error_rates[0].threshold_at(share)
    n_alone = np.count_nonzero(cells.scores >= of_500_bases().threshold_at(share))
    if more < 0:
        assert n_alone < share * len(cells) or n_alone <= 1
        assert np.count_nonzero(called) == max(1, n_alone)
    else:
        assert n_alone > share * len(cells) + 1
        assert share - 1 / len(cells) <= called.mean() <= share + 1 / len(cells)


def test_no_weight_means_scorer_calls():
    rng = np.random.default_rng(5)
    data = fragments()
    noise = replace(data, head=rng.normal(size=len(data)))
    join = fit_join([noise], scorer())
    assert join is not None and {knot.head for knot in join.knots} == {0}
    assert join.error_rates == scorer().error_rates
    both = fit_join([data, replace(noise, n_bases=1000), replace(noise, n_bases=9000)], scorer())
    assert both is not None and [knot.head > 0 for knot in both.knots] == [True, False, False]
    lengths = np.array([1000, 1500, 1999, 2000, 5000, 20_000, 50_000])
    for share in (0.1, 0.03, 0.005):
        ours, alone = (thresholds(one.error_rates, lengths, share) for one in (both, scorer()))
        assert ours == pytest.approx(alone, abs=1e-12)  # cuts on a line, from one more point


# Runs of chunks


def test_stretch_has_the_mean_of_its_scored_chunks():
    runs = replace(fragments(3), chunks=np.array([[0, 2], [4, 6], [8, 10]]))
    found = runs.with_head(np.array([0, 1, 5, 7]), np.array([1.0, 2.0, 4.0, 8.0]))
    assert found.head[:2].tolist() == [1.5, 4.0] and np.isnan(found.head[2])
    assert found.scores.tolist() == runs.scores.tolist()


def test_stretches_are_scored_on_their_chunks(tmp_path):
    rng = np.random.default_rng(4)
    scorer = Scorer.load_builtin()
    sequences = [random_dna(n, rng) for n in (700, 3100, 900, 2000)]
    splits = {"a": "train", "b": "validation", "c": "test", "d": "validation"}
    pairs = [
        (LabelledRecord(f"r{i}", i % 2 == 0, "abcd"[i]), FastaRecord(f"r{i}", "", bases))
        for i, bases in enumerate(sequences)
    ]
    write_frames(tmp_path / "frames", pairs, (300, 200), fasta=tmp_path / "records.fa")
    store = FrameStore.open(tmp_path / "frames")
    found = read_fragments(tmp_path / "records.fa", store, splits, 300, scorer, STANDARD)
    seen = set()
    for split, length_rates in found.items():
        for runs in length_rates:
            for (first, end), group, base in zip(
                runs.chunks, runs.groups, runs.scores, strict=True
            ):
                own = store.chunks[first:end]
                assert runs.n_bases == 300 * len(own) and set(own[:, 2]) == {300}
                (record,) = set(own[:, 0].tolist())
                assert (splits["abcd"[record]], record) == (split, group)
                bases = sequences[record][own[0, 1] : own[-1, 1] + 300]
                assert len(bases) >= 0.9 * runs.n_bases
                # sums of other blocks are rounded otherwise
                assert base == pytest.approx(next(score_sequences([bases], scorer)), abs=1e-12)
                seen.add((split, len(own)))
    assert {("validation", n) for n in (1, 2, 6)} | {("test", 1)} <= seen
    for frame, name in enumerate(read_ids(tmp_path / "frames")):
        _, start, size = store.chunks[store.all.chunk[frame]].tolist()
        number = int(name.split("_chunk_")[1].split("F")[0].split("R")[0])
        whole = FastaRecord("r", "", sequences[store.all.record[frame]])
        assert list(Chunk.from_record(whole, size))[number - 1].start == start


# The gain


def test_gain_is_an_auroc_difference_by_group():
    data = fragments()
    join = EnsembleWeights("x", (fit_join_knot(data),), fit_join([data], scorer()).error_rates)
    gain = measure_gain(7, "test", data, join)
    joined = data.concatenate(join.knots[0])
    for found, log_odds in ((gain.joined, joined), (gain.base, data.scores)):
        expected = roc_auc_score(data.is_virus, log_odds, sample_weight=data.weights)
        assert found == pytest.approx(expected)
    assert gain.gain == pytest.approx(gain.joined - gain.base)
    assert gain.gain_low < gain.gain < gain.gain_high
    # the head alone has no score for a third of the fragments: they are the lowest
    assert gain.head == auroc_of(data, data.head) < gain.base
    held_out = measure_gain(7, "validation", data, join)
    assert held_out.joined == pytest.approx(auroc_of(data, fold_log_odds(data)))


def test_further_seeds_are_measured(tmp_path):
    data = relabelled(tmp_path, {"virus": "virus", "other": "other"})
    asked = {"encoding": "composition", "epochs": 1}
    train_here(options(data, tmp_path / "one", **asked))
    out = tmp_path / "two"
    train_here(options(data, out, **asked, seeds=2))
    names = ("model/head.safetensors", "held_out.tsv", "split.tsv")
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    gains = rows(out / "gain.tsv")
    epochs = rows(out / "epochs.tsv")
    kinds = {(row["split"], row["n_bases"]) for row in gains}
    assert ("validation", "300") in kinds and ("test", "300") in kinds
    for seed in ("0", "1"):
        assert {(r["split"], r["n_bases"]) for r in gains if r["seed"] == seed} == kinds
    assert [(row["seed"], row["epoch"]) for row in epochs] == [("0", "1"), ("1", "1")]
    assert epochs[0]["loss"] != epochs[1]["loss"]
    first = rows(tmp_path / "one" / "gain.tsv")
    assert first == [row for row in gains if row["seed"] == "0"]
    join = Head.load(out / "model" / "head.safetensors").facts.join
    assert join is not None and join.scorer_sha256 == Scorer.load_builtin().sha256
    train_here(options(data, tmp_path / "one", **asked, seeds=2, resume=True))
    assert rows(tmp_path / "one" / "gain.tsv") == gains


def test_scorer_training_groups_are_left_out(tmp_path):
    data = relabelled(tmp_path, {"virus": "virus", "other": "other"}, n_groups=24)
    asked = options(data, tmp_path / "out", encoding="composition", epochs=1)
    training = train_here(asked)
    store = FrameStore.open(training.frames)
    splits = read_split(training.split)
    groups = sorted(name for name, split in splits.items() if split == "validation")
    groups_by_label = [[g for g in groups if g.startswith(label)] for label in ("virus", "other")]
    assert min(map(len, groups_by_label)) >= 3
    is_virus = np.array([name.startswith("virus") for name in groups])
    numbers = np.array([sorted(splits).index(name) for name in groups])
    data_of = scored(300, np.zeros(len(groups)), np.zeros(len(groups)), is_virus, numbers)
    scorer = Scorer.load_builtin()
    for known, n_left in (([], len(groups)), (groups[:1], len(groups) - 1), (groups, len(groups))):
        digests = np.unique(np.array([group_digest(name) for name in known], dtype=np.uint64))
        memory = replace(scorer, trained_groups=digests)
        results = TrainingResults(training, store, splits, {}, memory)
        assert [len(part) for part in results.unseen_groups("validation", [data_of])] == [n_left]
