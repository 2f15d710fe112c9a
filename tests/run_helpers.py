"""Run commands for tests, and read their results in a form that can be compared."""

from __future__ import annotations

import csv
import json
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import h5py
import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from pyarrow import parquet

from virnucpro.cli.main import app
from virnucpro.core.events import EventHandler
from virnucpro.core.json_checksum import add_checksum
from virnucpro.core.recipe import Recipe
from virnucpro.core.types import FastaRecord, Records
from virnucpro.engine.base import Executor
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.sequences.fasta import read_fasta
from virnucpro.sequences.translate import Chunk, translate_six_frames
from virnucpro.store.feature_store import open_stores
from virnucpro.viral.classifier_choice import choose_classifier
from virnucpro.viral.head import Head
from virnucpro.viral.types import (
    Call,
    CalledRecords,
    Calls,
    FrameScores,
    Region,
    Track,
)
from virnucpro.workflows.extract import extract, run_extract
from virnucpro.workflows.extract_config import ExtractConfig, resolve_extract
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.predict import predict, run_predict
from virnucpro.workflows.predict_config import PredictConfig
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.resolve_predict import resolve_predict
from virnucpro.workflows.run_config import RunConfig
from virnucpro.workflows.run_steps import ExecutorOn
from virnucpro.workflows.summary import Summary

if TYPE_CHECKING:
    from conftest import Tiny

ROOT = Path(__file__).parents[1]
CONTIGS, PROTEINS = (ROOT / "examples" / name for name in ("contigs.fa", "proteins.faa"))
TABLES = (
    "predictions.tsv",
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "viral.fasta",
    "viruses.tsv",
    "viruses.fasta",
)


def run_inline(
    config: RunConfig,
    head: Head | None,
    on_event: EventHandler = lambda _: None,
    executor: Executor | None = None,
) -> Summary:
    """Run in this process. The head calls, or the scorer if there is no head."""
    if isinstance(config, PredictConfig):
        options = config.options
        config = replace(config, classifier=choose_classifier(options, options.calls, head))
    return run(config, executor or InlineExecutor(), on_event)


def run(config: RunConfig, executor: Executor, on_event: EventHandler) -> Summary:
    """Run a config that ``predict`` or ``extract`` resolved."""
    if isinstance(config, PredictConfig):
        return run_predict(config, executor, on_event)
    assert isinstance(config, ExtractConfig)
    return run_extract(config, executor, on_event)


def execute(
    options: RunOptions, on_event: EventHandler, executor_on: ExecutorOn = ProcessExecutor
) -> Summary:
    """Run with these options."""
    if isinstance(options, PredictOptions):
        return predict(options, on_event, executor_on)
    assert isinstance(options, ExtractOptions)
    return extract(options, on_event, executor_on)


def resolve(options: RunOptions, on_event: EventHandler) -> RunConfig:
    if isinstance(options, PredictOptions):
        return resolve_predict(options, on_event)
    assert isinstance(options, ExtractOptions)
    return resolve_extract(options, on_event)


def invoke(*words: object) -> tuple[int, str]:
    """Run a command in this process. -> its exit code, and its output"""
    outcome = CliRunner().invoke(app, list(map(str, words)))
    return getattr(outcome.exception, "exit_code", outcome.exit_code), outcome.output


def predict_here(proteins: Sequence[Path], tiny: Tiny, folder: Path) -> Path:
    """Run the proteins on one machine, in this process. -> the run folder"""
    options = PredictOptions(
        input=tuple(proteins),
        output_dir=folder,
        model=str(tiny.model),
        head=tiny.head_file,
        device="cpu",
        precision="fp32",
    )
    execute(options, lambda _: None, lambda _: InlineExecutor())
    return folder


def write_fasta(path: Path, records: Mapping[str, str]) -> Path:
    path.write_text("".join(f">{header}\n{letters}\n" for header, letters in records.items()))
    return path


def again(config: RunConfig, **changes: object) -> RunConfig:
    """Configure the same run with other options."""
    return replace(config, options=replace(config.options, **changes))


def called(*rows: tuple[FastaRecord, Call, Sequence[Region] | None]) -> CalledRecords:
    """Return records with their calls and regions. None: not searched."""
    records, calls, regions = zip(*rows, strict=True)
    track = Track(*(np.empty(0, kind) for kind in (np.int64, np.int64, np.float64, np.float64)))
    return CalledRecords(
        Records.from_records(records),
        Calls.from_calls(calls),
        FrameScores.from_predictions([[] for _ in rows]),
        {place: (tuple(of), track) for place, of in enumerate(regions) if of is not None},
    )


