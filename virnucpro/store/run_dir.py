"""Define the run folder: where its files are, which belong to the run, and when to delete them.

The creator of a ``RunDir`` passes the names of the output files. All other names are defined here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from virnucpro.core.atomic_io import TEMPORARY, disk_error, storage_errors
from virnucpro.core.errors import InputMissingError, OutputError, UsageError
from virnucpro.core.json_checksum import add_checksum, has_checksum, read_facts
from virnucpro.core.logging import announce, log_to_file, printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Command, Recipe
from virnucpro.core.safe_dir import SafeDir
from virnucpro.core.types import SHARD_NAME
from virnucpro.sequences.inputs import RUN_FILE
from virnucpro.store.feature_store import (
    FeatureStore,
    encoder_folder_names,
    index_path,
    open_stores,
)
from virnucpro.store.frame_scores import FRAME_SCORES, FrameScoreStore
from virnucpro.store.manifest import Manifest, write_manifest
from virnucpro.store.run_lock import (
    LOCK,
    LOCK_FILES,
    is_held,
    locked,
    process_tag,
    shared,
    tagged,
)
from virnucpro.store.shard_store import ShardStore

FEATURES = "features"  # folder with vectors
SCORE_FORMAT = 9  # increase when the same records and scorer would give other scores
# the table with one row per record, which marks a finished run
RECORD_TABLES: Mapping[Command, str] = {"predict": "predictions.tsv", "extract": "records.tsv"}
FAILED_SEQUENCES = "failed_sequences.fa"  # records to correct and add to the run
# files that a run creates in its subfolders
_OWN_FILES = re.compile(
    rf"{SHARD_NAME}(_copies)?\.(h5|npz|pt|parquet|faa|fna|scores|frames|plan|ids|chunks|rows)"
    r"|\w+-[0-9a-f]{16}\.h5|[0-9a-f]{16}\.fa|(plan|parts)\.json|index\.parquet|lookup\.npy"
    r"|work-[\w.-]+-\d+\.log|\..*\.(tmp|partial)"
)


class _RunPath:
    """A file or folder in a run, by its path in the run folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, rundir: RunDir, _: type) -> Path:
        return rundir.root / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputNames:
    """The names of output files, which the run folder clears, protects and verifies."""

    run: tuple[str, ...] = ()
    sample: tuple[str, ...] = ()  # names that may also occur in a sample's folder


