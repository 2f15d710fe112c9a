"""From options to a run config: what is sized, converted and rejected before any work."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY
from fair_esm_reference import make_fair_esm, save_fair_esm
from run_helpers import assert_same_vectors, resolve, run, vectors

from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import ResumeError, UnavailableError, UsageError
from virnucpro.core.events import BatchDone
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.models import checkpoint_model, nvidia, nvidia_driver
from virnucpro.models import lookup as download
from virnucpro.models.device_choice import Gpu
from virnucpro.models.lookup import embedded_head, open_model
from virnucpro.models.names import DEFAULT_MODEL, TINY_MODEL
from virnucpro.models.registry import FAMILIES, Published, RemoteFile
from virnucpro.models.torch_build import TorchBuild
from virnucpro.viral import networks as nets
from virnucpro.viral.head import Head
from virnucpro.viral.networks import BUILTIN_SCORER
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")


@pytest.fixture
def options(tmp_path, contigs):
    """An extraction with a fair-esm checkpoint. Keywords change it."""
    model = save_fair_esm(make_fair_esm(TINY), tmp_path / "model.pt")

    def make(name: str = "run", **changes: object) -> RunOptions:
        kind = {"extract": ExtractOptions, "predict": PredictOptions}
        given: dict[str, object] = {
            "command": "extract",
            "input": (contigs,),
            "output_dir": tmp_path / name,
            "model": str(model),
            "device": "cpu",
            "workers": 2,
            **changes,
        }
        return kind[given.pop("command")](**given)

    return make


@pytest.fixture
def kept(monkeypatch, tmp_path) -> Path:
    """Let every model be large enough to be converted. -> the folder of copies"""
    monkeypatch.setattr(checkpoint_model, "WORTH_CONVERTING", 0)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub" / "virnucpro"


# The built-in model


def test_built_in_model_comes_with_its_head(options):
    config = resolve(options(command="predict", model=TINY_MODEL, calls="head"), lambda _: None)
    head = config.classifier.frame_head
    folder = embedded_head().with_name(TINY_MODEL)
    assert config.checkpoints == (folder.resolve(),)
    assert config.recipe.encoders[0].model == TINY_MODEL == "virnucpro-tiny"
    assert config.recipe.encoders[0].sha256 == hash_file(folder / "model.safetensors")
    assert head.sha256 == config.recipe.head_sha256 == Head.load(embedded_head()).sha256
    assert config.recipe.chunk_size == head.facts.chunk_size


@pytest.mark.parametrize(
    ("changes", "embeds", "is_scored"),
    [
        ({}, False, True),
        ({"workers": 1}, False, True),
        ({"typed": ("output_dir", "workers")}, False, True),
        ({"model": DEFAULT_MODEL}, True, True),
        ({"device": "cpu"}, True, True),
        ({"typed": ("device",)}, True, True),
        ({"typed": ("precision", "output_dir")}, True, True),
        ({"precision": "fp32"}, True, True),
        ({"esm_batch_size": "1024"}, True, True),
        ({"worker_timeout": 20.0}, True, True),
        ({"plan_only": True, "precision": "fp32"}, True, True),
        ({"executor": "parsl", "precision": "fp32"}, True, True),
        ({"command": "extract"}, True, False),
    ],
)
@pytest.mark.parametrize("input_type", ["nucleotide", "protein"])
def test_engine_options_embed_with_the_default_model(
    options, installed_default, changes, embeds, is_scored, input_type
):
    usual = {"command": "predict", "model": None, "device": "auto", "precision": "auto"}
    config = resolve(options(**{**usual, **changes}), lambda _: None)
    recipe = config.recipe_for(input_type)
    assert [encoder.model for encoder in recipe.encoders] == [DEFAULT_MODEL] * embeds
    has_own_scorer = recipe.scorer_sha256 == hash_file(BUILTIN_SCORER)
    has_head = isinstance(config, PredictConfig) and config.classifier.frame_head is not None
    assert (not has_head and has_own_scorer) == is_scored
    assert not has_head


def test_only_named_gpus_are_used(options, installed_default, monkeypatch):
    gpus = [
        Gpu(i, f"GPU-{i}", "NVIDIA H100", 80 << 30, 79 << 30, (9, 0), (12, 8)) for i in range(4)
    ]
    monkeypatch.setattr(nvidia_driver, "has_nvml", lambda: True)
    monkeypatch.setattr(nvidia, "list_gpus", lambda: (gpus, ""))
    monkeypatch.setattr(
        "virnucpro.models.torch_build.torch_build", lambda: TorchBuild("2.11", "12.8")
    )
    for request, places in (("0,1,2", "012"), ("0", "0"), ("2,3", "23"), ("all", "0123")):
        given = {"command": "predict", "model": None, "device": "auto", "workers": None}
        config = resolve(options(**given, gpus=request), lambda _: None)
        assert config.resources.devices == tuple(f"cuda:{place}" for place in places)
        assert config.recipe.encoders[0].model == DEFAULT_MODEL
        assert config.recipe.encoders[0].precision == "bf16"
    assert not resolve(options(**given), lambda _: None).recipe.encoders


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"keep_intermediate": True}, "--keep-intermediate: no effect where nothing is embedded"),
        ({"chunk_size": 300}, "the scorer works on pieces of 500 bases"),
        ({"calls": "scorer", "head": Path("h")}, "--head: no effect with --calls scorer"),
        (
            {"calls": "head", "preset": "sensitive", "model": TINY_MODEL},
            "--preset: no effect with a head alone",
        ),
    ],
)
def test_options_without_effect_are_refused(options, given, reason):
    usual = {"command": "predict", "model": None, "device": "auto", "precision": "auto"}
    with pytest.raises(UsageError, match=reason):
        resolve(options(**{**usual, **given}), lambda _: None)


def test_missing_scorer_file_is_named(options, tmp_path, monkeypatch):
    monkeypatch.setattr(nets, "BUILTIN_SCORER", tmp_path / "scorer.safetensors")
    monkeypatch.setattr(
        nets.Scorer, "load_builtin", staticmethod(nets.Scorer.load_builtin.__wrapped__)
    )
    with pytest.raises(UnavailableError, match=r"scorer\.safetensors"):
        resolve(options(command="predict", model=None, device="auto"), lambda _: None)


def test_worker_timeout_is_as_requested(options):
    config = resolve(options(worker_timeout=7.0), lambda _: None)
    assert config.resources.silence_seconds == 7.0


def test_other_model_needs_a_head_only_to_call(options):
    config = resolve(options(command="predict"), lambda _: None)
    assert config.classifier.frame_head is None and config.recipe.scorer_sha256
    with pytest.raises(UnavailableError, match="no head comes with the model model"):
        resolve(options(command="predict", calls="head"), lambda _: None)


def test_head_without_a_model_is_for_the_default(options, installed_default, tiny, tmp_path):
    head = tiny.head
    own = save_changed(head, tmp_path / "own.safetensors", threshold=0.75)
    config = resolve(options(command="predict", model=None, head=own), lambda _: None)
    assert config.classifier.frame_head.facts.threshold == 0.75
    assert config.recipe.encoders[0].model == DEFAULT_MODEL
    encoder = replace(head.facts.encoders[0], encoder_id="0" * 16)
    other = save_changed(head, tmp_path / "other.safetensors", encoders=(encoder,))
    with pytest.raises(UnavailableError, match="made for the encoder esm2_tiny") as caught:
        resolve(options(command="predict", model=None, head=other), lambda _: None)
    assert "--model" in caught.value.hint


def save_changed(head: Head, path: Path, **changes: object) -> Path:
    replace(head, facts=replace(head.facts, **changes)).save(path)
    return path


def given_alone(options, **given: object) -> RunConfig:
    """A prediction without a named model."""
    usual = {"device": "auto", "workers": None, "model": None}
    return resolve(options(command="predict", **{**usual, **given}), lambda _: None)


LEAVE_OUT = "It changes no call: leave {} out to run without it and without a GPU."


@pytest.mark.parametrize(
    ("given", "chosen_by", "why"),
    [
        ({"cache": Path("vectors")}, "--cache", LEAVE_OUT),
        ({"esm_batch_size": "512", "embed": "viral"}, "--embed and --esm-batch-size", LEAVE_OUT),
        ({"typed": ("precision", "input")}, "--precision", LEAVE_OUT),  # its default
        ({"head": "of the tiny model"}, "--head", "The head needs its vectors."),
    ],
)
def test_start_names_the_option_that_embeds(
    options, installed_default, tiny, given, chosen_by, why
):
    given = {**given, "head": tiny.head_file} if "head" in given else given
    (said, *_) = given_alone(options, **given).announcements
    reason = f"{DEFAULT_MODEL}, the default model, runs because of {chosen_by}."
    assert said == f"{reason} {why.format(chosen_by)}"
    without = given_alone(options)
    assert not without.recipe.encoders
    assert without.announcements == ("devices: CPU cores; no GPU is used, because no model embeds",)
    config = given_alone(options, model=TINY_MODEL, device="cpu")
    assert config.recipe.encoders and "because of" not in config.announcements[0]


@pytest.mark.parametrize("budget", ["1", "7", "512"])
def test_any_token_budget_gives_the_same_vectors(options, budget):
    config = resolve(options(budget, esm_batch_size=budget, precision="fp32"), lambda _: None)
    plain = resolve(options("plain", precision="fp32"), lambda _: None)
    events: list[object] = []
    run(config, InlineExecutor(), events.append)
    run(plain, InlineExecutor(), lambda _: None)
    batches = [event for event in events if isinstance(event, BatchDone)]
    assert all(event.n_tokens <= int(budget) or len(event.rows) == 1 for event in batches)
    assert max(len(event.rows) for event in batches) == 1 or int(budget) > 7
    assert_same_vectors(vectors(config.output), vectors(plain.output))


@pytest.mark.parametrize("budget", ["0", "-5", "1e3", "512.0", "9" * 5000, "", "many"])
def test_budget_that_is_no_number_is_refused(options, budget):
    with pytest.raises(UsageError, match="--esm-batch-size is") as caught:
        resolve(options(esm_batch_size=budget), lambda _: None)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["esm2_t36_3B_UR50D", "esm2_t48_15B_UR50D"])
def test_run_of_another_model_is_refused_first(options, monkeypatch, tmp_path, name):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    config = resolve(options(), lambda _: None)
    run(config, InlineExecutor(), lambda _: None)
    with pytest.raises(ResumeError, match=f"used the model model, not {name}"):
        resolve(options(model=name, resume=True), lambda _: None)
    asked = options(
        command="predict", model=name, head=None, calls="head", output_dir=tmp_path / "new"
    )
    with pytest.raises(UnavailableError, match=f"no head comes with the model {name}"):
        resolve(asked, lambda _: None)
    assert not (tmp_path / "torch").exists()


def test_other_weights_of_a_published_name_are_refused(options, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    name = "esm2_t6_8M_UR50D"
    path = download.hub_folder() / "esm2_t6_8M_UR50D.pt"
    path.parent.mkdir(parents=True)
    save_fair_esm(make_fair_esm(TINY), path)
    digest = hash_file(path)
    shape = {"n_layers": TINY.n_layers, "dim": TINY.dim}
    file = RemoteFile(url=f"http://127.0.0.1:1/{name}.pt", sha256=digest)
    published = Published(**shape, n_heads=TINY.n_heads, files=(file,))
    monkeypatch.setitem(FAMILIES["esm2"].published, name, published)
    config = resolve(options(model=name), lambda _: None)
    assert config.recipe.encoders[0].sha256 == digest
    save_fair_esm(make_fair_esm(TINY, seed=1), path)
    with pytest.raises(UnavailableError, match=f"is not the published {name}"):
        resolve(options(model=name), lambda _: None)


def test_package_without_its_model_says_so(options, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "EMBEDDED_FOLDER", tmp_path / "nothing")
    with pytest.raises(UnavailableError, match="no such file or folder"):
        resolve(options(model=TINY_MODEL), lambda _: None)


def test_package_head_fits_its_model():
    checkpoint = open_model(TINY_MODEL, lambda _: None)
    checkpoint.verify()
    facts = Head.load(embedded_head()).facts
    assert facts.encoders[0].encoder_id == checkpoint.encoder_id
    assert (facts.dim, facts.encoders[0].layer) == (checkpoint.shape.dim, checkpoint.shape.n_layers)
    assert checkpoint.footprint.file_bytes + embedded_head().stat().st_size <= 8 * 2**20


# Sizes


def test_batch_size_is_auto_or_given(options):
    sized = resolve(options(), lambda _: None)
    given = resolve(options(esm_batch_size="9999"), lambda _: None)
    assert sized.resources.tokens_per_batch == 4096  # of a narrow model on a CPU
    assert given.resources.tokens_per_batch == 9999


def test_large_model_is_converted_once(options, kept, monkeypatch):
    first = resolve(options("first"), lambda _: None)
    (made,) = kept.glob("*.safetensors")
    before = made.stat().st_mtime_ns
    second = resolve(options("second"), lambda _: None)
    assert first.weights == second.weights == (made.resolve(),) != first.checkpoints
    assert made.stat().st_mtime_ns == before
    run(second, ProcessExecutor(second.resources.devices), lambda _: None)

    monkeypatch.undo()  # a small model is not converted
    plain = resolve(options("plain"), lambda _: None)
    assert plain.weights == plain.checkpoints
    assert plain.recipe.fingerprint == second.recipe.fingerprint
    run(plain, InlineExecutor(), lambda _: None)
    assert_same_vectors(vectors(second.output), vectors(plain.output))


def test_run_continues_without_a_converted_copy(options, kept, caplog):
    kept.write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        config = resolve(options(), lambda _: None)
    assert config.weights == config.checkpoints
    assert "cannot be kept" in caplog.text
