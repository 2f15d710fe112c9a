"""What a stranger gives us runs no code, names no file, reaches no other file and no network."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import Tiny, open_dna
from runs import run_inline, tables
from trainings import Training, run_here, settings

from virnucpro.cli.exits import Finished, exits
from virnucpro.errors import FeatureFileError
from virnucpro.esm2.converted import convert, find_converted, open_esm2
from virnucpro.esm2.weights import inspect_checkpoint
from virnucpro.records import Embeddings
from virnucpro.request import Options, resolve
from virnucpro.store import (
    check_index,
    read_embeddings,
    read_label,
    with_label,
    write_embeddings,
)
from virnucpro.training.config_file import read_config


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trap),)


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
    """The exit code that a command would have, and what it would print."""
    shown = io.StringIO()
    with pytest.raises(Finished) as finished, redirect_stderr(shown), exits():
        work()
    assert "Traceback" not in shown.getvalue() and "hint: " in shown.getvalue()
    return finished.value.exit_code, shown.getvalue()


def options(tiny: Tiny, folder: Path, **changes: object) -> Options:
    fasta = folder / "in.fa"
    fasta.write_text(">a\nATGGCAGCAGCTGCTGGTGCAGCTGCAGGAGCTGCTGCAGGTGCAGCTGCT\n")
    common = {"command": "predict", "input": [fasta], "output_dir": folder / "run"}
    usual = {"input_type": "auto", "chunk_size": None, "min_length": 0, "gpus": None}
    device = {"device": "cpu", "workers": 1, "esm_batch_size": "auto", "precision": "fp32"}
    rest = {"worker_timeout": 60.0, "resume": False, "force": False, "keep_intermediate": False}
    files = {"model": str(tiny.model), "head": tiny.head_file, "argv": ()}
    given = {**common, **usual, **device, **rest, **files, "cuda_visible_devices": None}
    return Options(**{**given, **changes})


# Code


def test_the_traps_of_these_tests_work(trap) -> None:
    pickle.loads(as_pickle_alone(Payload(trap)))  # noqa: S301
    assert trap.is_dir()


@every_pickle
@pytest.mark.parametrize("place", ["model", "cfg", "args", "extra"])
def test_a_checkpoint_that_carries_code_is_refused_and_runs_none(
    tiny, tmp_path, trap, as_pickle, place
) -> None:
    content = {"model": {}, "cfg": {"model": argparse.Namespace()}, place: Payload(trap)}
    (tmp_path / "esm2.pt").write_bytes(as_pickle(content))
    given = options(tiny, tmp_path, model=str(tmp_path / "esm2.pt"))
    exit_code, shown = ending_of(lambda: resolve(given, lambda _: None))
    assert exit_code == 69 and "esm2.pt holds more than tensors" in shown
    assert not trap.exists() and not given.output_dir.exists()


@every_pickle
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_model_folder_with_a_pickle_is_refused_and_runs_no_code(
    tiny, tmp_path, trap, as_pickle, name
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny.model / "config.json").read_bytes())
    (folder / name).write_bytes(as_pickle(Payload(trap)))
    given = options(tiny, tmp_path, model=str(folder))
    exit_code, shown = ending_of(lambda: resolve(given, lambda _: None))
    assert exit_code == 69 and "safetensors" in shown
    assert not trap.exists()


def test_a_pickle_beside_the_weights_of_a_model_folder_is_not_looked_at(
    tiny, tmp_path, trap
) -> None:
    folder = tmp_path / "esm2_tiny"
    folder.mkdir()
    for file in tiny.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(as_pickle_alone(Payload(trap)))
    resolve(options(tiny, tmp_path, model=str(folder)), lambda _: None)
    assert not trap.exists()


@every_pickle
@pytest.mark.parametrize("name", ["500_model.pth", "head.safetensors", "head"])
def test_a_head_that_carries_code_is_refused_and_runs_none(
    tiny, tmp_path, trap, as_pickle, name
) -> None:
    (tmp_path / name).write_bytes(as_pickle({"layers.0.weight": Payload(trap)}))
    given = options(tiny, tmp_path, head=tmp_path / name)
    exit_code, shown = ending_of(lambda: resolve(given, lambda _: None))
    assert exit_code == 69 and f"{name} is no head" in shown
    assert not trap.exists()


@every_pickle
def test_a_converted_model_that_carries_code_is_made_again_or_refused(
    tiny, tmp_path, trap, as_pickle
) -> None:
    checkpoint = inspect_checkpoint(tiny.model)
    converted = convert(checkpoint, checkpoint.sha256(), torch.bfloat16, tmp_path / "kept")
    converted.path.write_bytes(as_pickle(Payload(trap)))
    assert find_converted(checkpoint, torch.bfloat16, tmp_path / "kept") is None
    work = lambda: open_esm2(converted.path, 2, torch.bfloat16, torch.device("cpu"))  # noqa: E731
    exit_code, shown = ending_of(work)
    assert exit_code == 69 and "cannot be used" in shown
    assert not trap.exists()


@every_pickle
def test_a_training_is_not_resumed_from_a_checkpoint_that_carries_code(
    tmp_path, trap, as_pickle
) -> None:
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
def test_a_config_that_carries_code_is_refused_and_runs_none(tmp_path, trap, tag) -> None:
    config = tmp_path / "train.yaml"
    value = "''" if tag.startswith("name") else f"['{trap}']"
    config.write_text(f"epochs: !!python/object/{tag} {value}\n")
    with pytest.raises(Finished) as finished, exits():
        read_config(config, {"epochs"})
    assert finished.value.exit_code == 64
    assert not trap.exists()


# Feature files of others

ATTRIBUTES = {"model": "tiny", "layer": 2, "pooling": "mean", "fingerprint": "f"}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of somebody's own, in a form in which HDF5 would read it."""
    path = tmp_path / "secret.h5"
    with h5py.File(path, "w") as h5:
        h5["embeddings"] = np.full((1, 4), 4711, dtype=np.float32)
        h5["ids"] = np.array(["secret"], dtype=object)
        h5["lengths"] = np.ones(1, dtype=np.int32)
    return path


