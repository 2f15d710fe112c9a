"""Large checkpoints, converted once: our names, the run's precision, mapped and not read.

Beside ``NAME.safetensors`` stands ``NAME.json`` with the hash of both the converted file and its
source. The parent verifies the file once for a run; then every worker maps it, so that all of
them share one copy of the weights in the machine's page cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from virnucpro.errors import UnavailableError
from virnucpro.esm2.attention import choose_kernel
from virnucpro.esm2.model import ESM2, ESM2Shape
from virnucpro.esm2.weights import Checkpoint, load_esm2
from virnucpro.files import atomic, sha256
from virnucpro.log import printable

WORTH_CONVERTING = 256 << 20  # bytes; what is smaller loads in a second anyway
_FORMAT = 1
_SUFFIX = ".safetensors"

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint in the form that workers map."""

    path: Path
    source_sha256: str


def find_converted(
    checkpoint: Checkpoint, dtype: torch.dtype, folder: Path, on_bytes: OnBytes = lambda _: None
) -> Converted | None:
    """The converted form of a checkpoint, if it was made and is whole to the last bit.

    The source is known by place, size and times: it is not read again.
    """
    path = _path(checkpoint, dtype, folder)
    try:
        facts = json.loads(_facts(path).read_text())
        if facts["format"] == _FORMAT and facts["sha256"] == sha256(path, on_bytes):
            return Converted(path, str(facts["source_sha256"]))
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def convert(
    checkpoint: Checkpoint, source_sha256: str, dtype: torch.dtype, folder: Path
) -> Converted:
    """Write the converted form of a checkpoint.

    Raises:
        UnavailableError: the checkpoint cannot be used.
        OSError: the folder cannot be written.
    """
    path = _path(checkpoint, dtype, folder)
    model = load_esm2(checkpoint.path, checkpoint.shape.n_layers, dtype, torch.device("cpu"))
    metadata = {"shape": json.dumps(asdict(checkpoint.shape)), "dtype": str(dtype)}
    with atomic(path) as temporary:
        try:
            save_file(model.state_dict(), temporary, metadata)
        except SafetensorError as error:
            raise OSError(f"{printable(path)}: {printable(error)}") from error
        facts = {
            "format": _FORMAT,
            "sha256": sha256(temporary),
            "source": str(checkpoint.path),
            "source_sha256": source_sha256,
        }
    with atomic(_facts(path)) as temporary:
        temporary.write_text(json.dumps(facts, indent=2) + "\n")
    return Converted(path, source_sha256)


def open_esm2(path: Path, layer: int, dtype: torch.dtype, device: torch.device) -> ESM2:
    """The first ``layer`` layers of a checkpoint or of its converted form, on ``device``.

    Raises:
        UnavailableError: it cannot be used.
    """
    if path.suffix != _SUFFIX:
        return load_esm2(path, layer, dtype, device)
    try:
        with safe_open(path, framework="pt") as stored:
            facts = stored.metadata()
            if facts["dtype"] != str(dtype):
                raise ValueError(f"it holds {facts['dtype']}")
            shape = ESM2Shape(**json.loads(facts["shape"]))
            with torch.device("meta"):
                model = ESM2(shape, layer, dtype, choose_kernel(device, dtype))
            tensors = {name: stored.get_tensor(name) for name in model.state_dict()}
        model.load_state_dict(tensors, assign=True)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise UnavailableError(
            f"{printable(path)} cannot be used: {printable(error)}",
            hint="delete it: it is made again from the model",
        ) from error
    return model.to(device).eval().requires_grad_(False)


def _path(checkpoint: Checkpoint, dtype: torch.dtype, folder: Path) -> Path:
    """Another place, size or time of the source gives another name."""
    known = hashlib.sha256()
    for file in checkpoint.files:
        stat = file.stat()
        where = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        known.update(repr(where).encode())
    precision = str(dtype).removeprefix("torch.")
    return folder / f"{known.hexdigest()[:16]}_{precision}{_SUFFIX}"


def _facts(path: Path) -> Path:
    return path.with_suffix(".json")
