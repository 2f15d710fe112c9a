"""Which model a run uses: its name, the default, and where it is found."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, random_esm2
from fair_esm_reference import make_fair_esm, save_fair_esm
from http_server import serving, whole
from labelled_data_helpers import options as training_options
from labelled_data_helpers import write_labelled
from run_helpers import assert_same_vectors, invoke, resolve, run, vectors, write_fasta
from safetensors.numpy import save_file

import virnucpro
from virnucpro.core.atomic_io import hash_file
from virnucpro.core.errors import ResumeError, UnavailableError, UsageError
from virnucpro.core.events import Progress, ShardDone
from virnucpro.core.json_checksum import add_checksum, parse_checked
from virnucpro.engine.local import InlineExecutor
from virnucpro.models.esm2.loading import save_esm2
from virnucpro.models.family import ModelFile
from virnucpro.models.hugging_face import cache_folder, find_snapshot
from virnucpro.models.lookup import (
    embedded_head,
    embedded_model,
    find_model,
    hub_folder,
    open_default,
    open_model,
)
from virnucpro.models.names import DEFAULT_MODEL, TINY_MODEL, TINY_NOTICE
from virnucpro.models.registry import (
    FAMILIES,
    Published,
    RemoteFile,
)
from virnucpro.training.train import train
from virnucpro.training.training_config import TrainingRun, open_training, resolve_training
from virnucpro.viral.head import Head
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.predict_options import PredictOptions

pytestmark = pytest.mark.usefixtures("quick_starts_in_module")

EARLIER_NAME = "esm2_virnucpro"
NOWHERE = "http://127.0.0.1:1"
REPOSITORY = "facebook/published"


@pytest.fixture
def proteins(tmp_path) -> Path:
    """Two short proteins."""
    return write_fasta(tmp_path / "in.faa", {"p1": "MKVLEFPQIL", "p2": "MSTARGWDE"})


@pytest.fixture
def options(tmp_path, contigs, proteins):
    """An extraction of proteins, or a prediction of contigs. Keywords change it."""

    def make(command: str = "extract", folder: str = "run", **changes: object) -> RunOptions:
        kind = {"extract": ExtractOptions, "predict": PredictOptions}[command]
        given: dict[str, object] = {
            "input": (proteins if command == "extract" else contigs,),
            "output_dir": tmp_path / folder,
            **changes,
        }
        return kind(**given)

    return make


# Names


def test_earlier_name_opens_the_same_model():
    assert find_model(EARLIER_NAME) == embedded_model()
    assert open_model(EARLIER_NAME, lambda _: None).name == TINY_MODEL
    assert Head.load(embedded_head()).facts.encoders[0].name == TINY_MODEL


def test_earlier_name_gives_the_same_recipe(options):
    configs = [
        resolve(options(model=name, device="cpu"), lambda _: None)
        for name in (EARLIER_NAME, TINY_MODEL)
    ]
    assert configs[0].recipe == configs[1].recipe
    assert configs[0].models == configs[1].models == (TINY_MODEL,)


def test_run_of_earlier_name_resumes_unchanged(options, caplog):
    config = resolve(options(model=TINY_MODEL, device="cpu"), lambda _: None)
    encoder = replace(config.recipe.encoders[0], model=EARLIER_NAME)
    recipe = replace(config.recipe, encoders=(encoder,))
    earlier = replace(config, recipe=recipe, models=(EARLIER_NAME,))
    run(earlier, InlineExecutor(), lambda _: None)
    before = {name: vector.tolist() for name, vector in vectors(config.output).items()}
    assert EARLIER_NAME in (config.output / "run.json").read_text()

    (config.output / "records.tsv").unlink()
    events: list[object] = []
    with caplog.at_level(logging.WARNING):
        again = resolve(options(model=TINY_MODEL, device="cpu", resume=True), lambda _: None)
        run(again, InlineExecutor(), events.append)
    assert not [event for event in events if isinstance(event, ShardDone)], "nothing is embedded"
    assert not caplog.records
    assert {name: vector.tolist() for name, vector in vectors(config.output).items()} == before
    assert EARLIER_NAME not in (config.output / "run.json").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "-i", "{contigs}", "-o", "run", "--model"],
        ["extract", "-i", "{contigs}", "-o", "run", "--model"],
        ["models", "info"],
    ],
    ids=" ".join,
)
def test_removed_model_names_alternatives(words, contigs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = invoke(*(word.format(contigs=contigs) for word in words), "cnn_virnucpro")
    assert code == 69 and "VirNucPro no longer has the model cnn_virnucpro" in said
    assert f"index of known viruses, and extract embeds with {DEFAULT_MODEL}" in said
    assert not (tmp_path / "run").exists()


def test_file_of_removed_model_is_recognised(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"head.weight": np.zeros(2, np.float32)}, path, {"virnucpro_codons": "{}"})
    code, said = invoke("models", "info", path)
    assert code == 69 and "is cnn_virnucpro, a model that VirNucPro no longer has" in said
    assert f"extract embeds with {DEFAULT_MODEL}" in said


@pytest.mark.parametrize("words", [["status"], ["work"], ["predict", "--resume", "-i", "in", "-o"]])
def test_run_of_removed_model_is_refused(words, options):
    config = resolve(options("predict", model=TINY_MODEL, device="cpu"), lambda _: None)
    run(config, InlineExecutor(), lambda _: None)
    manifest = config.output / "run.json"
    stored = parse_checked(manifest.read_bytes())
    (encoder,) = stored["recipe"]["encoders"]
    encoder |= {"family": "codons", "model": "cnn_virnucpro", "reads": "chunk"}
    manifest.write_text(add_checksum(stored))
    code, said = invoke(*words, config.output)
    assert code == 73
    assert "a run with the model cnn_virnucpro, which VirNucPro no longer has" in said
    assert "choose another --output-dir, or start again with --force" in said


def test_built_in_model_is_announced_once(options):
    named = resolve(options(model=TINY_MODEL, device="cpu"), lambda _: None)
    assert sum(TINY_NOTICE in line for line in named.announcements) == 1
    assert f"model {TINY_MODEL} ({TINY_NOTICE}): 6 layers" in " ".join(named.announcements)


# The default: a small ESM-2, published under its name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> bytes:
    """The content of the published file."""
    path = tmp_path_factory.mktemp("published") / "model.pt"
    return save_fair_esm(make_fair_esm(TINY), path).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A published folder of the same shape with other weights, which show that it was used."""
    path = tmp_path_factory.mktemp("published") / "folder"
    save_esm2(path, random_esm2(TINY, seed=1))
    return path