@dataclass(frozen=True, slots=True, eq=False)
class RunDir(SafeDir):
    """The folder of a run. ``SafeDir`` writes into it."""

    _PARTIAL = re.compile(r"\..*\.partial")

    owned_names: OutputNames

    page: ClassVar = "report.html"  # report on a run, a training or an evaluation
    command_files: ClassVar = frozenset({*LOCK_FILES, "virnucpro.log"})  # left by any command
    # suffixes of a slice's files: plan, id digests, table rows
    plan_suffix: ClassVar = ".plan"
    ids_suffix: ClassVar = ".ids"
    rows_suffix: ClassVar = ".rows"
    scores_suffix: ClassVar = ".scores"  # for the scores of a record block

    manifest = _RunPath(RUN_FILE)
    log = _RunPath("virnucpro.log")
    report = _RunPath(page)
    crate = _RunPath("ro-crate-metadata.json")  # written on request
    machine = _RunPath("machine.json")  # device work over time
    logs = _RunPath("logs")  # logs of ``work``, one per process
    parsl = _RunPath(f".parsl{TEMPORARY}")  # Parsl's files, while it runs
    features = _RunPath(FEATURES)
    scores = _RunPath("scores")  # scores of record blocks or of frames, in a run without vectors
    rows = _RunPath("rows")  # table rows of slices, until they are joined
    shards = _RunPath("shards")
    plan = _RunPath("shards/plan.json")
    chunks = _RunPath("chunks.fa")
    samples = _RunPath("samples")  # outputs of each input file, in a folder with its name
    copies = _RunPath("inputs")  # copies of inputs that cannot be read twice

    @property
    def feature_index(self) -> Path:
        return index_path(self.features)

    @property
    def staged(self) -> RunDir:
        """Return the folder for building a plan, while the old plan stays."""
        return RunDir(self.root / f".planned{TEMPORARY}", self.owned_names)

    def output(self, name: str) -> Path:
        return self.root / name

    def record_table(self, command: Command) -> Path:
        """Return the table with one row per record."""
        return self.output(RECORD_TABLES[command])

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
            self.crate,
            self.machine,
            *map(self.output, self.owned_names.run),
        )

    @contextmanager
    def locked(self, *, create: bool = False) -> Iterator[None]:
        """Lock this folder against other runs. With ``create``, create it if it is missing.

        A command that has already seen the folder does not create it, because it may have been
        moved since. The folder itself may be a link, for example to another disk. A run's files in
        it may not be links.

        Raises:
            OutputError: another run is using the folder, it cannot be created or written, it was
                removed in the meantime, or a run's file in it is a link.
            StorageError: its disk is full.
        """
        with _as_output_errors():
            if create:
                self._create()
            self._refuse_links()
            with locked(self.root, self.logs):
                yield

    def _create(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # its parents exist
            raise OutputError(
                f"{printable(self.root)}: this folder cannot be made",
                hint=with_options("choose another {output_dir}"),
            ) from error

    def shared(self) -> AbstractContextManager[None]:
        """Share this folder with other ``work`` processes, lock out runs, and log to a separate
        file.

        Raises:
            OutputError, StorageError: as ``locked``.
        """
        return self._lock_with_others(partial(shared, self.root))

    def locked_for_work(self) -> AbstractContextManager[None]:
        """Work in this folder for the run that locked it, and log to a separate file.

        Raises:
            OutputError, StorageError: as ``locked``.
        """
        return self._lock_with_others(tagged)

    @contextmanager
    def _lock_with_others(
        self, lock: Callable[[Path], AbstractContextManager[None]]
    ) -> Iterator[None]:
        with _as_output_errors():
            self._refuse_links()
            self.make_folder(self.logs)
            log = self.logs / f"work-{self.lock_holder}.log"
            with lock(log), log_to_file(log, self.make_opener(log)):
                yield

    @property
    def lock_holder(self) -> str:
        """Return this process's unique name among all users of the folder, on any machine."""
        return process_tag()

    @property
    def has_run(self) -> bool:
        """Return True if a process has locked this folder exclusively."""
        return is_held(self.root / LOCK)

    def _refuse_links(self) -> None:
        own_paths = (self.log, self.logs, self.staged.root, self.parsl, *self._results)
        self.refuse_links((*LOCK_FILES, *(path.name for path in own_paths)))
        SafeDir(self.features).refuse_links(encoder_folder_names(self.features))
        if self.samples.is_dir():
            SafeDir(self.samples).refuse_links([path.name for path in self.samples.iterdir()])

    @contextmanager
    def locked_for_run(self, *, create: bool = False) -> Iterator[None]:
        """Lock this folder and append to its log. See ``locked`` and ``logged``.

        Raises:
            OutputError, StorageError: as ``locked``.
        """
        with self.locked(create=create), self.logged():
            yield

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Append to this locked folder's log, and announce the target of a link.

        Unfinished files of a killed command are deleted.

        Raises:
            OutputError, StorageError: the log cannot be written.
        """
        with _as_output_errors(), log_to_file(self.log, self.make_opener(self.log)):
            if self.root.is_symlink():
                announce(f"{printable(self.root)} is a link to {printable(self.root.resolve())}")
            self.remove_leftovers()
            yield

    def check_free(self, *, resume: bool, force: bool) -> None:
        """Reject a folder with results unless ``resume`` or ``force`` says what to do with them.

        Raises:
            OutputError: it contains a run, or files named like outputs that are not from a run.
            UsageError: both were given.
        """
        if resume and force:
            raise UsageError(
                with_options("{resume} and {force} contradict each other"),
                hint=with_options("{resume} continues the run, {force} deletes it"),
            )
        present = [path for path in self._results if path.exists()]
        if all(map(self._is_leftover, present)):
            return
        names = [path.name for path in present]
        if self.manifest.name not in names:
            raise OutputError(
                f"{printable(self.root)} has {', '.join(names)}, but no run of VirNucPro",
                hint=with_options("choose another {output_dir}, or move these files away"),
            )
        if not resume and not force:
            raise OutputError(
                f"{printable(self.root)} already has a run",
                hint=with_options(
                    "add {resume} to continue it, or {force} to delete it and start again"
                ),
            )

    def _is_leftover(self, path: Path) -> bool:
        """Return True if an interrupted start may have left this before it claimed the folder."""
        return (
            path == self.copies
            and path.is_dir()
            and all(_OWN_FILES.fullmatch(file.name) for file in path.iterdir())
        )

    def delete_results(self) -> None:
        """Delete the results of a run and nothing else. ``run.json``, which claims the folder, goes
        last.

        Copies of inputs stay, because the next run may need them.
        """
        for path in reversed(self._results):
            if path == self.samples:
                self.clear_samples()
            elif path == self.features:
                for folder in self.feature_folders():
                    self._delete_owned(folder)
            elif path in (self.scores, self.rows, self.shards):
                self._delete_owned(path)
            elif path != self.copies:
                self.delete(path)
        self._delete_owned(self.logs)

    def feature_folders(self) -> list[Path]:
        """List the folders of further encoders, then the first encoder's, which contains them."""
        return [
            *(self.features / name for name in encoder_folder_names(self.features)),
            self.features,
        ]

    def clear_samples(self) -> None:
        """Delete the outputs of all samples."""
        for folder in self.sample_folders():
            self.delete_files(folder, self.owned_names.sample.__contains__)
            self.delete_folder(folder)
        self.delete_folder(self.samples)

    def sample_folders(self) -> list[Path]:
        """List the folders of samples."""
        if not self.samples.is_dir():
            return []
        return [path for path in self.samples.iterdir() if path.is_dir()]

    def _delete_owned(self, folder: Path, kept: Collection[str] = ()) -> None:
        """Delete a run's files in a folder, and the folder if it is then empty."""
        self.delete_files(folder, lambda name: _OWN_FILES.fullmatch(name) and name not in kept)
        self.delete_folder(folder)

    def clear_copies(self, manifest: Manifest) -> None:
        """Delete input copies that a run does not need, after its manifest was written."""
        copies = self.copies.resolve()
        paths = [Path(file.path) for file in (*manifest.inputs, *manifest.refused)]
        names_in_use = [path.name for path in paths if path.parent == copies]
        self._delete_owned(self.copies, kept=names_in_use)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Provide a temporary folder for a plan within the ``with`` block."""
        try:
            with storage_errors(self.staged.root, self.staged.shards):
                self.make_folder(self.staged.shards)
            yield
        finally:
            shutil.rmtree(self.staged.root, ignore_errors=True)

    def adopt_plan(self) -> None:
        """Move the plan out of its temporary folder. Move ``plan.json`` last to validate it."""
        with storage_errors(self.shards):
            self.make_folder(self.shards)
        self.delete(self.chunks)  # made from other inputs
        files = {file.name: file for file in self.staged.shards.iterdir()}
        listing = files.pop(self.plan.name)
        for file in (*files.values(), listing):
            with storage_errors(self.shards / file.name, file):
                self.move(file, self.shards / file.name)

    def clear_parts(self) -> None:
        """Delete parts that were joined. Remaining ones do no harm."""
        with suppress(OSError):
            self._delete_owned(self.rows)

    def clear_frame_scores(self) -> None:
        """Delete the frame scores of a run that keeps its vectors. Remaining ones do no harm."""
        with suppress(OSError):
            self.delete_files(self.scores, lambda name: name.endswith(FRAME_SCORES))
            self.delete_folder(self.scores)

    def clear_shards(self) -> None:
        """Delete files that only the run needed. Remaining ones do no harm."""
        with suppress(OSError):
            self._delete_owned(self.shards)
            self.delete(self.chunks)

    @property
    def own_names(self) -> tuple[str, ...]:
        """Return the names of the files that a run writes into its folder."""
        return tuple(path.name for path in (*self._results, self.log))

    def check_can_clear(self, inputs: Iterable[Path]) -> None:
        """Reject inputs that ``delete_results`` would delete.

        Raises:
            UsageError: an input is in the folder.
        """
        results = {result.resolve() for result in self._results}
        if any(results & {path.resolve(), *path.resolve().parents} for path in inputs):
            raise UsageError(
                with_options("an input is in the folder that {force} clears"),
                hint=with_options(
                    "move it away first; to repair a run with its {failed_sequences} use "
                    "{resume} {add}",
                    failed_sequences=FAILED_SEQUENCES,
                ),
            )

    def remove_leftovers(self) -> None:
        """Delete unfinished files of a killed command."""
        for folder in (self.staged.root, self.parsl):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (
            self.root,
            self.scores,
            self.rows,
            self.shards,
            self.copies,
            *self.sample_folders(),
        ):
            self.remove_temp_files(folder)
        for folder in self.feature_folders():
            self.remove_temp_files(folder, self._PARTIAL.fullmatch)

    def read_manifest(self) -> Manifest | None:
        """Read the manifest, or return None without a run.

        Raises:
            ResumeError: ``run.json`` is corrupt, or from another version.
        """
        if not self.manifest.exists():
            return None
        from virnucpro.store.manifest_reader import read_manifest

        return read_manifest(self.manifest, self.copies)

    def read_facts(self) -> dict[str, Any]:
        """Read all of ``run.json``. A resume needs only the manifest in it.

        Raises:
            ResumeError: it is corrupt.
            OutputError, StorageError: it cannot be read now.
        """
        try:
            return read_facts(self.manifest)
        except OSError as error:
            raise disk_error(error, self.manifest) from error

    def read_run(self, hint: str) -> Manifest:
        """Read the manifest of the run that must be in this folder.

        Raises:
            InputMissingError: the folder contains no run. ``hint`` says what to give.
            ResumeError: as ``read_manifest``.
        """
        manifest = self.read_manifest()
        if manifest is None:
            raise self.missing_run_error(hint)
        return manifest

    def check_finished(self, command: Command) -> None:
        """Check that the run is finished.

        Raises:
            InputMissingError: the run has no table of records yet.
        """
        if not self.record_table(command).exists():
            raise InputMissingError(
                f"{printable(self.root)} contains a run that is not finished",
                hint=with_options("finish it: run its command with {resume}"),
            )

    def missing_run_error(self, hint: str) -> InputMissingError:
        """Return the error for a folder that has no run or does not exist."""
        where = printable(self.root)
        if self.root.is_dir():
            within = self.root / "run"  # where an evaluation keeps its run
            if (within / self.manifest.name).is_file():
                hint = f"did you mean {printable(within)}?"
            return InputMissingError(f"{where} contains no run", hint)
        fault = "not a folder" if self.root.exists() else "there is no such folder"
        return InputMissingError(f"{where}: {fault}", hint)

    def feature_stores(self, recipe: Recipe) -> tuple[FeatureStore, ...]:
        """Return the feature stores of a run, one per encoder. Empty if it keeps no vectors."""
        return self.encoder_stores(recipe) if recipe.keep_vectors else ()

    def encoder_stores(self, recipe: Recipe) -> tuple[FeatureStore, ...]:
        """Return where workers keep the vectors of a run, at least those of unfinished shards."""
        return open_stores(self.features, recipe.encoders, recipe.fingerprint)

    def frame_scores(self, recipe: Recipe) -> FrameScoreStore | None:
        """Return the frame scores of a run, or None if it keeps vectors or has no model."""
        if recipe.keep_vectors or not recipe.encoders:
            return None
        return self.intermediate_scores(recipe)

    def intermediate_scores(self, recipe: Recipe) -> FrameScoreStore:
        """Return the frame scores of a run with a head, which may also keep its vectors."""
        return FrameScoreStore(SafeDir(self.root), self.scores, recipe.fingerprint)

    def shard_stores(self, recipe: Recipe) -> tuple[ShardStore, ...]:
        """Return the stores in which a finished shard has a file each."""
        scores = self.frame_scores(recipe)
        return self.feature_stores(recipe) if scores is None else (scores,)

    def write_manifest(self, manifest: Manifest, facts: Mapping[str, Any]) -> None:
        write_manifest(self.manifest, self.copies, manifest, facts)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Replace all of ``run.json``."""
        self.write_file(self.manifest, add_checksum(facts))

    @property
    def has_checksum(self) -> bool:
        """Return True if ``run.json`` contains its own checksum, which each read verifies."""
        try:
            return has_checksum(self.manifest.read_bytes())
        except OSError as error:
            raise disk_error(error, self.manifest) from error


@contextmanager
def _as_output_errors() -> Iterator[None]:
    """Translate disk errors, except those from standard output."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise disk_error(error) from error
