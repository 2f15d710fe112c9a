"""``virnucpro train``: its results, their use by ``predict``, and resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Tiny
from forkserver_runner import Beside, virnucpro
from labelled_data_helpers import (
    frames_of,
    options,
    pairs_of,
    relabelled,
    train_and_be_killed,
    train_here,
    write_labelled,
)
from run_helpers import leftovers, wait_until
from safetensors.torch import load_file
from training_helpers import distance, under_torchrun, weights_limit

from virnucpro.core.errors import InputError, InputMissingError, OutputError, ResumeError
from virnucpro.core.events import Progress
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.models.manage import import_model
from virnucpro.models.names import TINY_MODEL
from virnucpro.results.outputs import open_run_dir
from virnucpro.training.distributed import Ranks
from virnucpro.training.evaluation.evaluate import held_out_groups, report_evaluation
from virnucpro.training.evaluation.metrics import NOT_DEFINED
from virnucpro.training.labelled_data import group_digest, read_split, record_digest
from virnucpro.training.options import EvaluateOptions
from virnucpro.training.reports import find_card, read_table
from virnucpro.training.train import check_training
from virnucpro.training.training_config import open_training, resolve_training
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.head import Head
from virnucpro.viral.options import ThresholdOptions

CPU = Ranks(0, 1, torch.device("cpu"))
UNASKED = EvaluateOptions(data=Path("manifest.tsv"), output_dir=Path("evaluation"))
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
HIDDEN = 8
SMALL = ("--chunk-size", "300", "--batch-size", "16", "--hidden", str(HIDDEN), "--epochs", "2")
ON_CPU = ("--device", "cpu", "--precision", "fp32")
# files of every training
OVERALL_MEASURES = {
    "report.html",
    "frames",
    "split.tsv",
    "training.json",
    "checkpoints",
    "tensorboard",
    "epochs.tsv",
    "virnucpro.log",
    ".lock",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def head_only(data: Path, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a head on stored vectors, on the command line."""
    out = tmp_path_factory.mktemp("head") / "model"
    more = ("--model", tiny.model, "--workers", "1", "--keep-checkpoints", "2")
    answer = virnucpro("train", "--data", data, "-o", out, *more, *SMALL, *ON_CPU)
    assert answer.returncode == 0, answer.stderr
    return out


