"""--embed: the scorer chooses which records are embedded, and calls the others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from malformed_inputs import CLOSED
from region_helpers import gene
from run_helpers import (
    CONTIGS,
    PROTEINS,
    TABLES,
    execute,
    resolve,
    rows,
    run,
    tables,
    vectors,
    write_fasta,
    write_run_json,
)

from virnucpro.core.errors import ResumeError
from virnucpro.core.events import BatchDone
from virnucpro.core.recipe import EmbeddingRule, EncoderSpec, Recipe
from virnucpro.core.types import FastaRecord, Records
from virnucpro.engine.local import InlineExecutor
from virnucpro.engine.work_options import WorkOptions
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.screen import EXCLUDED, REJECTED
from virnucpro.store.manifest import Manifest
from virnucpro.viral.classifier import select_for_embedding
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.head import EnsembleKnot, EnsembleWeights
from virnucpro.viral.networks import Scorer, thresholds_of
from virnucpro.viral.options import ThresholdOptions
from virnucpro.viral.scoring import score_block, score_sequences
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.status import inspect_run, measure_run
from virnucpro.workflows.summary import Summary
from virnucpro.workflows.work_share import work

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

NUCLEOTIDES = Recipe(
    command="predict", input_type="nucleotide", chunk_size=500, min_length=150, encoders=()
)
Run = Callable[..., Summary]


@pytest.fixture(scope="module")
def head(tiny, tmp_path_factory) -> Path:
    """The tiny head, combined with the scorer so that it changes scores."""
    scorer = Scorer.load_builtin()
    join = EnsembleWeights(scorer.sha256, (EnsembleKnot(500, 0.8, 0.5, 0.1),), scorer.error_rates)
    path = tmp_path_factory.mktemp("joined") / "head.safetensors"
    replace(tiny.head, facts=replace(tiny.head.facts, join=join)).save(path)
    return path


@pytest.fixture
def run_on(tiny, head, tmp_path) -> Run:
    """Run the tiny model and the joined head, in this process and in small shards."""

    def start(folder: str, *inputs: Path, **options: object) -> Summary:
        on_event = options.pop("on_event", lambda _: None)
        n_helpers = options.pop("n_helpers", 0)
        values = {"model": str(tiny.model), "head": head, "device": "cpu", "precision": "fp32"}
        values |= {"input": inputs or (CONTIGS,), "output_dir": tmp_path / folder, **options}
        config = resolve(PredictOptions(**values), lambda _: None)
        recipe = replace(config.recipe, residues_per_shard=3000)
        resources = replace(config.resources, n_helpers=n_helpers)
        config = replace(config, recipe=recipe, resources=resources)
        return run(config, InlineExecutor(), on_event)

    return start


def beginnings(path: Path) -> Path:
    """The first bases of the contigs. The scorer is not sure about some of them."""
    return write_fasta(path, {one.id: one.sequence[:1200] for one in read_fasta(CONTIGS)})


def calls(folder: Path) -> dict[str, dict[str, str]]:
    """Return the rows in the table of records, by id, without their notes."""
    return {row["record"]: row for row in rows(folder / "predictions.tsv")}


def without_note(row: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in row.items() if name != "note"}


def records_with_vectors(folder: Path) -> set[str]:
    return {frame.partition("_chunk_")[0] for frame in vectors(folder)}


def test_other_records_are_called_without_a_model(run_on, tmp_path):
    summary = run_on("viral", embed="viral")
    run_on("all")
    execute(PredictOptions(input=(CONTIGS,), output_dir=tmp_path / "alone"), lambda _: None)
    viral, everything, alone = (calls(tmp_path / name) for name in ("viral", "all", "alone"))
    left = {name for name, row in viral.items() if row["note"] == "not embedded"}
    assert 0 < len(left) == summary.n_left < len(viral)
    assert list(viral) == list(everything)
    for name, row in viral.items():
        of = alone if name in left else everything
        assert without_note(row) == without_note(of[name]), name
    with_vectors = records_with_vectors(tmp_path / "viral")
    assert with_vectors == records_with_vectors(tmp_path / "all") - left
    per_record = vectors(tmp_path / "viral")
    all_vectors = vectors(tmp_path / "all")
    # other neighbours in a batch: sums of float32 of some ten terms in another order
    for name, vector in per_record.items():
        assert vector == pytest.approx(all_vectors[name], abs=1e-5)


def places_of(records: Records, recipe: Recipe, rules: tuple[EmbeddingRule, ...]) -> list[int]:
    """Return the index of the first rule that selects each record that can be embedded."""
    encoder = EncoderSpec(
        model="tiny", sha256="0" * 64, layer=1, pooling="mean", precision="fp32", dim=1
    )
    assert (select_for_embedding(records, recipe, rules) == REJECTED).all()
    recipe = replace(recipe, encoders=(encoder,))
    return select_for_embedding(records, recipe, rules).tolist()


def test_rules_are_shares_of_cells_by_length():
    records = Records.from_records(
        FastaRecord(f"{one.id}:{start}", one.id, one.sequence[start : start + 300])
        for one in read_fasta(CONTIGS)
        for start in range(0, len(one.sequence) - 299, 300)
    )
    sequences = records.sequences
    scorer = Scorer.load_builtin()
    lengths = np.array(list(map(len, sequences)))
    log_odds = np.array(list(score_sequences(sequences, scorer)))
    where = scorer.select_error_rates("nucleotide"), score_block(sequences, scorer)[2], lengths
    low, high = (thresholds_of(*where, share) for share in (0.2, 0.005))
    expected = {
        "all": np.ones(len(sequences), dtype=bool),
        "viral": log_odds >= low,
        "uncertain": (log_odds >= low) & (log_odds < high),
    }
    assert 0 < expected["uncertain"].sum() < expected["viral"].sum() < len(sequences)
    for rule, asks in expected.items():
        places = places_of(records, NUCLEOTIDES, (rule,))
        assert [place == 0 for place in places] == asks.tolist(), rule
    both = places_of(records, NUCLEOTIDES, ("uncertain", "viral"))
    assert [place == 0 for place in both] == expected["uncertain"].tolist()
    assert [place == EXCLUDED for place in both] == (~expected["viral"]).tolist()


def test_records_without_a_score_are_embedded():
    short = FastaRecord("a", "a", "ACGT" * 20)
    unknown = FastaRecord("b", "b", "N" * 500)
    recipe = replace(NUCLEOTIDES, min_length=0)
    assert places_of(Records.from_records([short, unknown]), recipe, ("uncertain",)) == [0, 0]


def test_resume_with_all_equals_all(run_on, tmp_path):
    done = []
    contigs = beginnings(tmp_path / "in.fa")
    run_on("steps", contigs, embed="uncertain")
    before = {path.name: path.read_bytes() for path in (tmp_path / "steps/features").glob("*.h5")}
    uncertain = records_with_vectors(tmp_path / "steps")
    run_on("steps", contigs, embed="viral", resume=True)
    viral = records_with_vectors(tmp_path / "steps")

    def count(event: object) -> None:
        if isinstance(event, BatchDone):
            done.append(event)

    run_on("steps", contigs, embed="all", resume=True, on_event=count)
    run_on("all", contigs)
    assert uncertain < viral < records_with_vectors(tmp_path / "steps")
    after = {path.name: path.read_bytes() for path in (tmp_path / "steps/features").glob("*.h5")}
    assert before.items() <= after.items()
    assert 0 < sum(len(event.rows) for event in done) < len(vectors(tmp_path / "all"))
    assert tables(tmp_path / "steps") == tables(tmp_path / "all")
    assert vectors(tmp_path / "steps").keys() == vectors(tmp_path / "all").keys()


def test_resume_keeps_the_embed_rule(run_on, tmp_path):
    run_on("run", embed="viral")
    before = tables(tmp_path / "run"), vectors(tmp_path / "run").keys()
    run_on("run", resume=True)
    run_on("run", resume=True, embed="uncertain")
    assert (tables(tmp_path / "run"), vectors(tmp_path / "run").keys()) == before
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["embed"] == [["viral", 0]]


def test_input_added_between_rules_moves_no_shard(run_on, tmp_path):
    records = beginnings(tmp_path / "in.fa").read_text().split(">")[1:]
    first, second, third = (tmp_path / f"{name}.fa" for name in "abc")
    for path, some in zip(
        (first, second, third), (records[:6], records[6:11], records[11:]), strict=True
    ):
        path.write_text("".join(f">{record}" for record in some))
    steps = [
        ((first,), {"embed": "uncertain"}),
        ((first, second), {}),
        ((first, second), {"embed": "all"}),
        ((first, second, third), {}),
    ]
    kept: dict[str, bytes] = {}
    for place, (inputs, options) in enumerate(steps):
        run_on("run", *inputs, resume=place > 0, add=place > 0, **options)
        files = {path.name: path.read_bytes() for path in (tmp_path / "run/features").glob("*.h5")}
        assert kept.items() <= files.items()
        kept = files
    run_on("all", first)
    run_on("all", first, second, resume=True, add=True)
    run_on("all", first, second, third, resume=True, add=True)
    assert tables(tmp_path / "run") == tables(tmp_path / "all")
    assert vectors(tmp_path / "run").keys() == vectors(tmp_path / "all").keys()


def test_later_input_or_rule_moves_no_shard():
    for history in itertools.product("ir", repeat=6):  # an input, or a rule, is added
        n_inputs = 1
        rules = {"uncertain": 0}
        before = [(0, 0)]
        for event in history:
            if event == "i":
                n_inputs += 1
            else:
                rules.setdefault("all" if "viral" in rules else "viral", n_inputs)
            inputs = tuple(SimpleNamespace(generation=i, sample="") for i in range(n_inputs))
            series = Manifest(NUCLEOTIDES, inputs, embed=rules).series
            assert series[: len(before)] == before
            assert sorted(series) == sorted(itertools.product(range(n_inputs), range(len(rules))))
            before = series


def test_bytes_do_not_depend_on_helpers_or_rules(run_on, tmp_path):
    """A million letters start a helper, and half a million are a block."""
    contigs = beginnings(tmp_path / "in.fa")
    records = contigs.read_text().split(">")[1:]
    closed = CLOSED * (2_100_000 // len(CLOSED) // len(records))
    contigs.write_text("".join(f">{one}>c{i}\n{closed}\n" for i, one in enumerate(records)))
    for folder, n_helpers in (("alone", 0), ("helped", 2)):
        options = {"n_helpers": n_helpers, "regions": False, "report": False}
        run_on(folder, contigs, embed="uncertain", **options)
        run_on(folder, contigs, embed="all", resume=True, **options)
    log = (tmp_path / "helped/virnucpro.log").read_text()
    assert "parts of the plan are made by 2 helpers" in log
    names = [path.name for path in (tmp_path / "alone/features").iterdir()]
    names = [*TABLES, "features.h5", *(f"features/{name}" for name in names)]
    for name in names:
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "helped" / name).read_bytes()


def test_notes_on_code_and_vectors_are_joined(run_on, tmp_path):
    genes = {f"g{seed}": gene(900, seed, code=4) for seed in range(6)}
    fasta = write_fasta(tmp_path / "recoded.fa", genes)
    run_on("run", fasta, embed="viral", regions=False)
    execute(
        PredictOptions(input=(fasta,), output_dir=tmp_path / "alone", regions=False),
        lambda _: None,
    )
    alone = {name: row["note"] for name, row in calls(tmp_path / "alone").items()}
    notes = {name: row["note"].split("; ") for name, row in calls(tmp_path / "run").items()}
    assert ["not embedded", "open in genetic code 4, not in 11"] in notes.values()
    for name, parts in notes.items():
        assert [part for part in parts if part not in ("", "not embedded")] == (
            [alone[name]] if alone[name] else []
        )


def test_head_calls_embedded_and_scorer_the_rest(run_on, tiny, tmp_path):
    """The head also calls records that the scorer cannot read."""
    inputs = (tmp_path / "in.fa", tmp_path / "empty.fa")
    inputs[0].write_text(f"{CONTIGS.read_text()}>unknown\n{'N' * 600}\n")
    inputs[1].touch()
    run_on("run", *inputs, embed="viral", head=tiny.head_file)
    run_on("all", *inputs, head=tiny.head_file)
    execute(PredictOptions(input=inputs, output_dir=tmp_path / "alone"), lambda _: None)
    run_calls, by_head, by_scorer = (calls(tmp_path / name) for name in ("run", "all", "alone"))
    left = {name for name, row in run_calls.items() if "not emb" in row["note"]}
    assert left and "unknown" in run_calls.keys() - left and len(left) < len(run_calls) - 1
    for name, row in run_calls.items():
        assert without_note(row) == without_note((by_scorer if name in left else by_head)[name])
        # a head alone has no error rates; a known virus has that of the index
        has_rate = name in left or row["evidence"] in ("known", "both")
        assert (row["fdr"] != "") == has_rate
    cut = json.loads((tmp_path / "run/run.json").read_text())["counts"]["cut"]
    assert cut.startswith("a score of 0.5 or more; not embedded: at most 3 % false positives")


def test_block_of_replaced_records_is_called(tiny):
    caller = choose_classifier(ThresholdOptions(), "head", tiny.head, ("viral",))
    assert caller.call(Records.from_records([]), [], NUCLEOTIDES).records == Records.from_records(
        []
    )


def test_protein_scorer_selects_proteins(run_on, tmp_path):
    run_on("run", PROTEINS, embed="viral", head=None)
    execute(PredictOptions(input=(PROTEINS,), output_dir=tmp_path / "alone"), lambda _: None)
    run_calls = calls(tmp_path / "run")
    alone = calls(tmp_path / "alone")
    left = {name for name, row in run_calls.items() if row["note"] == "not embedded"}
    assert 0 < len(left) < len(run_calls)
    assert set(vectors(tmp_path / "run")) == run_calls.keys() - left
    scores = ("virus_score", "call", "status")
    for name, row in run_calls.items():
        assert [row[column] for column in scores] == [alone[name][column] for column in scores]


def test_planned_run_embeds_as_asked(run_on, tmp_path):
    run_on("run", embed="viral", plan_only=True)
    work(
        WorkOptions(folder=tmp_path / "run", device="cpu"),
        lambda _: None,
        lambda _: InlineExecutor(),
    )
    joined = run_on("run", embed="viral", resume=True, no_embed=True)
    assert joined.n_left == run_on("here", embed="viral").n_left > 0
    assert tables(tmp_path / "run") == tables(tmp_path / "here")


def test_outputs_count_records_not_embedded(run_on, tmp_path):
    summary = run_on("run", embed="viral")
    (line,) = [line for line in summary.lines(tmp_path / "run") if line.startswith("not embedded")]
    letters = {record.id: len(record.sequence) for record in read_fasta(CONTIGS)}
    left = [name for name, row in calls(tmp_path / "run").items() if "not emb" in row["note"]]
    share = sum(letters[name] for name in left) / sum(letters.values())
    expected = f"not embedded (--embed): {len(left)} records, {share:.1%} of all letters"
    assert line == expected
    lines, _ = inspect_run(tmp_path / "run", verify=False)
    assert "embedded  only records that --embed viral chooses" in lines
    assert measure_run(tmp_path / "run")["embed"] == "viral"
    stored = json.loads((tmp_path / "run/run.json").read_text())
    assert stored["counts"]["n_left"] == len(left)
    assert "the scorer alone calls records that are not embedded" in stored["announced"]
    page = (tmp_path / "run/report.html").read_text()
    assert f"records not embedded (--embed)</dt><dd>{len(left)}</dd>" in page


def test_run_json_with_an_unknown_rule_is_damaged(run_on, tmp_path):
    run_on("run", embed="viral")
    stored = json.loads((tmp_path / "run/run.json").read_text())
    for rules in ([["some", 0]], [], [["viral"]]):
        write_run_json(tmp_path / "run", {**stored, "embed": rules})
        with pytest.raises(ResumeError, match=r"run\.json is damaged"):
            run_on("run", resume=True)
