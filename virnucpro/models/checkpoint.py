"""Read transformer checkpoints: find their files, read tensors on demand, check the numbers.

This module imports torch only for a number type that numpy lacks (bf16).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from virnucpro.core.atomic_io import hash_file, open_regular_file, read_json
from virnucpro.core.errors import UnavailableError
from virnucpro.core.logging import printable
from virnucpro.core.option_text import with_options
from virnucpro.core.recipe import Precision
from virnucpro.models.base import DAMAGE, check_header
from virnucpro.models.family import ModelFile, join_digests

LAYER_NORM_EPS = 1e-5  # in ESM-2 and ESM C
ROPE_THETA = 10000.0  # in ESM-2 and ESM C
# Errors raised for tensors and sizes that fit no model.
INVALID_CONTENT = (
    *(TypeError, ValueError, IndexError, ArithmeticError, RuntimeError),
    SafetensorError,
)
# Largest finite number in the type that matrix products use, by precision.
_LARGEST: Mapping[str, float] = {
    "fp32": float(np.finfo(np.float32).max),
    "fp16": float(np.finfo(np.float16).max),
    "bf16": (2 - 2**-7) * 2.0**127,
    # weights are scaled from bf16 to 8 bits
    "fp8": (2 - 2**-7) * 2.0**127,
    "int8": (2 - 2**-7) * 2.0**127,
}


# Files


def weight_files(path: Path) -> list[Path]:
    """List the weight files: those in the index, or all except a trained model's files.

    Raises:
        UnavailableError: the folder has no weight files, or lacks one that the index names.
    """
    if path.is_file():
        return [path]
    if (path / ModelFile.INDEX).is_file():
        return _indexed_files(path)
    not_weights = {ModelFile.HEAD, ModelFile.LEARNED}
    files = sorted(file for file in path.glob("*.safetensors") if file.name not in not_weights)
    if not files:
        raise UnavailableError(
            f"{printable(path)}: no *.safetensors file in this folder",
            hint="save the model with safetensors: model.save_pretrained(folder)",
        )
    return files


def _indexed_files(path: Path) -> list[Path]:
    """List the files that the index names, in alphabetical order."""
    try:
        names = sorted(set(read_json(path / ModelFile.INDEX)["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("it names no files of this folder")
    except DAMAGE as error:
        raise UnavailableError(
            f"{printable(path / ModelFile.INDEX)} cannot be read: {printable(error)}",
            hint="get the file again, or delete it: then all *.safetensors files are read",
        ) from error
    files = [path / name for name in names]
    for file in files:
        if not file.is_file():
            raise UnavailableError(
                f"{printable(file)}: no such file, but {ModelFile.INDEX} names it",
                hint="get all files of the model",
            )
    return files


def hash_weights(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return a file's SHA-256. For a folder, hash the hashes of its weight files in order."""
    files = weight_files(path)
    digests = list[str]()
    before = 0
    for file in files:
        digests.append(hash_file(file, lambda n, before=before: on_bytes(before + n)))  # type: ignore[misc]
        before += file.stat().st_size
    return join_digests(digests)


def count_bytes(path: Path) -> int:
    """Return the weight size in bytes."""
    return sum(file.stat().st_size for file in weight_files(path))


def is_safetensors(path: Path) -> bool:
    """Return True for a safetensors header, or for the suffix even if the file is damaged."""
    if not path.is_file():  # reading a pipe would block
        return False
    if path.suffix == ".safetensors":
        return True
    try:
        with open_regular_file(path) as handle:
            n_bytes = int.from_bytes(handle.read(8), "little")
            return n_bytes < path.stat().st_size and handle.read(1) == b"{"
    except OSError:
        return False


def open_slices(path: Path, framework: Literal["np", "pt"]) -> dict[str, Any]:
    """Open the tensors of a safetensors file or folder as slices that are read on demand.

    Even with ``np``, torch reads the tensors if numpy lacks one of the number types.

    Raises:
        UnavailableError: a file is missing or damaged.
    """
    slices: dict[str, Any] = {}
    try:
        for file in weight_files(path):
            check_header(file)
            handle = safe_open(file, framework=framework)
            for name in handle.keys():  # type: ignore[no-untyped-call] # noqa: SIM118
                slices[name] = handle.get_slice(name)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, SafetensorError) as error:
        raise unreadable_error(path, error) from error
    numpy_types = {"F64", "F32", "F16", "I64"}  # a folder may also contain integer positions
    if framework == "np" and {each.get_dtype() for each in slices.values()} - numpy_types:
        return open_slices(path, "pt")
    return slices