@pytest.fixture(scope="module")
def finetuned(data: Path, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train encoder and head, in this process, with two chunk sizes."""
    out = tmp_path_factory.mktemp("finetuned") / "model"
    train_here(options(data, out, finetune=True, model=str(tiny.model), chunk_size=(300, 210)))
    return out


@pytest.fixture(scope="module")
def pretrained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pretrained") / "model"
    train_here(options(data, out, pretrain=True, layers=1, dim=16, heads=2))
    return out


# Results


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_train_writes_what_its_help_lists(head_only, finetuned, pretrained):
    tables = {"held_out.tsv", "gain.tsv"}
    label_files = {*OVERALL_MEASURES, *tables, "records.fa", "model"}
    assert names_in(head_only) == {*label_files, "features"}
    assert names_in(finetuned) == label_files
    assert names_in(pretrained) == {*OVERALL_MEASURES, "model"}
    esm2_files = {"config.json", "model.safetensors", "README.md"}
    assert names_in(finetuned / "model") == {*esm2_files, "head.safetensors"}
    assert names_in(pretrained / "model") == esm2_files
    named_files = {"encoder.safetensors", "head.safetensors", "README.md"}
    assert names_in(head_only / "model") == named_files
    for out in (head_only, finetuned, pretrained):
        epoch_files = {"epoch_0001.pt"} if out == head_only else set()
        assert names_in(out / "checkpoints") == {"best.pt", "epoch_0002.pt", *epoch_files}
        assert [path.name for path in (out / "tensorboard").iterdir()]
        assert not leftovers(out)


@pytest.mark.parametrize(
    "changes",
    [
        {"encoding": "composition"},
        {"finetune": True, "layers": 1, "dim": 8, "heads": 2},
        {"pretrain": True, "layers": 1, "dim": 8, "heads": 2},
        {},
    ],
    ids=str,
)
def test_check_counts_and_leaves_nothing(data, tmp_path, tiny, changes):
    model = {} if changes else {"model": str(tiny.model)}
    asked = options(data, tmp_path / "out", check=True, **changes, **model)
    lines = list(check_training(asked, lambda _: None))
    assert not (tmp_path / "out").exists()
    found = {tuple(line.split()[:2]): line.split()[2:] for line in lines if "virus " in line}
    training, _ = resolve_training(replace(asked, check=False), lambda _: None)
    training.output.mkdir()
    open_training(training, lambda _: None)
    for part in ("train", "validation", "test"):
        frames = frames_of(training.output, part)
        n_frames = int(frames.is_virus.sum())
        n_groups = len(set(frames.group[frames.is_virus].tolist()))
        assert found[part, "virus"][0] == str(n_groups)
        assert found[part, "virus"][-1] == f"{n_frames:,}"
    assert {"time", "memory", "disk"} <= {line.split()[0] for line in lines}


def test_check_derives_sharded_memory(data, tmp_path):
    shape = {"finetune": True, "layers": 1, "dim": 8, "heads": 2}
    asked = options(data, tmp_path / "out", check=True, **shape, workers=2, fsdp=True)
    lines = list(check_training(asked, lambda _: None))
    assert re.search(r"memory +[\d.]+ .*B for weights.* on each of 2 devices, derived", lines[-1])


def test_check_names_what_is_missing(tmp_path):
    data = write_labelled(tmp_path, n_groups=1)
    asked = ("--data", data, "-o", tmp_path / "out", "--check", "--model", TINY_MODEL)
    answer = virnucpro("train", *asked, *ON_CPU)
    assert answer.returncode == 65 and not (tmp_path / "out").exists()
    assert "no group with the label other is in the part validation" in answer.stderr
    assert answer.stdout.count("virus") == 3, "the table is there all the same"


def test_check_warns_of_useless_groups(tmp_path):
    data = write_labelled(tmp_path)
    (tmp_path / "stops.fa").write_text(f">stops\n{'TTAATTAATTAA' * 50}\n")
    with data.open("a") as rows:
        rows.write("stops.fa\tstops\tother\tof stops\t1\t\n")
    asked = ("train", "--data", data, "-o", tmp_path / "out", "--check", *ON_CPU, *SMALL)
    answer = virnucpro(*asked, "--encoding", "composition")
    assert answer.returncode == 0, answer.stderr
    said = " ".join(answer.stderr.split())
    assert "groups without a frame, which the training does not use: of stops;" in said
    assert "validation has frames of 1 group of virus and 1 of other: the head will not" in said
    data = write_labelled(tmp_path, n_groups=16)
    assert "warning" not in virnucpro(*asked, "--encoding", "composition").stderr.lower()


def test_status_shows_the_progress_of_a_training(head_only, pretrained, tmp_path):
    figures = json.loads(virnucpro("status", head_only, "--json").stdout)
    assert (figures["kind"], figures["mode"], figures["epochs"]) == ("training", "head", 2)
    assert figures["is_finished"] and figures["seeds"].keys() == {"0"}
    assert figures["seeds"]["0"]["n_epochs"] == 2
    best = best_state(head_only)
    assert figures["seeds"]["0"]["best_epoch"] == best["best_epoch"]
    assert figures["seeds"]["0"]["auroc"] == pytest.approx(best["best"], rel=1e-5)
    assert json.loads(virnucpro("status", pretrained, "--json").stdout)["is_finished"]
    shutil.copytree(head_only, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "model")
    answer = virnucpro("status", tmp_path / "copy")
    assert "epoch 2 of 2" in answer.stdout and "unfinished" in answer.stdout
    refused = virnucpro("status", head_only, "--verify")
    assert refused.returncode == 64 and "--verify: no effect for a training" in refused.stderr


def best_state(out: Path) -> dict[str, float]:
    return torch.load(out / "checkpoints" / "best.pt", weights_only=True)["state"]


def test_models_info_describes_a_head(head_only):
    head = Head.load(head_only / "model" / "head.safetensors")
    said = virnucpro("models", "info", head_only / "model" / "head.safetensors").stdout
    folder_info = virnucpro("models", "info", head_only / "model").stdout
    assert folder_info.endswith(said) and "layers      2" in folder_info
    refused = virnucpro("models", "info", head_only)
    assert refused.returncode == 69 and "name the model in it" in refused.stderr
    for text in (head.sha256, head.facts.encoders[0].encoder_id, f"{head.facts.threshold:.6f}"):
        assert text in said
    assert f"{len(head.trained_records)} records of {len(head.trained_groups)} groups" in said


def test_model_folder_has_a_card_with_figures(finetuned, data, tiny, tmp_path, monkeypatch):
    """It is imported under a name. Code that is added to it does not run."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    moved = shutil.copytree(finetuned / "model", tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.E"}}))
    (moved / "evil.py").write_text("raise SystemExit('run')")
    facts = json.loads((finetuned / "training.json").read_text())
    head = Head.load(moved / "head.safetensors")
    model, _ = import_model(moved, "mine")
    card = find_card("mine")
    assert model.head is not None and model.head.parent == card.parent
    for text in (head.sha256, facts["data_sha256"], *facts["fasta_sha256"], facts["encoder_id"]):
        assert text in card.read_text()
    assert "None yet: `virnucpro evaluate" in card.read_text()
    asked = {"data": data, "split": finetuned / "split.tsv", "model": "mine", "card": True}
    more = {"lengths": "300", "output_dir": tmp_path / "out", "device": "cpu", "precision": "fp32"}
    for resume in (False, True):
        report_evaluation(EvaluateOptions(**asked, **more, resume=resume), lambda _: None)
    assert "None yet" not in card.read_text() and card.read_text().count("## Evaluation") == 1
    for cells in read_table(tmp_path / "out" / "evaluation.tsv"):
        for name in ("auroc", "auprc", "f1", "auroc_equal_groups", "auroc_no_orf_as_0"):
            assert cells[name] == NOT_DEFINED or f"| {float(cells[name]):.3f} |" in card.read_text()
    with pytest.raises(InputMissingError, match="has no card"):
        other = {**asked, **more, "model": str(tiny.model)}
        report_evaluation(EvaluateOptions(**other), lambda _: None)


