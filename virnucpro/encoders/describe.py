"""Lines about the models that have names: what they need, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator

from virnucpro.encoders.esm2.family import footprint_of, inspect_esm2
from virnucpro.encoders.models import (
    bundled_head,
    bytes_to_fetch,
    download_bytes,
    imported_names,
    locate,
    missing_files,
    open_model,
    shape_of,
)
from virnucpro.encoders.published import BASE_URL, BUNDLES, EMBEDDED, FOLDERS, PUBLISHED
from virnucpro.ground.config import Footprint, join_footprints
from virnucpro.ground.devices import as_size, default_gpu_memory, describe_needs
from virnucpro.ground.log import printable


def describe_models() -> Iterator[str]:
    """A line for each model that has a name: what it needs, and where it lies or would lie."""
    footprints = {EMBEDDED: inspect_esm2(locate(EMBEDDED)).footprint}
    footprints |= {name: _published_footprint(name) for name in (*PUBLISHED, *FOLDERS)}
    footprints |= {
        name: join_footprints([footprints[encoder] for encoder in bundle.encoders])
        for name, bundle in BUNDLES.items()
    }
    footprints |= {name: inspect_esm2(locate(name)).footprint for name in imported_names()}
    for name, footprint in footprints.items():
        path = bundled_head(name) if name in BUNDLES else locate(name)
        n_bytes = bytes_to_fetch(name)
        state = f"not here, {as_size(n_bytes)} to fetch" if n_bytes else "here"
        size = f"{footprint.n_parameters / 1e6:,.1f} M"
        memory = f"{default_gpu_memory(footprint) / 1e9:.1f} GB"
        yield f"{name:<22}{size:>10} parameters  {memory:>7} of a GPU  {state}: {printable(path)}"


def describe_model(model: str) -> Iterator[str]:
    """Lines about a model, by its content, or by its name if it is yet to be fetched.

    Raises:
        UnavailableError: there is none, or it is damaged.
    """
    footprint: Footprint
    if model in BUNDLES:
        yield from _describe_bundle(model)
        return
    path = locate(model)
    if model in PUBLISHED and not path.exists():
        shape = shape_of(model)
        n_layers, width, encoder_id = shape.n_layers, shape.width, "told when it is here"
        footprint = footprint_of(shape, download_bytes(model))
        yield f"path        {printable(path)}, when it is fetched"
    elif model in FOLDERS and missing_files(model):
        folder = FOLDERS[model]
        n_layers, width, encoder_id = folder.n_layers, folder.width, "told when it is here"
        footprint = folder.footprint
        yield f"path        {printable(path)}, when it is fetched"
        yield from (f"file        {file.url}" for file in folder.files)
    else:
        there = open_model(model, lambda _: None)
        n_layers, width, encoder_id = there.n_layers, there.width, there.encoder_id
        footprint = there.footprint
        yield f"path        {printable(path)}"
    yield f"layers      {n_layers}"
    yield f"dimensions  {width}"
    yield f"parameters  {footprint.n_parameters / 1e6:,.1f} M"
    yield f"encoder id  {encoder_id}"
    yield from describe_needs(footprint)


def _describe_bundle(model: str) -> Iterator[str]:
    bundle = BUNDLES[model]
    n_bytes = bytes_to_fetch(model)
    yield f"encoders    {' and '.join(bundle.encoders)}"
    yield f"head        {printable(bundled_head(model))}, for chunks of {bundle.chunk_size} bases"
    yield f"to fetch    {as_size(n_bytes) if n_bytes else 'nothing: all of it is here'}"
    for encoder in bundle.encoders:
        if encoder in FOLDERS:
            yield from (f"file        {file.url}" for file in FOLDERS[encoder].files)
        else:
            yield f"file        {BASE_URL}/{encoder}.pt"
    yield f"file        {bundle.head.url}"
    footprints = map(_published_footprint, bundle.encoders)
    yield from describe_needs(join_footprints(list(footprints)))


def _published_footprint(name: str) -> Footprint:
    """The footprint of a published model that need not be here."""
    if name in FOLDERS:
        return FOLDERS[name].footprint
    return footprint_of(shape_of(name), download_bytes(name))
