"""Large checkpoints, converted once: our names, the run's precision, mapped and not read.

In the folder stand, for each checkpoint's content and precision, the converted file and a JSON
with its hash; and for each place that a checkpoint was seen at, a note with the checkpoint's hash,
so that it need not be read again. The parent verifies the file once for a run; then every worker
maps it, so that all of them share one copy of the weights in the machine's page cache.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from virnucpro.encoders.esm2.attention import choose_kernel
from virnucpro.encoders.esm2.checkpoint import Checkpoint, ESM2Shape, weight_files
from virnucpro.encoders.esm2.model import DTYPES, ESM2
from virnucpro.encoders.esm2.weights import load_esm2
from virnucpro.ground.config import Precision
from virnucpro.ground.errors import OutputError, StorageError, UnavailableError
from virnucpro.ground.events import OnEvent, Progress
from virnucpro.ground.files import atomic, parse_json, read_json, sha256, write_json
from virnucpro.ground.log import LOGGER, printable

_FORMAT = "1"
_SUFFIX = ".virnucpro.safetensors"
_STALE_SECONDS = 86_400  # age after which a half written file has no writer any more
_DAMAGE = (OSError, ValueError, LookupError, TypeError, SafetensorError)

OnBytes = Callable[[int], None]


def converted_folder() -> Path:
    """The folder of converted large checkpoints; it may be deleted at any time."""
    return Path(torch.hub.get_dir()) / "virnucpro"


def prepare(
    checkpoint: Checkpoint, precision: Precision, folder: Path | None, on_event: OnEvent
) -> tuple[Path, str]:
    """The file that workers map, made if need be, and the checkpoint's SHA-256.

    If it cannot be kept, that is the checkpoint itself. ``folder`` None is the default one.
    """

    def progress(stage: str) -> OnBytes:
        return lambda done: on_event(Progress(stage, done, n_bytes, "bytes"))

    n_bytes, dtype, folder = checkpoint.n_bytes, DTYPES[precision], folder or converted_folder()
    if converted := find_converted(checkpoint, dtype, folder, progress("checking the model")):
        return converted
    digest = checkpoint.sha256(progress("hashing the model"))
    on_event(Progress("converting the model, this once", 0, 0, "bytes"))
    try:
        path = convert(checkpoint, digest, dtype, folder)
    except (OSError, OutputError, StorageError) as error:
        LOGGER.warning(
            "the converted model cannot be kept in %s (%s): every worker reads all of %s",
            printable(folder),
            printable(error),
            printable(checkpoint.path),
        )
        return checkpoint.path, digest
    LOGGER.info("converted model: %s", printable(path))
    return path, digest


def find_converted(
    checkpoint: Checkpoint, dtype: torch.dtype, folder: Path, on_bytes: OnBytes = lambda _: None
) -> tuple[Path, str] | None:
    """The converted form of a checkpoint, if it was made and is whole to the last bit.

    The checkpoint is known by place, size and times: it is not read again.
    -> the path, and the checkpoint's SHA-256
    """
    try:
        source_sha256 = str(read_json(_note(checkpoint, folder))["source_sha256"])
    except _DAMAGE:
        return None
    path = _find(checkpoint, source_sha256, dtype, folder, on_bytes)
    return (path, source_sha256) if path else None


def convert(checkpoint: Checkpoint, source_sha256: str, dtype: torch.dtype, folder: Path) -> Path:
    """The converted form of a checkpoint: written, or found to be that of another place.

    Raises:
        UnavailableError: the checkpoint cannot be used.
        OSError, OutputError, StorageError: the folder cannot be written.
    """
    path = _path(source_sha256, dtype, folder)
    is_made = _find(checkpoint, source_sha256, dtype, folder, lambda _: None) is not None
    folder.mkdir(parents=True, exist_ok=True)
    if not is_made:
        _sweep(folder)
        _write(checkpoint, source_sha256, dtype, path)
    write_json(_note(checkpoint, folder), {"source_sha256": source_sha256})
    return path


def is_converted(path: Path) -> bool:
    return path.name.endswith(_SUFFIX) and path.is_file()


def open_esm2(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    """The first ``layer`` layers of a checkpoint or of its converted form, on ``device``.

    Raises:
        UnavailableError: it cannot be used.
    """
    if not is_converted(path):
        return load_esm2(path, layer, dtype, device)
    try:
        with safe_open(path, framework="pt") as handle:
            facts = handle.metadata()
            if facts["dtype"] != str(dtype):
                raise ValueError(f"it holds {facts['dtype']}")
            shape = ESM2Shape(**parse_json(facts["shape"]))
            with torch.device("meta"):
                model = ESM2(shape, layer, dtype)
            tensors = {name: handle.get_tensor(name) for name in model.state_dict()}
        model.load_state_dict(tensors, assign=True)
    except (*_DAMAGE, RuntimeError) as error:
        raise UnavailableError(
            f"{printable(path)} cannot be used: {printable(error)}",
            hint="delete it: it is made again from the model",
        ) from error
    model.attend = choose_kernel(device, dtype, shape.head_dim)
    return model.to(device).eval().requires_grad_(False)


def _find(
    checkpoint: Checkpoint,
    source_sha256: str,
    dtype: torch.dtype,
    folder: Path,
    on_bytes: OnBytes,
) -> Path | None:
    if not re.fullmatch("[0-9a-f]{64}", source_sha256):
        return None
    path = _path(source_sha256, dtype, folder)
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata()
        if metadata != _metadata(checkpoint, source_sha256, dtype):
            return None
        if read_json(path.with_suffix(".json"))["sha256"] != sha256(path, on_bytes):
            return None
    except _DAMAGE:
        return None
    return path


def _write(checkpoint: Checkpoint, source_sha256: str, dtype: torch.dtype, path: Path) -> None:
    model = load_esm2(checkpoint.path, checkpoint.shape.n_layers, dtype, torch.device("cpu"))
    with atomic(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # others may read it if they may read other files
        try:
            metadata = _metadata(checkpoint, source_sha256, dtype)
            save_file(model.state_dict(), temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{printable(path)}: {printable(error)}") from error
        temporary.chmod(mode)
        digest = sha256(temporary)
    write_json(path.with_suffix(".json"), {"sha256": digest, "made of": str(checkpoint.path)})


def _metadata(checkpoint: Checkpoint, source_sha256: str, dtype: torch.dtype) -> dict[str, str]:
    return {
        "format": _FORMAT,
        "shape": json.dumps(asdict(checkpoint.shape)),
        "dtype": str(dtype),
        "encoder_id": checkpoint.encoder_id,
        "source_sha256": source_sha256,
    }


def _path(source_sha256: str, dtype: torch.dtype, folder: Path) -> Path:
    precision = str(dtype).removeprefix("torch.")
    return folder / f"{source_sha256[:16]}_{precision}{_SUFFIX}"


def _note(checkpoint: Checkpoint, folder: Path) -> Path:
    """The note of a checkpoint; another place, size or time of it has another note."""
    digest = hashlib.sha256()
    for file in weight_files(checkpoint.path):
        stat = file.stat()
        where = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        digest.update(repr(where).encode())
    return folder / f"seen_{digest.hexdigest()[:16]}.json"


def _sweep(folder: Path) -> None:
    """Delete temporary files of killed conversions, ours and those of safetensors."""
    for leftover in folder.glob(".*"):
        if leftover.is_file() and leftover.stat().st_mtime < time.time() - _STALE_SECONDS:
            leftover.unlink(missing_ok=True)
