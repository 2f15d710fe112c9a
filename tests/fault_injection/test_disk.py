"""Disk faults at any call: one clear message, nothing is lost, and --resume continues.

An audit hook and resource limits make chosen system calls fail, so that each file of a run is once
the one that fails. ``--rounds 32`` covers every call.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import make_tiny, random_dna, write_contigs
from forkserver_runner import call
from labelled_data_helpers import options, train_here, write_labelled
from run_helpers import (
    again,
    assert_same_run,
    leftovers,
    no_file_longer_than,
    run_inline,
    tables,
    within,
    write_fasta,
)
from small_disk import Evaluation, Prediction, Scoring, Training, fill_each

from virnucpro.core.errors import (
    InputError,
    OutputError,
    ResumeError,
    StorageError,
    VirnucproError,
)
from virnucpro.core.events import ShardDone
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.checkpoint import hash_weights
from virnucpro.results.outputs import open_run_dir
from virnucpro.results.report.run_report import report_folder
from virnucpro.store.feature_file import read_checksummed, write_checksummed
from virnucpro.store.plan_reader import read_plan
from virnucpro.training.evaluation.evaluate import EvaluationSpec
from virnucpro.training.options import EvaluateOptions
from virnucpro.workflows.find_proviruses import find_regions
from virnucpro.workflows.predict import predict
from virnucpro.workflows.predict_options import PredictOptions, RegionsOptions
from virnucpro.workflows.run_config import RunConfig
from virnucpro.workflows.status import inspect_run

CODES = {errno.ENOSPC: 74, errno.EDQUOT: 74, errno.EIO: 74, errno.EROFS: 73, errno.EACCES: 73}
UNREADABLE = {errno.EIO: 74, errno.EMFILE: 74, errno.EACCES: 73, errno.ESTALE: 73}
Strike = Callable[[int, str], None]  # the number of a call, and its path


# argument index of the open folder that a relative path starts from
_DESCRIPTORS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2}


def path_of(descriptor: object) -> Path:
    """Return the path of an open folder, or of the current folder."""
    if descriptor == -1:
        return Path()
    if sys.platform == "darwin":
        path = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
        return Path(os.fsdecode(path.rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()


class Calls:
    """Records every file that is opened, made, renamed or deleted below a folder."""

    def __init__(self) -> None:
        self.folder = ""
        self.made: list[tuple[str, str]] = []  # the call, and its file
        self.strike: Strike = lambda *_: None
        self.lock = threading.Lock()  # tables are written while shards are embedded

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.folder or event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        path = os.fspath(arguments[0]) if isinstance(arguments[0], (str, Path)) else ""
        if event in _DESCRIPTORS:
            path = str(path_of(arguments[_DESCRIPTORS[event]]) / path)
        if not path.startswith(self.folder):
            return
        if event == "open" and set("wax+") & set(str(arguments[1])):
            event = "write"
        folder, _, name = os.path.relpath(path, self.folder).rpartition("/")
        known = re.sub(r"^\.(.+)\.[0-9a-f]{8}\.tmp$", r"\1", name)
        with self.lock:
            number = len(self.made)
            self.made.append((event.removeprefix("os."), f"{folder}/{known}".lstrip("/")))
        self.strike(number, path)

    @contextmanager
    def below(self, folder: Path, strike: Strike = lambda *_: None) -> Iterator[None]:
        self.folder = str(folder)
        self.strike = strike
        self.made = []
        try:
            yield
        finally:
            self.folder = ""

    def of(self, config: RunConfig, head) -> list[tuple[str, str]]:
        """Run undisturbed and return the calls that were made."""
        with self.below(config.output):
            run_inline(config, head)
        return list(self.made)


CALLS = Calls()
sys.addaudithook(CALLS)


def at(number: int, strike: Callable[[str], None]) -> Strike:
    return lambda now, path: strike(path) if now == number else None


def refusing(fault: int) -> Callable[[str], None]:
    def strike(path: str) -> None:
        raise OSError(fault, os.strerror(fault), path)

    return strike


def ending_of(config: RunConfig, head, on_event=lambda _: None) -> VirnucproError | None:
    """Return how a run was rejected. Any other exception would be a traceback for the user."""
    try:
        run_inline(config, head, on_event)
    except VirnucproError as error:
        return error
    return None


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


MORE = {"more": "GCA" * 150}
SMALL = {"keep_intermediate": True, "residues_per_shard": 500}


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """14 records in three shards. Two of them are identical."""
    fasta = tmp_path_factory.mktemp("few") / "few.fa"
    records = write_contigs(fasta).read_text().split(">")[1:14]
    fasta.write_text("".join(f">{record}" for record in [*records, f"again{records[4]}"]))
    return fasta


@pytest.fixture
def make(make_config, few) -> Callable[..., RunConfig]:
    """Configure a run that writes every kind of file except a copy of its input."""
    return partial(make_config, few, **SMALL)


@pytest.fixture(scope="module")
def undisturbed(configure, few, tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_inline(configure(few, output=folder, **SMALL), tiny.head)
    return folder


@pytest.fixture
def finished(make, undisturbed) -> RunConfig:
    """Resume a copy of the undisturbed run."""
    config = make(resume=True)
    shutil.copytree(undisturbed, config.output)
    return config


def assert_resumes(config: RunConfig, tiny, undisturbed: Path) -> None:
    """Check the result of a resume. ``config`` has ``resume``."""
    run_inline(config, tiny.head)
    assert_same_run(config.output, undisturbed)
    assert not leftovers(config.output)


# Failing calls


def test_failed_system_call_is_reported_and_resumed(
    make_config, few, tiny, undisturbed, tmp_path, chaos_seed
):
    """Each of 16 rounds covers other calls. The input is inside the folder, so it is copied."""
    chance = random.Random(chaos_seed)
    folder = emptied(tmp_path / "run")
    inside = shutil.copy(few, folder)
    n_calls = len(CALLS.of(make_config(Path(inside), **SMALL), tiny.head))
    n_told = 0
    for number in range(chaos_seed % 16, n_calls, 16):
        fault = chance.choice(list(CODES))
        inside = Path(shutil.copy(few, emptied(folder)))
        with CALLS.below(folder, at(number, refusing(fault))):
            error = ending_of(make_config(inside, **SMALL), tiny.head)
        if error is not None:
            call, name = CALLS.made[number]
            what = (call, name, error)
            is_input = call == "open" and name.endswith(".fa")
            assert error.exit_code == (66 if is_input else CODES[fault]), what
            assert os.strerror(fault) in str(error) and error.hint, what
            blamed = "inputs" if name == "inputs/copy" else Path(name).name
            assert call == "open" or blamed in str(error), what
            assert call == "remove" or not leftovers(folder), what
            n_told += 1
        assert_resumes(make_config(inside, resume=True, **SMALL), tiny, undisturbed)
    assert n_told > 2


def test_failed_fsync_is_reported_and_resumed(make, tiny, undisturbed, tmp_path, monkeypatch):
    """Most disks report a fault at the end of a file."""
    sync = os.fsync
    left = [0]

    def faulty(descriptor: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", faulty)
    for number in range(1, 60, 4):
        emptied(tmp_path / "run")
        left[0] = number
        error = ending_of(make(), tiny.head)
        if left[0] > 0:
            break
        if error is None:  # the one file that no result depends on
            log = (tmp_path / "run" / "virnucpro.log").read_text()
            assert "machine.json: Input/output error" in log
            continue
        assert error.exit_code == 74 and "Input/output error" in str(error)
        assert str(tmp_path / "run") in str(error) and "the disk" in error.hint
        assert not leftovers(tmp_path / "run")
        assert_resumes(make(resume=True), tiny, undisturbed)
    assert number > 20


def test_file_size_limit_names_the_file(make, tiny, undisturbed, tmp_path, chaos_seed):
    """In a new run, and in one where only the tables are missing."""
    sizes = {path.stat().st_size for path in undisturbed.rglob("*") if path.is_file()}
    blamed = set()
    folder = tmp_path / "run"
    for size in sorted(sizes)[chaos_seed % 3 :: 3]:
        for is_embedded in (False, True):
            shutil.rmtree(folder, ignore_errors=True)
            if is_embedded:
                shutil.copytree(undisturbed, folder)
            with no_file_longer_than(size - 1):
                error = ending_of(make(resume=is_embedded), tiny.head)
            if error is not None:  # the log may be the longest, and never stops a run
                assert error.exit_code == 74 and "File too large" in str(error)
                assert "ulimit" in error.hint
                blamed.add(str(error).partition(": ")[0].rpartition("/")[2])
            assert not leftovers(folder)
            assert_resumes(make(resume=True), tiny, undisturbed)
    assert len(blamed) > 3, blamed


# Full disks


def in_own_mounts(*command: object) -> list[str]:
    """Return a command with private mounts that end with it."""
    own = ["unshare", "--mount", "--map-root-user"]
    try:
        subprocess.run([*own, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("mounting is not allowed here")
    return [*own, *map(str, command)]


def fill_disks(work: Callable[[bool], None], folder: Path, limits: list[str]) -> list[Path]:
    """Run ``work`` on small disks, and to its end when there is room. -> its results

    Each disk that was too small must be reported, with its path and a remedy.
    """
    in_own_mounts()  # skips the test where mounting is not allowed
    kept = emptied(folder.parents[1] / "kept")
    emptied(folder.parent)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = call(fill_each, (work, folder, kept, limits), env=variables)
    assert answer.returncode == 0, answer.stderr
    told = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(told) == len(limits)
    refused = [one for one in told if one["message"]]
    assert refused
    for one in refused:
        assert one["exit_code"] == 74 and "No space left on device" in one["message"], one
        assert str(folder.parent) in one["message"] and one["hint"].startswith("make room"), one
        assert not one["leftovers"], one
    assert "Traceback" not in answer.stderr, answer.stderr
    return [Path(one["kept"]) for one in told]


def test_full_disk_is_reported_and_resumed(make, tiny, undisturbed, tmp_path, request):
    """Disks are in memory, and small in bytes or files. More rounds use more of them."""
    apart = max(1, 20 // request.config.getoption("--rounds"))
    limits = [f"size={4096 * n}" for n in range(5, 45, apart)]
    limits += [f"nr_inodes={n}" for n in range(5, 40, apart)]
    folder = tmp_path / "disk" / "run"
    for kept in fill_disks(Prediction(make(output=folder), tiny.head_file), folder, limits):
        assert_same_run(kept, undisturbed)


def test_full_disk_while_scoring_is_resumed(tmp_path, request):
    """Most disks become full while blocks are scored."""
    rng = np.random.default_rng(4)
    fasta = write_fasta(tmp_path / "in.fa", {f"c{n}": random_dna(1_500, rng) for n in range(30)})
    options = PredictOptions(input=(fasta,), output_dir=tmp_path / "whole", report=False)
    Scoring(options)(resume=False)
    apart = max(1, 16 // request.config.getoption("--rounds"))
    limits = [f"size={4096 * n}" for n in range(6, 46, apart)]
    folder = tmp_path / "disk" / "run"
    for kept in fill_disks(Scoring(replace(options, output_dir=folder)), folder, limits):
        assert tables(kept) == tables(tmp_path / "whole")
        scores = [(run / "scores").iterdir() for run in (kept, tmp_path / "whole")]
        first, second = ({file.name: file.read_bytes() for file in files} for files in scores)
        assert first == second and len(first) == 15


def test_full_disk_while_training_is_resumed(tmp_path, request):
    apart = max(1, 40 // request.config.getoption("--rounds"))
    limits = [f"size={4096 * n}" for n in range(2, 82, 2 * apart)]
    limits += [f"nr_inodes={n}" for n in range(1, 22, apart)]
    data = write_labelled(tmp_path)
    folder = tmp_path / "disk" / "run"
    asked = {"finetune": True, "layers": 1, "dim": 8, "heads": 1, "epochs": 2}
    train_here(options(data, tmp_path / "undisturbed", **asked))
    names = ("model/head.safetensors", "model/model.safetensors", "held_out.tsv", "split.tsv")
    for kept in fill_disks(Training(options(data, folder, **asked)), folder, limits):
        for name in names:
            assert (kept / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_full_disk_while_evaluating_is_resumed(make_config, tiny, tmp_path, request):
    apart = max(1, 40 // request.config.getoption("--rounds"))
    limits = [f"size={4096 * n}" for n in range(2, 82, 2 * apart)]
    limits += [f"nr_inodes={n}" for n in range(1, 24, apart)]
    options = EvaluateOptions(
        data=write_labelled(tmp_path),
        output_dir=tmp_path / "disk" / "run",
        lengths="150",
        fragments_per_record=1,
    )
    question = EvaluationSpec.from_options(options)
    config = make_config(output=question.run_folder)
    kept = fill_disks(Evaluation(question, config, tiny.head_file), options.output_dir, limits)
    elsewhere = EvaluationSpec.from_options(replace(options, output_dir=tmp_path / "undisturbed"))
    config = make_config(output=elsewhere.run_folder)
    Evaluation(elsewhere, config, tiny.head_file)(resume=False)
    for folder in kept:
        for name in ("evaluation.tsv", "report.html"):
            assert (folder / name).read_bytes() == (
                elsewhere.options.output_dir / name
            ).read_bytes()


def test_full_disk_in_workers_is_one_message(few, tiny, tmp_path):
    """On the command line, where errors cross processes as text."""
    command = [*(sys.executable, "-m", "virnucpro", "predict", "--quiet", "--workers", "1"), "-i"]
    command += [few, "--device", "cpu", "--model", tiny.model, "--head", tiny.head_file]
    command += ["-o", tmp_path / "run"]
    limit = (9000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    answer = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        # Python would write truncated bytecode files, which later processes cannot read.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert answer.returncode == 74, answer.stderr
    assert answer.stderr.lower().count("error") == 1 and "Traceback" not in answer.stderr
    assert f"error: {tmp_path}/run/features/000000.h5: File too large" in answer.stderr
    assert "--resume" in answer.stderr and not leftovers(tmp_path / "run")


# Moved, deleted and read-only folders


def test_moved_run_folder_is_reported(make, tiny, undisturbed, tmp_path, chaos_seed):
    """At any call. The run can be resumed in the new place."""
    folder = tmp_path / "run"
    moved = tmp_path / "moved"
    calls = CALLS.of(make(), tiny.head)
    first = calls.index(("write", "virnucpro.log"))
    for number in range(first + chaos_seed % 32, len(calls) - 8, 32):
        for path in (folder, moved):
            shutil.rmtree(path, ignore_errors=True)
        with CALLS.below(folder, at(number, lambda _: folder.rename(moved))):
            error = ending_of(make(), tiny.head)
        assert isinstance(error, OutputError), calls[number]
        assert f"{folder} was moved or deleted" in str(error) and "--resume" in error.hint
        assert not folder.exists(), calls[number]
        assert_resumes(make(output=moved, resume=True), tiny, undisturbed)


def moved_at(number: int, folder: Path, command: Callable[[], object]) -> VirnucproError | None:
    """Return how a command ends if its folder is moved at this call."""
    moved = folder.with_name("moved")
    with CALLS.below(folder, at(number, lambda _: folder.rename(moved))):
        try:
            command()
        except VirnucproError as error:
            return error
    return None


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "predict": lambda source, folder: predict(
        PredictOptions(input=(source,), output_dir=folder, resume=True), lambda _: None
    ),
    "regions": lambda _, folder: find_regions(RegionsOptions(folder=folder), lambda _: None),
    "report": lambda _, folder: report_folder(folder),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_folder_moved_at_first_look_stays_away(tmp_path, name):
    """One lock is held from the first access to the end, so no process recreates the folder."""
    source = write_fasta(tmp_path / "in.fa", MORE)
    folder = tmp_path / "run"
    predict(PredictOptions(input=(source,), output_dir=folder), lambda _: None)
    command = partial(COMMANDS[name], source, folder)
    with CALLS.below(folder):
        command()
    calls = list(CALLS.made)
    first_output = next(i for i, call in enumerate(calls) if call[0] == "rename")
    assert first_output > 3
    for number in range(first_output):
        error = moved_at(number, folder, command)
        assert not folder.exists(), calls[number]
        assert error is not None and error.exit_code in (66, 73), calls[number]
        folder.with_name("moved").rename(folder)
    command()


def test_new_folder_moved_at_first_look_stays_away(tmp_path):
    source = write_fasta(tmp_path / "in.fa", MORE)
    folder = tmp_path / "run"
    options = PredictOptions(input=(source,), output_dir=folder)
    command = partial(predict, options, lambda _: None)
    for number in range(1, 12):
        error = moved_at(number, folder, command)
        assert isinstance(error, OutputError) and not folder.exists(), number
        shutil.rmtree(folder.with_name("moved"))


def test_moved_training_folder_stays_away(tmp_path, chaos_seed, capfd):
    """At any call, and without a traceback from TensorBoard."""
    data = write_labelled(tmp_path)
    folder = tmp_path / "run"
    asked = options(data, folder, encoding="composition")
    with CALLS.below(folder):
        train_here(asked)
    calls = list(CALLS.made)
    assert any("tfevents" in path for _, path in calls)
    shutil.rmtree(folder)
    for number in range(1 + chaos_seed % 24, len(calls) - 40, 24):
        error = moved_at(number, folder, lambda: train_here(asked))
        assert isinstance(error, OutputError), calls[number]
        assert f"{folder} was moved or deleted" in str(error), calls[number]
        assert not folder.exists(), calls[number]
        shutil.rmtree(folder.with_name("moved"))
    assert "Traceback" not in capfd.readouterr().err


def test_rejected_options_make_no_folder(tmp_path):
    source = write_fasta(tmp_path / "in.fa", MORE)
    folder = tmp_path / "run"
    options = PredictOptions(input=(source,), output_dir=folder, genetic_code=99)
    with pytest.raises(VirnucproError):
        predict(options, lambda _: None)
    assert not folder.exists()


def test_folder_is_locked_while_options_are_resolved(tmp_path):
    source = write_fasta(tmp_path / "in.fa", MORE)
    folder = tmp_path / "run"
    options = PredictOptions(input=(source,), output_dir=folder)
    predict(options, lambda _: None)
    options = replace(options, resume=True)
    with CALLS.below(folder):
        predict(options, lambda _: None)
    first_look = CALLS.made.index(("open", "run.json"))
    assert first_look < CALLS.made.index(("write", "virnucpro.log"))
    seen: list[VirnucproError] = []

    def start_second(_: str) -> None:
        CALLS.folder = ""
        with pytest.raises(OutputError) as caught:
            predict(options, lambda _: None)
        seen.append(caught.value)

    with CALLS.below(folder, at(first_look, start_second)):
        predict(options, lambda _: None)
    (error,) = seen
    assert "another run is using" in str(error)


def test_deleted_run_folder_is_reported(make, tiny, tmp_path):
    def delete(event) -> None:
        if isinstance(event, ShardDone):
            while (tmp_path / "run").exists():  # the worker may be writing the next shard there
                shutil.rmtree(tmp_path / "run", ignore_errors=True)

    error = ending_of(make(), tiny.head, delete)
    assert isinstance(error, OutputError) and "was moved or deleted" in str(error)
    assert not (tmp_path / "run").exists()


def read_only(folder: Path, *command: object) -> list[str]:
    """Return a command for which a folder is read-only, even for root."""
    if os.geteuid():
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o222)
        return list(map(str, command))
    bind = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    return in_own_mounts("sh", "-c", bind, folder, *command)


def test_read_only_folder_can_be_inspected(finished, few, tiny):
    config = finished
    before = content_of(config.output)
    program = (sys.executable, "-m", "virnucpro")
    command = (*program, "predict", "--resume", "--device", "cpu", "-i", few, "--model", tiny.model)
    command += ("--head", tiny.head_file, "-o", config.output)
    answer = subprocess.run(read_only(config.output, *command), capture_output=True, text=True)
    assert answer.returncode == 73, answer.stderr
    assert answer.stderr.startswith(f"error: {config.output}/.lock: "), answer.stderr
    assert "permissions" in answer.stderr and answer.stderr.count("\n") == 2
    command = (*program, "status", config.output, "--verify")
    answer = subprocess.run(read_only(config.output, *command), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "verified  intact: " in answer.stdout
    assert content_of(config.output) == before


def content_of(folder: Path) -> dict[str, bytes]:
    """Return all files of a run except its log and its lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("virnucpro.log", ".lock")
    }