@pytest.fixture
def publish(tmp_path, monkeypatch, checkpoint, folder) -> Callable[[str], None]:
    """Publish the small model at an address that no server has until a test starts one."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hugging_face"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def publish(address: str = NOWHERE) -> None:
        file = RemoteFile(
            url=f"{address}/{DEFAULT_MODEL}.pt",
            n_bytes=len(checkpoint),
            sha256=hashlib.sha256(checkpoint).hexdigest(),
        )
        published = Published(
            n_layers=TINY.n_layers,
            dim=TINY.dim,
            n_heads=TINY.n_heads,
            files=(file,),
            folder_sha256=hash_file(folder / "model.safetensors"),
            repository=REPOSITORY,
        )
        monkeypatch.setitem(FAMILIES["esm2"].published, DEFAULT_MODEL, published)

    publish()
    return publish


@pytest.fixture
def downloaded(publish, checkpoint) -> Path:
    """The published file in torch hub's folder."""
    hub_folder().mkdir(parents=True)
    path = hub_folder() / f"{DEFAULT_MODEL}.pt"
    path.write_bytes(checkpoint)
    return path


def cache_snapshot(cache: Path, folder: Path, digest: str | None = None) -> Path:
    """Put a folder into a cache as huggingface_hub does: links to files named by their hash."""
    repository = cache / f"models--{REPOSITORY.replace('/', '--')}"
    digest = digest or hash_file(folder / "model.safetensors")
    for name, blob in (("model.safetensors", digest), ("config.json", "0123abcd")):
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, repository / "blobs" / blob)
        link = repository / "snapshots" / "0f1e2d" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../blobs/{blob}")
    return repository / "snapshots" / "0f1e2d"


