"""Untrusted files run no code, name no file, and reach no other file and no network.

Nothing in a run folder leads a command out of it.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import Tiny, open_dna
from dnabert_reference import write_dnabert
from forkserver_runner import run_command, virnucpro
from malformed_inputs import Payload
from run_helpers import again, assert_same_vectors, execute, resolve, run_inline, tables, vectors
from training_helpers import Training, run_here, settings

from virnucpro.cli.exit_codes import CommandExit, exit_on_error
from virnucpro.core.errors import FeatureFileError, OutputError
from virnucpro.core.events import EmbeddingStarted, EventHandler, Progress, RunEvent
from virnucpro.core.recipe import EncoderSpec
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import Embeddings, Failure
from virnucpro.core.yaml_config import read_config
from virnucpro.engine.local import ProcessExecutor
from virnucpro.models.converted import prepare
from virnucpro.models.esm2.loading import load_esm2
from virnucpro.models.esm2.model_files import inspect_esm2
from virnucpro.results.outputs import open_run_dir
from virnucpro.results.report.run_report import report_folder
from virnucpro.store.feature_file import (
    checksummed_label,
    read_embeddings,
    read_label,
    write_embeddings,
)
from virnucpro.store.feature_index import read_shown
from virnucpro.store.feature_store import open_stores
from virnucpro.training.evaluation.evaluate import EvaluationSpec
from virnucpro.training.options import EvaluateOptions
from virnucpro.workflows.find_proviruses import find_regions
from virnucpro.workflows.predict import predict
from virnucpro.workflows.predict_options import PredictOptions, RegionsOptions
from virnucpro.workflows.run_config import RunConfig


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    return tmp_path / "trap"


def as_pickle_alone(content: object) -> bytes:
    return pickle.dumps(content, protocol=2)  # as torch writes it


def as_zip(content: object) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def as_before_torch_1_6(content: object) -> bytes:
    out = io.BytesIO()
    torch.save(content, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


PICKLED = {"zip": as_zip, "before torch 1.6": as_before_torch_1_6, "bare": as_pickle_alone}
every_pickle = pytest.mark.parametrize("as_pickle", PICKLED.values(), ids=PICKLED)


def ending_of(work: Callable[[], object]) -> tuple[int, str]:
    """Return the exit code and the output that a command would have."""
    shown = io.StringIO()
    with pytest.raises(CommandExit) as finished, redirect_stderr(shown), exit_on_error():
        work()
    assert "Traceback" not in shown.getvalue() and "hint: " in shown.getvalue()
    return finished.value.exit_code, shown.getvalue()


def options(tiny: Tiny, folder: Path, **changes: object) -> PredictOptions:
    fasta = folder / "in.fa"
    fasta.write_text(">a\nATGGCAGCAGCTGCTGGTGCAGCTGCAGGAGCTGCTGCAGGTGCAGCTGCT\n")
    files = {"input": (fasta,), "output_dir": folder / "run"}
    device = {"device": "cpu", "workers": 1, "precision": "fp32"}
    models = {"model": str(tiny.model), "head": tiny.head_file}
    return PredictOptions(**{**files, **device, **models, **changes})


# Code


def test_traps_of_these_tests_work(trap) -> None:
    pickle.loads(as_pickle_alone(Payload(trap)))  # noqa: S301
    assert trap.exists()


PLACES = ("model", "cfg", "args", "extra")
HEADS = ("500_model.pth", "head.safetensors", "head")
IN_FOLDERS = ("folder/pytorch_model.bin", "folder/model.safetensors")


@every_pickle
@pytest.mark.parametrize(
    ("option", "name", "place", "why"),
    [
        *(("model", "x.pt", place, "x.pt contains more than") for place in PLACES),
        *(("model", name, "model", "safetensors") for name in IN_FOLDERS),
        *(("head", name, "layers.0.weight", f"{name} is not a VirNucPro head") for name in HEADS),
    ],
)
def test_model_or_head_with_code_is_refused(
    tiny, tmp_path, trap, as_pickle, option, name, place, why
) -> None:
    path = tmp_path / name
    (tmp_path / "folder").mkdir()
    shutil.copy(tiny.model / "config.json", tmp_path / "folder")
    content = {"model": {}, "cfg": {"model": argparse.Namespace()}, place: Payload(trap)}
    path.write_bytes(as_pickle(content))
    weights = path.parent if name in IN_FOLDERS else path
    given = options(tiny, tmp_path, **{option: str(weights) if option == "model" else weights})
    exit_code, shown = ending_of(lambda: resolve(given, lambda _: None))
    assert exit_code == 69 and why in shown
    assert not trap.exists() and not given.output_dir.exists()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("head.safetensors", "virnucpro_head"),
        ("encoder.safetensors", "virnucpro_encoder"),
        ("esm2/model.safetensors", ""),
        ("bert/model.safetensors", ""),
    ],
)
def test_huge_header_claim_is_refused_early(tiny, tmp_path, name, entry) -> None:
    write_dnabert(tmp_path / "bert", "model.safetensors")
    (tmp_path / "esm2").mkdir()
    shutil.copy(tiny.model / "config.json", tmp_path / "esm2")
    path = tmp_path / name
    n_bytes = 90_000_000
    with path.open("wb") as handle:  # the rest is a hole
        handle.write(n_bytes.to_bytes(8, "little") + f'{{"__metadata__":{{"{entry}":'.encode())
        handle.truncate(2 * n_bytes)
    weights = path if path.parent == tmp_path else path.parent
    given = options(tiny, tmp_path, head=path) if "head" in name else None
    given = given or options(tiny, tmp_path, model=str(weights))
    exit_code, shown = ending_of(lambda: resolve(given, lambda _: None))
    assert exit_code == 69
    assert "it claims a header of 90,000,000 bytes" in " ".join(shown.split())


def test_pickle_beside_weights_is_not_read(tiny, tmp_path, trap) -> None:
    folder = shutil.copytree(tiny.model, tmp_path / "esm2_tiny")
    (folder / "pytorch_model.bin").write_bytes(as_pickle_alone(Payload(trap)))
    resolve(options(tiny, tmp_path, model=str(folder)), lambda _: None)
    assert not trap.exists()


@every_pickle
def test_converted_model_with_code_is_refused(tiny, tmp_path, trap, as_pickle, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    checkpoint = inspect_esm2(tiny.model)
    facts = checkpoint, "bf16", lambda _: None
    converted, _ = prepare(*facts)
    converted.write_bytes(as_pickle(Payload(trap)))
    work = lambda: load_esm2(converted, 2, torch.bfloat16, torch.device("cpu"))  # noqa: E731
    exit_code, shown = ending_of(work)
    assert exit_code == 69 and "cannot be used" in shown
    assert prepare(*facts)[0] == converted
    work()  # the copy was remade
    assert not trap.exists()


@every_pickle
def test_checkpoint_with_code_is_refused(tmp_path, trap, as_pickle) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    content = {"module": {}, "optimizer": {}, "state": Payload(trap), "settings": {}}
    (folder / "epoch_0001.pt").write_bytes(as_pickle(content))
    training = Training(tmp_path, settings(epochs=2))
    exit_code, shown = ending_of(lambda: run_here(training))
    assert (
        exit_code == 73 and "epoch_0001.pt cannot be read" in shown and "more than tensors" in shown
    )
    assert not trap.exists()


@pytest.mark.parametrize("tag", ["apply:os.mkdir", "new:os.mkdir", "name:os.mkdir"])
def test_config_with_code_is_refused(tmp_path, trap, tag) -> None:
    config = tmp_path / "train.yaml"
    value = "''" if tag.startswith("name") else f"['{trap}']"
    config.write_text(f"epochs: !!python/object/{tag} {value}\n")
    with pytest.raises(CommandExit) as finished, exit_on_error():
        read_config(config, {"epochs"})
    assert finished.value.exit_code == 64
    assert not trap.exists()


# Feature files of others

ATTRIBUTES = {"model": "tiny", "layer": 2, "pooling": "mean", "fingerprint": "f"}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A user's file in a form that HDF5 would read."""
    path = tmp_path / "secret.h5"
    with h5py.File(path, "w") as h5:
        h5["embeddings"] = np.full((1, 4), 4711, dtype=np.float32)
        h5["ids"] = np.array(["secret"], dtype=object)
        h5["lengths"] = np.ones(1, dtype=np.int32)
    return path


