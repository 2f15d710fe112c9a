"""The rule by which scorer and head call together, in the head file and in runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from conftest import open_dna, random_dna
from run_helpers import again, execute, rows, run_inline, tables, vectors

from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.events import BatchDone
from virnucpro.core.recipe import Recipe
from virnucpro.core.types import FastaRecord, Records
from virnucpro.sequences.fasta import read_fasta
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.head import (
    EnsembleKnot,
    EnsembleWeights,
    Head,
    combine_log_odds,
    log_odds,
    probability,
)
from virnucpro.viral.known import KnownIndex
from virnucpro.viral.networks import ErrorRates, Scorer
from virnucpro.viral.options import ThresholdOptions
from virnucpro.viral.scoring import score_sequences
from virnucpro.workflows.predict_options import PredictOptions

RATES = ErrorRates(500, (-2.0, 0.5, 2.0), (0.5, 0.03, 0.005), (0.9, 0.5, 0.2), (-2.0, 0.5, 2.0))
EXAMPLES = Path(__file__).parents[2] / "examples" / "contigs.fa"
CLOSED = "TAAATAAATAACTTAATTAGTTAGCTAGCTAACTAGTCATCACTATTA" * 4  # no frame without a stop


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer.load_builtin()


@pytest.fixture
def joined(tiny, scorer) -> Head:
    """The tiny head, with weights that make both scores count."""
    knots = (EnsembleKnot(500, 0.8, 0.5, 0.1), EnsembleKnot(1000, 0.6, 1.0, -0.3))
    join = EnsembleWeights(scorer.sha256, knots, (RATES,))
    return replace(tiny.head, facts=replace(tiny.head.facts, join=join))


def rows_of(folder: Path) -> dict[str, dict[str, str]]:
    """Return the rows of ``predictions.tsv`` by record."""
    return {row["record"]: row for row in rows(folder / "predictions.tsv")}


def test_joined_log_odds_are_weighed_by_length():
    knots = (EnsembleKnot(500, 1.0, 0.0, 0.0), EnsembleKnot(2000, 0.5, 2.0, 1.0))
    lengths = np.array([10, 500, 1000, 2000, 9000])
    both = combine_log_odds(knots, np.full(5, 2.0), np.full(5, 3.0), lengths)
    # half way between 500 and 2,000 on a logarithmic scale: weights of 0.75 and 1, offset of 0.5
    assert both.tolist() == pytest.approx([2.0, 2.0, 5.0, 8.0, 8.0])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"head": -0.1}, {"base": -1.0}, {"n_bases": 0}),
        *({name: float("nan")} for name in ("base", "head", "offset")),
        *({name: float("inf")} for name in ("base", "head", "offset")),
        {"head": float("inf"), "offset": -float("inf")},
        *({name: 1e300} for name in ("base", "head", "offset")),
    ],
)
def test_join_has_finite_positive_weights(wrong):
    knot = {"n_bases": 500, "base": 1.0, "head": 1.0, "offset": 0.0}
    with pytest.raises(ValueError, match="invalid weights: EnsembleKnot"):
        EnsembleKnot(**knot | wrong)
    assert EnsembleKnot(**knot | {"n_bases": 1}).n_bases == 1


def test_join_names_its_scorer_and_sorted_lengths():
    short, long = (EnsembleKnot(n, 1.0, 1.0, 0.0) for n in (500, 1000))
    for knots in ((), (long, short), (short, short)):
        with pytest.raises(ValueError, match="lengths of a join must rise"):
            EnsembleWeights("a" * 64, knots, (RATES,))
    with pytest.raises(ValueError, match=r"lengths of a join must rise: \[\]"):
        EnsembleWeights("a" * 64, (short, long), ())
    with pytest.raises(TypeError, match="hash of a scorer must be text"):
        EnsembleWeights(7, (short, long), (RATES,))


def test_head_file_contains_its_join(joined, tmp_path):
    joined.save(tmp_path / "head.safetensors")
    assert Head.load(tmp_path / "head.safetensors").facts.join == joined.facts.join


@pytest.mark.parametrize("calls", ["auto", "head"])
@pytest.mark.parametrize("rules", [("all",), ("viral",), ("viral", "all")])
def test_recipe_names_head_and_scorer(joined, scorer, calls, rules):
    hashes = choose_classifier(ThresholdOptions(), calls, joined, rules).hashes
    known_sha256 = KnownIndex.load_builtin().sha256
    assert hashes == {
        "head_sha256": joined.sha256,
        "scorer_sha256": scorer.sha256,
        "known_sha256": known_sha256,
    }


def test_record_without_frame_is_called_by_scorer(joined):
    sequences = [*(one.sequence for one in read_fasta(EXAMPLES)), CLOSED, "N" * 400, "ACG1"]
    records = Records.from_records(
        FastaRecord(f"r{i}", "", bases) for i, bases in enumerate(sequences)
    )
    recipe = Recipe(
        command="predict", input_type="nucleotide", chunk_size=500, min_length=0, encoders=()
    )
    joined_rows, scored = (
        choose_classifier(ThresholdOptions(), "auto", head)
        .call(records, [[]] * len(sequences), recipe)
        .calls
        for head in (joined, None)
    )
    for name in ("statuses", "virus_scores", "base_scores", "are_viruses", "rates"):
        assert getattr(joined_rows, name) == getattr(scored, name), name
    assert {*joined_rows.statuses} == {"scored", "no_orf", "invalid"}
    assert {*joined_rows.are_viruses} == {True, False}


def test_run_calls_by_scorer_and_head(joined, scorer, make_config, tmp_path):
    rng = np.random.default_rng(5)
    sequences = {
        "open": open_dna(700, rng),
        "long": open_dna(1500, rng),
        "closed": CLOSED,
        "short": open_dna(120, rng),
        "unknown": "N" * 400,
        "random": random_dna(5000, rng),
    }
    source = tmp_path / "in.fa"
    source.write_text("".join(f">{name}\n{bases}\n" for name, bases in sequences.items()))
    config = make_config(source)
    run_inline(config, joined)
    found = rows_of(config.output)
    frames: dict[str, dict[str, list[float]]] = {name: {} for name in sequences}
    for line in (config.output / "prediction_results.txt").read_text().splitlines()[1:]:
        frame_id, _, _, score = line.split("\t")
        record, _, chunk = frame_id.rpartition("_chunk_")
        frames[record].setdefault(chunk[:-2], []).append(float(score))
    base = dict(zip(sequences, score_sequences(sequences.values(), scorer), strict=True))
    for name, bases in sequences.items():
        row = found[name]
        frame_rows = list(frames[name].values())
        value = base[name]
        if value is None:
            assert row["base_score"] == row["fdr"] == "", name
            continue
        assert float(row["base_score"]) == probability(value), name
        if frame_rows:
            head = fmean(joined.facts.chunk_log_odds(frame_rows))
            ask = (np.array([value]), np.array([head]), np.array([len(bases)]))
            value = combine_log_odds(joined.facts.join.knots, *ask).item()
        # scores have six decimals
        assert float(row["virus_score"]) == pytest.approx(probability(value), abs=1e-6), name
        assert row["status"] == "scored" and row["fdr"], name
        cut = RATES.threshold_at(0.03) if frame_rows else None
        if cut is not None:
            assert (row["call"] == "virus") == (value >= cut), name
    assert found["short"]["status"] == "scored" and float(found["short"]["n_frames_scored"]) > 0
    assert found["closed"]["n_frames_scored"] == "0"
    assert found["unknown"]["status"] == "no_orf"
    assert any(frames.values()) and len(frames["long"]) > 1
    stored = json.loads((config.output / "run.json").read_text())
    assert stored["counts"]["cut_scores"] == [[500, probability(0.5)]]  # the join's, at 3 %


def test_threshold_of_joined_head_on_a_finished_run(joined, make_config, contigs):
    rates = replace(RATES, cuts=(-2.0, 1.0, 2.0))  # several records lie between the two presets
    join = replace(joined.facts.join, error_rates=(rates,))
    joined = replace(joined, facts=replace(joined.facts, join=join))
    config = make_config(contigs)
    run_inline(config, joined)
    default = rows_of(config.output)
    run_inline(again(config, resume=True, preset="sensitive"), joined)
    sensitive = rows_of(config.output)
    run_inline(again(config, resume=True, threshold=0.0), joined)
    everything = rows_of(config.output)
    called = [
        {name for name, row in found.items() if row["call"] == "virus"}
        for found in (default, sensitive, everything)
    ]
    assert called[0] < called[1] < called[2]
    assert called[2] == {name for name, row in default.items() if row["status"] == "scored"}
    odds = {name: log_odds(float(default[name]["virus_score"])) for name in called[2]}
    joint = [name for name in called[2] if default[name]["n_frames_scored"] != "0"]
    for share, found in zip((0.03, 0.1), called, strict=False):
        cut = rates.threshold_at(share)
        assert {name for name in joint if odds[name] >= cut} == found & {*joint}


def test_head_without_weight_is_announced_first(joined, make_config, contigs):
    join = joined.facts.join
    no_weight = "the head has no weight at any length"
    caller = choose_classifier(ThresholdOptions(), "auto", joined)
    (said,) = caller.announcements
    assert "weights of scorer and head" in said
    for knot in join.knots:
        assert f" {knot.base:.2f} and {knot.head:.2f} at {knot.n_bases:,}" in said
    assert no_weight not in said
    knots = tuple(replace(knot, head=0.0) for knot in join.knots)
    idle = replace(joined, facts=replace(joined.facts, join=replace(join, knots=knots)))
    config = make_config(contigs)
    logs = list[str]()

    def hear(event: object) -> None:
        if isinstance(event, BatchDone):
            logs.append((config.output / "virnucpro.log").read_text())

    run_inline(config, idle, hear)
    assert no_weight in logs[0]


def test_head_calls_alone_on_request(joined, make_config, contigs, tmp_path):
    run_inline(make_config(contigs, calls="head"), joined)
    not_joined = replace(joined, facts=replace(joined.facts, join=None))
    run_inline(make_config(contigs, output=tmp_path / "alone"), not_joined)
    assert tables(tmp_path / "run") == tables(tmp_path / "alone")


def test_vectors_without_a_head_change_no_call(make_config, contigs, tmp_path):
    """Embedded and other records have the same rows, byte by byte."""
    run_inline(make_config(contigs, min_length=150), None)
    options = PredictOptions(input=(contigs,), output_dir=tmp_path / "scored")
    execute(options, lambda _: None)
    assert tables(tmp_path / "run") == tables(tmp_path / "scored")
    assert len(vectors(tmp_path / "run")) > 50
    assert not (tmp_path / "scored/features.h5").exists()


@pytest.mark.parametrize("option", [{"preset": "sensitive"}, {"prevalence": 0.1}])
def test_head_that_is_not_joined_has_no_presets(tiny, make_config, contigs, option):
    with pytest.raises(UsageError, match="with a head alone, which has no"):
        run_inline(make_config(contigs, **option), tiny.head)


def test_head_joined_with_another_scorer_is_refused(joined, make_config, contigs):
    join = replace(joined.facts.join, scorer_sha256="f" * 64)
    other = replace(joined, facts=replace(joined.facts, join=join))
    with pytest.raises(UnavailableError, match=r"joined with another scorer \(ffffffffffff\)"):
        run_inline(make_config(contigs), other)
    assert not (make_config(contigs).output / "run.json").exists()