# Changed and damaged files


def damage(path: Path, harm: str, aside: Path) -> None:
    content = path.read_bytes()
    flipped = bytearray(content)
    where = len(content) // 2
    if h5py.is_hdf5(path):
        with h5py.File(path) as stored:
            where = stored["embeddings"].id.get_offset() + 2
    flipped[where] ^= 1
    path.unlink()
    match harm:
        case "empty":
            path.touch()
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "flipped":
            path.write_bytes(flipped)
        case "zeros":
            path.write_bytes(bytes(len(content)))
        case "of another shard":
            shutil.copy(path.with_name("000002.h5"), path)
        case "of another recipe":
            shutil.copy(aside / "features" / path.name, path)
        case "a pipe":
            os.mkfifo(path)
        case "a link to nothing":
            path.symlink_to("nothing")


HARMS = ["gone", "empty", "truncated", "flipped", "zeros"]
FEATURE_FAULTS = ["of another shard", "of another recipe", "a pipe", "a link to nothing"]


@pytest.mark.parametrize("name", ["000001.h5", "*_copies.h5"])
@pytest.mark.parametrize("harm", HARMS + FEATURE_FAULTS)
def test_damaged_feature_file_is_remade(finished, make, tiny, undisturbed, tmp_path, harm, name):
    config = finished
    second = make_tiny(tmp_path / "second", seed=1).model
    if harm == "of another recipe":
        about = {"sha256": hash_weights(second), "checkpoints": (second,), "weights": (second,)}
        run_inline(make(output=tmp_path / "other", **about), tiny.head)
    (path,) = (config.output / "features").glob(name)
    damage(path, harm, tmp_path / "other")
    assert_resumes(config, tiny, undisturbed)