def forge(
    path: Path, change: Callable[[h5py.File], None], failed_records: Sequence[str] = ()
) -> None:
    """Write a feature file with a correct label and one change."""
    good = Embeddings(("a",), np.ones(1, dtype=np.int32), np.ones((1, 4), dtype=np.float32))
    write_embeddings(path, good, ATTRIBUTES, SafeDir(path.parent))
    change_content(path, change, failed_records)


def change_content(
    path: Path, change: Callable[[h5py.File], None], failed_records: Sequence[str] = ()
) -> None:
    label = read_label(path, {})
    path.write_bytes(path.read_bytes()[: label.n_bytes])
    with h5py.File(path, "r+") as h5:
        change(h5)
    content = path.read_bytes()
    path.write_bytes(content + checksummed_label(content, label.attributes, failed_records))


def external_link(h5: h5py.File, secret: Path, name: str) -> None:
    del h5[name]
    h5[name] = h5py.ExternalLink(str(secret), name)


def soft_link_to_one(h5: h5py.File, secret: Path, name: str) -> None:
    del h5[name]
    h5["there"] = h5py.ExternalLink(str(secret), name)
    h5[name] = h5py.SoftLink("/there")


def virtual_dataset(h5: h5py.File, secret: Path, name: str) -> None:
    shape = h5[name].shape
    kind = h5[name].dtype
    del h5[name]
    layout = h5py.VirtualLayout(shape, kind)
    layout[:] = h5py.VirtualSource(str(secret), name, shape)
    h5.create_virtual_dataset(name, layout)


