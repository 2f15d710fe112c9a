"""The run folder: what lies where in it, what belongs to the run, and what is deleted when.

The names of the outputs are those of the sinks; every other name stands here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from virnucpro.ground.config import Command, Recipe
from virnucpro.ground.errors import InputMissingError, OutputError, UsageError
from virnucpro.ground.files import TEMPORARY, disk_error, open_plain, read_facts, writing
from virnucpro.ground.log import announce, counted, logging_to_file, printable
from virnucpro.ground.records import SHARD_NAME
from virnucpro.ground.tree import Tree
from virnucpro.run.features import FeatureStore, index_of, inner_names, open_stores
from virnucpro.run.journal import HostFigures, read_hosts
from virnucpro.run.lock import (
    LOCK,
    OF_A_LOCK,
    is_held,
    locked,
    others_at,
    own_name,
    shared,
    tagged,
)
from virnucpro.run.manifest import Manifest, read_manifest, write_manifest
from virnucpro.sequences.inputs import RUN_FILE
from virnucpro.tables.sinks import FAILED_SEQUENCES, SINKS, Sink, all_sinks

# what ends the names of files of a slice: its plan, digests of ids, rows of tables
PLAN, IDS, ROWS = ".plan", ".ids", ".rows"
# files that a run makes in its sub-folders
_OURS = re.compile(
    rf"{SHARD_NAME}(_copies)?\.(h5|npz|pt|parquet|faa|fna|scores|plan|ids|chunks|rows)"
    r"|\w+-[0-9a-f]{16}\.h5|[0-9a-f]{16}\.fa|plan\.json"
    r"|work-[\w.-]+-\d+\.log|\..*\.(tmp|partial)"
)
_WAITING, _LAST = "this part is done but for", 500  # bytes of a log with its last line
_PARTIAL = re.compile(r"\..*\.partial")


class _Inside:
    """A file or folder of a run, by its place in the run folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, rundir: RunDir, _: type) -> Path:
        return rundir.root / self.name


