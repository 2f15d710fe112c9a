"""VirNucPro from Python: ``predict``, ``extract``, ``embed``, and the readers of run folders.

They are attributes of ``virnucpro``, and stable: names, arguments and results stay as described
here. Options are named as on the command line (``--min-length`` is ``min_length``). Options for the
console and for several machines exist only there.

``workflows.options`` declares the options. The keyword classes here are for type checkers.

Every error is a ``VirnucproError``. Its ``hint`` says what to do, with options as arguments. The
calling process is left unchanged: one device computes in it, several in their own processes.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property, partial
from inspect import Parameter, cleandoc, formatannotation, signature
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from threading import Lock
from types import MappingProxyType
from typing import (
    Any,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray

from virnucpro.core.atomic_io import disk_error, storage_errors
from virnucpro.core.errors import (
    InputError,
    InputMissingError,
    UsageError,
    VirnucproError,
)
from virnucpro.core.events import (
    STAGES,
    EmbeddingStarted,
    EventHandler,
    Progress,
    RunEvent,
    ShardDone,
    ShardFailed,
)
from virnucpro.core.logging import log_to_handler, printable
from virnucpro.core.model_outputs import Include, OutputSpec, Pooling
from virnucpro.core.option_schema import build_options, option_annotations
from virnucpro.core.option_text import OptionText, with_options
from virnucpro.core.paths import expand_path
from virnucpro.core.recipe import Command, FeatureFormat
from virnucpro.engine.base import Executor
from virnucpro.engine.local import InlineExecutor, ProcessExecutor
from virnucpro.engine.progress import ProgressState
from virnucpro.models.environment import environment_fields
from virnucpro.results.outputs import RunOutput, open_run_dir
from virnucpro.results.table_readers import read_identities, read_records, read_regions
from virnucpro.sequences.fasta import write_record
from virnucpro.sequences.inputs import RECORDS
from virnucpro.sequences.python_input import NamedSequence, Paths, Sequences, split_input
from virnucpro.store.feature_index import read_shown
from virnucpro.store.feature_store import FeatureStore
from virnucpro.store.hdf5_check import check_connector
from virnucpro.store.manifest import Manifest
from virnucpro.store.vectors import Vectors, open_vectors
from virnucpro.viral.types import Call
from virnucpro.workflows.embedder import ResidentEmbedder
from virnucpro.workflows.export import open_finished_stores
from virnucpro.workflows.extract import extract as run_extract
from virnucpro.workflows.extract_config import resolve_extract
from virnucpro.workflows.extract_options import ExtractOptions
from virnucpro.workflows.options import RunOptions
from virnucpro.workflows.predict import predict as run_predict
from virnucpro.workflows.predict_options import PredictOptions
from virnucpro.workflows.run_steps import ExecutorOn

Vector: TypeAlias = NDArray[np.float32]
OnProgress: TypeAlias = Callable[[Progress], object]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# defaults that differ from the command line
_USUAL: Mapping[str, object] = {"strict": True}
_EMBED_DEFAULTS: Mapping[str, object] = {**_USUAL, "pooling": "mean"}  # one value, not a list
_REWRITE = with_options("rewrite it: run its command with {resume}")  # for a corrupt table


class _RunKeywords(TypedDict, total=False):
    min_length: int
    strict: bool
    rename_duplicates: bool
    gpus: str | None
    device: Literal["auto", "cuda", "cpu", "mps"]
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"]
    workers: int | None
    esm_batch_size: str
    worker_timeout: float
    cache: str | Path | None
    cache_size: float


class _FolderKeywords(_RunKeywords, total=False):
    input_type: Literal["auto", "nucleotide", "protein"]
    genetic_code: int
    chunk_size: int | None
    model: str | None
    store: Literal["float32", "bfloat16"]
    resume: bool
    add: bool
    force: bool
    keep_intermediate: bool
    per_file: bool
    report: bool


class _PredictKeywords(_FolderKeywords, total=False):
    threshold: float | None
    preset: Literal["sensitive", "default", "conservative"]
    evidence: Literal["both", "score", "known"]
    prevalence: float
    regions: bool
    genes: bool
    region_model: str | Path | None
    head: str | Path | None
    calls: Literal["auto", "scorer", "head"]
    embed: Literal["all", "viral", "uncertain"] | None
    keep_vectors: Literal["auto", "yes", "no"]


class _ExtractKeywords(_FolderKeywords, total=False):
    layer: int | None
    layers: int | str | Sequence[int | str]
    pooling: Pooling | Sequence[Pooling]
    include: Include | Sequence[Include]
    format: FeatureFormat


class _EmbedKeywords(_RunKeywords, total=False):
    layer: int | None
    pooling: Pooling


_ALIASES = {"layer": "layers"}  # keywords with another name than the option


def _translate_message(text: str) -> str:
    """Return a text with its options as arguments."""
    if not isinstance(text, OptionText):
        return text
    types = get_type_hints(PredictOptions) | get_type_hints(ExtractOptions)
    # options without a value, which texts show as True or False
    flags = frozenset(name for name, type_ in types.items() if type_ is bool)
    return text.in_python(flags)


@contextmanager
def _option_words() -> Iterator[None]:
    """Write errors for Python: options as arguments, disk errors as ``VirnucproError``."""
    try:
        yield
    except VirnucproError as error:
        error.args = (_translate_message(error.message),)
        error.hint = _translate_message(error.hint)
        raise
    except OSError as error:
        raise disk_error(error) from error


def _translate_errors(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, with errors written for Python."""
    with _option_words():
        yield from items


