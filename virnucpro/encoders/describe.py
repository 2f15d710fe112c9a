"""Lines about the models that have names: what they need, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator

from virnucpro.encoders.catalogue import (
    bundled_head,
    bytes_to_fetch,
    find_published,
    imported_names,
    locate,
    missing_files,
    open_model,
)
from virnucpro.encoders.families import BUNDLES, EMBEDDED, PUBLISHED
from virnucpro.ground.config import Footprint, join_footprints
from virnucpro.ground.devices import as_size, default_gpu_memory, describe_needs
from virnucpro.ground.log import printable


def describe_models() -> Iterator[str]:
    """A line for each model that has a name: what it needs, and where it lies or would lie."""
    footprints = {EMBEDDED: _footprint(EMBEDDED)}
    footprints |= {name: _footprint(name) for name in PUBLISHED}
    footprints |= {
        name: join_footprints([footprints[encoder] for encoder in bundle.encoders])
        for name, bundle in BUNDLES.items()
    }
    footprints |= {name: _footprint(name) for name in imported_names()}
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
    if model in BUNDLES:
        yield from _describe_bundle(model)
        return
    path, found = locate(model), find_published(model)
    if found and missing_files(model):
        family, published = found
        n_layers, width, encoder_id = published.n_layers, published.width, "told when it is here"
        footprint: Footprint = family.code.footprint_of(published)
        yield f"path        {printable(path)}, when it is fetched"
        yield from (f"file        {file.url}" for file in published.files)
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
        if found := find_published(encoder):
            yield from (f"file        {file.url}" for file in found[1].files)
    yield f"file        {bundle.head.url}"
    yield from describe_needs(join_footprints([_footprint(name) for name in bundle.encoders]))


def _footprint(name: str) -> Footprint:
    """The footprint of a model, which need not be here if it is published."""
    if found := find_published(name):
        family, published = found
        footprint: Footprint = family.code.footprint_of(published)
        return footprint
    return open_model(name, lambda _: None).footprint