def forge(path: Path, change: Callable[[h5py.File], None]) -> None:
    """A feature file with a right label, changed in one thing."""
    good = Embeddings(("a",), np.ones(1, dtype=np.int32), np.ones((1, 4), dtype=np.float32))
    write_embeddings(path, good, ATTRIBUTES)
    change_content(path, change)


def change_content(path: Path, change: Callable[[h5py.File], None]) -> None:
    label = read_label(path, {})
    path.write_bytes(path.read_bytes()[: label.n_bytes])
    with h5py.File(path, "r+") as h5:
        change(h5)
    path.write_bytes(with_label(path.read_bytes(), label.attributes))


def external_link(h5: h5py.File, secret: Path, name: str) -> None:
    del h5[name]
    h5[name] = h5py.ExternalLink(str(secret), name)


def soft_link_to_one(h5: h5py.File, secret: Path, name: str) -> None:
    del h5[name]
    h5["there"] = h5py.ExternalLink(str(secret), name)
    h5[name] = h5py.SoftLink("/there")


def virtual_dataset(h5: h5py.File, secret: Path, name: str) -> None:
    shape, kind = h5[name].shape, h5[name].dtype
    del h5[name]
    layout = h5py.VirtualLayout(shape, kind)
    layout[:] = h5py.VirtualSource(str(secret), name, shape)
    h5.create_virtual_dataset(name, layout)


def raw_bytes_of_a_file(h5: h5py.File, secret: Path, name: str) -> None:
    shape, kind = h5[name].shape, h5[name].dtype
    del h5[name]
    kind = np.dtype(np.float32) if kind.kind == "O" else kind
    h5.create_dataset(name, shape, kind, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


@pytest.mark.parametrize("name", ["ids", "lengths", "embeddings"])
@pytest.mark.parametrize(
    "point", [external_link, soft_link_to_one, virtual_dataset, raw_bytes_of_a_file]
)
def test_a_feature_file_that_points_at_another_file_is_not_whole(
    tmp_path, secret, point, name
) -> None:
    path = tmp_path / "000000.h5"
    forge(path, lambda h5: None)
    assert read_embeddings(path, ATTRIBUTES).ids == ("a",)
    forge(path, lambda h5: point(h5, secret, name))
    with pytest.raises(FeatureFileError, match=r"000000\.h5 is not whole"):
        read_embeddings(path, ATTRIBUTES)


def test_failures_are_not_read_from_another_file_either(tmp_path, secret) -> None:
    path = tmp_path / "000000.h5"
    forge(path, lambda h5: external_link(h5, secret, "failed"))
    with pytest.raises(FeatureFileError, match="failed is a link"):
        read_embeddings(path, ATTRIBUTES)


@pytest.mark.parametrize("name", ["ids", "lengths", "embeddings"])
def test_a_feature_file_that_carries_a_pickle_runs_no_code(tmp_path, trap, name) -> None:
    path = tmp_path / "000000.h5"

    def change(h5: h5py.File) -> None:
        del h5[name]
        h5[name] = np.array([np.void(as_pickle_alone(Payload(trap)))])

    forge(path, change)
    with pytest.raises(FeatureFileError, match=r"000000\.h5 is not whole"):
        read_embeddings(path, ATTRIBUTES)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["{folder}/secret.h5", "features/../../secret.h5"])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, secret, name) -> None:
    index = tmp_path / "run" / "features.h5"
    index.parent.mkdir()
    layout = h5py.VirtualLayout((1,), h5py.string_dtype())
    layout[:] = h5py.VirtualSource(name.format(folder=tmp_path), "ids", (1,))
    with h5py.File(index, "w") as h5:
        h5.create_virtual_dataset("ids", layout)
        h5.attrs["parts_sha256"] = "0" * 64
    with pytest.raises(FeatureFileError, match="not of this run"):
        check_index(index)