@pytest.mark.parametrize("harm", [None, "flipped"])
def test_unreadable_feature_file_is_named_and_kept(make, tiny, undisturbed, harm):
    """Also when all files are read because another one is damaged."""
    config = make(resume=True)
    name = "features/000001.h5"

    def start() -> None:
        shutil.rmtree(config.output, ignore_errors=True)
        shutil.copytree(undisturbed, config.output)
        if harm:
            damage(config.output / "features" / "000000.h5", harm, undisturbed)

    start()
    calls = CALLS.of(config, tiny.head)
    opened = [number for number, call in enumerate(calls) if call == ("open", name)]
    assert len(opened) > 2
    for number, fault in zip(cycle(opened), UNREADABLE):
        start()
        before = (config.output / name).stat()
        with CALLS.below(config.output, at(number, refusing(fault))):
            error = ending_of(config, tiny.head)
        assert error is not None and error.exit_code == UNREADABLE[fault]
        assert f"{name}: {os.strerror(fault)}" in str(error) and error.hint
        after = (config.output / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert_resumes(config, tiny, undisturbed)


def test_folder_in_place_of_a_file_is_kept(finished, tiny, undisturbed):
    config = finished
    for name in ("features/000001.h5", "features/*_copies.h5", "viral.fasta", "features.h5"):
        (path,) = config.output.glob(name)
        path.unlink()
        path.mkdir()
        (path / "mine").touch()
        error = ending_of(config, tiny.head)
        assert isinstance(error, OutputError) and f"{path}: Is a directory" in str(error)
        assert "move it away" in error.hint and (path / "mine").exists()
        shutil.rmtree(path)
        assert_resumes(config, tiny, undisturbed)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["shards/plan.json", "shards/000001.faa"])