def raw_bytes_of_a_file(h5: h5py.File, secret: Path, name: str) -> None:
    shape = h5[name].shape
    kind = h5[name].dtype
    del h5[name]
    kind = np.dtype(np.float32) if kind.kind == "O" else kind
    h5.create_dataset(name, shape, kind, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


@pytest.mark.parametrize("name", ["ids", "lengths", "embeddings"])
@pytest.mark.parametrize(
    "point", [external_link, soft_link_to_one, virtual_dataset, raw_bytes_of_a_file]
)
def test_feature_file_with_external_link_is_refused(tmp_path, secret, point, name) -> None:
    path = tmp_path / "000000.h5"
    forge(path, lambda h5: None)
    assert read_embeddings(path, ATTRIBUTES).ids == ("a",)
    forge(path, lambda h5: point(h5, secret, name))
    with pytest.raises(FeatureFileError, match=r"000000\.h5 is damaged or truncated"):
        read_embeddings(path, ATTRIBUTES)


def test_failures_are_not_read_from_another_file(tmp_path, secret) -> None:
    path = tmp_path / "000000.h5"
    forge(path, lambda h5: external_link(h5, secret, "failed"), failed_records=["a"])
    with pytest.raises(FeatureFileError, match="failed is a link"):
        read_embeddings(path, ATTRIBUTES)


@pytest.mark.parametrize("name", ["ids", "lengths", "embeddings"])
def test_feature_file_with_pickle_runs_no_code(tmp_path, trap, name) -> None:
    path = tmp_path / "000000.h5"

    def change(h5: h5py.File) -> None:
        del h5[name]
        h5[name] = np.array([np.void(as_pickle_alone(Payload(trap)))])

    forge(path, change)
    with pytest.raises(FeatureFileError, match=r"000000\.h5 is damaged or truncated"):
        read_embeddings(path, ATTRIBUTES)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["{folder}/secret.h5", "features/../../secret.h5"])
def test_older_links_elsewhere_are_refused(tmp_path, secret, name) -> None:
    """``features.h5`` of an older run linked feature files by their paths."""
    (tmp_path / "run/features").mkdir(parents=True)
    encoder = EncoderSpec(model="m", sha256="", layer=1, pooling="mean", precision="fp32", dim=4)
    (store,) = open_stores(tmp_path / "run/features", [encoder], "of the recipe")
    layout = h5py.VirtualLayout((1,), h5py.string_dtype())
    layout[:] = h5py.VirtualSource(name.format(folder=tmp_path), "ids", (1,))[:1]
    with h5py.File(store.index, "w") as h5:
        h5.create_group("groups/000000").create_virtual_dataset("ids", layout)
    with pytest.raises(FeatureFileError, match=r"secret\.h5") as caught:
        next(read_shown(store))
    assert str(store.folder / "secret.h5") in str(caught.value)


