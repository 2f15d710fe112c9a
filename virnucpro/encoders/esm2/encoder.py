"""ESM-2 as a family of encoders of proteins: its models, packed batches, pooling on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from virnucpro.config import EncoderSpec, Footprint, Pooling, Precision
from virnucpro.encoders.base import HostCopy, OnEvent, Pending, Rows
from virnucpro.encoders.esm2.converted import (
    WORTH_CONVERTING,
    convert,
    converted_folder,
    find_converted,
    open_esm2,
)
from virnucpro.encoders.esm2.model import (
    DTYPES,
    ESM2,
    ESM2Shape,
    bos_pool,
    mean_pool,
    residues_only,
)
from virnucpro.encoders.esm2.packing import EXTRA_TOKENS, PackedBatch, plan_batches
from virnucpro.encoders.esm2.weights import Checkpoint, inspect_checkpoint
from virnucpro.errors import OutputError, StorageError, UnavailableError
from virnucpro.events import Progress
from virnucpro.log import LOGGER, printable

_POOL = {"mean": mean_pool, "bos": bos_pool, "none": residues_only}
_BYTES_PER_TOKEN_AND_DIM = 64  # peak of all activations of a layer, with room to spare
_MIB = 1 << 20
# options of glibc's mallopt, and from how much on freed memory goes back to the system
_KEEPING = {-3: 32 * _MIB, -1: 256 * _MIB}  # M_MMAP_THRESHOLD (at most 32 MiB), M_TRIM_THRESHOLD
_FILLING = 32_768 * 1280  # tokens times dimensions. 650M: 32k tokens, 3B: 16k, 8M: 131k


def footprint_of(shape: ESM2Shape, file_bytes: int = 0) -> Footprint:
    """The room for an ESM-2; it is converted if its file is large."""
    converted = 2 * shape.n_parameters if file_bytes >= WORTH_CONVERTING else 0
    return Footprint(
        n_parameters=shape.n_parameters,
        file_bytes=file_bytes,
        converted_bytes=converted,
        bytes_per_token=_BYTES_PER_TOKEN_AND_DIM * shape.dim,
        filling_tokens=_FILLING // shape.dim,
    )


@dataclass(frozen=True, slots=True)
class ESM2Model(Checkpoint):
    """An ESM-2 on disk, inspected but not loaded; a ``base.Model``."""

    published: str = ""  # name of the published model that it must be
    accepted: frozenset[str] = frozenset()  # SHA-256 that this may have; none: not on record
    head: Path | None = None
    poolings: ClassVar[tuple[Pooling, ...]] = ("mean", "bos", "none")

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ESM2Model:
        return cls(checkpoint.path, checkpoint.shape, checkpoint.encoder_id)

    @property
    def width(self) -> str:
        return self.shape.width

    @property
    def footprint(self) -> Footprint:
        return footprint_of(self.shape, self.n_bytes)

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        return precision

    def describe(self, spec: EncoderSpec) -> str:
        shape = self.shape
        return (
            f"{shape.n_layers} layers, {shape.dim} dimensions, "
            f"{shape.n_parameters / 1e6:.1f} M parameters; layer {spec.layer}, "
            f"{spec.pooling} pooling, {spec.precision}"
            + ", fp32 for proteins whose numbers it cannot hold"
            * (spec.precision == "fp16")
        )

    def prepare(
        self, precision: Precision, folder: Path | None, on_event: OnEvent
    ) -> tuple[Path, str]:
        """A large checkpoint is converted once, so that all workers share what they map."""
        weights, digest = self._find_weights(precision, folder or converted_folder(), on_event)
        self.check(digest)
        return weights, digest

    def _find_weights(
        self, precision: Precision, folder: Path, on_event: OnEvent
    ) -> tuple[Path, str]:
        def progress(stage: str) -> Callable[[int], None]:
            return lambda done: on_event(Progress(stage, done, n_bytes, "bytes"))

        n_bytes, dtype = self.n_bytes, DTYPES[precision]
        if n_bytes < WORTH_CONVERTING:
            return self.path, self.sha256(progress("hashing the model"))
        converted = find_converted(self, dtype, folder, progress("checking the model"))
        if converted is None:
            digest = self.sha256(progress("hashing the model"))
            on_event(Progress("converting the model, this once", 0, 0, "bytes"))
            try:
                converted = convert(self, digest, dtype, folder)
            except (OSError, OutputError, StorageError) as error:
                LOGGER.warning(
                    "the converted model cannot be kept in %s (%s): every worker reads all of %s",
                    printable(folder),
                    printable(error),
                    printable(self.path),
                )
                return self.path, digest
            LOGGER.info("converted model: %s", printable(converted.path))
        return converted.path, converted.source_sha256

    def check(self, digest: str) -> None:
        """Refuse other weights under the name of a published model.

        Raises:
            UnavailableError: these are other weights.
        """
        if self.accepted and digest not in self.accepted:
            raise self.other_weights(f"its SHA-256 is {digest}")

    def other_weights(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{printable(self.path)} is not the published {self.published}: {why}",
            hint="delete it to fetch it again; name a model of your own by its path, "
            "or give it a name with `virnucpro models import PATH --name NAME`",
        )


def inspect_esm2(path: Path) -> ESM2Model:
    """
    Raises:
        UnavailableError: it is no ESM-2, is damaged, or holds more than tensors.
    """
    return ESM2Model.of(inspect_checkpoint(path))


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> ESM2Encoder:
    """The first ``spec.layer`` layers of a checkpoint or of its converted form.

    Raises:
        UnavailableError: it cannot be used.
    """
    if device.type == "cpu":
        keep_freed_memory()
    model = open_esm2(weights, spec.layer, DTYPES[spec.precision], device)
    return ESM2Encoder(spec, model, device)


def keep_freed_memory() -> None:
    """Have glibc reuse what a layer frees for the next: pages fetched anew take up to a third more.

    A batch of ours frees some 20 MB per layer. Other C libraries are left as they are.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option, n_bytes in _KEEPING.items():
            library.mallopt(option, n_bytes)