def test_summary_has_mean_and_deviation(tmp_path):
    for name, auroc in (("one", 0.5), ("two", 0.7)):
        (tmp_path / name).mkdir()
        held_out = "split\tnetwork\tauroc_frames\tauroc_chunks\ntest\tprotein\t0.6\t{}\n"
        (tmp_path / name / "held_out.tsv").write_text(held_out.format(auroc))
    gain = "seed\tsplit\tn_bases\tgain\n1\ttest\t300\t0.1\n2\ttest\t300\t0.3\n"
    (tmp_path / "two" / "gain.tsv").write_text(gain)
    answer = virnucpro("summary", tmp_path / "one", tmp_path / "two")
    rows = [line.split("\t") for line in answer.stdout.splitlines()]
    assert rows == [
        ["table", "row", "figure", "n", "mean", "deviation"],
        ["held_out.tsv", "test protein", "auroc_frames", "2", "0.6000", "0.0000"],
        ["held_out.tsv", "test protein", "auroc_chunks", "2", "0.6000", f"{0.02**0.5:.4f}"],
        ["gain.tsv", "test 300", "gain", "2", "0.2000", f"{0.02**0.5:.4f}"],
    ]
    refused = virnucpro("summary", tmp_path / "one")
    assert refused.returncode == 64 and "at least two finished trainings" in refused.stderr


def test_head_uses_the_first_chunk_size(head_only, finetuned, tiny):
    head = Head.load(head_only / "model" / "head.safetensors")
    assert head.facts.encoders[0].encoder_id == inspect_esm2(tiny.model).encoder_id
    head = Head.load(finetuned / "model" / "head.safetensors")
    own = inspect_esm2(finetuned / "model")
    assert (
        head.facts.encoders[0].encoder_id == own.encoder_id != inspect_esm2(tiny.model).encoder_id
    )
    assert (head.facts.encoders[0].name, head.facts.chunk_size) == ("model", 300)
    assert "finetune, 2 epochs, seed 0, chunks of 300 and 210 bases" in head.facts.training
    (told,) = (text for text in messages(finetuned) if text.startswith("model: "))
    assert f"a chunk is the {head.facts.frame_rule} of its frames" in told
    assert f"exponent {head.facts.exponent:.2f}, threshold {head.facts.threshold:.3f}" in told


def test_held_out_figures_of_both_networks(head_only, data):
    rows = [line.split("\t") for line in (head_only / "held_out.tsv").read_text().splitlines()]
    assert rows[0][:2] == ["split", "network"]
    names = [(split, n) for split in ("validation", "test") for n in ("protein", "nucleotide")]
    assert [(row[0], row[1]) for row in rows[1:]] == names
    frames = frames_of(head_only, "test")
    for row in rows[3:]:
        assert int(row[2]) == len(frames) and int(row[4]) == len(set(frames.chunk.tolist()))
        assert 0 <= float(row[3]) <= 1 and 0 <= float(row[5]) <= 1