def run_of_one_record(config: RunConfig, tiny: Tiny) -> RunConfig:
    """A finished run."""
    (fasta,) = config.options.input
    fasta.write_text(f">a\n{open_dna(300, np.random.default_rng(3))}\n")
    run_inline(config, tiny.head if config.recipe.command == "predict" else None)
    return config


def change_width(h5: h5py.File, width: int, n_rows: int) -> None:
    del h5["embeddings"]
    h5["embeddings"] = np.ones((n_rows, width), dtype=np.float32)


@pytest.mark.parametrize("command", ["predict", "extract"])
@pytest.mark.parametrize("width", [0, 1, 33])
def test_vectors_of_wrong_width_are_remade(tmp_path, tiny, make_config, width, command) -> None:
    config = run_of_one_record(make_config(tmp_path / "in.fa", command=command), tiny)
    before = vectors(config.output)
    path = config.output / "features" / "000000.h5"
    outputs = {table: table.read_bytes() for table in config.output.glob("*prediction*")}
    assert bool(outputs) == (command == "predict")
    change_content(path, lambda h5: change_width(h5, width, len(before)))
    read_embeddings(path, {})  # but for the width it is a feature file
    head = tiny.head if command == "predict" else None
    assert run_inline(again(config, resume=True), head).n_tokens > 0
    assert_same_vectors(vectors(config.output), before)
    assert {table: table.read_bytes() for table in outputs} == outputs


def test_failures_only_file_is_kept(tmp_path) -> None:
    path = tmp_path / "000000.h5"
    failures = (Failure("a", "a", "too large"),)
    nothing = np.empty(0, dtype=np.int32)
    for width in (0, 32):
        rows = np.empty((0, width), dtype=np.float32)
        write_embeddings(
            path, Embeddings((), nothing, rows, failures=failures), ATTRIBUTES, SafeDir(path.parent)
        )
        assert read_embeddings(path, ATTRIBUTES, 32).failures == failures
    write_embeddings(
        path,
        Embeddings((), nothing, rows[:, :7], failures=failures),
        ATTRIBUTES,
        SafeDir(path.parent),
    )
    with pytest.raises(FeatureFileError, match="7 values of 32"):
        read_embeddings(path, ATTRIBUTES, 32)


def test_foreign_run_folder_is_repaired(tmp_path, tiny, make_config) -> None:
    """A shard file that takes its vectors from elsewhere is remade."""
    config = run_of_one_record(make_config(tmp_path / "in.fa"), tiny)
    before = tables(config.output)
    path = config.output / "features" / "000000.h5"
    other = tmp_path / "other.h5"
    other.write_bytes(path.read_bytes())
    change_content(other, lambda h5: h5["embeddings"].write_direct(-h5["embeddings"][:]))
    change_content(path, lambda h5: virtual_dataset(h5, other, "embeddings"))
    summary = run_inline(again(config, resume=True), tiny.head)
    assert summary.n_tokens > 0
    assert tables(config.output) == before


# Links

