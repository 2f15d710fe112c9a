"""``predict`` and ``evaluate`` accept all results of ``train``, with the training's scores."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Tiny
from labelled_data_helpers import frames_of, ids_of, options, pairs_of, train_here, write_labelled
from run_helpers import execute, rows
from safetensors.numpy import load_file

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import UnavailableError, UsageError
from virnucpro.core.numeric import DECIMALS, sigmoid
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.base import load_encoder
from virnucpro.models.family import ModelFile
from virnucpro.models.lookup import open_model
from virnucpro.models.manage import describe_model
from virnucpro.models.names import TINY_MODEL
from virnucpro.models.trained_encoder import inspect_trained_encoder, save_trained_encoder
from virnucpro.sequences.fasta import write_record
from virnucpro.training.distributed import Ranks
from virnucpro.training.evaluation.evaluate import evaluate
from virnucpro.training.labelled_data import read_split
from virnucpro.training.networks import build_module, frame_log_odds
from virnucpro.training.options import EvaluateOptions
from virnucpro.training.training_config import TrainingRun
from virnucpro.viral.head import Head
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.predict_options import PredictOptions

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

CPU = torch.device("cpu")
KINDS = {
    "composition": {"encoding": "composition"},
    **{
        f"onehot-{architecture}": {"encoding": "onehot", "architecture": architecture}
        for architecture in ("mlp", "cnn", "lstm", "unet")
    },
    "blosum62-mlp": {"encoding": "blosum62", "architecture": "mlp"},
    "esm2-mlp": {"encoding": "esm2"},  # a head on vectors that are made once
    "esm2-cnn": {"encoding": "esm2", "architecture": "cnn"},
    "finetuned esm2-mlp": {"encoding": "esm2", "finetune": True, "chunk_size": (300, 210)},
    "finetuned esm2-cnn": {"encoding": "esm2", "architecture": "cnn", "finetune": True},
}
# a logit under 10 is off by half an eps of float32 for each of the roundings on its way, which
# are fewer than a thousand one after another; a score is off by a quarter of that. Two
# computations, and the decimals of a score
LIMIT = 2 * 1000 * np.finfo(np.float32).eps / 2 * 10 / 4 + 0.5 * 10.0**-DECIMALS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("labelled"))


@pytest.fixture(scope="module")
def trained(data: Path, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory):
    """Return a training of this kind. Each is made once."""
    made: dict[str, TrainingRun] = {}

    def train(kind: str) -> TrainingRun:
        if kind not in made:
            out = tmp_path_factory.mktemp("trained") / "model"
            model = {"model": str(tiny.model)} if "esm2" in kind else {}
            made[kind] = train_here(options(data, out, epochs=1, **KINDS[kind], **model))
        return made[kind]

    return train


def on_cpu(output: Path, **changes: object) -> dict[str, object]:
    return {"output_dir": output, "device": "cpu", "precision": "fp32", **changes}


def scores_of(training: TrainingRun, fasta: Path, output: Path) -> dict[str, float]:
    """Return the score of each frame by ``predict``."""
    asked = on_cpu(output, model=str(training.model), input=(fasta,))
    execute(PredictOptions(**asked), lambda _: None, lambda _: InlineExecutor())
    lines = (output / "prediction_results.txt").read_text().splitlines()[1:]
    return {line.split("\t")[0]: float(line.split("\t")[3]) for line in lines}


def scores_in_training(training: TrainingRun) -> dict[str, float]:
    """Return the scores of the test groups by the network of the best epoch."""
    frames = frames_of(training.output, "test")
    module = build_module(training, frames)
    best = torch.load(training.output / "checkpoints" / "best.pt", weights_only=True)
    module.load_state_dict(best["module"], strict=False)
    odds = frame_log_odds(module.eval(), frames, Ranks(0, 1, CPU))[-1].astype(np.float64)
    head = Head.load(training.head)
    network = head.nucleotide
    assert network is not None
    scores = sigmoid(odds / network.temperature)
    return dict(zip(ids_of(training.output, frames), scores.tolist(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_predict_uses_the_trained_model(kind, trained, data, tmp_path):
    training = trained(kind)
    fasta = tmp_path / "test.fa"
    with fasta.open("w") as out:
        for _, record in pairs_of(data, read_split(training.split), "test"):
            write_record(out, record.id, record.sequence)
    expected = scores_in_training(training)
    found = scores_of(training, fasta, tmp_path / "run")
    assert found.keys() == expected.keys()
    assert max(abs(found[name] - expected[name]) for name in expected) < LIMIT
    assert np.std(list(found.values())) > 5 * LIMIT, "scores that are all the same prove nothing"


@pytest.mark.parametrize("kind", ["composition", "finetuned esm2-cnn"])
def test_evaluate_uses_the_trained_model(kind, trained, data, tmp_path):
    training = trained(kind)
    asked = on_cpu(
        tmp_path / "evaluation",
        data=data,
        split=training.split,
        model=str(training.model),
        lengths="300",
    )
    figures = evaluate(EvaluateOptions(**asked), lambda _: None)
    whole = next(r for r in figures["rows"] if (r["length"], r["unit"]) == ("whole", "record"))
    assert whole["n"] and whole["scored"]["auroc"] is not None
    n_networks = 1 if kind == "composition" else 2
    rows = (training.output / "held_out.tsv").read_text().splitlines()
    assert len(rows) == 1 + 2 * n_networks, "validation and test, by each network"


def test_head_names_its_encoder_by_content(trained, tmp_path):
    training = trained("onehot-cnn")
    checkpoint = inspect_trained_encoder(training.model / ModelFile.LEARNED)
    (facts,) = Head.load(training.head).facts.encoders
    assert (facts.family, facts.encoder_id) == ("learned", checkpoint.encoder_id)
    again = tmp_path / ModelFile.LEARNED
    save_trained_encoder(again, checkpoint.facts, load_file(training.model / ModelFile.LEARNED))
    assert again.read_bytes() == (training.model / ModelFile.LEARNED).read_bytes()


def test_retrained_base_is_refused(trained, tiny, data, tmp_path):
    training = trained("finetuned esm2-cnn")
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / ModelFile.LEARNED).write_bytes((training.model / ModelFile.LEARNED).read_bytes())
    for path in tiny.model.iterdir():
        shutil.copy(path, moved)
    with pytest.raises(UnavailableError, match="contains other weights") as caught:
        inspect_trained_encoder(moved / ModelFile.LEARNED)
    assert "next to it" in caught.value.hint


def test_encoder_in_current_folder_needs_its_path(trained, tmp_path, monkeypatch):
    """A file that is named like a model is not taken for that model, either."""
    training = trained("onehot-cnn")
    monkeypatch.chdir(tmp_path)
    content = (training.model / ModelFile.LEARNED).read_bytes()
    for name in ("encoder.safetensors", TINY_MODEL):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UnavailableError, match="no model named encoder") as caught:
        open_model("encoder.safetensors", lambda _: None)
    assert "write ./encoder.safetensors" in caught.value.hint
    assert open_model("./encoder.safetensors", lambda _: None).family == "learned"
    assert open_model(TINY_MODEL, lambda _: None).family == "esm2"


@pytest.mark.parametrize("kind", ["composition", "onehot-cnn", "esm2-cnn"])
def test_encoder_is_sized_and_described(kind, trained, tiny):
    path = trained(kind).model / ModelFile.LEARNED
    model = open_model(str(path), lambda _: None)
    base = open_model(str(tiny.model), lambda _: None)
    n_weights = sum(values.size for values in load_file(path).values())
    on_esm2 = kind.startswith("esm2")
    assert model.footprint.n_parameters == n_weights + on_esm2 * base.footprint.n_parameters
    lines, _ = describe_model(str(path))
    assert lines[0] == f"path        {path}"
    assert f"dimensions  {model.dim}" in lines and f"encoder id  {hash_file(path)}" in lines


@pytest.mark.parametrize("damage", ["cut", "other weights"])
def test_damaged_encoder_file_is_reported(damage, trained, tmp_path):
    training = trained("onehot-cnn")
    path = tmp_path / ModelFile.LEARNED
    if damage == "cut":
        path.write_bytes((training.model / ModelFile.LEARNED).read_bytes()[:-9])
        with pytest.raises(UnavailableError, match=r"is not an encoder of VirNucPro: .*ncomplete"):
            open_model(str(path), lambda _: None)
    else:
        facts = inspect_trained_encoder(training.model / ModelFile.LEARNED).facts
        save_trained_encoder(path, facts, {"network.nothing": np.ones(3, dtype=np.float32)})
        asked = on_cpu(tmp_path / "run", model=str(path), input=(tmp_path / "none.fa",))
        (tmp_path / "none.fa").write_text(">a\n" + "ACG" * 100 + "\n")
        with pytest.raises(UnavailableError, match="does not hold the network that it names"):
            execute(ExtractOptions(**asked), lambda _: None, lambda _: InlineExecutor())


def test_learned_encoder_fixes_its_pooling(trained, tmp_path):
    training = trained("onehot-cnn")
    fasta = tmp_path / "one.fa"
    fasta.write_text(">a\n" + "ACG" * 100 + "\n")
    asked = on_cpu(tmp_path / "run", model=str(training.model / ModelFile.LEARNED), input=(fasta,))
    with pytest.raises(UsageError, match="--pooling bos"):
        execute(ExtractOptions(**asked, pooling=("bos",)), lambda _: None)
    execute(ExtractOptions(**asked), lambda _: None, lambda _: InlineExecutor())
    assert rows(tmp_path / "run" / "records.tsv")


def test_replaced_encoder_is_refused(trained):
    path = trained("onehot-cnn").model / ModelFile.LEARNED
    spec = open_model(str(path), lambda _: None).spec(sha256="0" * 64, precision="fp32")
    with pytest.raises(UnavailableError, match="was replaced since the run began"):
        load_encoder(spec, path, torch.device("cpu"))
