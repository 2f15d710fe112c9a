"""Converted copies of large checkpoints, shared by all workers on a machine.

A large checkpoint is converted once, to our tensor names and the run's precision. For each content
and precision, the cache folder contains the copy and a JSON file with its hash. For each checkpoint
path, it contains a note with the checkpoint's hash, so the checkpoint is not read again. The parent
verifies the copy once per run. Every worker then maps it, so all workers share one copy of the
weights in the machine's page cache.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from virnucpro.core.atomic_io import atomic_path, hash_file, parse_json, read_json
from virnucpro.core.errors import OutputError, StorageError, UnavailableError
from virnucpro.core.events import EventHandler, Progress
from virnucpro.core.logging import LOGGER, printable
from virnucpro.core.recipe import EncoderSpec, Footprint, Precision
from virnucpro.core.safe_dir import SafeDir
from virnucpro.models.attention import choose_kernel
from virnucpro.models.base import DAMAGE, check_unchanged, progress_of
from virnucpro.models.checkpoint import hash_weights, weight_files
from virnucpro.models.heads import Heads, hash_heads, select_heads
from virnucpro.models.transformer import DTYPES, PackedTransformer

_SUFFIX = ".virnucpro.safetensors"

ReadHeads = Callable[[Path], Mapping[str, Tensor]]  # of a checkpoint; names as in ``HeadScheme``
Network = TypeVar("Network", bound=PackedTransformer)


class Convertible(Protocol):
    """A checkpoint that can be converted: a ``CheckpointModel``."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def encoder_id(self) -> str: ...

    @property
    def footprint(self) -> Footprint: ...

    @property
    def shape(self) -> Any: ...  # noqa: ANN401 - a frozen dataclass of the family

    def check_numbers(self, precision: Precision) -> None: ...

    def load_network(self, precision: Precision) -> Any: ...  # noqa: ANN401


def prepare(model: Convertible, precision: Precision, on_event: EventHandler) -> tuple[Path, str]:
    """Return the file that workers map, and the checkpoint's SHA-256. Convert if necessary.

    A known checkpoint is recognised by its path, size and times. If the converted file cannot be
    written, workers map the checkpoint itself.
    """
    n_bytes = model.footprint.file_bytes
    dtype = DTYPES[precision]
    folder = Path(torch.hub.get_dir()) / "virnucpro"  # users may delete it at any time
    note = _write_note(model, folder)
    noted = _note_conversion(note, "source_sha256")
    hashing, checking = (
        progress_of(f"{stage} the model", n_bytes, on_event) for stage in ("hashing", "checking")
    )
    digest = noted or hash_weights(model.path, hashing)
    copy = folder / f"{digest[:16]}_{str(dtype).removeprefix('torch.')}{_SUFFIX}"
    format_number = "2"  # format 1 copies may contain non-finite numbers
    metadata = {
        "format": format_number,
        "shape": json.dumps(asdict(model.shape)),
        "dtype": str(dtype),
        "encoder_id": model.encoder_id,
        "source_sha256": digest,
    }
    try:
        if not _is_complete(copy, metadata, checking):
            model.check_numbers(precision)
            on_event(Progress("converting the model, this once", 0, 0, "bytes"))
            _convert(model, metadata, precision, copy)
            LOGGER.info("converted model: %s", printable(copy))
        if digest != noted:
            SafeDir(folder).write_json(note, {"source_sha256": digest})
    except (OSError, OutputError, StorageError) as error:
        LOGGER.warning(
            "the converted model cannot be kept in %s (%s): every worker reads all of %s",
            printable(folder),
            printable(error),
            printable(model.path),
        )
        return model.path, digest
    return copy, digest


def _note_conversion(path: Path, name: str) -> str:
    """Read the hash from one of our files. Return "" if the file is missing or damaged."""
    try:
        digest = str(read_json(path)[name])
    except DAMAGE:
        return ""
    return digest if re.fullmatch("[0-9a-f]{64}", digest) else ""