class _Warnings(logging.StreamHandler):  # type: ignore[type-arg]  # of Python 3.11
    """Print warnings on standard error, written for Python.

    A remedy is omitted if it names an option that the called function lacks.
    """

    def __init__(self, options: Collection[str]) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self._options = options

    def format(self, record: logging.LogRecord) -> str:
        translated = copy(record)
        if isinstance(record.args, tuple):
            translated.args = tuple(map(self._translate, record.args))
        return super().format(translated)

    def _translate(self, value: object) -> object:
        if not isinstance(value, OptionText):
            return value
        return _translate_message(value) if value.names <= {*self._options} else ""


def _with_options(
    options: type[RunOptions], keywords: type, own_defaults: Mapping[str, object] = _USUAL
) -> Callable[[F], F]:
    """Add the declared options to a function's signature and docstring."""
    infos = option_annotations(get_type_hints(options, include_extras=True))
    defaults = {field.name: field.default for field in fields(options)}
    defaults |= {**dict.fromkeys(_ALIASES), **own_defaults}
    shown = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in get_type_hints(keywords).items()
    ]

    characters_per_line = 76  # characters per line in help texts

    def text(parameter: Parameter) -> str:
        info = infos[_ALIASES.get(parameter.name, parameter.name)]
        description = _translate_message(info.help)
        if parameter.name in _ALIASES:
            description = f"The same as {_ALIASES[parameter.name]}, for one layer."
        elif isinstance(info.show_default, str):
            description = f"{description} Default: {_translate_message(info.show_default)}."
        head = f"    {parameter.name}: {formatannotation(parameter.annotation)}"
        indent = " " * 8
        body = fill(
            description, characters_per_line, initial_indent=indent, subsequent_indent=indent
        )
        return f"{head} = {parameter.default!r}\n{body}"

    def wrap(function: F) -> F:
        del function.__annotations__["options"]
        hints = get_type_hints(function)
        old_signature = signature(function)
        own = [
            old_signature.parameters[name].replace(annotation=hints[name])
            for name in hints
            if name != "return"
        ]
        new_signature = old_signature.replace(
            parameters=own + shown, return_annotation=hints["return"]
        )
        function.__signature__ = new_signature  # type: ignore[attr-defined]
        function.__annotations__ = hints | {
            parameter.name: parameter.annotation for parameter in shown
        }
        helps = "\n".join(map(text, shown)).replace("DIR", "output_dir")
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\nOptions:\n{helps}"
        return function

    return wrap