def test_default_is_the_published_650m():
    published = FAMILIES["esm2"].published[DEFAULT_MODEL]
    assert DEFAULT_MODEL == "esm2_t33_650M_UR50D"
    assert (published.n_layers, published.dim) == (33, 1280)
    assert published.repository == "facebook/esm2_t33_650M_UR50D"
    assert published.files[0].sha256 and published.folder_sha256


def test_default_is_downloaded_once(publish, checkpoint):
    progress: list[Progress] = []
    with serving(whole(checkpoint)) as (address, asked):
        publish(address)
        model = open_default(progress.append)
        assert open_default(progress.append) == model
    assert asked == [f"/models/{DEFAULT_MODEL}.pt"]
    assert model.path == hub_folder() / f"{DEFAULT_MODEL}.pt"
    assert model.path.read_bytes() == checkpoint
    assert progress[-1].done == progress[-1].total == len(checkpoint)


def test_download_of_other_bytes_is_refused(publish, checkpoint):
    with serving(whole(checkpoint[:-1] + b"x")) as (address, _):
        publish(address)
        with pytest.raises(UnavailableError, match=f"is not {DEFAULT_MODEL}.pt: its SHA-256 is"):
            open_default(lambda _: None)
    assert not list(hub_folder().iterdir())


def test_default_is_found_in_torch_hub(options, downloaded):
    config = resolve(options(device="cpu"), lambda _: None)
    assert config.checkpoints == (downloaded.resolve(),)
    assert config.recipe.encoders[0].model == DEFAULT_MODEL
    assert config.models == (DEFAULT_MODEL,)


def test_default_is_found_in_hugging_face_cache(options, publish, folder, tmp_path):
    snapshot = cache_snapshot(tmp_path / "cache", folder)
    found = resolve(options(device="cpu", hugging_face=tmp_path / "cache"), lambda _: None)
    assert found.checkpoints == (snapshot.resolve(),)
    assert found.recipe.encoders[0].model == DEFAULT_MODEL
    run(found, InlineExecutor(), lambda _: None)
    by_path = resolve(options(folder="plain", model=str(folder), device="cpu"), lambda _: None)
    run(by_path, InlineExecutor(), lambda _: None)
    assert_same_vectors(vectors(found.output), vectors(by_path.output))


def test_other_revisions_in_the_cache_are_passed_over(publish, folder, tmp_path):
    cache_snapshot(tmp_path / "cache", folder, digest="f" * 64)
    with pytest.raises(UnavailableError, match="the download failed"):
        open_default(lambda _: None, tmp_path / "cache")


def test_incomplete_snapshot_is_passed_over(folder, tmp_path):
    files = {"model.safetensors": hash_file(folder / "model.safetensors"), "config.json": ""}
    snapshot = cache_snapshot(tmp_path, folder)
    assert find_snapshot(tmp_path, REPOSITORY, files) == snapshot
    (snapshot / "config.json").resolve().unlink()
    assert find_snapshot(tmp_path, REPOSITORY, files) is None
    assert find_snapshot(tmp_path / "none", REPOSITORY, files) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "HOME": "/h"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "/b", "HOME": "/h"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/huggingface/hub"),
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({}, None),
    ],
)
def test_cache_folder_follows_the_environment(environment, expected):
    assert cache_folder(environment) == (Path(expected) if expected else None)


def test_models_list_finds_the_cached_default(publish, folder, tmp_path):
    def listed() -> dict[str, object]:
        code, said = invoke("models", "list", "--json")
        assert code == 0
        return next(one for one in json.loads(said) if one["name"] == DEFAULT_MODEL)

    assert listed()["is_default"] and not listed()["installed"]
    snapshot = cache_snapshot(tmp_path / "hugging_face", folder)
    assert listed()["installed"] and listed()["path"] == str(snapshot)
    assert listed()["dim"] == TINY.dim
    (line,) = (one for one in invoke("models", "list")[1].splitlines() if DEFAULT_MODEL in one)
    assert line.split()[-3:] == ["default", "yes", str(snapshot)]
    assert "is complete" in invoke("models", "verify", DEFAULT_MODEL)[1]