def test_changed_plan_is_remade(finished, tiny, undisturbed, name, harm):
    config = finished
    (config.output / "features" / "000001.h5").unlink()
    damage(config.output / name, harm, config.output)
    assert_resumes(config, tiny, undisturbed)
    assert (config.output / name).read_bytes() == (undisturbed / name).read_bytes()


@pytest.mark.parametrize("plan", ["shards/plan.json", "shards/000000.plan"])
def test_plan_with_a_flipped_bit_is_remade(finished, tiny, undisturbed, chaos_seed, plan):
    """At the first digit of every number, and at every 97th byte."""
    config = finished
    whole = (undisturbed / plan).read_bytes()
    numbers = [found.start(1) for found in re.finditer(rb"[ \[](\d+)[,\]}]", whole)]
    assert numbers
    rundir = open_run_dir(config.output)
    manifest = rundir.read_manifest()
    assert manifest is not None and not read_plan(rundir, manifest).missing_slices
    for place in (*numbers, *range(chaos_seed % 97, len(whole), 97)):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        (config.output / plan).write_bytes(flipped)
        found = read_plan(rundir, manifest)
        assert found is None or found.missing_slices, (place, flipped)
        if place in numbers[:3]:
            assert_resumes(config, tiny, undisturbed)
            assert (config.output / plan).read_bytes() == whole