@dataclass(frozen=True, slots=True)
class RunDir(Tree):
    """The folder of a run; see ``Tree`` for how it is written into."""

    page: ClassVar = "report.html"  # of a run, a training or an evaluation
    of_any_command: ClassVar = frozenset({*OF_A_LOCK, "virnucpro.log"})  # what any leaves

    manifest = _Inside(RUN_FILE)
    log = _Inside("virnucpro.log")
    report = _Inside(page)
    machine = _Inside("machine.json")  # the work of the devices over time
    logs = _Inside("logs")  # of ``work``, one of each process
    parsl = _Inside(f".parsl{TEMPORARY}")  # the files of Parsl, while it runs
    features = _Inside("features")
    scores = _Inside("scores")  # of blocks of records, in a run without a model
    rows = _Inside("rows")  # of the tables of slices, until all are joined
    shards = _Inside("shards")
    plan = _Inside("shards/plan.json")
    chunks = _Inside("chunks.fa")
    samples = _Inside("samples")  # outputs of each file by itself, in folders of their names
    copies = _Inside("inputs")  # copies of inputs that cannot be read twice

    @property
    def feature_index(self) -> Path:
        return index_of(self.features)

    @property
    def planned(self) -> RunDir:
        """The folder in which a plan is made; the old plan stays until the new one is whole."""
        return RunDir(self.root / f".planned{TEMPORARY}")

    def output(self, sink: Sink) -> Path:
        return self.root / sink.file

    def record_table(self, command: Command) -> Path:
        """The table with a row for every record."""
        return self.output(SINKS[command][0])

    @property
    def _results(self) -> tuple[Path, ...]:
        return (
            self.manifest,
            self.features,
            self.feature_index,
            self.scores,
            self.rows,
            self.shards,
            self.chunks,
            self.copies,
            self.samples,
            self.report,
            self.machine,
            *map(self.output, all_sinks()),
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of this folder, which is made if it is not there.

        The folder itself may be a link, to another disk say; what a run writes into it may not.

        Raises:
            OutputError: another run is using it; or it cannot be made or written, or was taken
                away since; or a file of a run in it is a link.
            StorageError: its disk is full.
        """
        with _told():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # those above it were made, or are there
                raise OutputError(
                    f"{printable(self.root)}: no folder can be made there",
                    hint="choose another --output-dir",
                ) from error
            self._refuse_links()
            with locked(self.root, self.logs):
                yield

    def shared(self) -> AbstractContextManager[None]:
        """Share this folder with others that work in it, with a log of this process; keep runs out.

        Raises:
            OutputError, StorageError: as ``locked``.
        """
        return self._beside_others(partial(shared, self.root))

    def helped(self) -> AbstractContextManager[None]:
        """Work in this folder for the run that has it, with a log of this process.

        Raises:
            OutputError, StorageError: as ``locked``.
        """
        return self._beside_others(tagged)

    @contextmanager
    def _beside_others(
        self, lock: Callable[[Path], AbstractContextManager[None]]
    ) -> Iterator[None]:
        with _told():
            self._refuse_links()
            self.make_folder(self.logs)
            log = self.logs / f"work-{self.user}.log"
            with lock(log), logging_to_file(log, self.opener(log)):
                yield

    @property
    def user(self) -> str:
        """The name of this process among all that may use the folder, on any machine."""
        return own_name()

    @property
    def has_run(self) -> bool:
        """Whether a process has this folder alone now."""
        return is_held(self.root / LOCK)

    def hosts(self) -> list[HostFigures]:
        """The figures of each host that did parts of the run, by name."""
        return read_hosts(self.logs)

    def note_waiting(self, n_shards: int) -> None:
        """Say, and write into the log, that this process has only to wait for others."""
        shards = counted(n_shards, "shard")
        announce(f"{_WAITING} tables: waiting for {shards} of other parts")

    @property
    def others_work(self) -> bool:
        """Whether another process that shares this folder has more to do than to wait."""
        return any(is_held(tag) and not _is_waiting(tag) for tag in others_at(self.logs))

    def _refuse_links(self) -> None:
        aside = (self.planned.root, self.parsl)
        ours = (self.log, self.logs, *aside, *self._results)
        self.refuse_links((*OF_A_LOCK, *(path.name for path in ours)))
        Tree(self.features).refuse_links(inner_names(self.features))
        if self.samples.is_dir():
            Tree(self.samples).refuse_links([path.name for path in self.samples.iterdir()])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lock this folder and append to its log; say where the folder is, if it is a link.

        What a killed command left in it half done is deleted.

        Raises:
            OutputError, StorageError: as ``locked``.
        """
        with self.locked(), logging_to_file(self.log, self.opener(self.log)):
            if self.root.is_symlink():
                announce(f"{printable(self.root)} is a link to {printable(self.root.resolve())}")
            self.sweep()
            yield

    def check_free(self, *, resume: bool, force: bool) -> None:
        """Refuse a folder with results, unless the user said what to do with them.

        Raises:
            OutputError: it holds a run, or files of that name that are not of a run.
            UsageError: both were said.
        """
        if resume and force:
            raise UsageError(
                "--resume and --force contradict each other",
                hint="--resume goes on with what is there, --force throws it away",
            )
        present = [path for path in self._results if path.exists()]
        if all(map(self._is_left_over, present)):
            return
        names = [path.name for path in present]
        if self.manifest.name not in names:
            raise OutputError(
                f"{printable(self.root)} holds {', '.join(names)}, but no run of VirNucPro",
                hint="choose another --output-dir, or move these files away",
            )
        if not resume and not force:
            raise OutputError(
                f"{printable(self.root)} holds a run already",
                hint="add --resume to go on with it, or --force to throw it away and start again",
            )

    def _is_left_over(self, path: Path) -> bool:
        """Whether it may be of a start that was ended before it had claimed the folder."""
        return (
            path == self.copies
            and path.is_dir()
            and all(_OURS.fullmatch(file.name) for file in path.iterdir())
        )

    def clear(self) -> None:
        """Delete the results of a run, and nothing else; the claim to the folder goes last.

        Copies of inputs stay: the next run may need them.
        """
        for path in reversed(self._results):
            if path == self.samples:
                self.clear_samples()
            elif path == self.features:
                for folder in self.feature_folders():
                    self._delete_ours(folder)
            elif path in (self.scores, self.rows, self.shards):
                self._delete_ours(path)
            elif path != self.copies:
                self.delete(path)
        self._delete_ours(self.logs)

    def feature_folders(self) -> list[Path]:
        """The folders of further encoders, and then that of the first, which contains them."""
        return [*(self.features / name for name in inner_names(self.features)), self.features]

    def clear_samples(self) -> None:
        """Delete the outputs of single samples."""
        names = {sink.file for sink in all_sinks() if sink.per_file}
        for folder in self.sample_folders():
            self.delete_files(folder, names.__contains__)
            self.delete_folder(folder)
        self.delete_folder(self.samples)

    def sample_folders(self) -> list[Path]:
        """The folders of single samples."""
        if not self.samples.is_dir():
            return []
        return [path for path in self.samples.iterdir() if path.is_dir()]

    def _delete_ours(self, folder: Path, kept: Collection[str] = ()) -> None:
        """Delete the files of a run in a folder, which stays if it holds others."""
        self.delete_files(folder, lambda name: _OURS.fullmatch(name) and name not in kept)
        self.delete_folder(folder)

    def clear_copies(self, manifest: Manifest) -> None:
        """Delete the copies of inputs that a run does not need; its manifest is written."""
        paths = [Path(file.path) for file in (*manifest.inputs, *manifest.refused)]
        names_in_use = [path.name for path in paths if path.parent == self.copies.resolve()]
        self._delete_ours(self.copies, kept=names_in_use)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Give a plan its place aside, for the time of the block."""
        try:
            with writing(self.planned.root, self.planned.shards):
                self.make_folder(self.planned.shards)
            yield
        finally:
            shutil.rmtree(self.planned.root, ignore_errors=True)

    def adopt_plan(self) -> None:
        """Put what was planned aside in its place; ``plan.json``, which vouches for it, last."""
        with writing(self.shards):
            self.make_folder(self.shards)
        self.delete(self.chunks)  # they would be of other inputs
        files = {file.name: file for file in self.planned.shards.iterdir()}
        vouching = files.pop(self.plan.name)
        for file in (*files.values(), vouching):
            with writing(self.shards / file.name, file):
                self.move(file, self.shards / file.name)

    def clear_parts(self) -> None:
        """Delete what was joined; what cannot be deleted does no harm."""
        with suppress(OSError):
            self._delete_ours(self.rows)

    def clear_shards(self) -> None:
        """Delete what only the run needed; what cannot be deleted does no harm."""
        with suppress(OSError):
            self._delete_ours(self.shards)
            self.delete(self.chunks)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the files that a run writes into its folder."""
        return tuple(path.name for path in (*self._results, self.log))

    def refuse_to_clear(self, inputs: Iterable[Path]) -> None:
        """Refuse inputs that ``clear`` would delete.

        Raises:
            UsageError: there is one.
        """
        ours = {result.resolve() for result in self._results}
        if any(ours & {path.resolve(), *path.resolve().parents} for path in inputs):
            raise UsageError(
                "an input lies in the folder that --force clears",
                hint=f"move it away first; to repair a run with its {FAILED_SEQUENCES.file} "
                "use --resume",
            )

    def sweep(self) -> None:
        """Delete what a killed command left half done."""
        for folder in (self.planned.root, self.parsl):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (
            self.root,
            self.scores,
            self.rows,
            self.shards,
            self.copies,
            *self.sample_folders(),
        ):
            self.sweep_folder(folder)
        for folder in self.feature_folders():
            self.sweep_folder(folder, _PARTIAL.fullmatch)

    def read_manifest(self) -> Manifest | None:
        """
        Raises:
            ResumeError: ``run.json`` is damaged, or of another version.
        """
        return read_manifest(self.manifest, self.copies)

    def read_facts(self) -> dict[str, Any]:
        """All that ``run.json`` holds; what a resume needs of it is the manifest.

        Raises:
            ResumeError: it is damaged.
            OutputError, StorageError: it cannot be read now.
        """
        try:
            return read_facts(self.manifest)
        except OSError as error:
            raise disk_error(error, self.manifest) from error

    def read_run(self, hint: str) -> Manifest:
        """The manifest of the run that must be here.

        Raises:
            InputMissingError: there is none; ``hint`` says what to name.
            ResumeError: as ``read_manifest``.
        """
        manifest = self.read_manifest()
        if manifest is None:
            raise self.no_run(hint)
        return manifest

    def no_run(self, hint: str, content: str = "run") -> InputMissingError:
        """The error for a folder that holds no run, or is not there."""
        where = printable(self.root)
        if self.root.is_dir():
            return InputMissingError(f"{where} holds no {content}", hint)
        fault = "not a folder" if self.root.exists() else "there is no such folder"
        return InputMissingError(f"{where}: {fault}", hint)

    def stores_of(self, recipe: Recipe) -> tuple[FeatureStore, ...]:
        """The feature stores of a run, one for each of its encoders."""
        return open_stores(self.features, recipe.encoders, recipe.fingerprint)

    def write_manifest(self, manifest: Manifest, facts: Mapping[str, Any]) -> None:
        write_manifest(self.manifest, self.copies, manifest, facts)


def _is_waiting(log: Path) -> bool:
    with open_plain(log) as handle:
        handle.seek(max(0, handle.seek(0, os.SEEK_END) - _LAST))
        return _WAITING.encode() in handle.read().rstrip().rpartition(b"\n")[2]


@contextmanager
def _told() -> Iterator[None]:
    """Turn errors of the disk into ours, but for those of standard output."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise disk_error(error) from error