# Without the default


THREE_WAYS = (
    f"virnucpro models download {DEFAULT_MODEL} ",
    "virnucpro models import FILE ",
    f"--model {TINY_MODEL} ",
)


NEEDS_PARSL = pytest.mark.skipif(not find_spec("parsl"), reason="needs the extra cluster")


@pytest.mark.parametrize(
    "words",
    [
        "extract",
        "predict --device cpu",
        "predict --precision fp32",
        "predict --esm-batch-size 512",
        "predict --worker-timeout 60",
        pytest.param("predict --precision fp32 --executor parsl", marks=NEEDS_PARSL),
        "predict --cache vectors",
        "predict --embed viral",
        "predict --precision fp32 --plan-only",
        "extract --precision fp32 --plan-only",
    ],
)
def test_missing_default_ends_with_69(publish, contigs, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    command, *more = words.split()
    code, said = invoke(command, "-q", "-i", contigs, "-o", "run", *more)
    assert code == 69, said
    assert f"{DEFAULT_MODEL}, the default model, is not on this machine" in said
    assert all(way in said for way in THREE_WAYS)
    assert not Path("run").exists() and not Path("vectors").exists()


def test_missing_default_leaves_the_folder_alone(publish, contigs, tmp_path):
    given = ("predict", "-q", "-i", contigs, "-o", tmp_path / "run")
    assert invoke(*given)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert invoke(*given, "--device", "cpu", "--force")[0] == 69
    after = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert after == before and len(before) > 5


def test_unwritable_hub_ends_with_69(publish, contigs, tmp_path):
    (tmp_path / "torch").write_text("a file where the folder would be")
    code, said = invoke("extract", "-q", "-i", contigs, "-o", tmp_path / "run")
    assert code == 69 and all(way in said for way in THREE_WAYS)


def test_plain_predict_needs_no_model(publish, contigs, tmp_path):
    assert invoke("predict", "-q", "-i", contigs, "-o", tmp_path / "run")[0] == 0
    assert not (tmp_path / "torch").exists() and not (tmp_path / "run" / "features").exists()


def test_python_raises_before_any_work(publish, tmp_path):
    with pytest.raises(UnavailableError) as caught:
        virnucpro.embed([("p", "MKVLEFPQIL")])
    assert f"model={TINY_MODEL!r}" in caught.value.hint
    with pytest.raises(UnavailableError):
        virnucpro.predict([("c", "ACGT" * 60)], output_dir=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / "run.json").exists()


def test_python_embeds_with_the_default(downloaded):
    proteins = [("p", "MKVLEFPQIL"), ("q", "MSTARGWDE")]
    by_default = virnucpro.embed(proteins, device="cpu", workers=1)
    named = virnucpro.embed(proteins, str(downloaded), device="cpu", workers=1)
    assert by_default.ids == named.ids and (by_default.vectors == named.vectors).all()


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"device": "cpu", "gpus": "0"}, UsageError, "--gpus does not go with"),
        ({"device": "cpu", "esm_batch_size": "0"}, UsageError, "--esm-batch-size is '0'"),
        ({"device": "cpu", "precision": "fp16"}, UnavailableError, "fp16 is not possible"),
        ({"calls": "head"}, UnavailableError, f"no head comes with the model {DEFAULT_MODEL}"),
        ({"head": embedded_head()}, UnavailableError, f"made for the encoder {TINY_MODEL}"),
    ],
)
def test_useless_download_is_refused(options, publish, given, error, reason):
    with serving(lambda _: None) as (address, asked):
        publish(address)
        with pytest.raises(error, match=reason):
            resolve(options("predict", **given), lambda _: None)
    assert not asked


# Runs with the default model