FILES_OF_A_RUN = (".lock", ".lock.held", "virnucpro.log", "run.json", "predictions.tsv")
FILES_OF_A_RUN += ("viral.fasta", "features.h5", "failed_files.txt", "features", "shards", "inputs")


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def put_outside(path: Path, outside: Path) -> None:
    """Move a file or folder of a run elsewhere, and put a link in its place."""
    if not path.exists():
        path.mkdir() if path.name == "inputs" else path.touch()
    if path.is_file():
        path.write_bytes(path.read_bytes() + b"precious\n")
    path.rename(outside / path.name)
    if (outside / path.name).is_dir():
        (outside / path.name / "000077.h5").write_bytes(b"precious")
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("name", FILES_OF_A_RUN)
def test_run_folder_link_is_not_followed(tmp_path, outside, tiny, make_config, name) -> None:
    config = make_config(tmp_path / "in.fa", keep_intermediate=True)
    run_of_one_record(config, tiny)
    put_outside(config.output / name, outside)
    before = content_of(outside)
    for how in ({}, {"resume": True}, {"force": True}):
        exit_code, shown = ending_of(partial(run_inline, again(config, **how), tiny.head))
        assert exit_code == 73
        assert f"{name} is a link to {outside / name}" in shown
        given = options(tiny, tmp_path, output_dir=config.output, **how)
        assert ending_of(partial(predict, given, print)) == (exit_code, shown)
        assert content_of(outside) == before and (config.output / name).is_symlink()


def scored(folder: Path, **changes: object) -> Path:
    """A finished run of the scorer on two files, with tables per file. -> its folder"""
    rng = np.random.default_rng(4)
    for name in "ab":
        (folder / f"{name}.fa").write_text(f">{name}\n{open_dna(900, rng)}\n")
    predict_again(folder, **changes)
    return folder / "run"


def predict_again(folder: Path, on_event: EventHandler = lambda _: None, **changes: object) -> None:
    inputs = (folder / "a.fa", folder / "b.fa")
    usual = {"input": inputs, "output_dir": folder / "run", "per_file": True}
    execute(PredictOptions(**usual | changes), on_event, lambda _: ProcessExecutor(()))


COMMANDS = {
    "predict": lambda folder: predict_again(folder),
    "resume": lambda folder: predict_again(folder, resume=True),
    "force": lambda folder: predict_again(folder, force=True),
    "regions": lambda folder: find_regions(RegionsOptions(folder=folder / "run"), lambda _: None),
    "report": lambda folder: report_folder(folder / "run"),
}


@pytest.mark.parametrize("name", ["samples", "samples/b", "logs", ".planned.tmp", ".parsl.tmp"])
def test_no_command_follows_a_link_at_any_depth(tmp_path, outside, name) -> None:
    run = scored(tmp_path)
    if not (run / name).exists():
        (run / name).mkdir()
        (run / name / "precious").touch()
    put_outside(run / name, outside)
    before = content_of(outside)
    inside = content_of(run)
    for command in COMMANDS.values():
        exit_code, shown = ending_of(partial(command, tmp_path))
        assert exit_code == 73
        assert f"{run / name} is a link to {outside / Path(name).name}" in shown
        assert content_of(outside) == before and (run / name).is_symlink()
        assert content_of(run) == inside  # not even the log


def test_link_in_place_of_an_output_is_replaced(tmp_path) -> None:
    """The linked file is unchanged."""
    run = scored(tmp_path)
    mine = tmp_path / "mine"
    before = content_of(run / "samples")
    mine.write_text("precious")
    for name in ("predictions.tsv", "viral.fasta"):
        (run / "samples/a" / name).unlink()
        (run / "samples/a" / name).symlink_to(mine)
    predict_again(tmp_path, resume=True)
    assert mine.read_text() == "precious" and content_of(run / "samples") == before
    assert not any(path.is_symlink() for path in run.rglob("*"))


class Placing:
    """Moves a file or folder of a run elsewhere at the first event of a kind."""

    def __init__(self, path: Path, outside: Path, kind: type) -> None:
        self.path = path
        self.outside = outside
        self.kind = kind
        self.before: dict[str, bytes] = {}  # content outside the folder afterwards

    def __call__(self, event: RunEvent) -> None:
        if not self.before and isinstance(event, self.kind):
            put_outside(self.path, self.outside)
            self.before = content_of(self.outside)


