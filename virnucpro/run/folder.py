"""The run folder: every file name in one place, whose run it is, and what of it is done."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from virnucpro import __version__
from virnucpro.config import FOLLOWS, SHARD_FORMAT, EncoderSpec, Recipe
from virnucpro.errors import OutputError, ResumeError, UsageError
from virnucpro.files import (
    TEMPORARY,
    atomic,
    disk_error,
    refuse_links,
    sweep,
    writing,
)
from virnucpro.log import announce, logging_to_file, printable
from virnucpro.run.lock import OF_A_LOCK, locked
from virnucpro.sequences.inputs import InputFile
from virnucpro.sequences.samples import RunIds

COPIES = "_copies"  # ends the stem of a feature file of copies
# files that a run makes in its sub-folders
_OURS = re.compile(
    r"\d{6}(_copies)?\.(h5|npz|pt|faa|fna)|[0-9a-f]{16}\.fa|plan\.json|\..*\.(tmp|partial)"
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``run.json`` must tell to go on with a run."""

    recipe: Recipe
    inputs: tuple[InputFile, ...]
    replaced: tuple[str, ...] = ()  # ids of failed records that a later input gives anew
    is_qualified: bool = False  # ids of records are written with their file
    refused: tuple[InputFile, ...] = ()  # files that could not be read
    version: str = __version__  # of the program that wrote it last

    def __post_init__(self) -> None:
        found = {known.generation for known in self.inputs}
        if found and found != set(range(len(found))):
            raise ValueError("the generations of the inputs have gaps")
        if not all(isinstance(record_id, str) for record_id in self.replaced):
            raise TypeError("a replaced record is named by its id")
        if not isinstance(self.is_qualified, bool):
            raise TypeError("ids are written with their file, or they are not")

    @property
    def ids(self) -> RunIds:
        return RunIds(self.is_qualified, frozenset(self.replaced))