def test_default_model_changes_no_call(options, downloaded):
    plain = resolve(options("predict", "plain"), lambda _: None)
    embedded = resolve(options("predict", "embedded", device="cpu", workers=1), lambda _: None)
    for config in (plain, embedded):
        run(config, InlineExecutor(), lambda _: None)
    assert vectors(embedded.output)
    for name in ("predictions.tsv", "viruses.tsv", "viruses.fasta", "viral.fasta"):
        assert (plain.output / name).read_bytes() == (embedded.output / name).read_bytes()


def test_resume_keeps_the_model(options, publish, tiny, tmp_path):
    for command in ("extract", "predict"):
        given = {"model": str(tiny.model), "device": "cpu", "workers": 1, "precision": "fp32"}
        first = resolve(options(command, command, **given), lambda _: None)
        run(first, InlineExecutor(), lambda _: None)
        again = resolve(options(command, command, resume=True, device="cpu"), lambda _: None)
        assert again.recipe == first.recipe and again.models == first.models
        run(again, InlineExecutor(), lambda _: None)
        stored = json.loads((tmp_path / command / "run.json").read_text())
        assert stored["tables"]["model"] == str(tiny.model)


def test_resume_keeps_the_recorded_default(options, downloaded):
    run(resolve(options(device="cpu"), lambda _: None), InlineExecutor(), lambda _: None)
    again = resolve(options(resume=True, device="cpu"), lambda _: None)
    assert again.models == (DEFAULT_MODEL,)
    assert not any("because of" in line for line in again.announcements)


def test_resume_of_the_scorer_takes_no_model(options, downloaded):
    run(resolve(options("predict"), lambda _: None), InlineExecutor(), lambda _: None)
    assert not resolve(options("predict", resume=True), lambda _: None).recipe.encoders
    config = resolve(options("predict", resume=True, device="cpu"), lambda _: None)
    with pytest.raises(ResumeError, match=f"it has the scorer, not the model {DEFAULT_MODEL}"):
        run(config, InlineExecutor(), lambda _: None)


# Training


@pytest.fixture
def labelled(tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    return write_labelled(tmp_path / "data", n_groups=4, per_group=1)


def opened(data: Path, **changes: object) -> TrainingRun:
    """Open a training that is about to make its first step."""
    asked = training_options(data, data.parents[1] / "out", **changes)
    training, _ = resolve_training(asked, lambda _: None)
    training.output.mkdir(exist_ok=True)
    open_training(training, lambda _: None)
    return training


def test_training_uses_the_default(labelled, installed_default):
    training = opened(labelled)
    assert training.encoder.name == DEFAULT_MODEL
    assert training.encoder.path == installed_default


def test_training_without_the_default_is_refused(labelled, publish, tmp_path):
    with pytest.raises(UnavailableError, match="the default model, is not on this machine"):
        opened(labelled)
    assert not (tmp_path / "out").exists()


def test_resumed_training_keeps_its_model(labelled, tiny, installed_default):
    first = opened(labelled, model=str(tiny.model))
    again = opened(labelled, resume=True)
    assert again.encoder.path == first.encoder.path == tiny.model
    assert again.options.model == str(tiny.model)


def test_resumed_training_of_earlier_name(labelled, publish, tmp_path):
    opened(labelled, model=TINY_MODEL)
    facts = tmp_path / "out" / "training.json"
    stored = json.loads(facts.read_text())
    stored["encoder"] = f"/earlier/virnucpro/embedded/{EARLIER_NAME}"
    facts.write_text(json.dumps(stored))
    assert opened(labelled, resume=True).options.model == TINY_MODEL


def test_model_trained_on_a_cached_default_opens(labelled, publish, folder, tmp_path):
    """The cache of Hugging Face is not searched for the base of a trained model."""
    snapshot = cache_snapshot(tmp_path / "cache", folder)
    asked = training_options(labelled, tmp_path / "out", hugging_face=tmp_path / "cache", epochs=1)
    train(asked, lambda _: None)
    trained = open_model(str(tmp_path / "out" / "model"), lambda _: None)
    assert trained.path == snapshot and trained.head == tmp_path / "out" / "model" / ModelFile.HEAD