def put(*keys: object, value: object) -> Callable[[dict], None]:
    """Change one value in a plan."""

    def change(plan: dict) -> None:
        for key in keys[:-1]:
            plan = plan[key]
        plan[keys[-1]] = value

    return change


INDEX, N_ORFS, N_EMBEDDED, N_RESIDUES, DIGEST = range(5)  # index of a shard in a plan
LISTING_FAULTS = {
    "no slices": put("slices", value=None),
    "a slice of less": put("slices", 0, value=[1, 1]),
    "a slice of no file": put("slices", 0, 3, 0, 0, value=7),
    "a slice from before": put("slices", 0, 3, 0, 1, 0, value=-1),
    "a slice of text": put("slices", 0, 0, value="0"),
}
FORGERIES = {
    "text": put("shards", 1, N_ORFS, value="5"),
    "a fraction": put("shards", 1, N_EMBEDDED, value=1.5),
    **{
        f"{number} residues": put("shards", 1, N_RESIDUES, value=number)
        for number in (-1, float("nan"), float("inf"), 10**9, 10**30)
    },
    "true": put("shards", 1, N_ORFS, value=True),
    "more embedded than there are": put("shards", 1, N_EMBEDDED, value=10**4),
    "a list": put("shards", 1, N_ORFS, value=[[[]]]),
    "no hash": put("shards", 1, DIGEST, value=None),
    "a hash that is a number": put("shards", 1, DIGEST, value=7),
    "a shard of letters": put("shards", 1, value="abcd"),
    "a shard of less": put("shards", 1, value=[1, 1]),
    "shards by name": put("shards", value={"abcd": 1}),
    "a number of shards": put("shards", value=5),
    "no shards": put("shards", value=None),
    "a shard of another slice": put("shards", 1, INDEX, value=10**6),
    "counts of text": put("counts", "n_records", value="14"),
    "counts below zero": put("counts", "n_letters", value=-1),
    "counts of nothing": put("counts", "n_copies", value=float("nan")),
    "huge counts": put("counts", "n_records", value=10**300),
    "other counts": put("counts", "n_other", value=1),
    "counts in a list": put("counts", value=[1, 2]),
}


