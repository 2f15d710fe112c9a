"""ESM-2 as a family of models on disk. Only ``.pt`` files and conversion import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.core.atomic_io import HEAD_FILE, REGIONS_FILE
from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Precision
from virnucpro.models.base import (
    Encoder,
    Model,
    check_unchanged,
    not_published,
    progress_of,
)
from virnucpro.models.esm2.config import (
    ESM2Shape,
    Tensors,
    check_numbers,
    count_bytes,
    hash_weights,
    identify,
    infer_shape,
    open_folder,
    weight_files,
)
from virnucpro.models.registry import Published

if TYPE_CHECKING:
    import torch


WORTH_CONVERTING = 256 << 20  # bytes; smaller files load within a second
_BYTES_PER_TOKEN_AND_DIM = 64  # peak of all activations of a layer, with room to spare
_FILLING = 32_768 * 1280  # tokens times dimensions: 32k tokens of 650M, 16k of 3B, 131k of 8M


def read_shape(published: Published) -> ESM2Shape:
    return ESM2Shape(published.n_layers, published.dim, published.n_heads)


def footprint_of(published: Published) -> Footprint:
    """The memory and disk space of a published model; without a known size, in half precision."""
    shape = read_shape(published)
    return estimate_memory(shape, published.files[0].n_bytes or 2 * shape.n_parameters)


def estimate_memory(shape: ESM2Shape, file_bytes: int = 0) -> Footprint:
    """The memory and disk space of an ESM-2; a large file is converted."""
    converted = 2 * shape.n_parameters if file_bytes >= WORTH_CONVERTING else 0
    return Footprint(
        n_parameters=shape.n_parameters,
        file_bytes=file_bytes,
        converted_bytes=converted,
        bytes_per_token=_BYTES_PER_TOKEN_AND_DIM * shape.dim,
        filling_tokens=_FILLING // shape.dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ESM2Model(Model):
    """An ESM-2 on disk; its id depends on the weights, not on the format."""

    shape: ESM2Shape
    published: str = ""  # the published model that it must be
    accepted: frozenset[str] = frozenset()  # its possible SHA-256; empty if unknown

    def sha256(self, on_bytes: Callable[[int], None] = lambda _: None) -> str:
        return hash_weights(self.path, on_bytes)

    def prepare(self, precision: Precision, on_event: EventHandler) -> tuple[Path, str]:
        """Convert a large checkpoint once, so that all workers map the same copy.

        Weights that are not finite in this precision are refused, before anything else is done.
        Those of a published model are known to be finite: its hash is compared instead.
        """
        weights, n_bytes = self.path, self.footprint.file_bytes
        if n_bytes < WORTH_CONVERTING:
            digest = self.sha256(progress_of("hashing the model", n_bytes, on_event))
            if not self.accepted:
                self.check_numbers(precision)
        else:
            from virnucpro.models.esm2.loading import prepare

            weights, digest = prepare(self, self.shape, precision, on_event)
        self.check(digest)
        return weights, digest

    def check_numbers(self, precision: Precision) -> None:
        """Read every weight.

        Raises:
            UnavailableError: one is not finite in this precision.
        """
        check_numbers(self.name, self.shape, open_checkpoint(self.path), precision)

    def check(self, digest: str) -> None:
        """Refuse other weights under the name of a published model.

        Raises:
            UnavailableError: the weights differ.
        """
        if self.accepted and digest not in self.accepted:
            raise not_published(self.path, self.published, f"its SHA-256 is {digest}")

    def verify(self) -> str:
        from virnucpro.models.esm2.loading import verify_weights

        verify_weights(self.path)
        digest = self.sha256()
        self.check(digest)
        return digest


def open_checkpoint(path: Path) -> Tensors:
    """The tensors of a checkpoint; those of a folder are read without torch.

    Raises:
        UnavailableError: it is not an ESM-2, damaged, or holds more than tensors.
    """
    if path.is_dir():
        return open_folder(path, "np")
    from virnucpro.models.esm2.loading import open_tensors

    return open_tensors(path)


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
    tensors = open_checkpoint(path)
    shape, files = infer_shape(tensors), weight_files(path)
    if path.is_dir():  # a trained model has more
        beside = [path / name for name in (HEAD_FILE, "README.md", REGIONS_FILE)]
        files += [path / "config.json", *(file for file in beside if file.is_file())]
    return ESM2Model(
        path=path,
        name=path.name if path.is_dir() else path.stem,
        family="esm2",
        reads=Alphabet.PROTEIN,
        encoder_id=identify(shape, tensors),
        n_layers=shape.n_layers,
        dim=shape.dim,
        poolings=("mean", "bos", "none"),
        footprint=estimate_memory(shape, count_bytes(path)),
        files=files,
        head=path / HEAD_FILE if path / HEAD_FILE in files else None,
        shape=shape,
    )


def inspect(path: Path, on_event: EventHandler) -> ESM2Model:
    """Inspect any path; the error says why it is not an ESM-2. Raises as ``inspect_esm2``."""
    return inspect_esm2(path)


def require_esm2(model: Model) -> ESM2Model:
    """
    Raises:
        UnavailableError: the model is of another family.
    """
    if not isinstance(model, ESM2Model):
        raise UnavailableError(
            f"{printable(model.name)} is not an ESM-2, but a model of the family "
            f"{printable(model.family)}",
            hint="only an ESM-2 can be trained or compared with fair-esm (`virnucpro models list` "
            "lists them); `predict` and `extract` take this model as it is",
        )
    return model


def open_published(name: str, published: Published, path: Path) -> ESM2Model:
    """Inspect a published model: compare shape and size now, and the hash when it is read.

    Raises:
        UnavailableError: it is another model, or damaged.
    """
    found = inspect_esm2(path)  # its folder may have any name, such as that of a revision
    model = replace(found, name=name, published=name, accepted=published.digests)
    if model.shape != read_shape(published):
        raise not_published(path, name, f"it has {model.n_layers} layers, {model.dim} dimensions")
    n_bytes, expected = model.footprint.file_bytes, published.files[0].n_bytes
    if path.is_file() and expected not in (None, n_bytes):
        raise not_published(path, name, f"it has {n_bytes} bytes, not {expected}")
    return model


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """Load the first ``spec.layer`` layers of a checkpoint or of its converted copy.

    Raises:
        UnavailableError: it cannot be used, or is small and not that of the recipe.
    """
    from virnucpro.models.esm2.encoder import load
    from virnucpro.models.esm2.loading import is_converted

    if count_bytes(weights) < WORTH_CONVERTING and not is_converted(weights):
        check_unchanged(spec, weights, hash_weights(weights))
    return load(spec, weights, device)