def _convert(
    model: Convertible, metadata: dict[str, str], precision: Precision, copy: Path
) -> None:
    """Write the converted copy of a checkpoint, with its hash next to it.

    Raises:
        UnavailableError: the checkpoint cannot be used.
        OSError, OutputError, StorageError: the folder cannot be written.
    """
    stale_seconds = 86_400  # older unfinished files no longer have a writer
    folder = copy.parent
    folder.mkdir(parents=True, exist_ok=True)
    # Leftovers of killed conversions, ours and those of safetensors.
    for leftover in folder.glob(".*"):
        if leftover.is_file() and leftover.stat().st_mtime < time.time() - stale_seconds:
            leftover.unlink(missing_ok=True)
    state = model.load_network(precision).state_dict()
    with atomic_path(copy) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # other users may read it if they may read other files
        try:
            save_file(state, temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{printable(copy)}: {printable(error)}") from error
        temporary.chmod(mode)
        digest = hash_file(temporary)
    facts = {"sha256": digest, "made of": str(model.path)}
    SafeDir(folder).write_json(copy.with_suffix(".json"), facts)


def is_converted(path: Path) -> bool:
    return path.name.endswith(_SUFFIX) and path.is_file()


def load_converted(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    make_empty: Callable[[Mapping[str, Any]], Network],
) -> Network:
    """Map a converted copy.

    Args:
        path: the copy.
        dtype: the type for matrix products.
        device: the device to load the weights on.
        make_empty: creates a model on "meta" from the dimensions in the copy, for ``dtype``
            products.

    Raises:
        UnavailableError: the copy is damaged, or belongs to another model.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            facts = handle.metadata()
            if facts["dtype"] != str(dtype):
                raise ValueError(f"it contains {facts['dtype']}")
            network = make_empty(parse_json(facts["shape"]))
            tensors = {name: handle.get_tensor(name) for name in network.state_dict()}
        network.load_state_dict(tensors, assign=True)
    except DAMAGE as error:
        raise UnavailableError(
            f"{printable(path)} cannot be used: {printable(error)}",
            hint="delete it: the next run creates it from the model",
        ) from error
    network.attend = choose_kernel(device, dtype, network.shape.head_dim)
    return network.to(device).eval().requires_grad_(False)


def heads_path(copy: Path) -> Path:
    """Return the file with the heads of a converted copy, which all precisions share."""
    heads_suffix = "_heads.safetensors"
    return copy.with_name(f"{copy.name.partition('_')[0]}{heads_suffix}")


def keep_heads(copy: Path, checkpoint: Path, heads: Mapping[str, Tensor]) -> Path:
    """Write the heads of a checkpoint next to its converted copy.

    Returns:
        The file that workers map: the copy, or the checkpoint if the heads cannot be written.
    """
    path = heads_path(copy)
    content = {name: tensor.detach().float().contiguous() for name, tensor in heads.items()}
    try:
        SafeDir(copy.parent).write_file(path, save(content))
    except (OSError, OutputError, StorageError) as error:
        LOGGER.warning(
            "the heads of the model cannot be kept as %s (%s): every worker reads all of %s",
            printable(path),
            printable(error),
            printable(checkpoint),
        )
        return checkpoint
    return copy


def load_heads(spec: EncoderSpec, weights: Path, read_heads: ReadHeads) -> Heads:
    """Load the heads that a specification needs, on the CPU.

    Args:
        spec: the specification.
        weights: a checkpoint, or a converted copy with its heads next to it.
        read_heads: reads the heads of a checkpoint of the family.

    Raises:
        UnavailableError: the heads are missing or damaged, or are not those of the recipe.
    """
    path = heads_path(weights) if is_converted(weights) else weights
    try:
        stored = load_file(path) if is_converted(weights) else read_heads(path)
        selected = select_heads(stored, spec)
        heads = Heads(selected)
    except DAMAGE as error:
        raise UnavailableError(
            f"{printable(path)} has no heads that can be used: {printable(error)}",
            hint="check the model with `virnucpro models verify`",
        ) from error
    check_unchanged(replace(spec, sha256=spec.heads_sha256), path, hash_heads(selected))
    return heads


def _is_complete(path: Path, metadata: object, on_bytes: Callable[[int], None]) -> bool:
    """Return True if a converted copy has this metadata and its recorded hash."""
    try:
        with safe_open(path, framework="pt") as handle:
            if handle.metadata() != metadata:
                return False
        return hash_file(path, on_bytes) == _note_conversion(path.with_suffix(".json"), "sha256")
    except DAMAGE:
        return False


def _write_note(model: Convertible, folder: Path) -> Path:
    """Return the note path for the checkpoint at this path, with this size and these times."""
    digest = hashlib.sha256()
    for file in weight_files(model.path):
        stat = file.stat()
        where = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        digest.update(repr(where).encode())
    return folder / f"seen_{digest.hexdigest()[:16]}.json"