class ESM2Encoder:
    """Our ESM-2 on packed batches; see ``base.Encoder``."""

    def __init__(self, spec: EncoderSpec, model: ESM2, device: torch.device) -> None:
        self.spec, self.model = spec, model
        self.pool = _POOL[spec.pooling]
        self.copy = HostCopy(device)

    @property
    def kernel(self) -> str:
        return self.model.attend.__name__

    def count_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths) + EXTRA_TOKENS * len(lengths)

    def count_flop(self, lengths: Sequence[int]) -> float:
        shape = self.model.shape
        squares = float(sum(length * length for length in lengths))
        return 2.0 * shape.n_parameters * sum(lengths) + 4.0 * squares * shape.dim * shape.n_layers

    def plan(self, lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
        return plan_batches(lengths, tokens_per_batch)

    def start(self, sequences: Sequence[str]) -> Pending:
        pending = self.copy.start(self.embed(sequences))
        if self.spec.precision != "fp16":
            return pending
        return Fp16Batch(sequences, pending, self.model, self.embed)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[str]) -> Tensor:
        """The rows of a batch, on the device."""
        batch = PackedBatch.of(sequences)
        return self.pool(self.model(batch), batch)


@dataclass(slots=True, eq=False)
class Fp16Batch:
    """A batch in fp16; a protein whose numbers are too large for that is embedded in float32.

    It is embedded alone then, so that its vector does not depend on the batch.
    """

    sequences: Sequence[str]
    pending: Pending
    model: ESM2
    embed: Callable[[Sequence[str]], Tensor]
    n_repeated: int = 0

    def rows(self) -> Rows:
        rows = self.pending.rows()
        parts = np.split(rows, self.ends(len(rows))[:-1])  # views
        for sequence, part in zip(self.sequences, parts, strict=True):
            if not np.isfinite(part).all():
                with self.model.in_float32():
                    part[:] = self.embed([sequence]).cpu().numpy()
                self.n_repeated += 1
        return rows

    def ends(self, n_rows: int) -> NDArray[np.int64]:
        """The end of each protein among the rows, of which it has one, or one per residue."""
        if n_rows == len(self.sequences):
            return np.arange(1, n_rows + 1)
        return np.cumsum([len(sequence) for sequence in self.sequences])