class _IdsAndVectors(NamedTuple):
    ids: tuple[str, ...]
    vectors: NDArray[np.float32]  # (n_proteins, dim)


class Embedded(_IdsAndVectors):
    """Proteins and their vectors. Row ``i`` belongs to ``ids[i]``. Unpacks into these two.

    ``statuses`` maps the id of each protein passed to ``embed`` to its status: ``embedded``, or why
    it has no vector, such as ``invalid``. ``notes`` maps some ids to further explanations.
    """

    statuses: Mapping[str, str]
    notes: Mapping[str, str]

    def __new__(
        cls,
        ids: tuple[str, ...],
        vectors: NDArray[np.float32],
        statuses: Mapping[str, str] = MappingProxyType({}),
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        self = super().__new__(cls, ids, vectors)
        self.statuses = statuses
        self.notes = notes
        return self


class RecordStatus(NamedTuple):
    """A record in ``extract``: a row of ``records.tsv``."""

    record_id: str
    sample: str  # its file
    length: int  # bases, or residues of a protein
    status: str  # ``embedded``, or why it has no vector
    n_chunks: int
    n_embedded: int  # frames with a vector, or 1 for a protein
    note: str


@dataclass(frozen=True)
class Extraction:
    """The result of ``extract``, which reads vectors from its folder on demand.

    Iterating yields ids and vectors one by one, as ``read_features`` does. A temporary folder is
    deleted by ``close``, at the end of a ``with`` block, or when the object is no longer used.
    """

    folder: Path
    _delete: Callable[[], object] = field(default=lambda: None, repr=False)

    # iterators are generators, so that they keep this object, and thereby its folder, alive

    def __iter__(self) -> Iterator[tuple[str, Vector]]:
        yield from read_features(self.folder)

    def batches(self, batch: int = 1024) -> Iterator[Embedded]:
        """Yield the vectors in batches, as ``iter_features`` does."""
        yield from iter_features(self.folder, batch=batch)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Name the outputs of the run, for ``read``."""
        return tuple(output.name for output in _manifest(self.folder).recipe.encoders[0].outputs)

    def read(self, output: str) -> Iterator[tuple[str, Vector]]:
        """Yield ids and rows of an output, as ``read_features`` does."""
        yield from read_features(self.folder, output=output)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of all vectors: nucleotide frames, or proteins."""
        return self._all.ids

    @cached_property
    def vectors(self) -> NDArray[np.float32]:
        """Return all vectors in memory, (n, dim) float32. Row ``i`` belongs to ``ids[i]``.

        Raises:
            UsageError: each residue has a vector. Iterate instead.
        """
        return self._all.vectors

    @cached_property
    def _all(self) -> Embedded:
        batches = list(self.batches())
        ids = tuple(name for batch in batches for name in batch.ids)
        if not batches:
            return Embedded((), _no_vectors(self.folder))
        return Embedded(ids, np.concatenate([batch.vectors for batch in batches]))

    def records(self) -> Iterator[RecordStatus]:
        """Yield the status of each record, in input order."""
        for call in _open_calls(self.folder, "extract"):
            yield RecordStatus(
                record_id=call.record_id,
                sample=call.sample,
                length=call.length,
                status=call.status,
                n_chunks=call.n_chunks,
                n_embedded=call.n_frames_scored,
                note=call.note,
            )

    def close(self) -> None:
        """Delete the folder if it is temporary."""
        self._delete()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _no_vectors(folder: Path) -> NDArray[np.float32]:
    """Return an array without rows, with the run's dimension. (0, dim)"""
    return np.empty((0, _manifest(folder).recipe.encoders[0].dim), dtype=np.float32)


@_with_options(PredictOptions, _PredictKeywords)
def predict(
    sequences: Sequences | None = None,
    *,
    input: Paths | None = None,
    output_dir: str | Path | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[_PredictKeywords],
) -> Iterator[Call]:
    """Call viruses, as ``virnucpro predict`` does, and yield the calls one by one, in input order.

    ``sequences`` is one or several sequences: strings, a dict of ids and sequences, pairs of id and
    sequence, or Biopython SeqRecords. Or it is one or several paths (FASTA or FASTQ file, folder or
    sample sheet). A ``pathlib.Path`` is a path. A string is a path if a file with this name exists
    or it contains a character that no sequence has. It is a sequence if it contains only capital
    letters, or only DNA letters. Sequences without ids are called ``sequence_1``, ``sequence_2``,
    and so on. Any other string is an error. ``input`` takes only paths, and replaces ``sequences``.

    The work is done when the function returns. Calls are read from disk on demand. With
    ``output_dir``, the run folder stays. Without it, nothing stays.

    A call includes the regions of its record. A record that could not be scored also has a call,
    with its status. An unreadable file ends the run (``strict=False`` skips the file).

    ``on_progress`` is called with a ``Progress`` now and then, by one thread at a time, but not
    always by the same one. If it raises an error, the run ends. ``resume`` continues it.

    Raises:
        VirnucproError: see ``errors``.
    """
    if output_dir is None:
        options["report"] = False  # the folder is temporary
    values = _resolve_keywords(options, _PredictKeywords)
    with _option_words(), ExitStack() as stack:
        folder = _find_run_dir(output_dir, stack)
        python_input = _PythonInput(sequences, input)
        _open_run_dir(
            folder, PredictOptions, run_predict, python_input, on_progress, values, _PredictKeywords
        )
        return _open_calls(folder, "predict")


@_with_options(ExtractOptions, _ExtractKeywords)
def extract(
    sequences: Sequences | None = None,
    *,
    input: Paths | None = None,
    output_dir: str | Path | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[_ExtractKeywords],
) -> Extraction:
    """Embed proteins, or nucleotides in six frames, as ``virnucpro extract`` does.

    ``sequences``, ``input`` and ``on_progress``: as in ``predict``. The result reads ids, vectors
    and statuses from the run folder, so the vectors need not fit into memory. Without
    ``output_dir``, the folder is temporary and deleted with the result.

    Raises:
        VirnucproError: see ``errors``.
    """
    if output_dir is None:
        options["report"] = False  # the folder is temporary
    values = _resolve_keywords(options, _ExtractKeywords)
    with _option_words(), ExitStack() as stack:
        folder = _find_run_dir(output_dir, stack)
        python_input = _PythonInput(sequences, input)
        _open_run_dir(
            folder, ExtractOptions, run_extract, python_input, on_progress, values, _ExtractKeywords
        )
        stack.pop_all()  # the folder stays
    if output_dir is not None:
        return Extraction(folder)
    delete = _make_deleter(folder.parent)
    result = Extraction(folder, delete)
    weakref.finalize(result, delete)
    return result


@_with_options(ExtractOptions, _EmbedKeywords, _EMBED_DEFAULTS)
def embed(
    sequences: Sequences | None = None,
    model: str | Path | None = None,
    *,
    input: Paths | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    on_progress: OnProgress | None = None,
    **options: Unpack[_EmbedKeywords],
) -> Embedded:
    """Embed proteins: one vector each, in input order.

    ``sequences``, ``input`` and ``on_progress``: as in ``predict``. ``model`` is a name or a path.
    The default is the published ESM-2 650M, from the caches of torch hub or Hugging Face, or
    downloaded once (2.6 GB).

    ``on_error`` says what happens if a protein has no vector, for example because it contains
    invalid letters. With ``raise``, an error names the first one. With ``skip``, the result
    contains the other vectors, and the status of each protein.

    Raises:
        VirnucproError: see ``errors``. A protein without a vector is named in the message.
    """
    values = {**_EMBED_DEFAULTS, **_resolve_keywords(options, _EmbedKeywords)}
    values |= {"input_type": "protein", "report": False, "model": model and str(model)}
    if options.get("pooling") == "none":
        raise UsageError(
            "embed gives one vector per protein, not one per residue",
            hint="use extract with pooling='none', and iterate over its result",
        )
    for name in ("layer", "pooling"):
        value = options.get(name)
        if isinstance(value, (list, tuple)) or "," in str(value) or value == "all":
            raise UsageError(
                f"embed gives one vector per protein; {name} is {printable(repr(value))}",
                hint=f"give one {name}, or use extract, whose result has several outputs",
            )
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error is {printable(repr(on_error))}", hint="give 'raise' or 'skip'")
    with _option_words(), ExitStack() as stack:
        folder = _find_run_dir(None, stack)
        python_input = _PythonInput(sequences, input, keeps_faults=on_error == "skip")
        _open_run_dir(
            folder, ExtractOptions, run_extract, python_input, on_progress, values, _EmbedKeywords
        )
        return _to_embedded(folder, python_input.faults, on_error)


def _to_embedded(
    folder: Path, faults: Mapping[str, str], on_error: Literal["raise", "skip"]
) -> Embedded:
    """Read the vectors of proteins from a run folder.

    ``faults`` maps ids of sequences that FASTA cannot represent to the reason.

    Raises:
        InputError: a protein has no vector, and errors are not skipped.
    """
    calls = list(_open_calls(folder, "extract"))
    failed = [call for call in calls if call.status != "embedded"]
    if failed and on_error == "raise":
        first = failed[0]
        raise InputError(
            f"{len(failed)} of {len(calls)} proteins have no vector: "
            f"{printable(first.record_id)} is {first.status} ({printable(first.note)})",
            hint="leave them out, fix them, or pass on_error='skip'",
        )
    name_of = _manifest(folder).ids.from_inputs
    statuses = {name_of(call.sample, call.record_id): call.status for call in calls}
    notes = {name_of(call.sample, call.record_id): call.note for call in calls if call.note}
    rows = [name for name, status in statuses.items() if status == "embedded"]
    row_of = {name: row for row, name in enumerate(rows)}
    dim = _no_vectors(folder).shape[1]
    vectors = np.full((len(rows), dim), np.nan, dtype=np.float32)
    for name, vector in read_features(folder) if rows else ():
        vectors[row_of[name]] = vector
    assert np.isfinite(vectors).all(), "every protein that is embedded has a vector"
    if repeated := faults.keys() & statuses.keys():
        raise InputError(
            f"the id {printable(min(repeated))} occurs twice", hint="give each id once"
        )
    statuses |= dict.fromkeys(faults, "invalid")
    return Embedded(tuple(rows), vectors, statuses, notes | dict(faults))


@_option_words()
def read_features(folder: str | Path, *, output: str | None = None) -> Iterator[tuple[str, Vector]]:
    """Yield each id in a run folder with its vector, float32, from all feature files.

    A vector is (dim,), or (residues, dim) with ``--pooling none``. ``output`` names another output
    of the run, such as ``mean_layer6``, ``logits`` (residues, tokens), ``contacts`` (residues,
    residues) or ``perplexity`` (a single number). A run with two encoders yields the first
    encoder's vectors. Each id comes once, copies included. Replaced records are omitted, as in
    ``features.h5``. Memory contains one feature file.

    Raises:
        VirnucproError: the folder contains no features, or they are corrupt.
    """
    store = _open_features(folder)
    return _translate_errors(read_shown(store, _find_output(store, output)))


@_option_words()
def iter_features(
    folder: str | Path, *, batch: int = 1024, output: str | None = None
) -> Iterator[Embedded]:
    """Yield the vectors of a run folder in batches: ids, and an array (batch, dim), float32.

    They are the vectors of ``read_features``, in the order of the feature files. The last batch may
    be smaller. Memory contains one batch and two feature files.

    Raises:
        VirnucproError: the folder contains no features, they are corrupt, or they have a row for
            each residue.
    """
    if batch < 1:
        raise UsageError(f"batch is {batch}", hint="give a number of rows, 1 or more")
    store = _open_features(folder)
    spec = _find_output(store, output)
    if not spec.has_one_row:
        raise UsageError(
            f"{printable(store.tree.root)} has a row for each residue, not one for each id",
            hint="use read_features, which gives all rows of an id",
        )
    return _translate_errors(_batches(read_shown(store, spec), batch))


def _find_output(store: FeatureStore, name: str | None) -> OutputSpec:
    """Find an output of a run by name. None stands for the first one.

    Raises:
        UsageError: the run has no output with this name.
    """
    outputs = store.encoder.outputs
    if name is None:
        return outputs[0]
    for output in outputs:
        if output.name == name:
            return output
    raise UsageError(
        f"{printable(store.tree.root)} has no output {printable(name)}",
        hint=f"it has {', '.join(output.name for output in outputs)}",
    )


def _batches(pairs: Iterator[tuple[str, Vector]], n: int) -> Iterator[Embedded]:
    while batch := list(islice(pairs, n)):
        names, rows = zip(*batch, strict=True)
        yield Embedded(names, np.stack(rows))


def _open_features(folder: str | Path) -> FeatureStore:
    """Open the first encoder's vectors in a finished run, as ``_open_stores`` does."""
    return _open_stores(folder)[0]


def _open_stores(folder: str | Path) -> tuple[FeatureStore, ...]:
    """Open the vectors in a finished run, one store per encoder.

    Raises:
        InputMissingError: the run has no vectors.
    """
    check_connector(os.environ.get("HDF5_VOL_CONNECTOR"))
    return open_finished_stores(expand_path(folder))


class Embedder(ResidentEmbedder):
    """A model that stays loaded: ``with Embedder("esm2_t33_650M_UR50D") as embedder: ...``

    ``embed`` takes a list of proteins. A call takes a batch of columns, so that an instance is an
    actor of Ray Data: ``dataset.map_batches(virnucpro.Embedder, fn_constructor_args=[model])``.
    Results have the bytes of ``extract`` with the same options.

    Args:
        model: name or path, as in ``extract``.
        devices: ``all`` GPUs (else the CPU), a kind (``cuda``, ``cpu``, ``mps``), or numbers of
            GPUs (``0,2``). A single device is used in this process, and several in their own.
        layer: 1 to the last, or from -1 backwards. None: the last.
        pooling: ``mean``, ``max``, ``std``, ``bos``, or ``none`` for a vector per residue.
        precision: as in ``extract``.
        batch_size: tokens per batch, or ``auto``.
        workers: processes on a CPU.
        sequence_column: column of a batch with the proteins.
        vector_column: column that a call adds.

    Raises:
        VirnucproError: the model or a device cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        devices: str = "all",
        layer: int | None = None,
        pooling: Pooling = "mean",
        precision: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"] = "auto",
        batch_size: int | str = "auto",
        workers: int | None = 1,
        sequence_column: str = "sequence",
        vector_column: str = "embedding",
    ) -> None:
        values: dict[str, object] = {
            "model": model and str(model),
            "layers": [] if layer is None else [layer],
            "pooling": [pooling],
            "precision": precision,
            "esm_batch_size": str(batch_size),
            "workers": workers,
            **_choose_devices(devices),
        }
        with _option_words(), TemporaryDirectory(prefix="virnucpro-") as folder:
            paths = {"output_dir": Path(folder) / "run", "input": ()}
            options = build_options(
                ExtractOptions, {**paths, **environment_fields(os.environ), **values}
            )
            config = resolve_extract(options, lambda _: None)
            super().__init__(config, sequence_column, vector_column)


def _choose_devices(devices: str) -> dict[str, object]:
    """Return the device options for a word or for numbers of GPUs."""
    if devices == "all":
        return {}
    if devices in ("cuda", "cpu", "mps"):
        return {"device": devices}
    return {"gpus": devices}


@_option_words()
def open(folder: str | Path) -> Vectors:
    """Open the vectors of a finished run: ``run["P12345"]``, ``run[5]``, ``run[10:20]``.

    They are in input order. Only their positions are loaded, 24 bytes for each. A vector is read
    when it is asked for. ``run.output("mean_layer33")`` is another output of the same run.

    Raises:
        VirnucproError: the run is not finished, has no vectors, or its index is missing or corrupt.
            The message names the file, and ``hint`` says how to get it back.
    """
    return open_vectors(_open_stores(folder))


@_option_words()
def read_predictions(folder: str | Path) -> Iterator[Call]:
    """Yield the calls in a run folder, in input order, with their regions and viruses.

    Memory contains one call at a time.

    Raises:
        VirnucproError: the folder contains no calls, or they cannot be read.
    """
    return _open_calls(expand_path(folder), "predict")


def _resolve_keywords(options: Mapping[str, object], keywords: type) -> dict[str, object]:
    """Return the options of a call by the names of their fields.

    Raises:
        UsageError: an option does not exist, or is given under two names.
    """
    names = get_type_hints(keywords)
    if strangers := options.keys() - names:
        raise _no_such_option(min(strangers), sorted(names))
    values = dict(options)
    for alias, name in _ALIASES.items():
        value = values.pop(alias, None)
        if value is not None and name in values:
            raise UsageError(f"both {alias} and {name}", hint=f"give all layers as {name}")
        if value is not None:
            values[name] = value
    return values


def _no_such_option(name: str, names: Sequence[str]) -> UsageError:
    """Return the error for an option that the called function does not have."""
    others = (predict, extract)
    owners = [other.__name__ for other in others if name in signature(other).parameters]
    similar = get_close_matches(name, names)
    advice = ""
    if owners:
        advice = f"it is an option of {' and '.join(owners)}; "
    elif similar:
        advice = f"did you mean {' or '.join(similar)}? "
    return UsageError(
        f"there is no option {printable(name)}", hint=f"{advice}options are {', '.join(names)}"
    )


@dataclass(frozen=True)
class _PythonInput:
    """The sequences or paths that a caller passed."""

    sequences: Sequences | None
    input: Paths | None
    keeps_faults: bool = False  # instead of raising an error
    # ids of sequences that FASTA cannot represent -> reason; filled during writing
    faults: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path, stack: ExitStack) -> list[str | Path]:
        """Return the paths. Sequences are written to a temporary file, which lasts until the stack
        ends.

        Raises:
            UsageError: the caller passed neither or both, sequences and paths.
            InputError: an item is neither a sequence nor a path.
        """
        fasta = "records"  # name in messages, and sample name
        if (self.sequences is None) == (self.input is None):
            raise UsageError(
                "both sequences and input" if self.sequences is not None else "no sequences",
                hint="give sequences or paths as the first argument, or paths as input",
            )
        if self.input is not None:
            return [self.input] if isinstance(self.input, str | Path) else list(self.input)
        assert self.sequences is not None
        paths, records = split_input(self.sequences)
        if paths:
            return paths
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        # in the run folder, from which it is copied, so that a resume finds the same content
        temporary = TemporaryDirectory(prefix=RECORDS, dir=folder)
        path = Path(stack.enter_context(temporary)) / fasta
        with path.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as out:
            for record in self._keep_writable(records):
                write_record(out, record.id, record.letters)
        return [path]

    def _keep_writable(self, records: Iterable[NamedSequence]) -> Iterator[NamedSequence]:
        """Yield the records that FASTA can represent. Keep the faults of all others.

        Raises:
            InputError: a record is faulty and faults are not kept, or its id occurs twice.
        """
        for record in records:
            if not record.fault:
                yield record
                continue
            if not self.keeps_faults or record.id in self.faults:
                raise InputError(
                    f"{printable(record.id)}: {record.fault}",
                    hint="give each sequence once, as letters alone",
                )
            self.faults[record.id] = record.fault


def _make_deleter(folder: Path) -> Callable[[], None]:
    """Make a function that deletes a temporary folder."""
    return partial(shutil.rmtree, folder, ignore_errors=True)


def _find_run_dir(output_dir: str | Path | None, stack: ExitStack) -> Path:
    """Return a call's run folder: ``output_dir``, or a temporary one until the stack ends.

    Raises:
        UsageError: ``output_dir`` is empty.
    """
    if output_dir == "":
        raise UsageError("output_dir is empty", hint="check that the variable in it is set")
    if output_dir is not None:
        return expand_path(output_dir)
    temporary = Path(tempfile.mkdtemp(prefix="virnucpro-"))
    stack.callback(_make_deleter(temporary))
    return temporary / "run"


_Options = TypeVar("_Options", bound=RunOptions)


def _open_run_dir(
    folder: Path,
    kind: type[_Options],
    workflow: Callable[[_Options, EventHandler, ExecutorOn], object],
    python_input: _PythonInput,
    on_progress: OnProgress | None,
    values: Mapping[str, object],
    keywords: type,
) -> None:
    """Run a workflow in this folder. ``keywords`` lists the options of the called function.

    Warnings go to standard error. The log in the folder contains everything.
    """
    warnings = _Warnings(get_type_hints(keywords))
    with _option_words(), log_to_handler(warnings), ExitStack() as stack:
        defaults = {**_USUAL, **environment_fields(os.environ)}
        options = build_options(kind, {"output_dir": folder, "input": (), **defaults, **values})
        options = build_options(kind, {**vars(options), "input": python_input.write(folder, stack)})
        workflow(options, _event_handler(on_progress), _executor_on)


def _executor_on(devices: Sequence[str]) -> Executor:
    return InlineExecutor(devices[0]) if len(devices) == 1 else ProcessExecutor(devices)


def _event_handler(on_progress: OnProgress | None) -> EventHandler:
    """Pass progress to the caller's function: one call at a time, from any thread."""
    lock = Lock()
    state = ProgressState()

    def on_event(event: RunEvent) -> None:
        if on_progress is None:
            return
        with lock:
            state.update(event)
            match event:
                case Progress() if state.stage is event:  # not while shards are embedded
                    on_progress(event)
                case EmbeddingStarted() | ShardDone() | ShardFailed():
                    embedding = state.embedding
                    on_progress(Progress(STAGES[1], embedding.n_done, embedding.n_shards, "shards"))

    return on_event


def _manifest(folder: Path) -> Manifest:
    """Read the manifest of the run in a folder.

    Raises:
        InputMissingError: the folder contains no run, or does not exist.
    """
    return open_run_dir(folder).read_run(hint="name a run folder")


def _open_calls(folder: Path, command: Command) -> Iterator[Call]:
    """Open the calls in a run folder, with their regions and viruses.

    The files are opened now, so the folder may be deleted afterwards.

    Raises:
        InputMissingError: the folder has no table of calls.
    """
    rundir = open_run_dir(folder)
    path = rundir.record_table(command)
    if not path.exists():
        raise InputMissingError(
            f"{printable(path)} does not exist",
            hint=f"name the folder of a finished `virnucpro {command}`",
        )
    calls = read_records(command, path, _REWRITE)
    if rundir.output(RunOutput.REGION_TABLE.file).exists():  # missing if regions were not searched
        regions = read_regions(rundir.output(RunOutput.REGION_TABLE.file), _REWRITE)
        calls = _with_rows(calls, "regions", regions)
    if rundir.output(RunOutput.VIRUS_TABLE.file).exists():
        viruses = read_identities(rundir.output(RunOutput.VIRUS_TABLE.file), _REWRITE)
        calls = _with_rows(calls, "identities", viruses)
    return _translate_errors(calls)


def _with_rows(
    calls: Iterable[Call], field: str, rows: Iterator[tuple[tuple[str, str], Any]]
) -> Iterator[Call]:
    """Join calls with their rows in another table. Both are in record order.

    Raises:
        InputError: a row belongs to no record, or is out of order.
    """
    groups = groupby(rows, itemgetter(0))
    owner, record_rows = next(groups, (None, iter(())))
    for call in calls:
        if owner == (call.sample, call.record_id):
            changes: dict[str, Any] = {field: tuple(row for _, row in record_rows)}
            yield replace(call, **changes)
            owner, record_rows = next(groups, (None, iter(())))
        else:
            yield call
    if owner is not None:
        raise InputError(
            f"{printable(owner[1])} is in the table of {field}, but not in the table of records, "
            "or out of order",
            hint=_REWRITE,
        )