def unreadable_error(path: Path, why: object) -> UnavailableError:
    if path.is_dir() and not (path / ModelFile.CONFIG).exists():
        return UnavailableError(
            f"{printable(path)} is not a model: it has no {ModelFile.CONFIG}",
            hint=f"a model folder contains {ModelFile.CONFIG} and *.safetensors files",
        )
    return UnavailableError(
        f"{printable(path)} cannot be read: {printable(why)}",
        hint=f"a model folder contains {ModelFile.CONFIG} and *.safetensors files"
        if path.is_dir()
        else "the file is damaged: get it again",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration in a folder. Return an empty dict if there is none.

    Raises:
        UnavailableError: the configuration is damaged.
    """
    file = folder / ModelFile.CONFIG
    if not file.is_file():
        return {}
    try:
        config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError(f"{ModelFile.CONFIG} is no dictionary")
    except (OSError, ValueError) as error:
        raise unreadable_error(folder, error) from error
    return config


# Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The tensors of a checkpoint, read on demand."""

    path: Path
    kind: str  # the expected kind, for messages: "an ESM-2 checkpoint"
    names: frozenset[str]
    read: Callable[[str, int | None], Any]  # same signature as ``get``

    def get(self, name: str, n_rows: int | None = None) -> Any:  # noqa: ANN401 - of numpy or torch
        """Read a tensor by its name in the checkpoint: the first ``n_rows`` rows, or all.

        Raises:
            UnavailableError: the tensor is missing, or is not numeric.
        """
        if name not in self.names:
            raise self.error(f"no tensor {name}")
        try:
            return self.read(name, n_rows)
        except INVALID_CONTENT as error:
            raise self.error(error) from error

    def error(self, why: object) -> UnavailableError:
        """Make the error for a checkpoint of another kind."""
        return UnavailableError(
            f"{printable(self.path)} is not {self.kind}: {printable(why)}",
            hint="see `virnucpro models list`",
        )


def read_slice(part: Any, first: int, n_rows: int | None) -> Any:  # noqa: ANN401 - of safetensors
    """Read rows from a safetensors slice.

    Raises:
        ValueError: the slice does not contain floats.
    """
    float_types = frozenset({"F64", "F32", "F16", "BF16"})  # number types in safetensors
    if part.get_dtype() not in float_types:
        raise ValueError(f"a tensor of {part.get_dtype()}")
    return part[first : None if n_rows is None else first + n_rows]


def check_numbers(
    name: str, tensors: Tensors, precision: Precision, parts: Iterable[tuple[str, bool]]
) -> None:
    """Read every number in a model and reject the model if one would not be finite in a run.

    Args:
        name: the model's name, for messages.
        tensors: the checkpoint's tensors.
        precision: the run's precision.
        parts: (tensor name, whether it is cast to the precision). All others stay in float32.

    Raises:
        UnavailableError: a number is NaN, infinite, or too large for the precision.
    """
    for tensor, is_converted in parts:
        number_type: Precision = precision if is_converted else "fp32"
        peak = float(abs(tensors.get(tensor)).max())
        if not peak <= _LARGEST[number_type]:  # also true for NaN
            raise _unusable_number(name, tensors.path, tensor, peak, number_type)


def _unusable_number(
    name: str, path: Path, tensor: str, peak: float, precision: str
) -> UnavailableError:
    """Make the error for a tensor whose largest number is NaN, infinite or too large."""
    if peak <= _LARGEST["fp32"]:
        possible = "bf16 or fp32" if peak <= _LARGEST["bf16"] else "fp32"
        return UnavailableError(
            f"the model {printable(name)} cannot run in {precision}: {printable(tensor)} contains "
            f"the number {peak:.3g}, and the largest number of {precision} is "
            f"{_LARGEST[precision]:.3g}",
            hint=with_options("set {precision} to {possible}", possible=possible),
        )
    return UnavailableError(
        f"the model {printable(name)} is damaged: {printable(tensor)} in {printable(path)} "
        "contains numbers that are not finite",
        hint="get the file again, and check it with `virnucpro models verify`",
    )


def check_finite(path: Path, network: Any) -> None:  # noqa: ANN401 - a module of torch
    """Check every number in a loaded model.

    Raises:
        UnavailableError: a number is NaN or infinite.
    """
    for name, tensor in network.state_dict().items():
        if not tensor.isfinite().all():
            raise UnavailableError(
                f"{printable(path)}: {name} contains a number that is not finite",
                hint="the file is damaged: download it again",
            )


def identify(
    shape: object, tensors: Tensors, complete: Iterable[str], first_rows: Iterable[str]
) -> str:
    """Hash the dimensions, some complete tensors, and the first row of others, by tensor name.

    This distinguishes a fine-tuned model from its original without reading gigabytes.
    """
    digest = hashlib.sha256(repr(shape).encode())
    parts = [tensors.get(name) for name in complete]
    parts += [tensors.get(name, n_rows=1) for name in first_rows]
    for part in parts:
        values = part if isinstance(part, np.ndarray) else part.float().numpy()
        digest.update(values.astype(np.float32).tobytes())
    return digest.hexdigest()[:16]
