"""A run on several machines: one plans, any number embed, and one joins."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
from forkserver_runner import virnucpro
from run_helpers import assert_same_run, invoke, leftovers, resolve, run, run_inline, within

from virnucpro.api import read_features
from virnucpro.cli.console import planned_steps
from virnucpro.core.errors import (
    InputError,
    InputMissingError,
    OutputError,
    ResumeError,
    UnavailableError,
    UsageError,
)
from virnucpro.core.events import STAGES, EventHandler, Progress, RunEvent, ShardDone, WorkerEvent
from virnucpro.core.types import Shard
from virnucpro.engine.event_log import HostProgress, read_events, read_work, sum_hosts
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.engine.retry_policy import Attempt
from virnucpro.engine.work_options import WorkOptions
from virnucpro.engine.worker import Worker
from virnucpro.models.lookup import open_model
from virnucpro.results.outputs import OUTPUTS, OutputFile, open_run_dir
from virnucpro.results.report.run_report import report_folder
from virnucpro.sequences import inputs
from virnucpro.store.checksums import Outputs
from virnucpro.store.feature_file import checksummed_label, read_label
from virnucpro.store.plan import PlanCounts, SlicePlan
from virnucpro.store.plan_reader import read_plan
from virnucpro.viral.head import Head
from virnucpro.viral.known import KnownIndex
from virnucpro.viral.networks import Scorer
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_config import RunConfig
from virnucpro.workflows.status import inspect_run, measure_run
from virnucpro.workflows.table_cache import RowStore, SliceRows
from virnucpro.workflows.work_share import WorkShare, choose_part, work

FORK = multiprocessing.get_context("fork")


def exit_codes_of(*calls: Callable[[], object]) -> list[int | None]:
    """Run all calls at the same time, each in a process. -> their exit codes"""
    processes = [FORK.Process(target=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@pytest.fixture
def digest(tiny) -> str:
    """The digest of the tiny model, by which ``work`` identifies it."""
    return open_model(str(tiny.model), lambda _: None).prepare("fp32", lambda _: None)[1]


@pytest.fixture
def hashes(tiny, digest) -> dict[str, str]:
    """Return the model hashes that ``work`` finds on this machine."""
    head = Head.load(tiny.head_file)
    return {
        "sha256": digest,
        "head_sha256": head.sha256,
        "scorer_sha256": Scorer.load_builtin().sha256,
        "known_sha256": KnownIndex.load_builtin().sha256,
    }


@pytest.fixture
def plan(make_config, tiny, hashes, contigs) -> Callable[..., Path]:
    """Plan a run of a dozen shards, with a model that ``work`` finds by its path."""

    def make(**changes: object) -> Path:
        run = {"plan_only": True, "head": tiny.head_file, **hashes}
        config = make_config(contigs, **{**run, **changes})
        run_inline(replace(config, models=(str(tiny.model),)), tiny.head)
        return config.output

    return make


@pytest.fixture
def merge(make_config, tiny, hashes, contigs) -> Callable[..., None]:
    """Join a planned run. Nothing may be embedded."""

    def join(**changes: object) -> None:
        executor = changes.pop("executor", ProcessExecutor(()))
        on_event = changes.pop("on_event", lambda _: None)
        run = {"resume": True, "head": tiny.head_file, **hashes}
        config = make_config(contigs, **{**run, **changes})
        config = replace(config, models=(str(tiny.model),))
        run_inline(config, tiny.head, on_event, executor)

    return join


@pytest.fixture
def asked(tiny, contigs, tmp_path) -> Callable[..., PredictOptions]:
    run = {"input": (contigs,), "output_dir": tmp_path / "run"}
    return partial(PredictOptions, **run, model=str(tiny.model), head=tiny.head_file)


def work_inline(
    folder: Path, part: str | None = None, on_event: EventHandler = lambda _: None
) -> int:
    options = WorkOptions(folder=folder, part=part, device="cpu", workers=1)
    return work(options, on_event, lambda _: InlineExecutor()).n_shards


def test_plan_ends_before_anything_is_embedded(plan):
    folder = plan()
    assert json.loads((folder / "run.json").read_text())["state"] == "planned"
    lines = inspect_run(folder, verify=False)[0]
    assert "command   predict, tiny, layer 2, fp32" in lines
    assert any(line.startswith("next      virnucpro work") for line in lines)
    assert not list((folder / "features").iterdir())
    assert not (folder / "predictions.tsv").exists()


def test_parts_in_any_order_equal_one_machine(plan, merge, undisturbed):
    folder = plan()
    done = [work_inline(folder, part) for part in ("3/3", "1/3", "2/3")]
    n_shards = len(list((folder / "shards").glob("*.faa")))
    assert sum(done) == n_shards > 6 and min(done) >= n_shards // 3
    assert len(list((folder / "rows").glob("*.rows"))) == count_slices(folder) == 1
    assert work_inline(folder) == 0
    merge()
    assert_same_run(folder, undisturbed)


def test_part_does_not_hash_unchanged_inputs(plan):
    folder = plan()
    inputs._hash_path.cache_clear()
    assert work_inline(folder) > 6
    assert inputs._hash_path.cache_info().misses == 0


def test_half_a_slice_leaves_only_its_files(plan):
    folder = plan()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    work_inline(folder, "1/2")
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before.items() <= after.items()
    new = {str(path.relative_to(folder)) for path in after.keys() - before.keys()}
    (log,) = {name for name in new if not name.startswith(("features/", "scores/", "shards/"))}
    assert log.startswith("logs/work-") and log.endswith(f"-{os.getpid()}.log")


def test_concurrent_work_on_the_same_parts(plan, merge, undisturbed):
    folder = plan()
    parts = [partial(work_inline, folder, part) for part in ("1/2", "2/2", "2/2")]
    assert exit_codes_of(*parts) == [0, 0, 0]
    assert not leftovers(folder)
    merge()
    assert_same_run(folder, undisturbed)


def killed_at_its_second_shard(folder: Path) -> None:
    done = []

    def count(event: RunEvent) -> None:
        done.extend([event] if isinstance(event, ShardDone) else [])
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    work_inline(folder, "1/1", count)


def test_killed_work_costs_its_open_shard(plan, merge, undisturbed):
    folder = plan()
    assert exit_codes_of(partial(killed_at_its_second_shard, folder)) == [-signal.SIGKILL]
    assert len(list((folder / "features").glob("*.h5"))) >= 2
    (folder / "features" / ".000005.h5.00000000.tmp").write_bytes(b"half a file")
    merge(executor=InlineExecutor())
    assert not leftovers(folder)
    assert_same_run(folder, undisturbed)


SLICE = 4000  # bytes; the contigs fill a dozen


@pytest.fixture
def alone(make_config, tiny, hashes, contigs, tmp_path) -> Callable[..., dict[str, str]]:
    """The outputs of an undisturbed run of the contigs in slices, on one device."""

    def make(**changes: object) -> dict[str, str]:
        cut = {"bytes_per_slice": SLICE, "output": tmp_path / "alone", **hashes}
        run_inline(make_config(contigs, **{**cut, **changes}), tiny.head)
        return outputs(tmp_path / "alone")

    return make


def outputs(folder: Path) -> dict[str, str]:
    """Return the hashes of all outputs except the report, which contains places and times."""
    hashes = Outputs(open_run_dir(folder)).hash()
    del hashes["report.html"]
    return hashes


def killed_at(folder: Path, part: str, is_time: Callable[[Path, RunEvent], bool]) -> None:
    """Run a part in a process until it is killed."""

    def look(event: RunEvent) -> None:
        if is_time(folder, event):
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_codes_of(partial(work_inline, folder, part, look)) == [-signal.SIGKILL]


def is_planning(folder: Path, event: RunEvent) -> bool:
    return isinstance(event, Progress) and event.stage == "planning this part" and event.done > 6000


def is_writing_rows(folder: Path, event: RunEvent) -> bool:
    return len(list((folder / "rows").glob("*.rows"))) >= 2


def tables_being_made(events: list[RunEvent]) -> list[RunEvent]:
    return [event for event in events if isinstance(event, Progress) and event.stage == STAGES[2]]


def test_parts_write_tables_and_the_join_merges(plan, merge, alone, tmp_path):
    folder = plan(bytes_per_slice=SLICE, per_file=True)
    assert not list((folder / "shards").glob("*.faa"))
    killed_at(folder, "1/2", is_planning)
    killed_at(folder, "1/2", is_writing_rows)
    parts = [partial(work_inline, folder, part) for part in ("2/2", "1/2")]
    assert exit_codes_of(*parts) == [0, 0]
    assert len(list((folder / "rows").glob("*.rows"))) == count_slices(folder) > 8
    assert "next      the planned command with --resume" in inspect_run(folder, verify=False)[0]
    events: list[RunEvent] = []
    merge(bytes_per_slice=SLICE, per_file=True, on_event=events.append)
    assert not tables_being_made(events)
    assert not (folder / "rows").exists() and not leftovers(folder)
    assert outputs(folder) == alone(per_file=True)
    assert_same_run(folder, tmp_path / "alone")


def count_slices(folder: Path) -> int:
    manifest = open_run_dir(folder).read_manifest()
    return len(read_plan(open_run_dir(folder), manifest).slices)


def test_join_does_what_parts_left_out(plan, merge, alone):
    folder = plan(bytes_per_slice=SLICE, per_file=True)
    work_inline(folder, "2/3")
    n_rows = len(list((folder / "rows").glob("*.rows")))
    slices = measure_run(folder)["slices"]
    n_planned = len(list((folder / "shards").glob("*.plan")))
    assert slices == {"total": count_slices(folder), "planned": n_planned, "tables": n_rows}
    shown = "slices    {planned} of {total} planned, {tables} with tables".format(**slices)
    described = inspect_run(folder, verify=False)[0]
    assert shown in described and f"next      virnucpro work {folder} " in "\n".join(described)

    def join_until_killed() -> None:
        def look(event: RunEvent) -> None:
            if tables_being_made([event]):
                os.kill(os.getpid(), signal.SIGKILL)

        merge(bytes_per_slice=SLICE, per_file=True, executor=InlineExecutor(), on_event=look)

    assert exit_codes_of(join_until_killed) == [-signal.SIGKILL]
    assert len(list((folder / "rows").glob("*.rows"))) == n_rows >= 3
    (damaged, *_) = sorted((folder / "rows").glob("*.rows"))
    damaged.write_bytes(damaged.read_bytes().replace(b"virus", b"VIRUS", 1))
    merge(bytes_per_slice=SLICE, per_file=True, executor=InlineExecutor())
    assert outputs(folder) == alone(per_file=True)


FORGERIES = ({"files": "x"}, {"files": [[{"name": "../x.h5"}]]}, {"portions": 3}, {"more": b"\0"})


def forge(rows: Path, forgery: dict[str, object]) -> None:
    """Replace rows, with a correct label."""
    label = read_label(rows, {})
    facts, _, text = rows.read_bytes()[: label.n_bytes].partition(b"\n")
    parts = zip(("files", "counts", "portions"), json.loads(facts), strict=True)
    forged = json.dumps([forgery.get(name, value) for name, value in parts]).encode()
    content = b"\n".join((forged, text + forgery.get("more", b"")))
    rows.write_bytes(content + checksummed_label(content, label.attributes))


def test_damaged_planned_run_is_repaired(plan, merge, alone):
    folder = plan(bytes_per_slice=SLICE)
    work_inline(folder, "1/2")
    cut, gone, pipe, *_ = sorted((folder / "shards").glob("*.ids"))
    assert len(cut.stem) == len(pipe.stem) == 6  # a slice takes a range of numbers, and no more
    cut.write_bytes(cut.read_bytes()[:-3])
    work_inline(folder, "2/2")  # it compares the ids of both parts
    gone.unlink()
    pipe.unlink()
    os.mkfifo(pipe)
    *_, damaged, last = sorted((folder / "rows").glob("*.rows"))
    (folder / "shards" / f"{last.stem}.faa").unlink()  # its rows exist, its vectors do not
    (folder / "features" / f"{last.stem}.h5").unlink()
    (folder / "shards" / f"{damaged.stem}.faa").unlink()  # its vectors exist, its rows are damaged
    damaged.write_bytes(damaged.read_bytes().replace(b"contig", b"CONTIG", 1))
    rows = sorted((folder / "rows").glob("*.rows"))[3:-2]
    for path, forgery in zip(rows, FORGERIES, strict=False):
        forge(path, forgery)
    assert len(rows) >= len(FORGERIES)
    merge(bytes_per_slice=SLICE, executor=InlineExecutor())
    assert outputs(folder) == alone()


def test_rows_of_another_threshold_are_not_joined(plan, merge, alone):
    folder = plan(bytes_per_slice=SLICE)
    work_inline(folder)
    first, *others = sorted((folder / "rows").glob("*.rows"))
    first.write_bytes(first.read_bytes()[:-1])
    assert measure_run(folder)["slices"]["tables"] == len(others)
    merge(bytes_per_slice=SLICE, threshold=0.9, plan_only=True)
    assert measure_run(folder)["slices"]["tables"] == 0 < len(others)
    merge(bytes_per_slice=SLICE, threshold=0.9)
    assert outputs(folder) == alone(threshold=0.9)


OTHER_OUTPUTS = (*OUTPUTS["predict"], OutputFile("another.tsv"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("results.outputs.OUTPUTS", {"predict": OTHER_OUTPUTS}),
        ("workflows.table_cache.SCORE_FORMAT", "another"),
    ],
)
def test_rows_of_another_version_are_not_joined(plan, monkeypatch, name, value):
    store = stored_rows(plan)
    first_slice = store.plan.slices[:1]
    assert store.has(first_slice) and store.read(first_slice) is not None
    monkeypatch.setattr(f"virnucpro.{name}", value)
    assert not store.has(first_slice) and store.read(first_slice) is None


def stored_rows(plan: Callable[..., Path]) -> RowStore:
    """Return the rows of the first slice of a plan without a shard."""
    rundir = open_run_dir(plan(bytes_per_slice=SLICE))
    rundir.make_folder(rundir.rows)
    store = RowStore(read_plan(rundir, rundir.read_manifest()), "somebody")
    store.write(store.plan.slices[:1], SliceRows(n_records=1))
    return store


def test_rows_of_other_records_are_not_joined(plan, tmp_path):
    store = stored_rows(plan)
    slices = store.plan
    first = slices.slices[:1]
    second = slices.slices[1:2]
    shutil.copy(store.path(first), store.path(second))
    assert store.has(first) and not store.has(second)
    shard = Shard(first[0].index, tmp_path / "000000.faa", 1, 1, 1, "a hash")
    parts = {first[0].index: SlicePlan((shard,), PlanCounts(), ())}
    assert not replace(store, plan=replace(slices, slice_plans=parts)).has(first)
    assert not replace(store, made_by="somebody else").has(first)
    with_replaced = replace(slices.manifest, replaced=("contig1",))
    assert not replace(store, plan=replace(slices, manifest=with_replaced)).has(first)


def test_scorer_parts_with_damage_are_remade(contigs, tmp_path):
    def config(name: str, **how: object) -> RunConfig:
        options = PredictOptions(input=(contigs,), output_dir=tmp_path / name, **how)
        config = resolve(options, lambda _: None)
        return replace(config, recipe=replace(config.recipe, bytes_per_slice=SLICE))

    run(config("alone"), ProcessExecutor(()), lambda _: None)
    run(config("spread", plan_only=True), ProcessExecutor(()), lambda _: None)
    for part in ("2/2", "1/2"):
        work_inline(tmp_path / "spread", part)
    assert len(list((tmp_path / "spread/rows").glob("*.rows"))) == count_slices(tmp_path / "spread")
    damaged, *_, gone = sorted((tmp_path / "spread/scores").glob("*.scores"))
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    gone.unlink()
    run(config("spread", resume=True), ProcessExecutor(()), lambda _: None)
    both_outputs = [outputs(tmp_path / name) for name in ("alone", "spread")]
    assert both_outputs[0] == both_outputs[1] and any(
        name.startswith("scores/") for name in both_outputs[0]
    )


def test_repeated_id_in_a_part_is_refused(plan, contigs):
    contigs.write_text(contigs.read_text() + ">contig1 again\nACGTACGTACGT\n")
    folder = plan(bytes_per_slice=SLICE)
    with pytest.raises(InputError, match="contig1 occurs twice"):
        work_inline(folder)
    assert not list((folder / "features").glob("*.h5"))


def test_repeated_id_across_parts_is_refused(plan, merge, contigs):
    text = f"{contigs.read_text()}>filler\n{'N' * SLICE}\n"
    contigs.write_text(f"{text}>contig1 again\nACGTACGTACGT\n")
    n_lines = text.count("\n")
    folder = plan(bytes_per_slice=SLICE)
    work_inline(folder, "1/2")
    finished = {path: path.read_bytes() for path in (folder / "features").glob("*.h5")}
    words = rf"{contigs}:{n_lines + 1}: the id contig1 occurs twice \(first at {contigs}:3\)"
    for again in (lambda: work_inline(folder, "2/2"), lambda: merge(bytes_per_slice=SLICE)):
        with pytest.raises(InputError, match=words) as caught:
            again()
        assert "--rename-duplicates; then start again with --force" in caught.value.hint
    assert {path: path.read_bytes() for path in (folder / "features").glob("*.h5")} == finished


def test_temporary_files_of_others_are_kept(plan, tiny, contigs, make_config):
    """Even by an interrupted `work`, which deletes its own partial file."""

    class InterruptedWorker(Worker):
        def run(self, attempt: Attempt) -> Iterator[WorkerEvent]:
            self.job.stores[0].partial_path(attempt.shard, self.job.owner).write_bytes(
                b"of its own"
            )
            raise KeyboardInterrupt

    folder = plan()
    others = [
        folder / "features" / name
        for name in (".000001.h5.00000000.tmp", ".000001.elsewhere-7.partial")
    ]
    for path in others:
        path.write_bytes(b"of another")
    options = WorkOptions(folder=folder, device="cpu", workers=1)
    with pytest.raises(KeyboardInterrupt):
        work(options, lambda _: None, lambda _: InlineExecutor(worker=InterruptedWorker))
    assert sorted((folder / "features").iterdir()) == sorted(others)
    with pytest.raises(OutputError, match="virnucpro work"), open_run_dir(folder).shared():
        run_inline(make_config(contigs, resume=True), tiny.head)
    assert [path.read_bytes() for path in others] == [b"of another"] * 2


def test_damaged_vector_file_is_replaced(plan, merge, undisturbed):
    folder = plan()
    work_inline(folder)
    path = folder / "features" / "000003.h5"
    path.write_bytes(path.read_bytes()[:-1])

    def is_there_still(_: RunEvent) -> None:
        assert path.exists()

    assert work_inline(folder, "1/1", is_there_still) == 1
    merge()
    assert_same_run(folder, undisturbed)


def test_pipe_in_place_of_a_file_is_not_read(plan):
    folder = plan()
    (folder / "logs").mkdir(exist_ok=True)
    shard = folder / "shards/000000.faa"
    log = folder / "logs/work-elsewhere-7.log"
    os.mkfifo(shard)
    with within(20):
        assert work_inline(folder, "1/2") and shard.is_file()
        os.mkfifo(log)
        work_inline(folder, "2/2")
        with pytest.raises(OSError, match="not a plain file"):
            inspect_run(folder, verify=False)


def test_join_without_vectors_names_missing_shards(plan, merge):
    folder = plan()
    work_inline(folder, "1/4")
    with pytest.raises(UnavailableError, match="000001, 000002, 000003, 000005") as caught:
        merge()
    assert f"`virnucpro work {folder}`" in caught.value.hint
    assert not (folder / "predictions.tsv").exists()


def test_finished_run_leaves_no_work_to_late_tasks(plan, merge):
    folder = plan()
    work_inline(folder)
    whole = measure_run(folder)
    merge()
    assert work_inline(folder) == 0
    after = measure_run(folder)
    (host,) = json.loads((folder / "run.json").read_text())["hosts"]
    assert host["n_shards"] == after["shards"]["done"]
    assert after["state"] == "complete" and after["remaining_seconds"] == 0
    assert (after["slices"], after["embed"]) == (None, "all")
    assert after["shards"] == whole["shards"] | {"pending": 0}
    assert after["tokens"] == whole["tokens"] | {"pending": 0}


def test_figures_of_each_host_are_read_from_the_logs(plan):
    folder = plan()
    assert measure_run(folder)["hosts"] == []
    seen = []
    work_inline(folder, "1/2", lambda event: seen.append((event, measure_run(folder))))
    during = [figures for event, figures in seen if isinstance(event, ShardDone)][-1]
    (host,) = during["hosts"]
    assert host["n_working"] == 1
    seconds = during["tokens"]["pending"] / host["tokens_per_second"]
    assert during["remaining_seconds"] == round(seconds)
    after = measure_run(folder)
    (host,) = after["hosts"]
    assert host["n_working"] == 0 and host["tokens_per_second"] > 0
    total = after["shards"]["total"]
    assert host["n_shards"] == after["shards"]["done"] == (total + 1) // 2
    assert after["shards"]["pending"] == total // 2 and after["remaining_seconds"] is None
    assert after["tokens"]["total"] > after["tokens"]["pending"] > 0
    (line,) = [line for line in inspect_run(folder, verify=False)[0] if line.startswith("host")]
    assert f"ended, {host['n_shards']} shards done" in line
    assert line.endswith(" tokens/s, 0 sequences failed")


def write_log(path: Path, *ends: tuple[int, int, int | None], seconds: float) -> None:
    """Write the log of a process: shard, tokens, and failed sequences (None: the shard failed)."""
    fields = {"time": 100.0, "event": "WorkerReady", "worker": "cpu", "memory": [0, 0]}
    lines = [fields | {"description": "a CPU"}]
    for index, n_tokens, n_failed in ends:
        shard_event = {"worker": "cpu", "shard": [index, 9, 9, 999], "time": 100.0 + seconds}
        batch = {"event": "BatchDone", "n_tokens": n_tokens, "memory": [0, 0]}
        end = {"event": "ShardDone", "seconds": 1.0, "n_failed": n_failed}
        if n_failed is None:
            end = {"event": "ShardFailed", "reason": "bad"}
        lines += [shard_event | batch, shard_event | end]
    path.write_text("".join(f"2026 INFO    event {json.dumps(line)}\n" for line in lines))


def test_hosts_sum_their_processes(tmp_path):
    write_log(tmp_path / "work-node-1.log", (0, 100, 1), (1, 300, None), seconds=4)
    write_log(tmp_path / "work-node-2.log", (1, 60, 2), (2, 0, None), seconds=2)
    write_log(tmp_path / "work-other-3.log", (3, 100, 0), seconds=0.3)
    other = HostProgress("other", 0, 1, 0, 0, 333.3)  # 100 / 0.3
    rate = (400 / 4 + 60 / 2) / 2  # none is at work: their mean
    assert sum_hosts(read_work(tmp_path)) == [HostProgress("node", 0, 2, 3, 1, rate), other]
    with (tmp_path / "work-node-1.log").open() as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # only the rates of those at work count
        node = HostProgress("node", 1, 2, 3, 1, 400 / 4)
        assert sum_hosts(read_work(tmp_path)) == [node, other]


def test_status_names_running_processes(plan):
    folder = plan()
    assert measure_run(folder)["running"] is None
    with open_run_dir(folder).locked():
        name = measure_run(folder)["running"]
        text = "\n".join(inspect_run(folder, verify=False)[0])
    assert name.startswith(f"process {os.getpid()} on ") and " since " in name
    assert f"\nrunning   {name}\n" in text and "\nnext " not in text
    (folder / ".lock").write_text(f"{name}\n")  # as one that was killed leaves it
    assert measure_run(folder)["running"] is None


def test_status_while_the_input_is_read(tmp_path):
    reading = pytest.raises(InputMissingError, match="is still reading the input")
    with open_run_dir(tmp_path).locked_for_run(), reading:
        inspect_run(tmp_path, verify=False)
    with pytest.raises(InputMissingError, match=r"contains no run$"):
        inspect_run(tmp_path, verify=False)


def test_damaged_events_are_skipped(plan):
    folder = plan()
    work_inline(folder, "1/4")
    before = measure_run(folder)
    (log,) = (folder / "logs").iterdir()
    end = {"time": 1, "event": "ShardDone", "worker": "cpu", "shard": [1, 1, 1, 9], "seconds": 1}
    changes = (
        *({"n_failed": "x"}, {"n_failed": -1}, {"n_failed": True}, {"shard": None}, {"shard": [1]}),
        *({"event": "Other"}, {"worker": 3}, {"time": 1e300}, {"strange": 1}),
    )
    wrong = [json.dumps({"n_failed": 0, **end, **change}) for change in changes]
    with log.open("a") as lines:
        for text in ("{", "[]", '{"shard": 1}', *wrong, "[" * 100_000):
            lines.write(f"2026 INFO    event {text}\n")
    (folder / "logs" / "slurm-12.out").write_text(f"a event {json.dumps({**end, 'n_failed': 0})}\n")
    assert measure_run(folder) == before


# Rejected work


def test_folder_without_a_run_is_refused(tmp_path):
    for look in (work_inline, report_folder, read_features, partial(inspect_run, verify=False)):
        with pytest.raises(InputMissingError, match="contains no run"):
            look(tmp_path)
        with pytest.raises(InputMissingError, match="nowhere: there is no such folder"):
            look(tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(InputMissingError, match="file: not a folder"):
        work_inline(tmp_path / "file")


def test_unplanned_run_is_refused(make_config, tiny, contigs):
    config = make_config(contigs, plan_only=True)
    run_inline(config, tiny.head)
    with pytest.raises(ResumeError, match="not planned for several machines"):
        work_inline(config.output)


def test_other_model_of_the_same_name_is_refused(plan, tmp_path):
    folder = plan(sha256="1" * 64)
    with pytest.raises(UnavailableError, match="the SHA-256 of the model was 111"):
        work_inline(folder)


def test_part_by_another_scorer_is_refused(contigs, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    scorer = Scorer.load_builtin()
    assert invoke("predict", "-i", contigs, "-o", folder, "--plan-only")[0] == 0
    another = replace(scorer, sha256="0" * 64)
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "load_builtin", staticmethod(lambda: another))
        with pytest.raises(UnavailableError, match=r"the SHA-256 of the scorer was .* now 0000"):
            work_inline(folder)
    assert not [*(folder / "scores").glob("*.scores")]
    work_inline(folder)
    assert [*(folder / "scores").glob("*.scores")]


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_device_without_the_precision_is_refused(plan, asked, precision):
    """In a part, and in a resume that would embed. A resume that only joins is accepted."""
    folder = plan(precision=precision)
    with pytest.raises(UnavailableError, match=f"computes in {precision}, and CPU") as caught:
        work_inline(folder)
    assert caught.value.exit_code == 69
    again = asked(resume=True, device="cpu")
    with pytest.raises(UnavailableError, match=f"computes in {precision}, and CPU") as caught:
        resolve(again, lambda _: None)
    assert caught.value.hint.endswith("start again with --force and another --precision")
    config = resolve(replace(again, no_embed=True), lambda _: None)
    assert config.recipe.encoders[0].precision == precision


def test_plan_in_fp8_for_cpus_is_refused(asked):
    with pytest.raises(UnavailableError, match="--precision fp8 needs GPUs") as caught:
        resolve(asked(plan_only=True, device="cpu", precision="fp8"), lambda _: None)
    assert "models check MODEL --device cpu --precision fp8" in caught.value.hint


def test_lost_plan_is_named(plan):
    folder = plan()
    shutil.rmtree(folder / "shards")
    counts = {"total": None, "done": 0, "pending": None, "given_up": 0}
    assert measure_run(folder)["shards"] == counts
    with pytest.raises(ResumeError, match="no plan") as caught:
        work_inline(folder)
    assert "--resume --plan-only" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan_only": True}, "the plan fixes the precision of the run"),
        ({"no_embed": True}, "--no-embed: no effect without --resume"),
        ({"no_embed": True, "plan_only": True}, "--no-embed: no effect with --plan-only"),
    ],
)
def test_senseless_work_options_are_refused(asked, changes, words):
    with pytest.raises(UsageError, match=words) as caught:
        resolve(asked(**changes), lambda _: None)
    assert caught.value.hint


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
def test_plan_may_be_for_other_devices(asked, precision):
    gpus = "0,1,2,3,4,5,6,7"
    config = resolve(asked(plan_only=True, precision=precision, gpus=gpus), lambda _: None)
    assert config.recipe.encoders[0].precision == precision
    assert not any("CPU" in line for line in config.announcements)


SLURM = {
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "4",
}


@pytest.mark.parametrize(
    ("text", "array", "part"),
    [
        (None, {}, WorkShare(0, 1)),
        ("3/16", {}, WorkShare(2, 16)),
        ("3/16", SLURM, WorkShare(2, 16)),
        (None, SLURM, WorkShare(2, 4)),
        ("4", SLURM, WorkShare(1, 4)),
        ("16", {"PBS_ARRAY_INDEX": "16"}, WorkShare(0, 16)),
        ("16", {"PBS_ARRAYID": "3"}, WorkShare(3, 16)),
    ],
)
def test_part_is_given_or_taken_from_the_task(text, array, part):
    assert choose_part(text, array) == part


def test_logs_are_read_from_their_last_line_on(tmp_path):
    log = tmp_path / "work-a-1.log"
    write_log(log, (7, 1, 0), seconds=1)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(f"text\n{lines[0]}{lines[2][:40]}")
    events, end = read_events(log)
    assert ([type(logged.event).__name__ for logged in events]) == ["WorkerReady"]
    assert read_events(log, end) == ([], end)
    with log.open("a") as out:
        out.write(lines[2][40:])
    ((logged,), end) = read_events(log, end)
    assert (logged.event.shard.index, end) == (7, log.stat().st_size)


@pytest.mark.parametrize(
    ("text", "array", "words"),
    [
        ("0/3", {}, "parts are 1/3 to 3/3"),
        ("4/3", {}, "parts are 1/3 to 3/3"),
        ("1/0", {}, "is not a part"),
        ("half", {}, "is not a part"),
        ("0", SLURM, "is not a part"),
        ("16", {}, "names no part"),
        (None, {"PBS_ARRAY_INDEX": "1"}, "is not of SLURM"),
        (None, {**SLURM, "SLURM_ARRAY_TASK_MAX": "8"}, "has gaps"),
        (None, {"SLURM_ARRAY_TASK_ID": "1"}, "has gaps"),
    ],
)
def test_unreadable_part_is_refused(text, array, words):
    with pytest.raises(UsageError, match=words) as caught:
        choose_part(text, array)
    assert caught.value.hint


@pytest.mark.parametrize("has_shards", [True, False])
@pytest.mark.parametrize(("n", "n_slices"), [(1, 1), (2, 1), (5, 3), (3, 40), (64, 1800)])
def test_parts_are_disjoint_and_equal(n, n_slices, has_shards):
    each = [WorkShare(number, n).shares(n_slices, has_shards=has_shards) for number in range(n)]
    (n_shares,) = {n_shares for n_shares, _ in each}
    owners = [(place, share) for _, ours in each for place in ours for share in ours[place]]
    assert sorted(owners) == [(i, j) for i in range(n_slices) for j in range(n_shares)]
    sizes = [sum(map(len, ours.values())) for _, ours in each]
    assert max(sizes) - min(sizes) <= 1
    assert has_shards or n_shares == 1


# The command line


@pytest.mark.parametrize(
    ("device", "precision", "place"),
    [
        ("auto", "bf16", "--gres=gpu:1"),
        ("auto", "fp32", "--cpus-per-task=8"),
        ("cpu", "auto", "--cpus-per-task=8"),
        ("cuda", "fp32", "--gres=gpu:1"),
    ],
)
def test_plan_offers_suitable_nodes(tmp_path, device, precision, place):
    options = PredictOptions(input=(), output_dir=tmp_path, device=device, precision=precision)
    for n_slices, n_tasks in ((40, 16), (2, 2)):
        line, *_ = planned_steps(options, n_slices, ["predict", "--plan-only"])
        work = f"--wrap 'virnucpro work {tmp_path}'"
        assert line == f"next: sbatch --array=1-{n_tasks} {place} {work}"


def test_three_commands_print_the_next_step(tiny, contigs, tmp_path):
    run = ("-i", contigs, "-o", tmp_path / "run", "--model", tiny.model, "--head", tiny.head_file)
    planned = virnucpro("predict", *run, "--plan-only", "--precision", "fp32")
    assert planned.returncode == 0, planned.stderr
    assert "planned: 1 slice of the input" in planned.stdout
    assert f"next: virnucpro work {tmp_path / 'run'}\n" in planned.stdout
    (then,) = [line for line in planned.stdout.splitlines() if line.startswith("then: ")]
    assert then.endswith("--resume") and "--plan-only" not in then
    words = ["virnucpro", "predict", *map(str, run), "--plan-only", "--precision", "fp32"]
    assert f"as typed  {shlex.join(words)}\n" in virnucpro("status", tmp_path / "run").stdout
    on_cpu = ("--device", "cpu", "--workers", "1")
    array = {**os.environ, **SLURM, "SLURM_ARRAY_TASK_ID": "1"}
    worked = virnucpro("work", tmp_path / "run", *on_cpu, env=array)
    assert worked.returncode == 0, worked.stderr
    done = "part 1 of 4 done: 1 slice planned, 1 of 1 shard embedded, tables of 1 slice written\n"
    assert worked.stdout.startswith(done)
    assert worked.stdout.endswith(
        "when all parts are done, run the planned command with --resume\n"
    )
    merged = virnucpro("predict", *run, "--resume", "--no-embed")
    assert merged.returncode == 0, merged.stderr
    figures = json.loads(virnucpro("status", tmp_path / "run", "--json").stdout)
    assert figures["state"] == "complete" and figures["shards"]["done"] == 1


def test_two_containers_of_one_machine_have_two_names():
    """Each program is process 1 in its own namespace, at the same time."""
    show = (
        "from virnucpro.store.run_lock import process_tag; "
        "print(process_tag(), flush=True); input()"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", show]
    both = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(2)]
    names = [one.stdout.readline().strip() for one in both]
    for one in both:
        one.communicate("\n")
    if any(one.returncode for one in both):
        pytest.skip("no namespaces of processes can be made here")
    assert all(name.endswith("-1") for name in names)
    assert len(set(names)) == 2
