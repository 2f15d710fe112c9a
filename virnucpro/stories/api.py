"""VirNucPro from Python: ``predict``, ``embed``, ``read_features`` and ``read_predictions``.

They are attributes of ``virnucpro``, and stable: names, arguments and results stay as they are
described here. Options have the names of the command line (``--min-length`` is ``min_length``), but
for those of the console and of several machines, which are for the command line alone.

Every error is a ``VirnucproError``; its ``hint`` says what to do, with options as arguments.
Nothing is left behind in the process that calls: one device works in it, several in processes of
their own.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from virnucpro.engine.executor import Executor, InlineExecutor
from virnucpro.engine.local import ProcessExecutor
from virnucpro.engine.options import PlaceOptions
from virnucpro.ground.config import Command
from virnucpro.ground.errors import (
    FeatureFileError,
    InputError,
    InputMissingError,
    UsageError,
    VirnucproError,
)
from virnucpro.ground.events import Telling
from virnucpro.ground.files import disk_error, expanded, open_plain, writing
from virnucpro.ground.log import logging_to, printable
from virnucpro.ground.option_fields import make, names_of
from virnucpro.ground.records import Call
from virnucpro.run.features import open_stores
from virnucpro.run.folder import RunDir, no_run
from virnucpro.run.index import read_shown
from virnucpro.run.manifest import Manifest
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.inputs import RECORDS
from virnucpro.stories import pipeline
from virnucpro.stories.options import ExtractOptions, PredictOptions, RunOptions
from virnucpro.tables.read import read_calls
from virnucpro.tables.sinks import record_table

Vector: TypeAlias = NDArray[np.float32]
Record: TypeAlias = Any  # (id, sequence), or a SeqRecord of Biopython
Sequences: TypeAlias = str | Path | Iterable[str | Path] | Iterable[Record]
T = TypeVar("T", bound=RunOptions)
_FASTA = "records.fa"
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*[a-z0-9])(?: (?P<value>\w+))?")


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """Proteins and their vectors; row ``i`` is that of ``ids[i]``."""

    ids: tuple[str, ...]
    vectors: NDArray[np.float32]  # (n_proteins, dim)

    def __iter__(self) -> Iterator[Any]:
        """Yield ids and vectors, for ``ids, vectors = embed(...)``."""
        return iter((self.ids, self.vectors))


def predict(
    sequences: Sequences, *, output_dir: str | Path | None = None, **options: object
) -> Iterator[Call]:
    """Call viruses, as ``virnucpro predict`` does, and give the calls one by one, in input order.

    ``sequences`` is a path (FASTA file, folder or sample sheet), several, or records: pairs of id
    and sequence, or SeqRecords of Biopython. The work is done when the function returns. With
    ``output_dir`` the run folder stays; without, nothing does.

    A record that could not be scored is given too, with its status. A file that cannot be read
    ends the run (``strict=False`` leaves it out).

    Raises:
        VirnucproError: see ``errors``.
    """
    options.setdefault("report", output_dir is not None)
    with ExitStack() as stack:
        folder = _start(stack, output_dir)
        parsed = _options(PredictOptions, sequences, folder, stack, options)
        pipeline.predict(parsed, _unheard, _executor_on)
        return _open_calls(folder, "predict")


def embed(sequences: Sequences, model: str | Path | None = None, **options: object) -> Embedded:
    """Embed proteins, given as in ``predict``: one vector each, in input order.

    ``model`` is a name or path, as of ``--model``; None is the model that is part of VirNucPro.

    Raises:
        VirnucproError: see ``errors``; or a protein has no vector. The message names it.
    """
    if options.setdefault("input_type", "protein") != "protein":
        raise UsageError(
            "embed takes proteins alone",
            hint="for nucleotides use `virnucpro extract` and read_features",
        )
    options["model"] = None if model is None else str(model)
    options.setdefault("report", False)
    with ExitStack() as stack:
        folder = _start(stack, None)
        parsed = _options(ExtractOptions, sequences, folder, stack, options)
        if parsed.pooling == "none":
            raise UsageError(
                "embed gives one vector per protein, not one per residue",
                hint="use `virnucpro extract --pooling none` and read_features",
            )
        pipeline.extract(parsed, _unheard, _executor_on)
        calls = list(_open_calls(folder, "extract"))
        if failed := [call for call in calls if call.status != "embedded"]:
            first = failed[0]
            raise InputError(
                f"{len(failed)} of {len(calls)} proteins have no vector: "
                f"{printable(first.record_id)} is {first.status} ({printable(first.note)})",
                hint="leave them out, or fix them",
            )
        ids = _manifest(folder).ids
        place = {ids.of(call.sample, call.record_id): row for row, call in enumerate(calls)}
        vectors = np.empty((0, 0), dtype=np.float32)
        for protein_id, vector in read_features(folder):
            if not vectors.size:
                vectors = np.full((len(calls), len(vector)), np.nan, dtype=np.float32)
            vectors[place[protein_id]] = vector
        assert np.isfinite(vectors).all(), "every protein that is embedded has a vector"
        return Embedded(tuple(place), vectors)


def read_features(folder: str | Path) -> Iterator[tuple[str, Vector]]:
    """Each id of a run folder with its vector, however many feature files there are.

    A vector is (dim,); of a run with ``--pooling none`` it is (residues, dim). Of a run with two
    encoders it is that of the first. Each id is given once, copies too; what was replaced by a
    later input is left out, as in ``features.h5``. Memory holds one feature file.

    Raises:
        VirnucproError: the folder holds no features, or they are not whole.
    """
    rundir = RunDir(expanded(folder))
    manifest = _manifest(rundir.root)
    recipe = manifest.recipe
    if not recipe.has_encoder:
        raise InputMissingError(
            f"{printable(rundir.root)} holds a run without vectors: {recipe.reader} called it",
            hint="make them with `virnucpro extract`, or predict with --model",
        )
    store = open_stores(rundir.features, recipe.encoders, recipe.fingerprint)[0]
    if not (rundir.root / record_table(recipe.command).file).exists():
        raise InputMissingError(
            f"{printable(rundir.root)} holds a run that is not finished",
            hint="go on with the same command and --resume",
        )
    if manifest.replaced and not store.index.exists():
        raise FeatureFileError(
            f"without {store.index.name} nothing tells which vectors were replaced",
            hint="run it again with the corrected sequences, in a new folder",
        )
    return read_shown(store)


def read_predictions(folder: str | Path) -> Iterator[Call]:
    """The rows of a run folder's ``predictions.tsv``, in input order.

    Raises:
        VirnucproError: there is none, or it cannot be read.
    """
    return _open_calls(expanded(folder), "predict")


def _start(stack: ExitStack, output_dir: str | Path | None) -> Path:
    """The run folder: the one that is named, or one that goes. Errors and warnings are told."""
    stack.enter_context(_words_of_python())
    stack.enter_context(logging_to(_warnings()))
    if output_dir == "":
        raise UsageError("output_dir is empty", hint="is the variable set that it came from?")
    if output_dir is not None:
        return expanded(output_dir)
    temporary = TemporaryDirectory(prefix="virnucpro-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(temporary)) / "run"


def _warnings() -> logging.Handler:
    """Shows what the user should act on; the rest is in the log of the run folder."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    return handler


