"""The ESM C family on disk. Only loading and conversion import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from virnucpro.core.events import EventHandler
from virnucpro.core.model_outputs import Include, Pooling
from virnucpro.core.recipe import Alphabet, EncoderSpec, Footprint, Precision
from virnucpro.models.base import Encoder, not_published
from virnucpro.models.checkpoint import check_numbers, count_bytes, weight_files
from virnucpro.models.checkpoint_model import CheckpointModel, estimate_footprint
from virnucpro.models.esmc.config import (
    HEADS,
    N_TOKENS,
    ESMCShape,
    identify_esmc,
    infer_shape,
    inner_of,
    is_esmc,
    open_tensors,
    tensor_names,
)
from virnucpro.models.family import ModelFile, Published

if TYPE_CHECKING:
    import torch

    from virnucpro.models.esmc.model import ESMC


def read_shape(published: Published) -> ESMCShape:
    return ESMCShape(
        n_layers=published.n_layers,
        dim=published.dim,
        n_heads=published.n_heads,
        inner=inner_of(published.dim),
    )


def footprint_of(published: Published) -> Footprint:
    """Return a published model's memory and disk space. Unrecorded sizes are estimated."""
    bytes_per_number = 4  # in the published files, which are float32
    shape = read_shape(published)
    recorded = [file.n_bytes for file in published.files]
    n_bytes = sum(each for each in recorded if each is not None)
    if None in recorded:
        n_bytes = bytes_per_number * shape.n_parameters
    return estimate_footprint(shape.n_parameters, shape.dim, n_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ESMCModel(CheckpointModel):
    """An ESM C on disk: a folder, or a weight file."""

    shape: ESMCShape

    def check_numbers(self, precision: Precision) -> None:
        tensors = open_tensors(self.path, "np")
        check_numbers(self.name, tensors, precision, tensor_names(self.n_layers))

    def load_network(self, precision: Precision) -> ESMC:
        from virnucpro.models.esmc.loading import load_complete
        from virnucpro.models.transformer import DTYPES

        return load_complete(self.path, DTYPES[precision])

    def read_heads(self) -> Mapping[str, Any]:
        from virnucpro.models.esmc.loading import read_heads

        return read_heads(self.path)

    def explain_missing(self, include: Include) -> str:
        if include == "contacts":
            return "no ESM C has a contact head; name an ESM-2"
        return "name a checkpoint with the language-model head, as published"


def inspect(path: Path, on_event: EventHandler) -> ESMCModel | None:
    """Inspect a folder or a safetensors file.

    Returns:
        The model, or None if the path is something else.

    Raises:
        UnavailableError: the path contains another model, or is damaged.
    """
    return inspect_esmc(path) if is_esmc(path) else None


def inspect_esmc(path: Path) -> ESMCModel:
    """Inspect an ESM C checkpoint.

    Raises:
        UnavailableError: the checkpoint is not an ESM C, or is damaged.
    """
    tensors = open_tensors(path, "np")
    shape = infer_shape(tensors)
    files = weight_files(path)
    if path.is_dir():
        files += [
            path / name for name in (ModelFile.INDEX, ModelFile.CONFIG) if (path / name).is_file()
        ]
    return ESMCModel(
        path=path,
        name=path.name if path.is_dir() else path.stem,
        family="esmc",
        reads=Alphabet.PROTEIN,
        encoder_id=identify_esmc(shape, tensors),
        n_layers=shape.n_layers,
        dim=shape.dim,
        poolings=get_args(Pooling),
        includes=HEADS.find_includes(tensors.names),
        n_tokens=N_TOKENS,
        footprint=estimate_footprint(shape.n_parameters, shape.dim, count_bytes(path)),
        files=files,
        shape=shape,
    )


def open_published(name: str, published: Published, path: Path) -> ESMCModel:
    """Inspect a published model. Compare shape and sizes now, and the hash when it is read.

    Raises:
        UnavailableError: the path contains another model, or is damaged.
    """
    found = inspect_esmc(path)  # the folder may have any name, for example that of a revision
    model = replace(found, name=name, published=name, accepted=published.digests)
    if model.shape != read_shape(published):
        raise not_published(path, name, f"it has {model.n_layers} layers, {model.dim} dimensions")
    for file in published.files:
        n_bytes = (path / file.name).stat().st_size
        if file.n_bytes not in (None, n_bytes):
            raise not_published(
                path / file.name, name, f"it has {n_bytes} bytes, not {file.n_bytes}"
            )
    return model


def load(spec: EncoderSpec, weights: Path, device: torch.device) -> Encoder:
    """Load the layers and heads that ``spec`` needs, of a checkpoint or its converted copy.

    Raises:
        UnavailableError: the checkpoint cannot be used, or is small and does not match the recipe.
    """
    from virnucpro.models.esmc.loading import load_esmc, read_heads
    from virnucpro.models.transformer_encoder import load_encoder

    return load_encoder(spec, weights, device, load_esmc, read_heads)
