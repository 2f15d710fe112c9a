"""Bundles: encoders whose vectors stand side by side, and the file of the head that reads them.

A bundle has a name, as a model has, and ``--model`` takes either.
"""

from __future__ import annotations

from pathlib import Path

from virnucpro.encoders.models import bundled_head, check_file, fetch_file
from virnucpro.encoders.published import BUNDLES
from virnucpro.ground.errors import UnavailableError
from virnucpro.ground.events import OnEvent
from virnucpro.ground.log import printable


def model_names(name: str) -> tuple[str, ...]:
    """The models that ``--model`` means by a name or path, in the order of their vectors."""
    return BUNDLES[name].encoders if name in BUNDLES else (name,)


def fetch_head(name: str, on_event: OnEvent) -> tuple[Path, int]:
    """The published head of a bundle, fetched if need be, and the length of its chunks.

    Raises:
        UnavailableError: it cannot be fetched, or is another one.
    """
    head, path = BUNDLES[name].head, bundled_head(name)
    if not path.exists():
        fetch_file(head, path.parent, on_event)
    try:
        check_file(head, path)
    except UnavailableError as error:
        raise UnavailableError(
            f"{printable(path)} is not the published head of {name}: {error}",
            hint="delete it to fetch it again",
        ) from error
    return path, BUNDLES[name].chunk_size