@pytest.mark.parametrize("name", [*FORGERIES, *LISTING_FAULTS])
def test_plan_with_impossible_values_is_remade(finished, tiny, undisturbed, name, chaos_seed):
    """Its checksum is correct, because whoever makes such a file can compute it.

    Recognised forgeries are also replaced by a resume, each in one of five rounds. The others are
    replaced in every round.
    """
    config = finished
    plan = "shards/plan.json" if name in LISTING_FAULTS else "shards/000000.plan"
    whole = (config.output / plan).read_bytes()
    label, content = read_checksummed(config.output / plan, {})
    forged = json.loads(content)
    ({**FORGERIES, **LISTING_FAULTS}[name])(forged)
    text = json.dumps(forged).encode()
    write_checksummed(SafeDir(config.output), config.output / plan, text, label.attributes)
    inspect_run(config.output, verify=True)
    rundir = open_run_dir(config.output)
    manifest = rundir.read_manifest()
    assert manifest is not None
    found = read_plan(rundir, manifest)
    is_recognised = found is None or bool(found.missing_slices)
    if not is_recognised or [*FORGERIES, *LISTING_FAULTS].index(name) % 5 == chaos_seed % 5:
        assert_resumes(config, tiny, undisturbed)
        assert (config.output / plan).read_bytes() == whole


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, 0o600 | stat.S_IFSOCK),
    "a folder": lambda path: (path.mkdir(), (path / "mine").touch()),
}