@dataclass(frozen=True, slots=True)
class RunDir:
    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "run.json"

    @property
    def log(self) -> Path:
        return self.root / "virnucpro.log"

    @property
    def features(self) -> Path:
        return self.root / "features"

    @property
    def feature_index(self) -> Path:
        return self.root / "features.h5"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def plan(self) -> Path:
        return self.shards / "plan.json"

    @property
    def chunks(self) -> Path:
        return self.root / "chunks.fa"

    @property
    def samples(self) -> Path:
        """Tables of each file by itself, in folders of their names."""
        return self.root / "samples"

    def sample(self, name: str) -> RunDir:
        """Where the tables of one file are, by the names that those of the run have."""
        return RunDir(self.samples / name)

    @property
    def planned(self) -> RunDir:
        """Where a plan is made, aside: what it would replace stays until it is whole."""
        return RunDir(self.root / f".planned{TEMPORARY}")

    @property
    def copies(self) -> Path:
        """Of inputs that cannot be read twice."""
        return self.root / "inputs"

    @property
    def frame_table(self) -> Path:
        return self.root / "prediction_results.txt"

    @property
    def chunk_table(self) -> Path:
        return self.root / "prediction_results_highestscore.csv"

    @property
    def viral(self) -> Path:
        return self.root / "viral.fasta"

    @property
    def failed_files(self) -> Path:
        return self.root / "failed_files.txt"

    @property
    def failed_sequences(self) -> Path:
        return self.root / "failed_sequences.fa"

    def record_table(self, command: str) -> Path:
        return self.root / ("predictions.tsv" if command == "predict" else "records.tsv")

    @property
    def _results(self) -> tuple[Path, ...]:
        return (
            self.manifest,
            self.features,
            self.feature_index,
            self.shards,
            self.chunks,
            self.copies,
            self.samples,
            self.failed_files,
            self.failed_sequences,
            *self.tables,
        )

    @property
    def tables(self) -> tuple[Path, ...]:
        """Of the whole run, and of each sample in its folder."""
        return (
            self.frame_table,
            self.chunk_table,
            self.viral,
            self.record_table("predict"),
            self.record_table("extract"),
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
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            ours = (self.log, *self._results)
            refuse_links(self.root, (*OF_A_LOCK, *(path.name for path in ours)))
            with locked(self.root):
                yield
        except BrokenPipeError:  # of standard output
            raise
        except OSError as error:
            raise disk_error(error) from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lock this folder and append to its log; say where the folder is, if it is a link.

        Raises:
            OutputError, StorageError: as ``locked``.
        """
        with self.locked(), logging_to_file(self.log, os.O_NOFOLLOW):
            if self.root.is_symlink():
                announce(f"{printable(self.root)} is a link to {printable(self.root.resolve())}")
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
        found = [path.name for path in self._results if path.exists()]
        if set(found) <= {self.shards.name, self.copies.name} and not self._strangers():
            return  # a start that was ended before it had claimed the folder
        if found and self.manifest.name not in found:
            raise OutputError(
                f"{printable(self.root)} holds {', '.join(found)}, but no run of VirNucPro",
                hint="choose another --output-dir, or move these files away",
            )
        if found and not resume and not force:
            raise OutputError(
                f"{printable(self.root)} holds a run already",
                hint="add --resume to go on with it, or --force to throw it away and start again",
            )

    def _strangers(self) -> list[Path]:
        folders = [path for path in (self.shards, self.copies) if path.is_dir()]
        return [
            file for path in folders for file in path.iterdir() if not _OURS.fullmatch(file.name)
        ]

    def clear(self) -> None:
        """Delete the results of a run, and nothing else; the claim to the folder goes last.

        Copies of inputs stay: the next run may need them.
        """
        for path in reversed(self._results):
            if path == self.samples:
                self.clear_samples()
            elif path != self.copies:
                _delete_ours(path)

    def clear_samples(self) -> None:
        """Delete the tables of single samples."""
        for folder in self.sample_folders():
            for table in RunDir(folder).tables:
                table.unlink(missing_ok=True)
            _delete_empty(folder)
        _delete_empty(self.samples)

    def sample_folders(self) -> list[Path]:
        """No link is one of them: what it leads to is not of this run."""
        if self.samples.is_symlink() or not self.samples.is_dir():
            return []
        return [path for path in self.samples.iterdir() if path.is_dir() and not path.is_symlink()]

    def clear_copies(self, manifest: Manifest) -> None:
        """Delete the copies of inputs that a run, whose manifest is written, does not need."""
        paths = [Path(known.path) for known in (*manifest.inputs, *manifest.refused)]
        needed = [path.name for path in paths if path.parent == self.copies.resolve()]
        _delete_ours(self.copies, kept=needed)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Give a plan its place aside, for the time of the block."""
        try:
            for folder in (self.planned.root, self.planned.shards):
                with writing(folder):
                    folder.mkdir()
            yield
        finally:
            shutil.rmtree(self.planned.root, ignore_errors=True)

    def adopt_plan(self) -> None:
        """Put what was planned aside in its place; ``plan.json``, which vouches for it, last."""
        with writing(self.shards):
            self.shards.mkdir(exist_ok=True)
        if self.planned.chunks.exists():
            with writing(self.chunks, self.planned.chunks):
                self.planned.chunks.replace(self.chunks)
        else:  # an old one would be of other inputs
            self.chunks.unlink(missing_ok=True)
        files = {file.name: file for file in self.planned.shards.iterdir()}
        vouching = files.pop(self.plan.name)
        for file in (*files.values(), vouching):
            with writing(self.shards / file.name, file):
                file.replace(self.shards / file.name)

    def clear_shards(self) -> None:
        """Delete what only the run needed; what cannot be deleted does no harm."""
        with suppress(OSError):
            for path in (self.shards, self.chunks):
                _delete_ours(path)

    @property
    def own_names(self) -> tuple[str, ...]:
        """Of the files that a run writes into its folder."""
        return tuple(path.name for path in (*self._results, self.log))

    def would_clear(self, path: Path) -> bool:
        """Whether ``clear`` would delete this file."""
        ours = {result.resolve() for result in self._results}
        return bool(ours & {path.resolve(), *path.resolve().parents})

    def sweep(self) -> None:
        """Delete what a killed run left half done."""
        shutil.rmtree(self.planned.root, ignore_errors=True)
        for folder in (
            *(self.root, self.features, self.shards, self.copies),
            *self.sample_folders(),
        ):
            sweep(folder)
        for partial in self.features.glob(".*.partial"):
            partial.unlink(missing_ok=True)

    def read_manifest(self) -> Manifest | None:
        """
        Raises:
            ResumeError: ``run.json`` is damaged, or of another version.
        """
        if not self.manifest.exists():
            return None
        if not self.manifest.is_file():  # a pipe would never end
            raise _damaged(self.manifest, "it is no file")
        version: object = __version__
        try:
            stored = json.loads(self.manifest.read_text())
            version = stored["virnucpro_version"]
            if stored["recipe"].get("shard_format") != SHARD_FORMAT:
                raise _of_another_version(self.root, version)
            encoders = tuple(EncoderSpec(**spec) for spec in stored["recipe"]["encoders"])
            return Manifest(
                recipe=Recipe(**{**stored["recipe"], "encoders": encoders}),
                inputs=tuple(self._from_json(known) for known in stored["inputs"]),
                replaced=tuple(stored["replaced"]),
                is_qualified=stored.get("qualified", False),
                refused=tuple(self._from_json(file) for file in stored.get("refused", ())),
                version=str(version),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if version != __version__:
                raise _of_another_version(self.root, version) from error
            raise _damaged(self.manifest, error) from error

    def _to_json(self, known: InputFile) -> dict[str, Any]:
        """Copies are named from the run folder, so that it can be moved."""
        path = Path(known.path)
        if path.parent == self.copies.resolve():
            path = path.relative_to(self.root.resolve())
        fields = {**asdict(known), "path": str(path)}
        del fields["stamp"]  # it tells of this start only
        return fields

    def _from_json(self, known: Mapping[str, Any]) -> InputFile:
        return InputFile(**{**known, "path": str(self.root.resolve() / known["path"])})

    def write_manifest(self, manifest: Manifest, facts: Mapping[str, Any]) -> None:
        content = {
            "virnucpro_version": __version__,
            "fingerprint": manifest.recipe.fingerprint,
            **facts,
            "recipe": asdict(manifest.recipe),
            "inputs": [self._to_json(known) for known in manifest.inputs],
            "replaced": manifest.replaced,
            "qualified": manifest.is_qualified,
            "refused": [self._to_json(file) for file in manifest.refused],
        }
        with atomic(self.manifest) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


def _delete_ours(path: Path, kept: Collection[str] = ()) -> None:
    """Delete a file, or the files of a run in a folder, which stays if it holds others."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for file in path.iterdir():
        if _OURS.fullmatch(file.name) and file.name not in kept:
            file.unlink()
    _delete_empty(path)


def _delete_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not there, or holds somebody's files
        folder.rmdir()


def _damaged(manifest: Path, why: object) -> ResumeError:
    return ResumeError(
        f"{printable(manifest)} is damaged: {printable(why)}",
        hint="put a copy of it back, start again with --force, or choose another --output-dir",
    )


def _of_another_version(folder: Path, version: object) -> ResumeError:
    return ResumeError(
        f"{printable(folder)} holds a run of another version of virnucpro, {printable(version)}: "
        f"this one, {__version__}, cannot go on with it",
        hint="finish it with that version, choose another --output-dir, or start with --force",
    )


def check_same_recipe(rundir: RunDir, recorded: Manifest, asked: Recipe) -> None:
    """
    Raises:
        ResumeError: the recipes differ; the message says in what.
    """
    if recorded.recipe.has_encoder != asked.has_encoder:
        raise ResumeError(
            f"this folder holds a run with {printable(recorded.recipe.reader)}, "
            f"not with {printable(asked.reader)}",
            hint="use the old options (the scorer reads nucleotides where no --model is named), "
            "choose another --output-dir, or start again with --force",
        )
    if changed := _changes(recorded.recipe, asked):
        raise ResumeError(
            f"this folder holds a run of another recipe: {'; '.join(changed)}",
            hint="use the old options, choose another --output-dir, or start again with --force",
        )


def _changes(before: Recipe, now: Recipe) -> list[str]:
    """What differs between two recipes: "layer was 6, now 3"."""
    families = [[encoder.family for encoder in recipe.encoders] for recipe in (before, now)]
    if families[0] != families[1]:
        return [f"encoders were {before.reader}, now {now.reader}"]
    changed = _changed_fields(before, now, ("encoders",))
    for old, new in zip(before.encoders, now.encoders, strict=True):
        of_which = f" of {new.model}" if len(now.encoders) > 1 else ""
        changed += _changed_fields(old, new, FOLLOWS, of_which)
    return changed


def _changed_fields(
    before: Recipe | EncoderSpec,
    now: Recipe | EncoderSpec,
    left_out: Collection[str],
    of_which: str = "",
) -> list[str]:
    old, new = asdict(before), asdict(now)
    return [
        f"{_SHOWN.get(name, name)}{of_which} was {_short(old[name])}, now {_short(new[name])}"
        for name in new
        if old[name] != new[name] and name not in left_out
    ]


_SHOWN = {"sha256": "model_sha256"}  # a field -> its name in messages


def _short(value: object) -> str:
    text = str(value) or "none"
    return f"{text[:12]}..." if len(text) == 64 else text  # a hash