@contextmanager
def _words_of_python() -> Iterator[None]:
    """Have errors in words of Python: those of a disk by our classes, and options as arguments."""
    try:
        yield
    except VirnucproError as error:
        error.args, error.hint = (in_python(str(error)),), in_python(error.hint)
        raise
    except OSError as error:
        raise disk_error(error) from error


def in_python(text: str) -> str:
    """A message with the options of the command line as arguments, but for those of commands.

    >>> in_python("add --resume, or say it with --input-type protein; `virnucpro predict --force`")
    "add resume=True, or say it with input_type='protein'; `virnucpro predict --force`"
    """
    hints = get_type_hints(PredictOptions, include_extras=True)
    hints |= get_type_hints(ExtractOptions, include_extras=True)
    hints = {name: hints[name] for name in names_of(PredictOptions, ExtractOptions)}

    def argument(match: re.Match[str]) -> str:
        name, value = match["name"].replace("-", "_"), match["value"]
        if name not in hints:
            return match[0]
        kind = get_args(hints[name])[0]
        if kind is bool:
            return f"{name}=True" + (f" {value}" if value else "")
        if value and get_origin(kind) is Literal and value in get_args(kind):
            return f"{name}={value!r}"
        return name + (f" {value}" if value else "")

    parts = text.split("`")  # every other one is quoted: a command, or an option by itself
    parts = [
        _OPTION.sub(argument, part) if i % 2 == 0 or part.startswith("--") else part
        for i, part in enumerate(parts)
    ]
    return "`".join(parts)