FILES = [".lock", "virnucpro.log", "run.json", "predictions.tsv", "viral.fasta", "chunks.fa"]
FILES += ["features.h5", "features/000001.h5", "shards/plan.json", "shards/000001.faa"]
FILES += ["failed_sequences.fa"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in FILES for kind in ("a pipe", "a folder")),
        *((name, "a pipe") for name in ("features", "shards")),
        *((name, "a socket") for name in (".lock", "run.json", "features/000001.h5")),
    ],
)
def test_special_file_in_place_of_a_file(finished, tiny, undisturbed, name, kind):
    config = finished
    path = config.output / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)
    with within(120):
        with suppress(VirnucproError):
            inspect_run(config.output, verify=True)
        error = ending_of(config, tiny.head)
    if error is not None:
        assert error.exit_code == 73 and str(path) in str(error) and error.hint
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if name == "run.json":
            shutil.copy(undisturbed / name, path)
        run_inline(config, tiny.head)
    assert_same_run(config.output, undisturbed)


def test_add_to_a_run_with_a_damaged_table(make_config, few, tiny, tmp_path):
    """The table tells which records failed, and an input for them may be added."""
    more = write_fasta(tmp_path / "more.fa", MORE)
    config = make_config(few)
    run_inline(config, tiny.head)
    table = config.output / "predictions.tsv"
    added = make_config(few, more, resume=True, add=True)
    for content in (b"a\nb\n", b"a\tb\tc\n\xff\xfe\t\n"):
        table.write_bytes(content)
        error = ending_of(added, tiny.head)
        assert isinstance(error, InputError) and f"{table} is damaged" in str(error)
        run_inline(again(config, resume=True, add=True), tiny.head)  # as its hint says
    table.unlink()
    os.mkfifo(table)
    with within(120):
        error = ending_of(added, tiny.head)
    assert isinstance(error, OutputError) and f"{table}: it is not a plain file" in str(error)


@pytest.mark.parametrize("harm", ["empty", "truncated", "zeros", "a pipe"])
def test_damaged_run_json_is_named(finished, tiny, undisturbed, harm):
    config = finished
    manifest = config.output / "run.json"
    whole = manifest.read_bytes()
    damage(manifest, harm, config.output)
    before = {name: text for name, text in content_of(config.output).items() if name != "run.json"}
    error = ending_of(config, tiny.head)
    assert isinstance(error, ResumeError) and f"{manifest} is damaged" in str(error)
    assert "--force" in error.hint
    assert {**content_of(config.output), **before} == content_of(config.output)
    manifest.unlink()
    manifest.write_bytes(whole)
    assert_resumes(config, tiny, undisturbed)


@pytest.mark.parametrize("harm", ["gone", "flipped"])
def test_shard_damaged_during_the_run_is_remade(make, tiny, undisturbed, harm):
    config = make()
    name = "shards/000003.faa"
    error = ending_of(config, tiny.head, harm_after_shard_1(config, name, harm))
    assert isinstance(error, StorageError) and name in str(error)
    assert "the next start" in error.hint
    assert not leftovers(config.output)
    assert_resumes(make(resume=True), tiny, undisturbed)


@pytest.mark.parametrize("harm", ["gone", "flipped"])
def test_feature_file_damaged_during_the_run_is_remade(make, tiny, undisturbed, harm):
    config = make()
    name = "features/000001.h5"
    run_inline(config, tiny.head, harm_after_shard_1(config, name, harm))
    fault = {"gone": "is missing", "flipped": "is damaged or truncated"}[harm]
    assert f"{name} {fault}" in (config.output / "virnucpro.log").read_text()
    assert_same_run(config.output, undisturbed)
    assert not leftovers(config.output)


def harm_after_shard_1(config, name, harm):
    """Damage a file once, before the tables learn that the shard is done."""
    is_harmed = False

    def strike(event) -> None:
        nonlocal is_harmed
        if isinstance(event, ShardDone) and event.shard.index == 1 and not is_harmed:
            is_harmed = True
            damage(config.output / name, harm, config.output)

    return strike


# Replaced results and added inputs


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda text: text + b">contig0\nACGT\n", "occurs twice"),
        (lambda text: gzip.compress(text)[:-20], "cannot be decompressed"),
        (lambda text: text + b">\nACGT\n", "the header has no id"),
    ],
)
def test_old_results_survive_a_rejected_input(finished, make, few, tiny, tmp_path, spoil, why):
    """The faults are at the end of the input."""
    before = content_of(finished.output)
    bad = tmp_path / "bad.fa"
    bad.write_bytes(spoil(few.read_bytes()))
    for _ in range(2):
        with pytest.raises(InputError, match=why):
            run_inline(make_forced(make, bad), tiny.head)
        assert content_of(finished.output) == before
    assert not leftovers(finished.output)


