"""Lines about the models that have names: what they need, and where they lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal, NamedTuple

from virnucpro.encoders.catalogue import (
    bundled_head,
    bytes_to_fetch,
    every_name,
    find_published,
    imported_names,
    locate,
    missing_files,
    open_model,
)
from virnucpro.encoders.families import BUNDLES, EMBEDDED
from virnucpro.ground.config import Footprint, join_footprints
from virnucpro.ground.devices import as_size, default_gpu_memory, describe_needs
from virnucpro.ground.log import printable

_Kind = Literal["embedded", "published", "bundle", "imported"]


class _Entry(NamedTuple):
    """A model that has a name. The fields are keys of ``models list --json``."""

    name: str
    kind: _Kind
    parameters: int
    gpu_memory: int  # bytes, for the default batches
    to_fetch: int  # bytes that are not here yet
    path: str  # where it lies, or will; of a bundle that of its head
    encoders: tuple[str, ...] = ()  # of a bundle


def describe_models(*, as_json: bool) -> Iterator[str]:
    """A line for each model that has a name: what it needs, and where it lies or would lie."""
    if as_json:
        yield json.dumps([entry._asdict() for entry in _entries()], indent=2)
        return
    for entry in _entries():
        to_fetch = entry.to_fetch
        state = f"not here, {as_size(to_fetch)} to fetch" if to_fetch else "here"
        size = f"{entry.parameters / 1e6:,.1f} M"
        memory = f"{entry.gpu_memory / 1e9:.1f} GB"
        yield (
            f"{entry.name:<22}{size:>10} parameters  {memory:>7} of a GPU  "
            f"{state}: {printable(entry.path)}"
        )


def _entries() -> Iterator[_Entry]:
    for name in every_name():
        encoders = BUNDLES[name].encoders if name in BUNDLES else ()
        footprint = join_footprints([_footprint(each) for each in encoders or (name,)])
        yield _Entry(
            name,
            kind=_kind(name),
            parameters=footprint.n_parameters,
            gpu_memory=int(default_gpu_memory(footprint)),
            to_fetch=bytes_to_fetch(name),
            path=str(bundled_head(name) if encoders else locate(name)),
            encoders=encoders,
        )


def _kind(name: str) -> _Kind:
    if name == EMBEDDED:
        return "embedded"
    if name in BUNDLES:
        return "bundle"
    return "imported" if name in imported_names() else "published"


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