def test_pretrained_model_can_be_finetuned(pretrained, data, tmp_path):
    start = pretrained / "model"
    checkpoint = inspect_esm2(start)
    assert (checkpoint.shape.n_layers, checkpoint.shape.dim, checkpoint.shape.n_heads) == (1, 16, 2)
    assert "lm_head.bias" in load_file(start / "model.safetensors")
    train_here(options(data, tmp_path / "on", finetune=True, model=str(start), epochs=1))
    assert Head.load(tmp_path / "on" / "model" / "head.safetensors").facts.dim == 16
    trained = inspect_esm2(tmp_path / "on" / "model")
    assert trained.encoder_id != checkpoint.encoder_id


def test_checkpoint_excludes_a_frozen_encoder(data, tiny, tmp_path):
    asked = {"model": str(tiny.model), "architecture": "cnn", "epochs": 2}
    train_here(options(data, tmp_path, **asked))
    figures = (tmp_path / "held_out.tsv").read_bytes()
    names = set(best_weights(tmp_path))
    assert any(name.startswith("reader.network.") for name in names)
    assert not [name for name in names if name.startswith("reader.encoder.layers")]
    (tmp_path / "checkpoints" / "epoch_0002.pt").unlink()
    train_here(options(data, tmp_path, resume=True, **asked))
    assert (tmp_path / "held_out.tsv").read_bytes() == figures


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training that the options are compared with."""
    out = tmp_path_factory.mktemp("plain") / "model"
    train_here(options(data, out, encoding="onehot", epochs=1, grad_accum_steps=2))
    return out


def best_weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "checkpoints" / "best.pt", weights_only=True)["module"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 8},
        {"lr": 1e-3},
        {"scale_lr": "linear"},
        {"warmup_epochs": 0.9},
        {"grad_accum_steps": 1},
        {"weight_decay": 0.9},
        {"class_weights": "none"},
        {"dropout": 0.0},
        {"precision": "bf16"},
        {"chunk_size": (210,)},
        {"encoding": "blosum62"},
        {"profile": True},
    ],
    ids=str,
)
def test_each_loop_option_has_its_effect(plain, data, tmp_path, changes):
    asked = {"encoding": "onehot", "epochs": 1, "grad_accum_steps": 2, **changes}
    train_here(options(data, tmp_path / "out", **asked))
    one = best_weights(plain)
    other = best_weights(tmp_path / "out")
    learned = "classifier.nucleotide.1.weight"
    has_none = changes.keys() <= {"profile"}
    same = one[learned].shape == other[learned].shape and torch.equal(one[learned], other[learned])
    assert same == has_none


@pytest.mark.parametrize(("best_by", "name"), [("f1", "f1"), ("loss", "validation_loss")])
def test_best_epoch_is_by_the_chosen_figure(data, tmp_path, best_by, name):
    train_here(options(data, tmp_path, encoding="composition", epochs=3, best_by=best_by))
    lines = (tmp_path / "epochs.tsv").read_text().splitlines()
    header, *rows = [line.split("\t") for line in lines]
    figures = [float(row[header.index(name)]) for row in rows]
    best = min(figures) if best_by == "loss" else max(figures)
    state = best_state(tmp_path)
    assert figures[state["best_epoch"] - 1] == best
    assert abs(state["best"]) == pytest.approx(best, rel=1e-5)


def messages(out: Path) -> list[str]:
    """Return the messages of a training, from its log."""
    lines = (out / "virnucpro.log").read_text().splitlines()
    return [line.split(maxsplit=3)[-1] for line in lines]


def test_record_weights_come_from_the_manifest(data, tmp_path):
    said = {}
    for class_weights in ("auto", "none"):
        asked = {"encoding": "composition", "epochs": 1, "class_weights": class_weights}
        training = train_here(options(data, tmp_path / class_weights, **asked))
        said[class_weights] = [text for text in messages(training.output) if "mean weight" in text]
    frames = frames_of(training.output, "train")
    sides = {"virus": frames.is_virus, "other": ~frames.is_virus}
    for line, (label, rows) in zip(said["none"], sides.items(), strict=True):
        assert line.startswith(f"{label}: {rows.sum():,} frames of 4 groups")
        assert line.endswith(f"mean weight {frames.weight[rows].mean():.3f}")
    half = len(frames) / 2
    for line, rows in zip(said["auto"], sides.values(), strict=True):
        assert float(line.rpartition(" ")[2]) == pytest.approx(half / rows.sum(), abs=6e-4)


@pytest.mark.parametrize("is_learnable", [True, False])
def test_useless_classifier_gets_a_warning(tmp_path, is_learnable):
    data = relabelled(tmp_path, {"virus": "virus", "other": "other" if is_learnable else "virus"})
    train_here(options(data, tmp_path / "out", encoding="composition"))
    said = [text for text in messages(tmp_path / "out") if "no better than chance" in text]
    assert len(said) == (not is_learnable)
    if said:
        assert "AUROC of chunks 0." in said[0] and "label more groups" in said[0]
    assert (tmp_path / "out" / "held_out.tsv").exists()


# Held-out data


def test_evaluate_takes_only_the_test_part(head_only, data):
    head = Head.load(head_only / "model" / "head.safetensors")
    splits = read_split(head_only / "split.tsv")
    caller = choose_classifier(ThresholdOptions(), "head", head)
    known = pairs_of(data, splits, "train", "validation")
    digests = {record_digest(record.sequence) for _, record in known}
    assert set(head.trained_records.tolist()) == digests
    groups = {group_digest(labelled.group) for labelled, _ in known}
    assert set(head.trained_groups.tolist()) == groups
    everything = pairs_of(data)
    test = pairs_of(data, splits, "test")
    told = rf"the head was trained on {len(known)} of {len(everything)} records"
    with pytest.raises(InputError, match=told):
        list(held_out_groups(everything, caller, UNASKED, set()))
    trained: set[str] = set()
    kept = replace(UNASKED, allow_training_data=True)
    assert list(held_out_groups(everything, caller, kept, trained)) == everything
    assert trained == {labelled.id for labelled, _ in known}
    assert list(held_out_groups(test, caller, UNASKED, set())) == test


def test_finetuned_encoder_knows_its_data(finetuned, data):
    head = Head.load(finetuned / "model" / "head.safetensors")
    caller = choose_classifier(ThresholdOptions(), "head", head)
    both = r"the head was trained on (\d+), its encoder was trained on \1 of"
    with pytest.raises(InputError, match=both):
        list(held_out_groups(pairs_of(data), caller, UNASKED, set()))


# Kill and resume


def command(data: Path, out: Path, model: Path, *more: object) -> list[str]:
    given = ("train", "--data", data, "-o", out, "--finetune", "--model", model, *SMALL, *ON_CPU)
    return [*map(str, (*given, *more))]


def has_ended(process: Beside) -> bool:
    return process.returncode is not None


def contents(out: Path) -> list[bytes]:
    names = ("model/head.safetensors", "model/model.safetensors", "held_out.tsv", "split.tsv")
    return [(out / name).read_bytes() for name in names]


def test_killed_training_resumes_to_same_bytes(data, tiny, tmp_path):
    asked = {"finetune": True, "model": str(tiny.model), "epochs": 4}
    undisturbed = train_here(options(data, tmp_path / "undisturbed", **asked))
    out = tmp_path / "killed"
    killed = Beside(options(data, out, **asked), run=train_and_be_killed, env=ONE_THREAD)
    killed.said()
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in out.glob("checkpoints/epoch_*")]
    assert not (out / "model" / "head.safetensors").exists()
    train_here(options(data, out, resume=True, **asked))
    assert contents(out) == contents(undisturbed.output)
    assert not leftovers(out)


def test_resumed_finished_training_is_unchanged(finetuned, data, tiny):
    before = contents(finetuned)
    written = [path.stat().st_mtime_ns for path in sorted((finetuned / "checkpoints").iterdir())]
    told: list[object] = []
    asked = {"finetune": True, "model": str(tiny.model), "chunk_size": (300, 210)}
    train_here(options(data, finetuned, resume=True, **asked), told)
    assert contents(finetuned) == before
    after = [path.stat().st_mtime_ns for path in sorted((finetuned / "checkpoints").iterdir())]
    assert after == written
    assert not any(event.stage.startswith("epoch") for event in told if isinstance(event, Progress))


def test_vectors_are_made_once_for_a_head(head_only, data, tiny, tmp_path):
    out = tmp_path / "again"
    shutil.copytree(head_only, out)
    (out / "model" / "head.safetensors").unlink()
    (out / "checkpoints" / "epoch_0002.pt").unlink()
    made = {path: path.stat().st_mtime_ns for path in (out / "features" / "features").glob("*.h5")}
    given = ("train", "--data", data, "-o", out, "--model", tiny.model, *SMALL, *ON_CPU)
    refused = virnucpro(*given, "--workers", "1")
    assert refused.returncode == 73 and "already contains a training" in refused.stderr
    answer = virnucpro(*given, "--workers", "1", "--resume", env=ONE_THREAD)
    assert answer.returncode == 0, answer.stderr
    assert "continuing after epoch 1" in answer.stderr
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert Head.load(out / "model" / "head.safetensors").facts.encoders[0].name == "esm2_tiny"


def test_other_training_options_are_refused(finetuned, data, tiny):
    """All options that the weights depend on.

    The number of devices counts by the effective batch.
    """
    changes = {
        "epochs": 1,
        "lr": 0.1,
        "batch_size": 8,
        "seed": 1,
        "weight_decay": 0.5,
        "class_weights": "none",
        "dropout": 0.0,
        "hidden": 9,
        "chunk_size": (300,),
        "precision": "bf16",
    }
    asked = {"finetune": True, "model": str(tiny.model), "chunk_size": (300, 210), "resume": True}
    with pytest.raises(ResumeError, match="contains a training with other ") as caught:
        train_here(options(data, finetuned, **asked | changes))
    named = re.findall(r"(\w+) \([^;]*, now", str(caught.value))
    device_names = {"lr": "peak_lr", "batch_size": "effective_batch"}
    assert named == sorted(device_names.get(name, name) for name in changes)
    with pytest.raises(ResumeError, match=r"with other effective_batch \("):
        train_here(options(data, finetuned, workers=2, **asked))


def test_other_training_data_is_refused(finetuned, data, tiny, tmp_path, pretrained):
    def refusal(**changes: object) -> str:
        asked = {"data": data, "model": str(tiny.model), **changes}
        with pytest.raises(ResumeError) as caught:
            train_here(
                options(
                    output=finetuned, finetune=True, resume=True, chunk_size=(300, 210), **asked
                )
            )
        return str(caught.value)

    shutil.copytree(data.parent, tmp_path / "moved")
    moved = tmp_path / "moved" / data.name
    fasta = moved.with_name("data.fa")
    given = {"resume": True, "finetune": True, "model": str(tiny.model), "chunk_size": (300, 210)}
    train_here(options(moved, finetuned, **given))  # the same bytes elsewhere
    fasta.write_text(fasta.read_text().replace("A", "C", 1))
    assert "fasta_sha256" in refusal(data=moved)
    moved.write_text(moved.read_text().replace("kingdom\n", "realm\n"))
    assert "data_sha256" in refusal(data=moved)
    assert "encoder_id" in refusal(model=str(pretrained / "model"))
    other = tmp_path / "other.tsv"
    text = (finetuned / "split.tsv").read_text()
    other.write_text(text.replace("\ttrain\t", "\ttest\t", 1))
    assert "is not the split of this training" in refusal(split=other)


def test_foreign_or_shared_folder_is_refused(data, tiny, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"has no training: thesis\.txt"):
            train_here(options(data, foreign, encoding="composition", resume=resume))
    assert (foreign / "thesis.txt").read_text() == "mine"
    out = tmp_path / "out"
    with open_run_dir(out).locked(create=True):
        answer = virnucpro(*command(data, out, tiny.model))
    assert answer.returncode == 73
    assert str(os.getpid()) in answer.stderr
    assert not (out / "training.json").exists()


# Several processes


@pytest.fixture(scope="module")
def on_one_and_two(data, tiny, tmp_path_factory) -> tuple[Path, Path, str]:
    """Train one epoch with one effective batch, on one process and on two. -> both, and the log"""
    root = tmp_path_factory.mktemp("two")
    once = {"finetune": True, "model": str(tiny.model), "epochs": 1, "dropout": 0.0}
    train_here(options(data, root / "one", **once))
    more = ("--epochs", 1, "--dropout", 0, "--batch-size", 8, "--workers", 2, "--profile")
    answer = virnucpro(*command(data, root / "two", tiny.model, *more), env=ONE_THREAD)
    assert answer.returncode == 0, answer.stderr
    return root / "one", root / "two", answer.stderr


def test_two_processes_equal_one(on_one_and_two, tiny, data):
    one, two, _ = on_one_and_two
    assert_trained_alike(one, two, tiny, data)


def assert_trained_alike(one: Path, two: Path, tiny: Tiny, data: Path) -> None:
    n_steps = len(frames_of(one, "train")) // 16
    encoders = [load_file(path / "model" / "model.safetensors") for path in (one, two)]
    start = load_file(tiny.model / "model.safetensors")
    assert distance(*encoders, start) < weights_limit(n_steps)
    weights = [
        {str(i): torch.from_numpy(w) for i, (w, _) in enumerate(network.layers)}
        for network in (
            Head.load(path / "model" / "head.safetensors").nucleotide for path in (one, two)
        )
    ]
    # the weights of a head are larger than what an epoch moves them by
    nothing = {name: torch.zeros_like(w) for name, w in weights[0].items()}
    assert distance(*weights, nothing) < weights_limit(n_steps)


def test_first_process_logs_once(on_one_and_two):
    _, two, console = on_one_and_two
    log = (two / "virnucpro.log").read_text()
    for said in ("effective batch 16: 8 on each of 2", "epoch 1: ", "best epoch: 1", "model: "):
        assert console.count(said) == log.count(said) == 1, said
    for shown in ("frames/s", "0 cpu", "1 cpu", "all ", "forward and backward", "virus: "):
        assert shown in console, shown


def test_torchrun_starts_the_command_too(on_one_and_two, data, tiny, tmp_path):
    """Here with an encoder that is sharded over the processes."""
    one, _, _ = on_one_and_two
    out = tmp_path / "out"
    more = ("--epochs", 1, "--dropout", 0, "--batch-size", 8, "--fsdp")
    processes = under_torchrun(*command(data, out, tiny.model, *more))
    said = [process.said() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert_trained_alike(one, out, tiny, data)
    assert "epoch 1: " in said[0] and "epoch 1: " not in said[1]


def test_torchrun_chooses_the_devices(data, tiny, tmp_path):
    asked = command(data, tmp_path / "out", tiny.model, "--workers", 2)
    processes = under_torchrun(*asked)
    for said in [process.said() for process in processes]:
        assert "do not go with torchrun" in said and "--nproc-per-node" in said
    assert [process.returncode for process in processes] == [64, 64]


def test_torchrun_error_ends_all_processes(data, tiny, tmp_path):
    manifest = data.with_name("wrong.tsv")
    manifest.write_text(data.read_text().replace("\tvirus\t", "\tviral\t", 1))
    processes = under_torchrun(*command(manifest, tmp_path / "out", tiny.model))
    said = [process.said() for process in processes]
    assert [process.returncode for process in processes] == [65, 65], said
    assert "wrong.tsv:2: the label is 'viral'" in said[0] and not said[1]


def test_torchrun_unwritable_folder_ends_all_with_73(data, tiny, tmp_path):
    """One process finds it while the other waits in torch."""
    out = tmp_path / "out"
    first, other = under_torchrun(*command(data, out, tiny.model, "--epochs", 500))
    wait_until(lambda: list(out.glob("checkpoints/epoch_*")) or has_ended(first))
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints").touch()
    said = [process.said() for process in (first, other)]
    assert (first.returncode, other.returncode) == (73, 73), said
    assert "checkpoints" in said[0].rpartition("error: ")[2]


def test_sigterm_ends_torchruns_processes_with_143(data, tiny, tmp_path):
    out = tmp_path / "out"
    processes = under_torchrun(*command(data, out, tiny.model, "--epochs", 500))
    wait_until(lambda: list(out.glob("checkpoints/epoch_*")) or has_ended(processes[0]))
    for process in processes:
        process.process.terminate()
    said = [process.said() for process in processes]
    assert [process.returncode for process in processes] == [143, 143], said
    assert "error: terminated" in said[0] and "--resume" in said[0]
    assert not leftovers(out)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends them")
def test_no_process_outlives_a_killed_torchrun(data, tiny, tmp_path):
    out = tmp_path / "out"
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    arguments = command(data, out, tiny.model, "--epochs", "500")
    agent = subprocess.Popen(
        [sys.executable, *module, "virnucpro", *arguments],
        env=ONE_THREAD,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: list(out.glob("checkpoints/epoch_*")) or agent.poll() is not None)
    family = psutil.Process(agent.pid).children(recursive=True)
    assert len(family) >= 2
    agent.kill()
    agent.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
