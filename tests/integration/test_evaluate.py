"""``virnucpro evaluate``: figures by id, on sequences that no model was trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import open_dna, random_dna
from faulty_workers import POISON, RaisingWorker
from forkserver_runner import virnucpro
from labelled_data_helpers import pairs_of, records_of
from run_helpers import leftovers, rows
from scorer_file import save_scorer
from sklearn.metrics import roc_auc_score

from virnucpro.core.errors import InputError, OutputError, ResumeError, UsageError, VirnucproError
from virnucpro.core.types import reverse_complement
from virnucpro.engine.local import InlineExecutor
from virnucpro.results.outputs import open_run_dir
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.kmers import Sketch
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.training.evaluation.evaluate import (
    EvaluationSpec,
    _Fragment,
    cut_record,
    evaluate,
    evaluate_spec,
    held_out_groups,
    read_chunks,
    summary_lines,
    write_fragments,
    write_report,
)
from virnucpro.training.labelled_data import LabelledRecord, group_digest, record_digest
from virnucpro.training.options import EvaluateOptions
from virnucpro.training.trained_data import read_trained
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.networks import Scorer, load_scorer
from virnucpro.viral.options import ThresholdOptions

SAMPLES = {"lengths": "150,400", "fragments_per_record": 2, "seed": 3}
CUTTING = EvaluateOptions(data=Path("m.tsv"), output_dir=Path("out"), **SAMPLES)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Viruses of two kingdoms and cells of one. Some ids look like those of chunks."""
    rng = np.random.default_rng(5)
    rows = ["path\tid\tlabel\tgroup\tkingdom"]
    with (tmp_path / "data.fa").open("w") as out:
        for i in range(24):
            is_virus = i % 2 == 0
            record_id = f"r{i}_chunk_1F1"
            bases = open_dna(300 + 40 * i, rng) if is_virus else random_dna(300 + 40 * i, rng)
            out.write(f">{record_id} of a test\n{bases}\n")
            label = "virus" if is_virus else "other"
            kingdom = ("phage", "algal")[i % 4 // 2] if is_virus else "bacteria"
            rows.append(f"data.fa\t{record_id}\t{label}\tgroup{i // 4}{label}\t{kingdom}")
    path = tmp_path / "manifest.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def ask(tiny, make_config, manifest, tmp_path):
    """Evaluate the tiny head. Keywords change the options, the head or the run."""

    def asked(head=tiny.head, run=None, executor=None, **changes):
        given = {"data": manifest, "output_dir": tmp_path / "evaluation", **SAMPLES}
        question = EvaluationSpec.from_options(EvaluateOptions(**(given | changes)))
        asked.question = question
        config = make_config(output=question.run_folder, input_type="nucleotide", **(run or {}))
        config = replace(config, classifier=choose_classifier(config.options, "auto", head))
        return evaluate_spec(question, config, executor or InlineExecutor(), lambda _: None)

    return asked


def records_by_fragment(folder: Path) -> dict[str, dict[str, str]]:
    return {row["fragment"]: row for row in rows(folder / "fragments.tsv")}


# Scored fragments


def test_fragments_tile_both_strands(manifest, tmp_path):
    sequences = {record.id: record.sequence for record in read_fasta(tmp_path / "data.fa")}
    fasta = tmp_path / "fragments.fa"
    fragments = write_fragments(pairs_of(manifest), CUTTING, fasta)
    written = {record.id: record.sequence for record in read_fasta(fasta)}
    assert written.keys() == {fragment.id for fragment in fragments}
    assert {fragment.strand for fragment in fragments} == {"+", "-"}
    for fragment in fragments:
        piece = sequences[fragment.record.id][fragment.start : fragment.end]
        if fragment.strand == "-":
            piece = piece[::-1].translate(str.maketrans("ACGT", "TGCA"))
        assert written[fragment.id] == piece
        whole = min(len(sequences[fragment.record.id]), 800)
        assert len(piece) == (whole if fragment.length == "whole" else int(fragment.length))
        assert fragment.record.id not in fragment.id
    for record_id, sequence in sequences.items():
        for length in (150, 400):
            own = [f for f in fragments if (f.record.id, f.length) == (record_id, str(length))]
            assert len(own) == min(2, len(sequence) // length)
            assert all(a.end <= b.start for a, b in pairwise(own))


def test_record_is_cut_independently_of_others():
    def places(record: LabelledRecord, seed: int = 3) -> list[_Fragment]:
        return list(cut_record(record, 5000, replace(CUTTING, seed=seed)))

    one = LabelledRecord("one", True, "g")
    assert places(one) == places(one)
    assert places(one) != places(one, seed=4)
    assert [f.start for f in places(one)] != [f.start for f in places(replace(one, id="two"))]
    fewer = [f for f in cut_record(one, 5000, replace(CUTTING, lengths="400")) if f.length == "400"]
    assert fewer == [f for f in places(one) if f.length == "400"]


@pytest.mark.parametrize("lengths", ["", "0,300", "5,5", "300,-5", "300,b"])
def test_senseless_lengths_are_refused(lengths):
    with pytest.raises(UsageError, match="must be numbers of bases above 0, each once"):
        replace(CUTTING, lengths=lengths)


# Figures


def test_record_figures_match_the_table(ask, tiny, tmp_path):
    """A kingdom with only too short pieces has no row, and a single class has no AUROC."""
    figures = ask()
    folder = tmp_path / "evaluation"
    write_report(folder, figures)
    of = records_by_fragment(folder)
    predictions = {row["record"]: row for row in rows(folder / "run" / "predictions.tsv")}
    assert predictions.keys() == of.keys()
    table = [row for row in rows(folder / "evaluation.tsv") if row["unit"] == "record"]
    assert {row["length"] for row in table} == {"150", "400", "whole"}
    kingdoms = [("all", ""), ("virus", "phage"), ("virus", "algal"), ("other", "bacteria")]
    for row in table:
        subset = row["subset"]
        kingdom = row["kingdom"]
        assert (subset, kingdom) in kingdoms
        chosen = [
            name
            for name, piece in of.items()
            if piece["length"] == row["length"]
            and (subset == "all" or piece["label"] != subset or piece["kingdom"] == kingdom)
        ]
        labels = np.array([of[name]["label"] == "virus" for name in chosen])
        scores = np.array([float(predictions[name]["virus_score"] or "nan") for name in chosen])
        scored = np.isfinite(scores)
        assert [predictions[name]["status"] == "scored" for name in chosen] == scored.tolist()
        called = scores >= figures["head"]["threshold"]
        assert int(row["n"]) == len(chosen) and int(row["n_virus"]) == labels.sum()
        groups = np.array([of[name]["group"] for name in chosen])
        viral, others = (set(groups[scored & side].tolist()) for side in (labels, ~labels))
        expected = {
            "no_orf": 1 - scored.mean(),
            "auroc": roc_auc_score(labels[scored], scores[scored]),
            "auroc_no_orf_as_0": roc_auc_score(labels, np.nan_to_num(scores)),
            "recall": called[scored & labels].mean(),
            "recall_no_orf_as_0": called[labels].mean(),
            "false_positives": called[scored & ~labels].mean(),
            "recall_equal_groups": np.mean([called[scored & (groups == g)].mean() for g in viral]),
        }
        for name, value in expected.items():
            # six decimals are written
            assert float(row[name]) == pytest.approx(value, abs=5e-7), (name, row)
        if min(len(viral), len(others)) < 2:  # a single group has no spread
            assert row["auroc_low"] == row["auroc_high"] == "n/a"
        else:
            assert float(row["auroc_low"]) <= float(row["auroc"]) <= float(row["auroc_high"])
    assert "nan" not in (folder / "evaluation.tsv").read_text().lower()
    assert any("records, 150" in line for line in summary_lines(folder, figures))
    stored = json.loads((folder / "evaluation.json").read_text())
    assert stored["rows"] == figures["rows"]
    assert stored["scorer"] is None and stored["head"]["sha256"] == tiny.head.sha256
    assert [(one["unit"], one["length"]) for one in stored["scores"]] == [
        *(("record", length) for length in ("150", "400", "whole")),
        ("chunk", "whole"),
    ]
    for one in stored["scores"][:3]:  # every score is in the histogram
        own = [row for name, row in predictions.items() if of[name]["length"] == one["length"]]
        for label in ("virus", "other"):
            label_rows = [row for row in own if of[row["record"]]["label"] == label]
            scores = [float(row["virus_score"]) for row in label_rows if row["virus_score"]]
            bars = np.minimum((np.array(scores) * 40).astype(int), 39)  # 1 is in the last bar
            assert one[label] == np.bincount(bars, minlength=40).tolist()
        called = [float(row["virus_score"]) for row in own if row["call"] == "virus"]
        assert one["lowest_called"] == pytest.approx(min(called), abs=1e-6)


def test_chunk_figures_match_best_frames(ask, tmp_path):
    evaluation = ask()
    folder = tmp_path / "evaluation"
    of = records_by_fragment(folder)
    frames = {
        row["Sequence_ID"]: float(row["score2"])
        for row in rows(folder / "run" / "prediction_results.txt")
    }
    labels = []
    scores = []
    n_chunks = 0
    for record in read_fasta(folder / "fragments.fa"):
        if of[record.id]["length"] != "whole":
            continue
        for chunk in Chunk.from_record(record, 300):
            n_chunks += 1
            if found := [frames[orf.id] for orf in translate_six_frames([chunk])]:
                labels.append(of[record.id]["label"] == "virus")
                scores.append(max(found))
    (row,) = (r for r in evaluation["rows"] if (r["unit"], r["subset"]) == ("chunk", "all"))
    assert (row["n"], row["n_no_orf"]) == (n_chunks, n_chunks - len(scores))
    assert row["n_no_orf"] > 0
    # six decimals are written
    assert row["scored"]["auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=5e-7)


def test_only_the_requested_part_is_scored(ask, manifest, tmp_path):
    groups = sorted({record.group for record in records_of(manifest)})
    split = tmp_path / "split.tsv"
    parts = ["test" if "1" in g or "2" in g else "train" for g in groups]
    lines = [f"{g}\t{part}\n" for g, part in zip(groups, parts, strict=True)]
    split.write_text("group\tsplit\n" + "".join(lines))
    expected = {g for g, part in zip(groups, parts, strict=True) if part == "test"}
    ask(split=split)
    of = records_by_fragment(tmp_path / "evaluation")
    assert {row["group"] for row in of.values()} == expected
    with pytest.raises(UsageError, match="--part: no effect without --split"):
        ask(part="test")


def test_scorer_is_measured_without_a_model(manifest, tmp_path):
    asked = {"data": manifest, "output_dir": tmp_path / "evaluation", **SAMPLES}
    options = EvaluateOptions(**asked)
    figures = evaluate(options, lambda _: None)
    folder = options.output_dir
    write_report(folder, figures)
    of = records_by_fragment(folder)
    calls = rows(folder / "run" / "predictions.tsv")
    assert {(row["unit"], row["length"]) for row in figures["rows"]} == {
        ("record", length) for length in ("150", "400", "whole")
    }
    for row in (row for row in figures["rows"] if row["subset"] == "all"):
        own = [call for call in calls if of[call["record"]]["length"] == row["length"]]
        labels = np.array([of[call["record"]]["label"] == "virus" for call in own])
        called = np.array([call["call"] == "virus" for call in own])
        all_rates = row["no_orf_as_0"]["recall"], row["no_orf_as_0"]["false_positives"]
        assert all_rates == pytest.approx((called[labels].mean(), called[~labels].mean()), abs=5e-7)
    stored = json.loads((folder / "evaluation.json").read_text())
    assert stored["head"] is None and stored["scorer"]["sha256"] == Scorer.load_builtin().sha256
    assert "preset default" in stored["cut"]
    assert stored["roc"][0]["true_positives"][-1] == 1.0


def test_scorer_knows_its_training_data(manifest, tmp_path):
    records = records_of(manifest)
    scorer = trained_on(Scorer.load_builtin(), groups=[records[0].group])
    save_scorer(tmp_path / "scorer.safetensors", scorer)
    caller = choose_classifier(ThresholdOptions(), "auto", None)
    caller = replace(caller, scorer=load_scorer(tmp_path / "scorer.safetensors"))
    asked = EvaluateOptions(data=manifest, output_dir=tmp_path)
    with pytest.raises(InputError, match="the scorer was trained on 2 of 24 records"):
        list(held_out_groups(pairs_of(manifest), caller, asked, set()))


def test_shipped_scorer_has_its_training_sketch():
    """The sketch is next to the scorer. That of another scorer does not count."""
    records, _, kmers = read_trained(None, Scorer.load_builtin())["the scorer"]
    assert len(kmers.hashes) > 10 * len(records) > 0


# Held-out data


def trained_on(head, records=(), groups=()):
    def digests(found) -> np.ndarray:
        return np.sort(np.array(list(found), dtype=np.uint64))

    return replace(
        head,
        trained_records=digests(map(record_digest, records)),
        trained_groups=digests(map(group_digest, groups)),
    )


@pytest.mark.parametrize("by", ["record", "group", "content"])
def test_training_data_is_refused_or_marked(tiny, manifest, tmp_path, by):
    everything = pairs_of(manifest)
    sequences = {record.id: record.sequence for _, record in everything}
    if by == "record":
        known = {everything[3][0].id}
        head = trained_on(tiny.head, records=[everything[3][1].sequence.lower()])
    elif by == "content":  # of a longer sequence, on the other strand
        known = {everything[20][0].id, everything[21][0].id}
        genome = "N".join(sequences[one].lower() for one in sorted(known))
        kmers = Sketch.unpack(Sketch.from_sequences(reverse_complement(genome)).pack())
        head = replace(tiny.head, trained_kmers=kmers)
    else:
        known = {record.id for record, _ in everything if record.group == "group1virus"}
        head = trained_on(tiny.head, groups=["group1virus"])
    caller = choose_classifier(ThresholdOptions(), "head", head)

    def tested(**changes: bool) -> tuple[set[str], set[str]]:
        trained: set[str] = set()
        asked = EvaluateOptions(data=manifest, output_dir=tmp_path, **changes)
        pairs = list(held_out_groups(everything, caller, asked, trained))
        return {labelled.id for labelled, _ in pairs}, trained

    with pytest.raises(InputError, match=f"trained on {len(known)} of 24 records") as caught:
        tested()
    assert "--held-out-only" in caught.value.hint
    assert tested(held_out_only=True) == (sequences.keys() - known, set())
    assert tested(allow_training_data=True) == (sequences.keys(), known)


def test_evaluation_on_training_data_says_so(ask, tiny, tmp_path):
    head = trained_on(tiny.head, groups=["group1virus"])
    with pytest.raises(InputError, match=r"^the head was trained on 2 of 24 records, or"):
        ask(head)
    assert not (tmp_path / "evaluation").exists()
    kept = ask(head, allow_training_data=True)
    assert (kept["n_trained_records"], kept["n_records"]) == (2, 24)
    whole = [row for row in kept["rows"] if (row["length"], row["unit"]) == ("whole", "record")]
    assert whole[0]["n_trained"] == 2
    assert "WITH TRAINING DATA" in summary_lines(tmp_path, kept)[-1]


@pytest.mark.parametrize(
    ("head_data", "encoder_data", "words"),
    [
        ([], [0, 1], "its encoder was trained on 4 of 24 records, or"),
        ([0], [1], "the head was trained on 2, its encoder was trained on 2 of 24 records, or"),
    ],
)
def test_refusal_names_the_model_trained_on_the_data(ask, tiny, head_data, encoder_data, words):
    head = trained_on(tiny.head, groups=["another", *(f"group{i}virus" for i in head_data)])
    known = trained_on(tiny.head, groups=[f"group{i}virus" for i in encoder_data]).trained_groups
    with pytest.raises(InputError) as caught:
        ask(replace(head, encoder_groups=known))
    assert str(caught.value).startswith(words)


def test_evaluation_needs_both_labels(ask, tiny, manifest):
    viral = {record.group for record in records_of(manifest) if record.is_virus}
    with pytest.raises(InputError, match="viruses or other records are missing"):
        ask(trained_on(tiny.head, groups=viral), held_out_only=True)


# Runs


class StoppedExecutor(InlineExecutor):
    """Is interrupted after two shards."""

    def run(self, shards, job, resources):
        yield from super().run(shards[:2], job, resources)
        raise KeyboardInterrupt


def test_interrupted_evaluation_resumes_equally(ask, tmp_path):
    figures = ask(output_dir=tmp_path / "undisturbed")
    write_report(ask.question.options.output_dir, figures)
    folder = tmp_path / "evaluation"
    with pytest.raises(KeyboardInterrupt):
        ask(executor=StoppedExecutor())
    assert len(list((folder / "run" / "features").glob("*.h5"))) == 2
    figures = ask(run={"resume": True})
    write_report(ask.question.options.output_dir, figures)
    table = (folder / "evaluation.tsv").read_bytes()
    assert table == (tmp_path / "undisturbed" / "evaluation.tsv").read_bytes()
    assert not leftovers(folder)


def test_resume_with_other_fragments_is_refused(ask, tmp_path):
    ask()
    fragments = [tmp_path / "evaluation" / f"fragments.{ending}" for ending in ("fa", "tsv")]
    before = [file.read_bytes() for file in fragments]
    with pytest.raises(ResumeError, match="is of other fragments"):
        ask(run={"resume": True}, seed=4)
    assert [file.read_bytes() for file in fragments] == before


def test_locked_evaluation_is_left_alone(ask, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    with open_run_dir(folder).locked(), pytest.raises(OutputError, match="is using"):
        ask()
    assert not (folder / "fragments.fa").exists()


def test_missing_scores_give_no_figures(ask, tmp_path):
    data = tmp_path / "data.fa"
    codons = {"W": "TGG", "C": "TGC"}
    poison = "".join(codons[residue] for residue in POISON)
    data.write_text(data.read_text().replace("of a test\n", f"of a test\n{poison}", 1))
    with pytest.raises(VirnucproError, match="not everything was scored") as caught:
        ask(executor=InlineExecutor(worker=RaisingWorker))
    assert "--resume" in caught.value.hint
    assert ask(run={"resume": True})["rows"]


def test_table_that_lost_a_frame_is_not_measured(ask, tiny, make_config, manifest, tmp_path):
    ask()
    table = tmp_path / "evaluation" / "run" / "prediction_results.txt"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    fragments = write_fragments(pairs_of(manifest), CUTTING, tmp_path / "again.fa")
    with pytest.raises(VirnucproError, match=r"the frame .* has no score"):
        read_chunks(ask.question, fragments, set(), make_config().recipe, tiny.head.facts)


# The command


def test_evaluate_command_resumes_and_reports(tiny, manifest, tmp_path):
    model = ("--model", tiny.model, "--head", tiny.head_file, "--device", "cpu", "--workers", "1")
    out = tmp_path / "out"
    command = ("evaluate", "--data", manifest, "-o", out, *model, "--lengths", "150,400", "--quiet")
    answer = virnucpro(*command)
    assert answer.returncode == 0, answer.stderr
    assert "AUROC of all (95 % interval)" in answer.stdout and "precision at 5 %" in answer.stdout
    files = {path.name for path in out.iterdir()}
    assert files == {".lock", "fragments.fa", "fragments.tsv", "run", "report.html"} | {
        f"evaluation.{ending}" for ending in ("tsv", "json")
    }
    table = (out / "evaluation.tsv").read_bytes()
    assert virnucpro(*command).returncode == 73
    (out / ".report.html.0123abcd.tmp").write_text("of a killed one")
    resumed = virnucpro(*command, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert (out / "evaluation.tsv").read_bytes() == table
    assert not leftovers(out)
    for wrong, exit_code, words in (
        (("--lengths", "a,b"), 64, "must be numbers of bases"),
        (("--held-out-only", "--allow-training-data"), 64, "contradict"),
        (("--data", tmp_path / "nowhere.tsv"), 66, "nowhere.tsv"),
    ):
        refused = virnucpro(*command, "-o", tmp_path / "other", *wrong)
        assert (refused.returncode, words in refused.stderr) == (exit_code, True), refused.stderr
        assert not (tmp_path / "other").exists()