def test_a_run_folder_from_somebody_else_is_mended_not_believed(
    tmp_path, tiny, make_config
) -> None:
    """A shard's file that borrows its vectors elsewhere is made again."""
    fasta = tmp_path / "in.fa"
    fasta.write_text(f">a\n{open_dna(300, np.random.default_rng(3))}\n")
    config = make_config(fasta)
    run_inline(config, tiny.head)
    before, path = tables(config.output), config.output / "features" / "000000.h5"
    other = tmp_path / "other.h5"
    other.write_bytes(path.read_bytes())
    change_content(other, lambda h5: h5["embeddings"].write_direct(-h5["embeddings"][:]))
    change_content(path, lambda h5: virtual_dataset(h5, other, "embeddings"))
    summary = run_inline(replace(config, resume=True), tiny.head)
    assert summary.n_tokens > 0
    assert tables(config.output) == before


# Names

PLAIN_IDS = [f"r{i}" for i in range(12)]
HOSTILE_IDS = ["../../x", "/etc/passwd", "..", ".", "-rf", "[red]", "a\x1b[2J", "a\u202eb"]
HOSTILE_IDS += ["$(touch", "predictions.tsv", "x" * 10_000, "000000.h5"]


@pytest.mark.parametrize("feature_format", ["h5", "npz", "pt"])
@pytest.mark.parametrize("command", ["predict", "extract"])
@pytest.mark.parametrize("input_type", ["nucleotide", "protein"])
def test_no_file_is_named_after_a_record(
    tmp_path, tiny, make_config, monkeypatch, command, input_type, feature_format
) -> None:
    monkeypatch.chdir(tmp_path)
    rng, names = np.random.default_rng(11), []
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
            command=command,
            keep_intermediate=True,
            feature_format=feature_format,
        )
        summary = run_inline(config, tiny.head if command == "predict" else None)
        assert summary.exit_code == 0 and summary.n_frames
        names.append({path.relative_to(root).as_posix() for path in root.rglob("*")})
    assert names[0] == names[1]
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "hostile"}


def test_a_file_name_in_a_message_of_the_system_has_no_control_characters(tmp_path) -> None:
    shown = io.StringIO()
    with pytest.raises(Finished), redirect_stderr(shown), exits():
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


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a command whose processes, and theirs, can reach no network and tell if they try."""
    (tmp_path / "sentry").mkdir()
    (tmp_path / "sentry" / "sitecustomize.py").write_text(SENTRY)
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'sentry'}{os.pathsep}{root}",
        "SENTRY": str(tmp_path / "told"),
        "TORCH_HOME": str(tmp_path / "torch"),
    }

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "virnucpro", *map(str, arguments)]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=environment, text=True, **out)

    return start


def test_no_network_is_touched_unless_a_download_is_asked_for(tmp_path, tiny, start) -> None:
    """In the parent and in two workers; then a download shows that the sentry sees."""
    told, watched = tmp_path / "told", tmp_path / "told.watched"
    fasta = tmp_path / "in.fa"
    rng = np.random.default_rng(5)
    fasta.write_text("".join(f">r{i}\n{open_dna(300, rng)}\n" for i in range(4)))
    model = ("--model", tiny.model, "--device", "cpu", "-i", fasta)
    runs = [
        start("predict", "-o", tmp_path / "p", *model, "--head", tiny.head_file, "--workers", "2"),
        start("extract", "-o", tmp_path / "e", *model, "--workers", "1"),
    ]
    finish(runs)
    assert len(watched.read_text().split()) >= 5  # two parents, three workers
    finish([start("models", "list"), start("devices"), start("status", tmp_path / "p")])
    assert not told.exists(), told.read_text()
    download = start("models", "download", "esm2_t6_8M_UR50D")
    shown, _ = download.communicate(timeout=600)
    assert download.returncode == 69 and "Traceback" not in shown, shown
    assert "socket.getaddrinfo" in told.read_text()


def finish(commands: list[subprocess.Popen[str]]) -> None:
    for command in commands:
        shown, _ = command.communicate(timeout=600)
        assert command.returncode == 0, shown