def _options(
    kind: type[T],
    sequences: Sequences,
    folder: Path,
    stack: ExitStack,
    options: dict[str, object],
) -> T:
    """The options of a call; records are written to a file that lasts as long as the stack."""
    names = names_of(kind) - names_of(PlaceOptions) - {"input", "output_dir"}
    if strangers := options.keys() - names:
        raise UsageError(
            f"there is no option {printable(min(strangers))}",
            hint="the sequences are the first argument; a run folder is made by predict alone; "
            f"options are {', '.join(sorted(names))}",
        )
    usual = {"strict": True, "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
    parsed = make(kind, {"output_dir": folder, "input": (), **usual, **options})
    return make(kind, {**vars(parsed), "input": _paths(sequences, folder, stack)})


def _paths(sequences: Sequences, folder: Path, stack: ExitStack) -> Sequence[str | Path]:
    if isinstance(sequences, (str, Path)):
        return [sequences]
    if hasattr(sequences, "seq") or not isinstance(sequences, Iterable):
        raise InputError(
            f"{printable(repr(sequences))} is neither a path nor a list",
            hint="give paths, or a list of records: pairs of id and sequence, or SeqRecords",
        )
    items = iter(sequences)
    first = next(items, None)
    if isinstance(first, (str, Path)):
        paths = [first, *items]
        if strangers := [item for item in paths if not isinstance(item, (str, Path))]:
            raise InputError(
                f"{printable(repr(strangers[0]))} stands among paths, and is not one",
                hint="give paths alone, or records alone",
            )
        return paths
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # in the run folder: from there it is copied, so that a resume finds the same content
    path = Path(stack.enter_context(TemporaryDirectory(prefix=RECORDS, dir=folder))) / _FASTA
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as out:
        for item in chain([] if first is None else [first], items):
            write_record(out, *_id_and_letters(item))
    return [path]


def _id_and_letters(record: Record) -> tuple[str, str]:
    """
    Raises:
        InputError: it is not a pair of an id and a sequence, or not one that FASTA could hold.
    """
    pair = (record.id, str(record.seq)) if hasattr(record, "seq") else record
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not (is_pair and all(isinstance(part, str) for part in pair)):
        raise InputError(
            f"{printable(repr(record))} is not a record",
            hint="give paths, pairs of id and sequence, or SeqRecords",
        )
    name, letters = map(str, pair)  # NumPy has strings of its own
    is_sequence = letters.split() in ([letters], []) and ">" not in letters
    if not name or name.split() != [name] or not is_sequence:
        raise InputError(
            f"the record {printable(repr(name))} has blanks in its id, or blanks or > in its "
            "sequence",
            hint="give an id of one word, and a sequence of letters alone",
        )
    return name, letters


def _executor_on(devices: Sequence[str]) -> Executor:
    return InlineExecutor(devices[0]) if len(devices) == 1 else ProcessExecutor(devices)


def _unheard(event: Telling) -> None:
    """Ignore an event: it is in the log."""


def _manifest(folder: Path) -> Manifest:
    """
    Raises:
        InputMissingError: the folder holds no run, or is not there.
    """
    manifest = RunDir(folder).read_manifest()
    if manifest is None:
        raise no_run(folder, hint="name a run folder")
    return manifest


def _open_calls(folder: Path, command: Command) -> Iterator[Call]:
    """The rows of a table of records, which is open from now on: the folder may go."""
    calls = _read_calls(folder, command)
    next(calls)
    return calls


def _read_calls(folder: Path, command: Command) -> Iterator[Any]:
    """Yield None once the table is open, then its rows. The table is closed at its end."""
    path = folder / record_table(command).file
    try:
        table = open_plain(path)
    except FileNotFoundError as error:
        raise InputMissingError(
            f"{printable(path)} is not there",
            hint=f"name the folder of a finished `virnucpro {command}`",
        ) from error
    except OSError as error:
        raise disk_error(error, path) from error
    with TextIOWrapper(table, "utf-8", "surrogateescape", newline="\n") as lines:
        yield None
        try:
            yield from read_calls(lines)
        except ValueError as error:
            raise InputError(
                f"{printable(path)} is not as this version of VirNucPro writes it: "
                f"{printable(error)}",
                hint="write it again: run the same command with --resume",
            ) from error