@pytest.mark.parametrize("command", ["resume", "regions"])
def test_link_placed_during_a_command(tmp_path, outside, command) -> None:
    """After all checks at its start."""
    run = scored(tmp_path)
    place = Placing(run / "samples/b", outside, Progress)
    if command == "resume":
        go = partial(predict_again, tmp_path, place, resume=True)
    else:
        go = partial(find_regions, RegionsOptions(folder=run), place)
    exit_code, shown = ending_of(go)
    assert exit_code == 73 and f"{run / 'samples/b'} is a link to {outside / 'b'}" in shown
    assert content_of(outside) == place.before
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["features", "shards"])
def test_link_placed_during_embedding(tmp_path, outside, tiny, make_config, name) -> None:
    fasta = tmp_path / "in.fa"
    fasta.write_text(f">a\n{open_dna(300, np.random.default_rng(3))}\n")
    config = make_config(fasta)
    place = Placing(config.output / name, outside, EmbeddingStarted)
    exit_code, shown = ending_of(partial(run_inline, config, tiny.head, place))
    assert exit_code == 73 and f"{config.output / name} is a link to" in shown
    assert place.before and content_of(outside) == place.before


def test_link_placed_before_an_input_is_copied(tmp_path, outside) -> None:
    """An input inside the run folder is copied, so that a later start finds it."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "in.fa").write_text(f">a\n{open_dna(900, np.random.default_rng(3))}\n")

    def place(_: RunEvent) -> None:
        if not (run / "inputs").is_symlink():
            (run / "inputs").symlink_to(outside)

    exit_code, shown = ending_of(partial(predict_again, tmp_path, place, input=(run / "in.fa",)))
    assert exit_code == 73 and f"{run / 'inputs'} is a link to {outside}" in shown
    assert not list(outside.iterdir())


@pytest.mark.parametrize("command", ["resume", "force", "regions", "report"])
def test_locking_commands_sweep_leftovers(tmp_path, command) -> None:
    run = scored(tmp_path)
    left = [".predictions.tsv.0123abcd.tmp", "samples/b/.viral.fasta.0123abcd.tmp"]
    left += [".planned.tmp/shards/000000.faa", "features/.000000.h5.0123abcd.tmp"]
    left += ["features/.000000.host-7.partial"]
    mine = [".notes.tmp", "samples/b/.0123abcd.tmp.txt"]
    for name in (*left, *mine):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("half")
    COMMANDS[command](tmp_path)
    assert not [name for name in left if (run / name).exists()]
    assert [(run / name).read_text() for name in mine] == ["half"] * 2


def test_run_folder_may_be_a_link(tmp_path, tiny, make_config) -> None:
    config = make_config(tmp_path / "in.fa")
    (tmp_path / "scratch").mkdir()
    config.output.symlink_to("scratch")
    run_of_one_record(config, tiny)
    log = (tmp_path / "scratch" / "virnucpro.log").read_text()
    assert f"{config.output} is a link to {tmp_path / 'scratch'}\n" in log
    run_inline(again(config, force=True), tiny.head)
    assert config.output.is_symlink() and (tmp_path / "scratch" / "predictions.tsv").is_file()


@pytest.mark.parametrize("name", ["mine", "run/.lock"])
def test_lock_that_is_another_file_is_not_emptied(tmp_path, name) -> None:
    mine = tmp_path / name
    rundir = open_run_dir(tmp_path / "run")
    rundir.root.mkdir()
    mine.write_text("precious")
    if name == "mine":
        (rundir.root / ".lock").hardlink_to(mine)
    with pytest.raises(OutputError, match=r"\.lock is not the lock of a run"), rundir.locked():
        pass
    assert mine.read_text() == "precious"
    mine.write_text("")  # as in a copy of hard links of a folder that is not in use
    with rundir.locked():
        pass


def test_evaluation_writes_through_no_link(tmp_path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="run is a link to"):
        EvaluationSpec.from_options(
            EvaluateOptions(data=tmp_path / "manifest.tsv", output_dir=tmp_path)
        )


# Names

PLAIN_IDS = [f"r{i}" for i in range(12)]
HOSTILE_IDS = ["../../x", "/etc/passwd", "..", ".", "-rf", "[red]", "a\x1b[2J", "a\u202eb"]
HOSTILE_IDS += ["$(touch", "predictions.tsv", "x" * 10_000, "000000.h5"]


@pytest.mark.parametrize(
    ("input_type", "layout"),
    [
        *(("nucleotide", layout) for layout in ("tables", "h5", "npz", "pt", "parquet")),
        *(("protein", layout) for layout in ("tables", "h5")),
    ],
)
def test_no_file_is_named_after_a_record(
    tmp_path, tiny, make_config, monkeypatch, input_type, layout
) -> None:
    """In ``predict``, and in ``extract`` with each format."""
    command = {"command": "extract", "format": layout} if layout != "tables" else {}
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(11)
    names = []
    sequences = [open_dna(300, rng) for _ in PLAIN_IDS]
    if input_type == "protein":
        sequences = ["M" + "".join(rng.choice(list("DEFGHIKLMNPQRSVWY"), 40)) for _ in PLAIN_IDS]
    for which, record_ids in (("plain", PLAIN_IDS), ("hostile", HOSTILE_IDS)):
        root = tmp_path / which
        (root / "deep" / "er").mkdir(parents=True)
        records = zip(record_ids, sequences, strict=True)
        (root / "in.fa").write_text("".join(f">{name}\n{text}\n" for name, text in records))
        config = make_config(
            root / "in.fa",
            output=root / "deep" / "er" / "run",
            keep_intermediate=True,
            **command,
        )
        summary = run_inline(config, None if command else tiny.head)
        assert summary.exit_code == 0 and summary.records.n_frames
        names.append({path.relative_to(root).as_posix() for path in root.rglob("*")})
    assert names[0] == names[1]
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "hostile"}


def test_file_names_have_no_control_characters(tmp_path) -> None:
    shown = io.StringIO()
    with pytest.raises(CommandExit), redirect_stderr(shown), exit_on_error():
        (tmp_path / "a\x1b[31m\nb").read_bytes()
    assert r"a\x1b[31m\nb: No such file" in shown.getvalue()


# Network

SENTRY = """
import os, socket, sys

