"""Named checkpoints: where they lie, and how they get there.

One lies in this package, with a head for it. The published ones are fair-esm's, kept in the folder
that torch hub uses, so that one download serves every program. Nothing is fetched unless a name
was asked for and is not there.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch

from virnucpro.errors import UnavailableError
from virnucpro.esm2.model import ESM2Shape
from virnucpro.esm2.weights import Checkpoint, inspect_checkpoint
from virnucpro.files import atomic
from virnucpro.log import printable

PUBLISHED = {
    "esm2_t6_8M_UR50D": ESM2Shape(6, 320, 20),
    "esm2_t12_35M_UR50D": ESM2Shape(12, 480, 20),
    "esm2_t30_150M_UR50D": ESM2Shape(30, 640, 20),
    "esm2_t33_650M_UR50D": ESM2Shape(33, 1280, 20),
    "esm2_t36_3B_UR50D": ESM2Shape(36, 2560, 40),
    "esm2_t48_15B_UR50D": ESM2Shape(48, 5120, 40),
}
EMBEDDED = "esm2_virnucpro"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"
BASE_URL = "https://dl.fbaipublicfiles.com/fair-esm/models"
_BLOCK = 1 << 20
_TIMEOUT = 30  # seconds without a byte

OnBytes = Callable[[int, int], None]  # bytes so far, bytes in all (0: unknown)


def hub_folder() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints"


def converted_folder() -> Path:
    """For what is made of large checkpoints; it may be deleted at any time."""
    return Path(torch.hub.get_dir()) / "virnucpro"


def embedded_model() -> Path:
    return EMBEDDED_FOLDER / EMBEDDED


def embedded_head() -> Path:
    """Made for the embedded model."""
    return EMBEDDED_FOLDER / "head.safetensors"


def locate(model: str) -> Path:
    """Where the checkpoint lies that a user means by ``--model``, or, once fetched, would lie.

    A file, a folder, or a name.

    Raises:
        UnavailableError: it is none of these.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in PUBLISHED:
        return hub_folder() / f"{model}.pt"
    if model != EMBEDDED:
        raise UnavailableError(
            f"{printable(model)} is neither a file, nor a folder, nor a published ESM-2",
            hint=f"by name there are {', '.join((EMBEDDED, *PUBLISHED))}",
        )
    if not embedded_model().exists():
        raise UnavailableError(
            f"{EMBEDDED} is not in {printable(EMBEDDED_FOLDER)}: the installation is not whole",
            hint="install virnucpro again, or name another model with --model",
        )
    return embedded_model()


def find_checkpoint(
    model: str, on_bytes: OnBytes = lambda *_: None, base_url: str = BASE_URL
) -> Checkpoint:
    """The checkpoint a user means by ``--model``, fetched if need be.

    Raises:
        UnavailableError: there is none, or it cannot be fetched.
    """
    path = locate(model)
    if model in PUBLISHED and not path.exists():
        download(model, path, on_bytes, base_url)
    return inspect_checkpoint(path)


def download(model: str, path: Path, on_bytes: OnBytes, base_url: str = BASE_URL) -> None:
    """Fetch a published checkpoint; ``path`` appears only when it is whole and what it says.

    Raises:
        UnavailableError: it cannot be fetched, or is not the model of that name.
    """
    url = f"{base_url}/{model}.pt"
    hint = f"on a machine without network, fetch {url} elsewhere and put it in {path.parent}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            _fetch(url, temporary, on_bytes)
            found = inspect_checkpoint(temporary).shape
            if found != PUBLISHED[model]:
                raise UnavailableError(f"it has {found}")
    except UnavailableError as error:
        raise UnavailableError(f"what {url} gave is not {model}: {error}", hint=hint) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"cannot fetch {url}: {printable(reason)}", hint=hint) from error


def _fetch(url: str, path: Path, on_bytes: OnBytes) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer, path.open("wb") as out:
        total, done = int(answer.headers.get("Content-Length") or 0), 0
        while block := answer.read(_BLOCK):
            out.write(block)
            done += len(block)
            on_bytes(done, total)
    if total and done != total:
        raise OSError(f"the connection ended after {done} of {total} bytes")
