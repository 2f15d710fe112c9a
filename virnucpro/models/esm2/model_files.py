"""The ESM-2 family on disk. Only ``.pt`` files and conversion import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from virnucpro.core.errors import UnavailableError
from virnucpro.core.events import EventHandler
from virnucpro.core.logging import printable
from virnucpro.core.model_outputs import Include, Pooling
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Precision
from virnucpro.models.base import Encoder, Model, not_published
from virnucpro.models.checkpoint import check_numbers, count_bytes, weight_files
from virnucpro.models.checkpoint_model import CheckpointModel, estimate_footprint
from virnucpro.models.esm2.config import (
    CONTACTS,
    N_TOKENS,
    ESM2Shape,
    ESM2Tensors,
    contacts_path,
    identify_esm2,
    infer_shape,
    open_folder,
    tensor_names,
)
from virnucpro.models.family import ModelFile
from virnucpro.models.registry import FAMILIES, Published

if TYPE_CHECKING:
    import torch

    from virnucpro.models.esm2.model import ESM2


def read_shape(published: Published) -> ESM2Shape:
    return ESM2Shape(published.n_layers, published.dim, published.n_heads)


def footprint_of(published: Published) -> Footprint:
    """Estimate the footprint of a published model, in half precision if its size is unknown."""
    shape = read_shape(published)
    return estimate_memory(shape, published.files[0].n_bytes or 2 * shape.n_parameters)


def estimate_memory(shape: ESM2Shape, file_bytes: int = 0) -> Footprint:
    """Estimate the memory and disk space of an ESM-2. A large file is converted."""
    return estimate_footprint(shape.n_parameters, shape.dim, file_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ESM2Model(CheckpointModel):
    """An ESM-2 on disk."""

    shape: ESM2Shape

    def check_numbers(self, precision: Precision) -> None:
        tensors = open_checkpoint(self.path)
        check_numbers(self.name, tensors, precision, tensor_names(tensors, self.n_layers))

    def load_network(self, precision: Precision) -> ESM2:
        from virnucpro.models.esm2.loading import load_complete
        from virnucpro.models.transformer import DTYPES

        return load_complete(self.path, DTYPES[precision])

    def read_heads(self) -> Mapping[str, Any]:
        from virnucpro.models.esm2.loading import read_heads

        return read_heads(self.path)

    def explain_missing(self, include: Include) -> str:
        contacts_url = "https://dl.fbaipublicfiles.com/fair-esm/regression/"
        if include != "contacts":
            return "name a checkpoint with the language-model head, as published"
        if self.path.is_dir():
            return "name a folder of an EsmForMaskedLM, as published, or a .pt of fair-esm"
        contacts = contacts_path(self.path)
        by_hand = f"save its contact head, {contacts_url}{contacts.name}, as {printable(contacts)}"
        if self.name not in FAMILIES["esm2"].published:
            return by_hand
        return f"run `virnucpro models download {self.name}`, or {by_hand}"


def open_checkpoint(path: Path) -> ESM2Tensors:
    """Open the tensors of a checkpoint. A folder is read without torch.

    Raises:
        UnavailableError: it is not an ESM-2, is damaged, or contains more than tensors.
    """
    if path.is_dir():
        return open_folder(path, "np")
    from virnucpro.models.esm2.loading import open_tensors

    return open_tensors(path)


def inspect_esm2(path: Path) -> ESM2Model:
    """Inspect an ESM-2 checkpoint.

    Raises:
        UnavailableError: it is not an ESM-2, is damaged, or contains more than tensors.
    """
    if not path.exists():
        raise UnavailableError(
            f"{printable(path)}: no such file or folder",
            hint="check the path; `virnucpro models download NAME` fetches a published model",
        )
    tensors = open_checkpoint(path)
    shape = infer_shape(tensors)
    files = weight_files(path)
    if path.is_dir():  # a trained model has more files
        beside = [path / name for name in (ModelFile.HEAD, "README.md", ModelFile.REGIONS)]
        files += [path / ModelFile.CONFIG, *(file for file in beside if file.is_file())]
    return ESM2Model(
        path=path,
        name=path.name if path.is_dir() else path.stem,
        family="esm2",
        reads=Alphabet.PROTEIN,
        encoder_id=identify_esm2(shape, tensors),
        n_layers=shape.n_layers,
        dim=shape.dim,
        poolings=get_args(Pooling),
        includes=_find_includes(path, tensors),
        n_tokens=N_TOKENS,
        footprint=estimate_memory(shape, count_bytes(path)),
        files=files,
        companions=_companions(path),
        head=path / ModelFile.HEAD if path / ModelFile.HEAD in files else None,
        shape=shape,
    )


def _companions(path: Path) -> list[Path]:
    """Return the contact head next to a ``.pt``, if there is one."""
    contacts = contacts_path(path)
    return [contacts] if path.is_file() and contacts.is_file() else []


def _find_includes(path: Path, tensors: ESM2Tensors) -> tuple[Include, ...]:
    """Return the values of ``--include`` that a checkpoint has a head for."""
    names = set(tensors.names)
    if _companions(path):
        names.update(name for (name,) in CONTACTS.values())
    return tensors.heads.find_includes(names)


def inspect(path: Path, on_event: EventHandler) -> ESM2Model:
    """Inspect any path. The error says why it is not an ESM-2. Raises as ``inspect_esm2``."""
    return inspect_esm2(path)


def require_esm2(model: Model) -> ESM2Model:
    """Return the model if it is an ESM-2.

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
    """Inspect a published model. Compare shape and size now, and the hash when it is read.

    Raises:
        UnavailableError: the path contains another model, or is damaged.
    """
    found = inspect_esm2(path)  # the folder may have any name, for example that of a revision
    model = replace(found, name=name, published=name, accepted=published.digests)
    if model.shape != read_shape(published):
        raise not_published(path, name, f"it has {model.n_layers} layers, {model.dim} dimensions")
    n_bytes = model.footprint.file_bytes
    expected = published.files[0].n_bytes
    if path.is_file() and expected not in (None, n_bytes):
        raise not_published(path, name, f"it has {n_bytes} bytes, not {expected}")
    return model


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """Load the layers and heads that ``spec`` needs, of a checkpoint or its converted copy.

    Raises:
        UnavailableError: the checkpoint cannot be used, or is small and does not match the recipe.
    """
    from virnucpro.models.esm2.loading import load_esm2, read_heads
    from virnucpro.models.transformer_encoder import load_encoder

    return load_encoder(spec, weights, device, load_esm2, read_heads)