def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        refuse(event, arguments[0])
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        if arguments[0].family != socket.AF_UNIX:
            refuse(event, arguments[1])

def refuse(event, where):
    with open(os.environ["SENTRY"], "a") as told:
        told.write(f"{event} {where} by {sys.argv}\\n")
    raise OSError("no network here")

sys.addaudithook(watch)
with open(os.environ["SENTRY"] + ".watched", "a") as watched:
    watched.write(f"{os.getpid()}\\n")
"""


def run_watched(words: list[str]) -> None:
    exec(SENTRY, {})
    run_command(words)


@pytest.fixture
def watched_environment(tmp_path: Path) -> dict[str, str]:
    """Let the processes of a command reach no network, and report if they try."""
    (tmp_path / "sentry").mkdir()
    (tmp_path / "sentry" / "sitecustomize.py").write_text(SENTRY)
    root = Path(__file__).parents[2]
    return {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'sentry'}{os.pathsep}{root}",
        "SENTRY": str(tmp_path / "told"),
        "TORCH_HOME": str(tmp_path / "torch"),
    }


def test_network_is_used_only_for_downloads(tmp_path, tiny, watched_environment) -> None:
    """In a parent and its worker. A download then shows that the guard works."""
    told = tmp_path / "told"
    watched = tmp_path / "told.watched"
    fasta = tmp_path / "in.fa"
    rng = np.random.default_rng(5)
    fasta.write_text("".join(f">r{i}\n{open_dna(300, rng)}\n" for i in range(4)))
    words = ["predict", "-o", tmp_path / "p", "-i", fasta, "--head", tiny.head_file]
    words += ["--model", tiny.model, "--device", "cpu", "--workers", "1"]
    subprocess.run(
        [sys.executable, "-m", "virnucpro", *words],
        env=watched_environment,
        check=True,
        capture_output=True,
    )
    assert len(watched.read_text().split()) >= 2  # the parent, and a worker for its one shard
    run_other = partial(virnucpro, env=watched_environment, run=run_watched)
    for words in (["models", "list"], ["devices"], ["status", tmp_path / "p"]):
        done = run_other(*words)
        assert done.returncode == 0, done.stderr
    assert not told.exists(), told.read_text()
    download = run_other("models", "download", "esm2_t6_8M_UR50D")
    shown = download.stdout + download.stderr
    assert download.returncode == 69 and "Traceback" not in shown, shown
    assert "socket.getaddrinfo" in told.read_text()