def make_forced(make, fasta: Path) -> RunConfig:
    return again(make(force=True, chunk_size=500), input=(fasta,))


def test_kill_while_old_results_are_replaced(make, few, tiny, undisturbed, tmp_path, chaos_seed):
    """At every call from the first to the claim of the folder, in 16 rounds."""
    folder = tmp_path / "run"
    run_inline(again(make_forced(make, few), output_dir=tmp_path / "new", force=False), tiny.head)
    calls = CALLS.of(make_forced(make, few), tiny.head)
    for number in range(chaos_seed % 16, calls.index(("open", "shards/000000.faa")), 16):
        shutil.rmtree(folder)
        shutil.copytree(undisturbed, folder)
        end_of_killed(make_forced(make, few), tiny, folder, number)
        manifest = open_run_dir(folder).read_manifest()
        if manifest is not None and manifest.recipe == make().recipe:
            assert_resumes(make(resume=True), tiny, undisturbed)
        else:
            resumed = again(make_forced(make, few), force=False, resume=manifest is not None)
            assert_resumes(resumed, tiny, tmp_path / "new")


def test_kill_while_an_input_is_added(make_config, few, tiny, undisturbed, tmp_path, chaos_seed):
    """At every call that moves a planned file into place, in three rounds."""
    more = write_fasta(tmp_path / "more.fa", MORE)
    folder = tmp_path / "run"
    config = make_config(few, more, resume=True, add=True, **SMALL)
    shutil.copytree(undisturbed, folder)
    calls = CALLS.of(config, tiny.head)
    shutil.copytree(folder, tmp_path / "added")
    moves = [n for n, call in enumerate(calls) if call[0] == "rename" and ".planned" in call[1]]
    assert len(moves) > 8
    for number in moves[chaos_seed % 3 :: 3]:
        shutil.rmtree(folder)
        shutil.copytree(undisturbed, folder)
        end_of_killed(config, tiny, folder, number)
        assert_resumes(config, tiny, tmp_path / "added")
        assert shards_of(folder) == shards_of(tmp_path / "added")


def shards_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the shard files, which include the bases of frames and have no hash."""
    return {path.name: path.read_bytes() for path in (folder / "shards").iterdir()}


def end_of_killed(config: RunConfig, tiny, folder: Path, number: int) -> None:
    """Run in a process that ends at this call, as after ``kill -9``."""

    def run() -> None:
        with CALLS.below(folder, at(number, lambda _: os.kill(os.getpid(), signal.SIGKILL))):
            run_inline(config, tiny.head)

    process = multiprocessing.get_context("fork").Process(target=run)
    with warnings.catch_warnings():  # about threads: none holds a lock now
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


# Copies of pipes


def test_run_on_a_copy_resumes_in_a_moved_folder(make_config, few, tiny, tmp_path):
    """With the same data on the pipe, with the copy named, and with another input only."""
    other = write_fasta(tmp_path / "other.fa", MORE)
    small = {"residues_per_shard": 500}
    run_inline(make_config(few, other, output=tmp_path / "both", **small), tiny.head)
    piped = tmp_path / "pipe" / few.name
    piped.parent.mkdir()
    os.mkfifo(piped)

    def stop(event) -> None:
        if isinstance(event, ShardDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), fed(piped, few):
        run_inline(make_config(piped, other, **small), tiny.head, stop)
    (tmp_path / "run").rename(tmp_path / "away")
    for number, given in enumerate(("pipe", "copy", "other")):
        moved = tmp_path / f"moved{number}"
        shutil.copytree(tmp_path / "away", moved)
        copy = next((moved / "inputs").iterdir())
        path = {"pipe": piped, "copy": copy, "other": other}[given]
        with fed(piped, few) if given == "pipe" else nullcontext():
            run_inline(make_config(path, output=moved, resume=True, **small), tiny.head)
        assert_same_run(moved, tmp_path / "both")


@contextmanager
def fed(pipe: Path, source: Path) -> Iterator[None]:
    """Write into a pipe from another thread."""
    feeder = subprocess.Popen(["sh", "-c", 'cat "$0" > "$1"', source, pipe])
    try:
        yield
    finally:
        feeder.wait(60)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b">a\nACGT\n" * 999, mtime=0)[:-9], b">\nACGT\n"],
    ids=["cut", "blank"],
)
def test_pipe_faults_name_the_pipe(make_config, tiny, tmp_path, content):
    source = tmp_path / "source"
    pipe = tmp_path / "reads.fifo"
    source.write_bytes(content)
    os.mkfifo(pipe)
    with fed(pipe, source), pytest.raises(InputError) as caught:
        run_inline(make_config(pipe), tiny.head)
    assert str(caught.value).startswith(f"{pipe}:") and "inputs/" not in str(caught.value)
