"""ESM-2 as a family of models on disk. Only ``.pt`` files and conversion import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from virnucpro.encoders.base import Encoder, Model, describe_layers, not_published, progress_of
from virnucpro.encoders.esm2.checkpoint import (
    FP8_WIDTH,
    ESM2Shape,
    count_bytes,
    hash_weights,
    identify,
    not_esm2,
    open_folder,
    shape_of_tensors,
    weight_files,
)
from virnucpro.encoders.families import Published, describe_width
from virnucpro.ground.config import EncoderSpec, Footprint, Pooling, Precision
from virnucpro.ground.errors import UnavailableError, UsageError
from virnucpro.ground.events import OnEvent
from virnucpro.ground.files import HEAD_FILE, REGIONS_FILE
from virnucpro.ground.log import printable

if TYPE_CHECKING:
    import torch


WORTH_CONVERTING = 256 << 20  # bytes; smaller files load within a second
_BYTES_PER_TOKEN_AND_DIM = 64  # peak of all activations of a layer, with room to spare
_FILLING = 32_768 * 1280  # tokens times dimensions: 32k tokens of 650M, 16k of 3B, 131k of 8M


def shape_of(published: Published) -> ESM2Shape:
    return ESM2Shape(published.n_layers, published.dim, published.n_heads)


def footprint_of(published: Published) -> Footprint:
    """The memory and disk space of a published model; without a known size, in half precision."""
    shape = shape_of(published)
    return room_for(shape, published.files[0].n_bytes or 2 * shape.n_parameters)


def room_for(shape: ESM2Shape, file_bytes: int = 0) -> Footprint:
    """The memory and disk space of an ESM-2; a large file is converted."""
    converted = 2 * shape.n_parameters if file_bytes >= WORTH_CONVERTING else 0
    return Footprint(
        n_parameters=shape.n_parameters,
        file_bytes=file_bytes,
        converted_bytes=converted,
        bytes_per_token=_BYTES_PER_TOKEN_AND_DIM * shape.dim,
        filling_tokens=_FILLING // shape.dim,
    )


@dataclass(frozen=True, slots=True)
class ESM2Model:
    """An ESM-2 on disk, inspected but not loaded; a ``base.Model``."""

    path: Path
    shape: ESM2Shape
    encoder_id: str  # depends on the weights, not on the format
    head: Path | None = None
    published: str = ""  # the published model that it must be
    accepted: frozenset[str] = frozenset()  # its possible SHA-256; empty if unknown
    family: ClassVar[str] = "esm2"
    reads: ClassVar[Literal["protein"]] = "protein"
    poolings: ClassVar[tuple[Pooling, ...]] = ("mean", "bos", "none")

    @property
    def dim(self) -> int:
        return self.shape.dim

    @property
    def n_layers(self) -> int:
        return self.shape.n_layers

    @property
    def name(self) -> str:
        return self.path.stem if self.path.is_file() else self.path.name

    @property
    def files(self) -> list[Path]:
        """The files of weights; of a folder also the configuration and the trained parts."""
        files = weight_files(self.path)
        if self.path.is_file():
            return files
        beside = [self.path / name for name in (HEAD_FILE, "README.md", REGIONS_FILE)]
        return [*files, self.path / "config.json", *(file for file in beside if file.is_file())]

    @property
    def n_bytes(self) -> int:
        """Size of the weights."""
        return count_bytes(self.path)

    def sha256(self, on_bytes: Callable[[int], None] = lambda _: None) -> str:
        return hash_weights(self.path, on_bytes)

    @property
    def width(self) -> str:
        return describe_width(self.dim, self.shape.n_heads)

    @property
    def footprint(self) -> Footprint:
        return room_for(self.shape, self.n_bytes)

    def precision_on(self, kind: str, precision: Precision) -> Precision:
        return precision

    def describe(self, spec: EncoderSpec) -> str:
        also = ", fp32 for proteins whose numbers it cannot hold" * (spec.precision == "fp16")
        return describe_layers(self, spec) + also

    def prepare(
        self, precision: Precision, folder: Path | None, on_event: OnEvent
    ) -> tuple[Path, str]:
        """Convert a large checkpoint once, so that all workers map the same copy.

        Raises:
            UsageError: its matrices are too narrow for the precision.
        """
        if precision == "fp8" and self.dim % FP8_WIDTH:
            raise UsageError(
                f"--precision fp8 needs a multiple of {FP8_WIDTH} dimensions; "
                f"{printable(self.name)} has {self.dim}",
                hint="use --precision bf16",
            )
        if self.n_bytes < WORTH_CONVERTING:
            weights = self.path
            digest = self.sha256(progress_of("hashing the model", self.n_bytes, on_event))
        else:
            from virnucpro.encoders.esm2.weights import prepare

            weights, digest = prepare(self, self.shape, precision, folder, on_event)
        self.check(digest)
        return weights, digest

    def check(self, digest: str) -> None:
        """Refuse other weights under the name of a published model.

        Raises:
            UnavailableError: the weights differ.
        """
        if self.accepted and digest not in self.accepted:
            raise not_published(self.path, self.published, f"its SHA-256 is {digest}")

    def verify(self) -> str:
        from virnucpro.encoders.esm2.weights import verify_weights

        verify_weights(self.path)
        return self.sha256()


def inspect_esm2(path: Path) -> ESM2Model:
    """
    Raises:
        UnavailableError: it is not an ESM-2, damaged, or holds more than tensors.
    """
    if not path.exists():
        raise UnavailableError(
            f"{printable(path)}: no such file or folder",
            hint="check the path; `virnucpro models download NAME` fetches a published model",
        )
    if path.is_dir():
        tensors = open_folder(path, "np")
    else:
        from virnucpro.encoders.esm2.weights import open_tensors

        tensors = open_tensors(path)
    shape, head = shape_of_tensors(tensors), path / HEAD_FILE
    return ESM2Model(path, shape, identify(shape, tensors), head if head.is_file() else None)


def inspect(path: Path, on_event: OnEvent) -> ESM2Model:
    """Inspect any path; the error says why it is not an ESM-2. Raises as ``inspect_esm2``."""
    return inspect_esm2(path)


def as_esm2(model: Model) -> ESM2Model:
    """
    Raises:
        UnavailableError: the model is of another family.
    """
    if not isinstance(model, ESM2Model):
        raise not_esm2(model.path, f"a model of the family {model.family}")
    return model


def open_published(name: str, published: Published, path: Path) -> ESM2Model:
    """Inspect a published model: compare shape and size now, and the hash when it is read.

    Raises:
        UnavailableError: it is another model, or damaged.
    """
    model = replace(inspect_esm2(path), published=name, accepted=published.digests)
    if model.shape != shape_of(published):
        raise not_published(path, name, f"it has {model.shape}")
    n_bytes = published.files[0].n_bytes
    if path.is_file() and n_bytes not in (None, model.n_bytes):
        raise not_published(path, name, f"it has {model.n_bytes} bytes, not {n_bytes}")
    return model


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """Load the first ``spec.layer`` layers of a checkpoint or of its converted copy.

    Raises:
        UnavailableError: it cannot be used.
    """
    from virnucpro.encoders.esm2.encoder import load

    return load(spec, weights, device)