def hear_signals() -> None:
    """Restore signal handlers that the test runner ignores (`nohup`), before a command starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def our_processes() -> list[psutil.Process]:
    """Return the running processes that this one started, including forked ones."""
    found = list[psutil.Process]()
    for child in multiprocessing.active_children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found.append(psutil.Process(child.pid))
    for pid in child_ids():
        with suppress(psutil.NoSuchProcess):
            if is_own_process(child := psutil.Process(pid)):
                found.append(child)
    return found


def child_ids() -> list[int]:
    """List the children of this process.

    Linux has a list of them. Elsewhere psutil looks at each process of the machine, which takes
    milliseconds after every test.
    """
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:
        return [child.pid for child in psutil.Process().children()]
    found = list[int]()
    for path in lists:
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def kill_ours() -> int:
    """Kill the processes that this one started. -> their number"""
    ours = our_processes()
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return len(ours)


def is_own_process(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "virnucpro.core.child_process" in " ".join(process.cmdline())
    return False


def assert_gone(*pids: int) -> None:
    """Check that the processes have ended. A zombie counts as ended."""
    for pid in pids:
        wait_until(lambda pid=pid: not is_there(pid), seconds=10)


T = TypeVar("T")


def wait_until(
    look: Callable[[], T],
    seconds: float = 120,
    apart: float = 0.01,
    story: Callable[[], str] = lambda: "",
) -> T:
    """Call ``look`` until it returns a true value, and return that, or fail with a description."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"nothing came within {seconds} seconds\n{story()}"
        time.sleep(apart)
    return found


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if the block takes longer than this, instead of waiting forever."""

    def give_up(*_: object) -> None:
        pytest.fail(f"nothing came within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def exported(run_folder: Path, layout: str) -> dict[str, NDArray[np.float32]]:
    """Return the vectors of a run in another format, by id."""
    found: dict[str, NDArray[np.float32]] = {}
    for path in (run_folder / "features").glob(f"[0-9]*.{layout}"):
        if layout == "npz":
            with np.load(path) as stored:
                found |= dict(zip(stored["ids"].tolist(), stored["embeddings"], strict=True))
        elif layout == "parquet":
            table = parquet.read_table(path)
            rows = [np.array(row, np.float32) for row in table["embedding"].to_pylist()]
            found |= dict(zip(table["id"].to_pylist(), rows, strict=True))
        else:
            stored = torch.load(path, weights_only=True)
            rows = [row.numpy() for row in stored["data"]]
            found |= dict(zip(stored["proteins"], rows, strict=True))
    return found


def flip_bit(path: Path, place: int | None = None) -> None:
    """Flip one bit of a file: in its middle byte, or in the byte at ``place``."""
    content = bytearray(path.read_bytes() or b"\0")
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


@contextmanager
def no_file_longer_than(n_bytes: int) -> Iterator[None]:
    """Let writes past this length fail, much as on a full disk.

    No bytecode is written, because Python would not notice that it is truncated.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_no_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes_no_bytecode


def forget_hashes(folder: Path) -> None:
    """Turn a finished run into one of an older version, without output hashes in ``run.json``."""
    stored = json.loads((folder / "run.json").read_text())
    del stored["outputs"]
    write_run_json(folder, stored)


def write_run_json(folder: Path, stored: Mapping[str, object]) -> None:
    """Replace ``run.json``, with a correct checksum."""
    (folder / "run.json").write_text(add_checksum(stored))


def tables(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


def vectors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Return the vectors in ``features.h5`` by id: a row, or a row per residue."""
    with h5py.File(folder / "features.h5") as h5:
        if "ids" not in h5:
            return {}
        ids = h5["ids"].asstr()[:].tolist()
        rows = h5["embeddings"][:]
        ends = np.cumsum(h5["lengths"][:])
    assert len(set(ids)) == len(ids)
    by_orf = rows if len(rows) == len(ids) else np.split(rows, ends[:-1])
    return dict(zip(ids, by_orf, strict=True))


def vectors_of_each(folder: Path, recipe: Recipe) -> list[dict[str, NDArray[np.float32]]]:
    """Return the vectors of each encoder in a run, by frame id."""
    stores = open_stores(folder / "features", recipe.encoders, recipe.fingerprint)
    parts = [[content for *_, content in store.read_files()] for store in stores]
    return [
        {
            name: row
            for part in encoder_parts
            for name, row in zip(part.ids, part.vectors, strict=True)
        }
        for encoder_parts in parts
    ]


def bases_by_frame(fasta: Path) -> dict[str, str]:
    frames = {}
    for record in read_fasta(fasta):
        if set(record.sequence) <= set("ACGT"):
            chunks = list(Chunk.from_record(record, 300))
            frames |= {orf.id: orf.bases for orf in translate_six_frames(chunks)}
    return frames


def statuses(folder: Path, table: str = "predictions.tsv") -> dict[str, str]:
    """Return the status of each record by id. Ids must be unique over all files."""
    found = rows(folder / table)
    assert len({row["record"] for row in found}) == len(found)
    return {row["record"]: row["status"] for row in found}


def rows(table: Path) -> list[dict[str, str]]:
    """Return the lines of a table as dicts by column."""
    with table.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
        found = list(csv.DictReader(lines, delimiter="\t", strict=True))
    assert all(None not in row and None not in row.values() for row in found)
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Check that tables and failures have equal bytes, and vectors equal bits, id by id."""
    assert tables(one) == tables(other)
    assert failures(one) == failures(other)
    chunks = [folder / "chunks.fa" for folder in (one, other)]
    if all(path.exists() for path in chunks):
        assert chunks[0].read_bytes() == chunks[1].read_bytes()
    assert feature_names(one) == feature_names(other)
    assert_same_vectors(vectors(one), vectors(other))


def failures(folder: Path) -> dict[str, bytes]:
    """Return the files that exist only if something failed."""
    paths = [folder / name for name in ("failed_files.txt", "failed_sequences.fa")]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def feature_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "features").glob("*.h5")}


def assert_same_vectors(
    one: dict[str, NDArray[np.float32]], other: dict[str, NDArray[np.float32]]
) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert np.array_equal(one[name], other[name]), name


def leftovers(folder: Path) -> list[str]:
    """Return temporary and partial files that a run must not leave."""
    return [path.name for path in folder.rglob(".*") if path.name.endswith((".tmp", ".partial"))]


def copies_files(folder: Path) -> list[Path]:
    return sorted((folder / "features").glob("*_copies.h5"))
